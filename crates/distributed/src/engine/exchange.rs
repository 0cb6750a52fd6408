//! Sums of two ranks of one machine, whose numbers move while the GPUs go on with the pass that they are of.
//!
//! NCCL moves numbers by kernels. Beside a backward pass these take multiprocessors from products that are laid out for
//! all of them, and what those have left over is a second round. A GPU's copy engines take none. So each rank copies
//! gradients to where the other finds them as soon as the pass has made them. When the pass is over, a kernel adds what has
//! come to its own; in the meantime the last ones come. Nothing runs beside those, so a kernel may send them, which looks at
//! what it sends: zeros stay, and they are most of an embedding's gradient.
//!
//! ```text
//! rank 0, copies:  wait until rank 1 has added what came last time
//!                  for each milestone: wait until the pass is there  ->  copy, or send  ->  "so much has come"
//! rank 1, fetches: for each milestone: wait until it has come  ->  copy from the host's memory
//! rank 1, sums:    wait for the end of its own pass
//!                  for each stage: wait until it has come, and until its own is copied  ->  add
//!                  "all is added"
//! ```
//!
//! Numbers go through [memory](super::exchange_memory) of the host, or over `NVLink`: then nothing is fetched, and what has
//! come is told once a stage.
//!
//! and the same in the other direction. All waits are the devices': for a number in memory to be reached. Passes count
//! up to where they have come ([`Progress`](blackburn_backend::graph::Progress)), the other rank writes the other two.
//!
//! All milestones but the last are one stage, which is added while what is there at the last one comes.
//!
//! Both ranks get the same bits: a sum of two numbers is rounded once, in whichever order.

use super::{
    cuda_copies::{Address, CudaCopies, Function},
    cuda_library::{Context, Cuda, Event},
    exchange_kernels::kernels,
    exchange_memory::{COPIES_VARIABLE, Mailbox, Met, Offer, Way},
    exchange_plan::{Batch, Block, Piece, Places, STAGES, Stage, WARPS, bytes_of, planned},
    library::{CallFailed, Stream},
    nccl_library::DataType,
};
use crate::control::Control;
use std::{
    ffi::CString,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

const THREADS: u32 = 32 * WARPS as u32;
/// How long the ranks wait for their first words.
const FIRST_WORDS: Duration = Duration::from_secs(5);
/// How long a rank that ends waits for what still moves.
const LAST_NUMBERS: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);
/// Beyond all that anybody waits for, and still ahead of it modulo 2^32.
const FAR: u32 = 1 << 30;

/// What this rank does with another one's numbers, and that one with this one's.
pub(super) struct Exchange {
    reach: Arc<Reach>,
    met: Met,
    streams: Streams,
    functions: Functions,
    /// What moves and adds up the pieces of the last time.
    plan: Plan,
    /// How often there were some.
    rounds: u32,
}

#[derive(Clone, Copy)]
struct Functions {
    send: Function,
    add_f32: Function,
    add_f16: Function,
    add_bf16: Function,
}

impl Functions {
    fn add(&self, dtype: DataType) -> Function {
        match dtype {
            DataType::Float16 => self.add_f16,
            DataType::Bfloat16 => self.add_bf16,
            _ => self.add_f32,
        }
    }
}

#[derive(Clone, Copy)]
struct Streams {
    /// Two that copy in turn, or one that sends and one that fetches. Sends come before sums.
    copies: [Stream; 2],
    sums: Stream,
    /// When the second of them is done with a stage, and when what the rank sends is.
    half_copied: Event,
    copied: [Event; STAGES],
    /// When the pass is over.
    over: Event,
}

/// What moves and adds up pieces.
#[derive(Default)]
struct Plan {
    pieces: Vec<Piece>,
    stages: Vec<Stage>,
    /// Where the blocks are on the device.
    blocks: Memory,
}

/// Memory that this process alone uses.
#[derive(Default)]
struct Memory {
    address: Address,
    bytes: usize,
}

// SAFETY: streams, events and functions may be used by any thread, one at a time, which the mutex around them sees to.
unsafe impl Send for Exchange {}

/// What ends waits for a rank that is gone.
pub(super) struct Reach {
    cuda: Cuda,
    driver: CudaCopies,
    context: Context,
    own: Mailbox,
    /// What the other rank was told so far of what has come.
    sent: AtomicU32,
    rescue: Stream,
    /// Whether the other rank may be gone.
    is_over: AtomicBool,
}

// SAFETY: as above; the stream is used once, by the thread that ends the waits.
unsafe impl Send for Reach {}
// SAFETY: as above.
unsafe impl Sync for Reach {}

impl Reach {
    /// Has all waits be over.
    pub(super) fn end(&self) -> Result<(), CallFailed> {
        self.is_over.store(true, Ordering::Relaxed);
        let far = self.sent.load(Ordering::Relaxed).wrapping_add(FAR);
        // SAFETY: the context, the stream and the memory live as long as the process.
        unsafe {
            self.cuda.enter(self.context)?;
            self.driver.write(self.rescue, self.own.come(), far)?;
            self.driver.write(self.rescue, self.own.added(), far)
        }
    }
}

/// Whether the ranks may try to reach each other's memory.
///
/// # Errors
///
/// With the reason why they may not.
pub(super) fn may_meet(control: &Control) -> Result<(), String> {
    if control.size() != 2 {
        return Err(format!("there are {} ranks, and two can", control.size()));
    }
    if Way::wanted().is_none() {
        return Err(format!("{COPIES_VARIABLE} is off"));
    }
    match control.hosts() {
        [one, two] if one == two => Ok(()),
        _ => Err("the ranks are on two machines".into()),
    }
}

impl Exchange {
    /// Finds the other rank, for pieces that come to `bytes`. `None` where one of the two cannot reach the other's memory.
    /// Both come here together.
    ///
    /// # Errors
    ///
    /// When a rank has failed meanwhile.
    pub(super) fn meet(
        control: &Control,
        ordinal: usize,
        bytes: usize,
    ) -> Result<Option<Self>, String> {
        let wanted = serde_json::to_vec(&Way::wanted()).map_err(|error| error.to_string())?;
        let all =
            control.share("what moves gradients", wanted).map_err(|error| error.to_string())?;
        let all: Vec<_> =
            all.iter().map(|wanted| serde_json::from_slice(wanted).unwrap_or_default()).collect();
        for way in Way::to_try(&all) {
            match Self::meet_by(*way, control, ordinal, bytes)? {
                Ok(exchange) => {
                    tracing::debug!("gradients move beside the pass, by copies, {way:?}");
                    return Ok(Some(exchange));
                }
                Err(reason) => tracing::debug!("gradients do not move, {way:?}: {reason}"),
            }
        }
        Ok(None)
    }

    /// The same by one way, or why that is none, which is the same on both ranks.
    fn meet_by(
        way: Way,
        control: &Control,
        ordinal: usize,
        bytes: usize,
    ) -> Result<Result<Self, String>, String> {
        let share = |what: &str, part: Result<Vec<u8>, String>| {
            let part = match part {
                Ok(bytes) => [b"ok".as_slice(), &bytes].concat(),
                Err(reason) => reason.into_bytes(),
            };
            let parts = control.share(what, part).map_err(|error| error.to_string())?;
            let theirs = parts.get(1 - control.rank()).cloned().unwrap_or_default();
            let refusal = parts.iter().find(|part| !part.starts_with(b"ok"));
            Ok::<_, String>(match refusal {
                Some(reason) => Err(String::from_utf8_lossy(reason).into_owned()),
                None => Ok(theirs[2..].to_vec()),
            })
        };
        let prepared = Self::prepare(way, control, ordinal, bytes);
        let own = prepared.as_ref().map(|prepared| prepared.offer.told()).map_err(Clone::clone);
        let (prepared, theirs) = match (prepared, share("memory for gradients", own)?) {
            (Ok(prepared), Ok(theirs)) => (prepared, theirs),
            (Err(reason), _) | (_, Err(reason)) => return Ok(Err(reason)),
        };
        let met = prepared.opened(control.rank(), bytes, &theirs);
        let sound = met.as_ref().map(|_| Vec::new()).map_err(Clone::clone);
        let opened = share("the other rank's memory", sound)?;
        let exchange = match (met, opened) {
            (Ok(exchange), Ok(_)) => exchange,
            (Err(reason), _) | (_, Err(reason)) => return Ok(Err(reason)),
        };
        let heard = exchange.greet().map(|()| Vec::new());
        if let Err(reason) = share("first words", heard)? {
            return Ok(Err(reason));
        }
        let is_fast = exchange.met.check_speed(&exchange.reach.driver).map(|()| Vec::new());
        Ok(share("the speed of copies", is_fast)?.map(|_| exchange))
    }

    fn prepare(
        way: Way,
        control: &Control,
        ordinal: usize,
        bytes: usize,
    ) -> Result<Prepared, String> {
        may_meet(control)?;
        let (cuda, driver) = (Cuda::load()?, CudaCopies::load()?);
        let made = || {
            let context = cuda.context(ordinal)?;
            // SAFETY: it is this device's.
            unsafe { cuda.enter(context) }?;
            let ptx = CString::new(kernels()).unwrap_or_default();
            let names = [c"send", c"add_f32", c"add_f16", c"add_bf16"];
            let [send, add_f32, add_f16, add_bf16] = driver.functions(&ptx, names)?;
            let functions = Functions { send, add_f32, add_f16, add_bf16 };
            let mut copied = [std::ptr::null_mut(); STAGES];
            for event in &mut copied {
                *event = cuda.event()?;
            }
            let streams = Streams {
                copies: [cuda.urgent_stream()?, cuda.urgent_stream()?],
                sums: cuda.stream()?,
                half_copied: cuda.event()?,
                copied,
                over: cuda.event()?,
            };
            Ok::<_, CallFailed>((context, functions, streams, cuda.stream()?))
        };
        let (context, functions, streams, rescue) = made().map_err(|error| error.to_string())?;
        let offer = Offer::of(way, &driver, control.rank(), bytes)?;
        Ok(Prepared { cuda, driver, context, rescue, streams, functions, offer })
    }

    /// Writes to the other rank's memory, and waits until it has done the same.
    fn greet(&self) -> Result<(), String> {
        let Reach { driver, own, .. } = &*self.reach;
        let since = Instant::now();
        let heard = || {
            // SAFETY: both memories live, and nobody uses them yet.
            unsafe {
                driver.copy_now(own.come(), self.met.theirs.come(), 4)?;
                driver.write(self.streams.sums, self.met.theirs.greeting(), 1)?;
                while driver.number_at(own.greeting())? == 0 && since.elapsed() < FIRST_WORDS {
                    std::thread::sleep(PAUSE);
                }
                driver.number_at(own.greeting())
            }
        };
        match heard().map_err(|error: CallFailed| error.to_string())? {
            0 => Err("the other rank's copies do not come".into()),
            _ => Ok(()),
        }
    }

    /// Whether there is memory for `pieces` to come to. The answer is the same on both ranks.
    pub(super) fn fits(&self, pieces: &[Piece]) -> bool {
        bytes_of(pieces) <= self.reach.own.bytes
    }

    /// Adds the other rank's numbers to `pieces`, and those to the other rank's. They are there when `counter` has reached
    /// what `count_at` says of their milestones, and are copied then; they are added behind all that the context was asked
    /// for. Records `start` when the first of them move, and `end` behind the last sum.
    ///
    /// # Safety
    ///
    /// The numbers stay where they are, and nothing else uses them between their milestone and `end`. The other rank
    /// calls this with pieces of the same sizes, types and milestones, which [fit](Self::fits).
    pub(super) unsafe fn add(
        &mut self,
        pieces: Vec<Piece>,
        counter: Address,
        count_at: impl Fn(u32) -> u32,
        [start, end]: [Event; 2],
    ) -> Result<(), CallFailed> {
        self.prepare_for(pieces)?;
        let Self { reach, met, streams, functions, plan, rounds } = self;
        let Reach { cuda, driver, context, own, sent, .. } = &**reach;
        let Streams { copies, sums, half_copied, copied, over } = *streams;
        let (theirs, landed) = (met.theirs, met.landed);
        // SAFETY: memory of both ranks, streams and events live as long as this; the rest is the caller's.
        unsafe {
            cuda.wait_for_context(sums, *context, over)?;
            for stream in copies {
                driver.wait_for_number(stream, own.added(), *rounds)?;
            }
            *rounds = rounds.wrapping_add(1);
            let mut is_first = true;
            let launch = |stream, function, first: usize, count: usize| {
                let table = plan.blocks.address + (first * size_of::<Block>()) as u64;
                driver.launch(stream, function, [count as u32, THREADS], [table])
            };
            // Tells the other rank, and returns what it is told, which this one will be told, too.
            let tell = || {
                let number = sent.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
                driver.write(copies[0], theirs.come(), number).map(|()| number)
            };
            for (stage, copied) in plan.stages.iter().zip(copied) {
                let mut bytes = [0; 2];
                let mut number = None;
                for group in stage.pieces.chunk_by(|(a, _), (b, _)| a.milestone == b.milestone) {
                    let count = count_at(group[0].0.milestone);
                    driver.wait_for_number(copies[0], counter, count)?;
                    if std::mem::take(&mut is_first) {
                        cuda.record(start, copies[0])?;
                    }
                    match (&stage.sent, met.way) {
                        (Some(Range { start, end }), _) => {
                            launch(copies[0], functions.send, *start, end - start)?;
                        }
                        (None, Way::Links) => {
                            driver.wait_for_number(copies[1], counter, count)?;
                            for (piece, place) in group {
                                let lane = usize::from(bytes[1] < bytes[0]);
                                bytes[lane] += piece.bytes;
                                let to = theirs.address + place;
                                driver.copy(copies[lane], piece.address, to, piece.bytes)?;
                            }
                        }
                        (None, Way::Host) => {
                            for (piece, place) in group {
                                let to = theirs.address + place;
                                driver.copy(copies[0], piece.address, to, piece.bytes)?;
                            }
                            let come = tell()?;
                            driver.wait_for_number(copies[1], own.come(), come)?;
                            for (piece, place) in group {
                                let [from, to] = [own.address, landed].map(|at| at + place);
                                driver.copy(copies[1], from, to, piece.bytes)?;
                            }
                            number = Some(come);
                        }
                    }
                }
                cuda.record(half_copied, copies[1])?;
                if met.way == Way::Links {
                    driver.wait(copies[0], half_copied)?;
                }
                let number = match number {
                    Some(number) => number,
                    None => tell()?,
                };
                cuda.record(copied, copies[0])?;

                // Its own numbers have moved before they are changed.
                driver.wait(sums, copied)?;
                driver.wait(sums, half_copied)?;
                driver.wait_for_number(sums, own.come(), number)?;
                for Batch { dtype, first, count } in &stage.batches {
                    launch(sums, functions.add(*dtype), *first, *count)?;
                }
            }
            driver.write(sums, theirs.added(), *rounds)?;
            cuda.record(end, sums)
        }
    }

    /// Has the plan be that of `pieces`: those of a recording lie where they lay last time.
    fn prepare_for(&mut self, pieces: Vec<Piece>) -> Result<(), CallFailed> {
        let Self { reach, met, streams, plan, .. } = self;
        if plan.pieces == pieces {
            return Ok(());
        }
        let (own, theirs) = (met.own.address, met.theirs.address);
        let (stages, blocks) = planned(pieces.clone(), Places { own, landed: met.landed, theirs });
        let bytes = size_of_val(&blocks[..]);
        // SAFETY: blocks are read by launches in this stream alone, and have so many bytes.
        unsafe {
            if bytes > plan.blocks.bytes {
                let address = reach.driver.own_memory(bytes)?;
                let old = std::mem::replace(&mut plan.blocks, Memory { address, bytes });
                if old.bytes > 0 {
                    reach.driver.free(old.address)?;
                }
            }
            reach.driver.copy_from_host(streams.sums, &blocks, plan.blocks.address)?;
        }
        (plan.pieces, plan.stages) = (pieces, stages);
        Ok(())
    }

    /// What ends its waits.
    pub(super) fn reach(&self) -> Arc<Reach> {
        self.reach.clone()
    }
}

/// An exchange that does not know the other rank yet.
struct Prepared {
    cuda: Cuda,
    driver: CudaCopies,
    context: Context,
    rescue: Stream,
    streams: Streams,
    functions: Functions,
    offer: Offer,
}

impl Prepared {
    fn opened(self, rank: usize, bytes: usize, theirs: &[u8]) -> Result<Exchange, String> {
        let Self { cuda, driver, context, rescue, streams, functions, offer } = self;
        let met = offer.met(&driver, rank, bytes, theirs)?;
        let (own, sent, is_over) = (met.own, AtomicU32::new(0), AtomicBool::new(false));
        let reach = Arc::new(Reach { cuda, driver, context, own, sent, rescue, is_over });
        Ok(Exchange { reach, met, streams, functions, plan: Plan::default(), rounds: 0 })
    }
}

impl Drop for Exchange {
    /// Streams and events live as long as the process, as the memory does, which the other rank may still use.
    fn drop(&mut self) {
        let Reach { cuda, driver, context, is_over, .. } = &*self.reach;
        let since = Instant::now();
        let is_waiting = || !is_over.load(Ordering::Relaxed) && since.elapsed() < LAST_NUMBERS;
        let Streams { copies: [one, two], sums, .. } = self.streams;
        let close = || {
            // SAFETY: the context and the streams live. What another rank's memory is for this one is used by the streams
            // alone, which have nothing to do any more.
            unsafe {
                cuda.enter(*context)?;
                for stream in [one, two, sums] {
                    while !cuda.is_done(stream)? {
                        if !is_waiting() {
                            return Ok(());
                        }
                        std::thread::sleep(PAUSE);
                    }
                }
                match self.met.way {
                    Way::Links => driver.close(self.met.theirs.address),
                    // It is the process's own.
                    Way::Host => Ok(()),
                }
            }
        };
        let closed: Result<(), CallFailed> = close();
        if let Err(error) = closed {
            tracing::debug!("at the end: {error}");
        }
    }
}
