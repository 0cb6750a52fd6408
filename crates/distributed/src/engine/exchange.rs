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
//! and the same in the other direction. Numbers go through [memory](super::exchange_memory) of the host, or over `NVLink`:
//! then nothing is fetched, and what has come is told once a stage.
//!
//! All waits are the devices': for a number in memory to be reached. Passes count
//! up to where they have come ([`Progress`](blackburn_backend::graph::Progress)), the other rank writes the other two.
//!
//! What is there early is one stage, which is added while the last numbers still move; what is there shortly before the end
//! is the next, and what is there at the last milestone is a third, which another stream adds.
//!
//! Both ranks get the same bits: a sum of two numbers is rounded once, in whichever order.

use super::{
    cuda_copies::{Address, CudaCopies, Function},
    cuda_library::{Context, Cuda, Event},
    exchange_memory::{Met, Passage, Words},
    exchange_plan::{Batch, Block, Piece, Places, STAGES, Stage, WARPS, bytes_of, planned},
    library::{CallFailed, Stream},
    nccl_library::DataType,
};
use crate::control::lock;
use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

const THREADS: u32 = 32 * WARPS as u32;
/// After how many rounds the length of a step is known: the shortest time between the ends of two that follow each other.
pub(super) const LAPS: usize = 8;
/// How long a rank waits for what still moves, where it ends or goes another way.
const LAST_NUMBERS: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);
/// Beyond all that anybody waits for, and still ahead of it modulo 2^32.
const FAR: u32 = 1 << 30;

/// What this rank does with another one's numbers, and that one with this one's.
pub(super) struct Exchange {
    pub(super) reach: Arc<Reach>,
    pub(super) met: Met,
    pub(super) streams: Streams,
    pub(super) functions: Functions,
    /// What moves and adds up the pieces of the last time.
    pub(super) plan: Plan,
    /// How often there were some since numbers go this way.
    pub(super) rounds: u32,
    /// Whether the length of a step will decide how numbers go.
    pub(super) is_open: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub(super) send: Function,
    pub(super) add_f32: Function,
    pub(super) add_f16: Function,
    pub(super) add_bf16: Function,
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
pub(super) struct Streams {
    /// Two that copy in turn, or one that sends and one that fetches. Sends come before sums.
    pub(super) copies: [Stream; 2],
    /// One that adds what copy engines have moved, and one for what was sent.
    pub(super) sums: [Stream; 2],
    /// When the second of them is done.
    pub(super) sent_added: Event,
    /// When the second of them is done with a stage, and when what the rank sends is.
    pub(super) half_copied: Event,
    pub(super) copied: [Event; STAGES],
    /// When the pass is over.
    pub(super) over: Event,
    /// When all is added, in the first rounds.
    pub(super) laps: [Event; LAPS],
}

/// What moves and adds up pieces.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) pieces: Vec<Piece>,
    pub(super) stages: Vec<Stage>,
    /// Where the blocks are on the device.
    blocks: Memory,
}

/// Memory that this process alone uses.
#[derive(Default)]
pub(super) struct Memory {
    address: Address,
    bytes: usize,
}

// SAFETY: streams, events and functions may be used by any thread, one at a time, which the mutex around them sees to.
unsafe impl Send for Exchange {}

/// What ends waits for a rank that is gone.
pub(super) struct Reach {
    pub(super) cuda: Cuda,
    pub(super) driver: CudaCopies,
    pub(super) context: Context,
    /// What this rank waits for.
    pub(super) words: Mutex<Words>,
    /// What the other rank was told so far of what has come.
    pub(super) sent: AtomicU32,
    pub(super) rescue: Stream,
    /// Whether the other rank may be gone.
    pub(super) is_over: AtomicBool,
}

// SAFETY: as above; the stream is used once, by the thread that ends the waits.
unsafe impl Send for Reach {}
// SAFETY: as above.
unsafe impl Sync for Reach {}

impl Reach {
    /// Has all waits be over.
    pub(super) fn end(&self) -> Result<(), CallFailed> {
        self.is_over.store(true, Ordering::Relaxed);
        let words = lock(&self.words);
        let far = self.sent.load(Ordering::Relaxed).wrapping_add(FAR);
        // SAFETY: the context, the stream and the memory live as long as the process.
        unsafe {
            self.cuda.enter(self.context)?;
            self.driver.write(self.rescue, words.come(), far)?;
            self.driver.write(self.rescue, words.added(), far)
        }
    }
}

impl Exchange {
    /// Whether there is memory for `pieces` to come to. The answer is the same on both ranks.
    pub(super) fn fits(&self, pieces: &[Piece]) -> bool {
        bytes_of(pieces) <= self.met.bytes
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
        let Self { reach, met, streams, functions, plan, rounds, .. } = self;
        let Reach { cuda, driver, context, sent, .. } = &**reach;
        let Streams { copies, sums, sent_added, half_copied, copied, over, laps } = *streams;
        let [own, theirs] = met.words();
        // SAFETY: memory of both ranks, streams and events live as long as this; the rest is the caller's.
        unsafe {
            cuda.wait_for_context(sums[0], *context, over)?;
            driver.wait(sums[1], over)?;
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
                    match (&stage.sent, met.passage) {
                        (Some(Range { start, end }), _) => {
                            launch(copies[0], functions.send, *start, end - start)?;
                        }
                        (None, None) => {
                            driver.wait_for_number(copies[1], counter, count)?;
                            for (piece, place) in group {
                                let lane = usize::from(bytes[1] < bytes[0]);
                                bytes[lane] += piece.bytes;
                                let to = met.theirs + place;
                                driver.copy(copies[lane], piece.address, to, piece.bytes)?;
                            }
                        }
                        (None, Some(passage)) => {
                            for (piece, place) in group {
                                let to = passage.theirs + place;
                                driver.copy(copies[0], piece.address, to, piece.bytes)?;
                            }
                            let come = tell()?;
                            driver.wait_for_number(copies[1], own.come(), come)?;
                            for (piece, place) in group {
                                let [from, to] = [passage.own, met.landed].map(|at| at + place);
                                driver.copy(copies[1], from, to, piece.bytes)?;
                            }
                            number = Some(come);
                        }
                    }
                }
                cuda.record(half_copied, copies[1])?;
                if met.passage.is_none() {
                    driver.wait(copies[0], half_copied)?;
                }
                let number = match number {
                    Some(number) => number,
                    None => tell()?,
                };
                cuda.record(copied, copies[0])?;

                // Its own numbers have moved before they are changed.
                let adds = sums[usize::from(stage.sent.is_some())];
                driver.wait(adds, copied)?;
                driver.wait(adds, half_copied)?;
                driver.wait_for_number(adds, own.come(), number)?;
                for Batch { dtype, first, count } in &stage.batches {
                    launch(adds, functions.add(*dtype), *first, *count)?;
                }
            }
            cuda.record(sent_added, sums[1])?;
            driver.wait(sums[0], sent_added)?;
            driver.write(sums[0], theirs.added(), *rounds)?;
            if let Some(lap) = laps.get(rounds.wrapping_sub(1) as usize) {
                cuda.record(*lap, sums[0])?;
            }
            cuda.record(end, sums[0])
        }
    }

    /// Has the plan be that of `pieces`: those of a recording lie where they lay last time.
    fn prepare_for(&mut self, pieces: Vec<Piece>) -> Result<(), CallFailed> {
        let Self { reach, met, streams, plan, .. } = self;
        if plan.pieces == pieces {
            return Ok(());
        }
        let Passage { own, theirs } = met.mailboxes();
        let (stages, blocks) = planned(pieces.clone(), Places { landed: met.landed, own, theirs });
        let bytes = size_of_val(&blocks[..]);
        // SAFETY: what reads blocks comes behind this, and what has read the old ones is over; they have so many bytes.
        unsafe {
            if bytes > plan.blocks.bytes {
                let address = reach.driver.own_memory(bytes)?;
                let old = std::mem::replace(&mut plan.blocks, Memory { address, bytes });
                if old.bytes > 0 {
                    reach.driver.free(old.address)?;
                }
            }
            reach.driver.copy_from_host(streams.sums[0], &blocks, plan.blocks.address)?;
            reach.cuda.record(streams.over, streams.sums[0])?;
            for stream in [streams.copies[0], streams.sums[1]] {
                reach.driver.wait(stream, streams.over)?;
            }
        }
        (plan.pieces, plan.stages) = (pieces, stages);
        Ok(())
    }

    /// Waits until nothing moves. `false` where it will not come to that.
    pub(super) fn rest(&self) -> Result<bool, CallFailed> {
        let Reach { cuda, is_over, .. } = &*self.reach;
        let since = Instant::now();
        let Streams { copies, sums, .. } = self.streams;
        for stream in copies.into_iter().chain(sums) {
            // SAFETY: the streams live as long as the process.
            while !unsafe { cuda.is_done(stream) }? {
                if is_over.load(Ordering::Relaxed) || since.elapsed() >= LAST_NUMBERS {
                    return Ok(false);
                }
                std::thread::sleep(PAUSE);
            }
        }
        Ok(true)
    }

    /// What ends its waits.
    pub(super) fn reach(&self) -> Arc<Reach> {
        self.reach.clone()
    }
}

impl Drop for Exchange {
    /// Streams and events live as long as the process, as the memory does, which the other rank may still use.
    fn drop(&mut self) {
        let Reach { cuda, driver, context, .. } = &*self.reach;
        let close = || {
            // SAFETY: the context lives. What another rank's memory is for this one is used by the streams alone, which
            // have nothing to do any more.
            unsafe {
                cuda.enter(*context)?;
                match self.rest()? {
                    true => driver.close(self.met.theirs),
                    false => Ok(()),
                }
            }
        };
        let closed: Result<(), CallFailed> = close();
        if let Err(error) = closed {
            tracing::debug!("at the end: {error}");
        }
    }
}
