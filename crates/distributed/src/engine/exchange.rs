//! Sums of two ranks of one machine, whose numbers move while the GPUs go on with the pass that they are of.
//!
//! NCCL moves numbers by kernels. Beside a backward pass these take multiprocessors from products that are laid out for
//! all of them, and what those have left over is a second round. A GPU's copy engines take none. So each rank copies
//! gradients into the other's memory as soon as the pass has made them. When the pass is over, a kernel adds what has come
//! to its own; in the meantime the last ones come.
//!
//! ```text
//! rank 0, copies:  wait until rank 1 has added what came last time
//!                  for each milestone: wait until the pass is there  ->  copy
//!                  at the end of a stage: "so many stages have come"
//! rank 1, sums:    wait for the end of its own pass
//!                  for each stage: wait until it has come, and until its own is copied  ->  add
//!                  "all is added"
//! ```
//!
//! All milestones but the last are one stage. What is there at the last one is as large as an embedding, and its first
//! numbers are added while its last ones come.
//!
//! and the same in the other direction. All waits are the devices': for a number in memory to be reached. Passes count
//! up to where they have come ([`Progress`](blackburn_backend::graph::Progress)), the other rank writes the other two.
//! Both ranks get the same bits: a sum of two numbers is rounded once, in whichever order.

use super::{
    cuda_copies::{Address, CudaCopies, Function, SharedMemory},
    cuda_library::{Context, Cuda, Event},
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

/// Where it is "off", gradients move over NCCL alone.
const COPIES_VARIABLE: &str = "BLACKBURN_COPIES";
/// Numbers of the two ranks lie behind what comes, each in a line of its own.
const LINE: u64 = 128;
/// Where pieces begin in memory.
const ALIGNMENT: usize = 256;
/// What a thread adds up at a time.
pub(super) const VECTOR_BYTES: usize = 16;
/// Copies are cut to so many bytes, and go to two copy engines in turn.
const COPY_BYTES: usize = 8 << 20;
/// Bytes of a stage of the last milestone, unless it has more stages than are served.
const STAGE_BYTES: usize = 16 << 20;
/// Stages at most.
const STAGES: usize = 8;
/// What a block adds up at most.
const BLOCK_VECTORS: u64 = 4096;
const THREADS: u32 = 256;
/// How long the ranks wait for their first words.
const FIRST_WORDS: Duration = Duration::from_secs(5);
/// How long a rank that ends waits for what still moves.
const LAST_NUMBERS: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);
/// Beyond all that anybody waits for, and still ahead of it modulo 2^32.
const FAR: u32 = 1 << 30;

/// Numbers to add up where they lie, which are there at a milestone of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    pub(super) address: Address,
    /// A multiple of [`VECTOR_BYTES`].
    pub(super) bytes: usize,
    pub(super) dtype: DataType,
    pub(super) milestone: u32,
}

/// Pieces, cut to what is copied at once, in the order in which they are there, each with its place in the memory that
/// it comes to.
fn placed(mut pieces: Vec<Piece>) -> Vec<(Piece, u64)> {
    pieces.sort_by_key(|piece| piece.milestone);
    let mut next = 0;
    let place = |piece: Piece| {
        let base = next;
        next += piece.bytes.next_multiple_of(ALIGNMENT) as u64;
        (0..piece.bytes).step_by(COPY_BYTES).map(move |begin| {
            let bytes = COPY_BYTES.min(piece.bytes - begin);
            let begin = begin as u64;
            (Piece { address: piece.address + begin, bytes, ..piece }, base + begin)
        })
    };
    pieces.into_iter().flat_map(place).collect()
}

/// The stages of pieces in their order.
fn stages(placed: &[(Piece, u64)]) -> Vec<Range<usize>> {
    let last = placed.last().map_or(0, |(piece, _)| piece.milestone);
    let first_of_last = placed.partition_point(|(piece, _)| piece.milestone < last);
    let mut stages = Vec::new();
    if first_of_last > 0 {
        stages.push(0..first_of_last);
    }
    let all: usize = placed[first_of_last..].iter().map(|(piece, _)| piece.bytes).sum();
    let most = STAGE_BYTES.max(all.div_ceil(STAGES - 2));
    let (mut begin, mut bytes) = (first_of_last, 0);
    for (index, (piece, _)) in placed.iter().enumerate().skip(first_of_last) {
        // The last one that there may be takes all that is left.
        if bytes + piece.bytes > most && bytes > 0 && stages.len() + 1 < STAGES {
            stages.push(begin..index);
            (begin, bytes) = (index, 0);
        }
        bytes += piece.bytes;
    }
    if begin < placed.len() {
        stages.push(begin..placed.len());
    }
    stages
}

/// How much memory they come to.
pub(super) fn bytes_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.bytes.next_multiple_of(ALIGNMENT)).sum()
}

/// What one block adds up, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    to: Address,
    from: Address,
    vectors: u64,
}

/// Blocks that one launch adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch {
    dtype: DataType,
    first: usize,
    count: usize,
}

/// Pieces that are copied and added together.
#[derive(Debug)]
struct Stage {
    pieces: Vec<(Piece, u64)>,
    batches: Vec<Batch>,
}

/// What adds up `pieces` that come to `base`.
fn planned(pieces: Vec<Piece>, base: Address) -> (Vec<Stage>, Vec<Block>) {
    let placed = placed(pieces);
    let mut blocks = Vec::new();
    let stage = |range: Range<usize>| {
        let pieces = placed[range].to_vec();
        let mut batches = Vec::new();
        for dtype in [DataType::Float32, DataType::Float16, DataType::Bfloat16] {
            let first = blocks.len();
            for (piece, place) in pieces.iter().filter(|(piece, _)| piece.dtype == dtype) {
                let all = (piece.bytes / VECTOR_BYTES) as u64;
                for begin in (0..all).step_by(BLOCK_VECTORS as usize) {
                    let offset = begin * VECTOR_BYTES as u64;
                    let vectors = BLOCK_VECTORS.min(all - begin);
                    let (to, from) = (piece.address + offset, base + place + offset);
                    blocks.push(Block { to, from, vectors });
                }
            }
            if blocks.len() > first {
                batches.push(Batch { dtype, first, count: blocks.len() - first });
            }
        }
        Stage { pieces, batches }
    };
    let stages = stages(&placed).into_iter().map(stage).collect();
    (stages, blocks)
}

/// A kernel for each type that adds numbers from one place to those in another, as a table of [`Block`]s says.
///
/// It is PTX and not CubeCL's, whose launches take only memory of its own.
fn kernels() -> String {
    // In bf16 a product with one, since `add` knows the type from Hopper on.
    let [f32, f16, bf16] = [
        ["add.rn.f32 %a{}, %a{}, %b{};"; 4],
        ["add.rn.f16x2 %a{}, %a{}, %b{};"; 4],
        ["fma.rn.bf16x2 %a{}, %a{}, %one, %b{};"; 4],
    ]
    .map(|adds| {
        let numbered = adds.iter().enumerate().map(|(n, add)| add.replace("{}", &n.to_string()));
        numbered.collect::<Vec<String>>().join("\n    ")
    });
    let entry = |name: &str, adds: &str| {
        format!(
            "
.visible .entry {name}(.param .u64 blocks)
{{
    .reg .pred %done;
    .reg .b32 %block, %threads, %thread, %one;
    .reg .b32 %a<4>;
    .reg .b32 %b<4>;
    .reg .b64 %blocks, %own, %to, %from, %vectors, %at, %step, %offset, %x, %y;
    ld.param.u64 %blocks, [blocks];
    cvta.to.global.u64 %blocks, %blocks;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %own, %block, 24;
    add.s64 %own, %blocks, %own;
    ld.global.u64 %to, [%own];
    ld.global.u64 %from, [%own+8];
    ld.global.u64 %vectors, [%own+16];
    cvta.to.global.u64 %to, %to;
    cvta.to.global.u64 %from, %from;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.b32 %one, 0x3F803F80;
    cvt.u64.u32 %at, %thread;
    cvt.u64.u32 %step, %threads;
NEXT:
    setp.ge.u64 %done, %at, %vectors;
    @%done bra END;
    shl.b64 %offset, %at, 4;
    add.s64 %x, %to, %offset;
    add.s64 %y, %from, %offset;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%x];
    ld.global.v4.b32 {{%b0, %b1, %b2, %b3}}, [%y];
    {adds}
    st.global.v4.b32 [%x], {{%a0, %a1, %a2, %a3}};
    add.s64 %at, %at, %step;
    bra NEXT;
END:
    ret;
}}
"
        )
    };
    let entries = [entry("add_f32", &f32), entry("add_f16", &f16), entry("add_bf16", &bf16)];
    format!(".version 7.0\n.target sm_80\n.address_size 64\n{}", entries.concat())
}

/// The memory that the two ranks write to.
#[derive(Clone, Copy)]
struct Mailbox {
    address: Address,
    /// What can come.
    bytes: usize,
}

impl Mailbox {
    /// What it takes for `bytes` to come.
    fn size(bytes: usize) -> usize {
        bytes.next_multiple_of(ALIGNMENT) + 3 * LINE as usize
    }

    /// How many stages have come.
    fn come(self) -> Address {
        self.address + self.bytes.next_multiple_of(ALIGNMENT) as u64
    }

    /// How often the other rank has added all that this one has sent.
    fn added(self) -> Address {
        self.come() + LINE
    }

    /// Something else than zero once the other rank has found this memory.
    fn greeting(self) -> Address {
        self.come() + 2 * LINE
    }
}

/// What this rank does with another one's numbers, and that one with this one's.
pub(super) struct Exchange {
    reach: Arc<Reach>,
    theirs: Mailbox,
    streams: Streams,
    functions: [Function; 3],
    /// What adds up the pieces of the last time.
    plan: Plan,
    /// How often there were some.
    rounds: u32,
}

#[derive(Clone, Copy)]
struct Streams {
    copies: [Stream; 2],
    sums: Stream,
    /// When the second stream of copies is done with a stage, and when both are.
    half_copied: Event,
    copied: [Event; STAGES],
    /// When the pass is over.
    over: Event,
}

/// What adds up pieces.
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
    /// Stages that were sent so far.
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
        let told = |reason: &str| tracing::debug!("gradients move behind the pass: {reason}");
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
        let prepared = Self::prepare(control, ordinal, bytes);
        let own = prepared.as_ref().map(|(_, shared)| shared.0.to_vec()).map_err(Clone::clone);
        let (prepared, theirs) = match (prepared, share("memory for gradients", own)?) {
            (Ok((prepared, _)), Ok(theirs)) => (prepared, theirs),
            (Err(reason), _) | (_, Err(reason)) => {
                told(&reason);
                return Ok(None);
            }
        };
        let met = prepared.opened(&theirs);
        let sound = met.as_ref().map(|_| Vec::new()).map_err(Clone::clone);
        let opened = share("the other rank's memory", sound)?;
        let (Ok(exchange), Ok(_)) = (met, opened.as_ref()) else {
            told(&opened.err().unwrap_or_default());
            return Ok(None);
        };
        let heard = exchange.greet().map(|()| Vec::new());
        if let Err(reason) = share("first words", heard)? {
            told(&reason);
            return Ok(None);
        }
        tracing::debug!("gradients move beside the pass, by copies");
        Ok(Some(exchange))
    }

    fn prepare(
        control: &Control,
        ordinal: usize,
        bytes: usize,
    ) -> Result<(Prepared, SharedMemory), String> {
        if std::env::var(COPIES_VARIABLE).as_deref() == Ok("off") {
            return Err(format!("{COPIES_VARIABLE} is off"));
        }
        let hosts = control.hosts();
        if hosts.iter().any(|host| *host != hosts[0]) {
            return Err("the ranks are on two machines".into());
        }
        let (cuda, driver) = (Cuda::load()?, CudaCopies::load()?);
        let made = || {
            let context = cuda.context(ordinal)?;
            // SAFETY: it is this device's.
            unsafe { cuda.enter(context) }?;
            let ptx = CString::new(kernels()).unwrap_or_default();
            let functions = driver.functions(&ptx, [c"add_f32", c"add_f16", c"add_bf16"])?;
            let mut copied = [std::ptr::null_mut(); STAGES];
            for event in &mut copied {
                *event = cuda.event()?;
            }
            let streams = Streams {
                copies: [driver.urgent_stream()?, driver.urgent_stream()?],
                sums: driver.urgent_stream()?,
                half_copied: cuda.event()?,
                copied,
                over: cuda.event()?,
            };
            let rescue = cuda.stream()?;
            let (own, shared) = driver.memory(Mailbox::size(bytes))?;
            Ok::<_, CallFailed>((context, functions, streams, rescue, own, shared))
        };
        let (context, functions, streams, rescue, address, shared) =
            made().map_err(|error| error.to_string())?;
        let (own, sent) = (Mailbox { address, bytes }, AtomicU32::new(0));
        let is_over = AtomicBool::new(false);
        let reach = Arc::new(Reach { cuda, driver, context, own, sent, rescue, is_over });
        Ok((Prepared { reach, streams, functions }, shared))
    }

    /// Writes to the other rank's memory, and waits until it has done the same.
    fn greet(&self) -> Result<(), String> {
        let Reach { driver, own, .. } = &*self.reach;
        let since = Instant::now();
        let heard = || {
            // SAFETY: both memories live, and nobody uses them yet.
            unsafe {
                driver.copy_now(own.come(), self.theirs.come(), 4)?;
                driver.write(self.streams.sums, self.theirs.greeting(), 1)?;
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
        let Self { reach, theirs, streams, functions, plan, rounds } = self;
        let Reach { cuda, driver, context, own, sent, .. } = &**reach;
        let Streams { copies, sums, half_copied, copied, over } = *streams;
        // SAFETY: memory of both ranks, streams and events live as long as this; the rest is the caller's.
        unsafe {
            cuda.wait_for_context(sums, *context, over)?;
            for stream in copies {
                driver.wait_for_number(stream, own.added(), *rounds)?;
            }
            *rounds = rounds.wrapping_add(1);
            let mut is_first = true;
            for (stage, copied) in plan.stages.iter().zip(copied) {
                let mut bytes = [0; 2];
                for group in stage.pieces.chunk_by(|(a, _), (b, _)| a.milestone == b.milestone) {
                    for stream in copies {
                        driver.wait_for_number(stream, counter, count_at(group[0].0.milestone))?;
                    }
                    if std::mem::take(&mut is_first) {
                        cuda.record(start, copies[0])?;
                    }
                    for (piece, place) in group {
                        let lane = usize::from(bytes[1] < bytes[0]);
                        bytes[lane] += piece.bytes;
                        let to = theirs.address + place;
                        driver.copy(copies[lane], piece.address, to, piece.bytes)?;
                    }
                }
                cuda.record(half_copied, copies[1])?;
                driver.wait(copies[0], half_copied)?;
                let number = sent.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
                driver.write(copies[0], theirs.come(), number)?;
                cuda.record(copied, copies[0])?;

                // Its own numbers are copied before they are changed.
                driver.wait(sums, copied)?;
                driver.wait_for_number(sums, own.come(), number)?;
                for Batch { dtype, first, count } in &stage.batches {
                    let table = plan.blocks.address + (first * size_of::<Block>()) as u64;
                    let [add_f32, add_f16, add_bf16] = *functions;
                    let function = match dtype {
                        DataType::Float16 => add_f16,
                        DataType::Bfloat16 => add_bf16,
                        _ => add_f32,
                    };
                    driver.launch(sums, function, [*count as u32, THREADS], [table])?;
                }
            }
            driver.write(sums, theirs.added(), *rounds)?;
            cuda.record(end, sums)
        }
    }

    /// Has the plan be that of `pieces`: those of a recording lie where they lay last time.
    fn prepare_for(&mut self, pieces: Vec<Piece>) -> Result<(), CallFailed> {
        let Self { reach, streams, plan, .. } = self;
        if plan.pieces == pieces {
            return Ok(());
        }
        let (stages, blocks) = planned(pieces.clone(), reach.own.address);
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

/// Whether numbers of this type, so many bytes at this address, can be pieces.
pub(super) fn serves(address: Address, bytes: usize, dtype: DataType) -> bool {
    let is_known = matches!(dtype, DataType::Float16 | DataType::Bfloat16 | DataType::Float32);
    is_known
        && bytes > 0
        && bytes.is_multiple_of(VECTOR_BYTES)
        && address.is_multiple_of(VECTOR_BYTES as u64)
}

/// An exchange that does not know the other rank yet.
struct Prepared {
    reach: Arc<Reach>,
    streams: Streams,
    functions: [Function; 3],
}

impl Prepared {
    fn opened(self, theirs: &[u8]) -> Result<Exchange, String> {
        let Self { reach, streams, functions } = self;
        let theirs = theirs.try_into().map_err(|_| "the other rank's memory has no name")?;
        let opened = reach.driver.opened(SharedMemory(theirs));
        let address = opened.map_err(|error| error.to_string())?;
        let theirs = Mailbox { address, ..reach.own };
        Ok(Exchange { reach, theirs, streams, functions, plan: Plan::default(), rounds: 0 })
    }
}

impl Drop for Exchange {
    /// Streams and events live as long as the process, as the memory does, which the other rank may still use.
    fn drop(&mut self) {
        let Reach { cuda, driver, context, is_over, .. } = &*self.reach;
        let since = Instant::now();
        let is_waiting = || !is_over.load(Ordering::Relaxed) && since.elapsed() < LAST_NUMBERS;
        // SAFETY: the context and the streams live. What another rank's memory is for this one is used by the streams
        // alone, which have nothing to do any more.
        let Streams { copies: [one, two], sums, .. } = self.streams;
        let ended = unsafe { cuda.enter(*context) }.and_then(|()| unsafe {
            for stream in [one, two, sums] {
                while !cuda.is_done(stream)? {
                    if !is_waiting() {
                        return Ok(());
                    }
                    std::thread::sleep(PAUSE);
                }
            }
            driver.close(self.theirs.address)
        });
        if let Err(error) = ended {
            tracing::debug!("at the end: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blackburn_simulator::{Argument, Device, Launch, Options, Program};

    fn piece(address: u64, bytes: usize, milestone: u32) -> Piece {
        Piece { address, bytes, dtype: DataType::Float32, milestone }
    }

    #[test]
    fn pieces_are_placed_in_the_order_in_which_they_come() {
        let pieces = vec![piece(1000, 48, 2), piece(2000, 272, 1), piece(3000, 32, 2)];
        assert_eq!(bytes_of(&pieces), 256 + 512 + 256);
        let expected = [(pieces[1], 0), (pieces[0], 512), (pieces[2], 768)];
        assert_eq!(placed(pieces), expected);
    }

    #[test]
    fn large_pieces_are_cut() {
        let found = placed(vec![piece(1 << 30, COPY_BYTES + 16, 1), piece(0, 16, 1)]);
        let (first, second) = (COPY_BYTES as u64, COPY_BYTES as u64 + 256);
        let expected = [
            (piece(1 << 30, COPY_BYTES, 1), 0),
            (piece((1 << 30) + first, 16, 1), first),
            (piece(0, 16, 1), second),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_last_milestone_has_stages_of_its_own() {
        let stages = |pieces| stages(&placed(pieces));
        assert!(stages(Vec::new()).is_empty());
        assert_eq!(stages(vec![piece(0, 16, 3), piece(64, 16, 3)]), [0..2]);
        let embedding = 5 * COPY_BYTES;
        let pieces = vec![piece(0, 16, 1), piece(64, 16, 2), piece(1 << 30, embedding, 3)];
        assert_eq!(stages(pieces), [0..2, 2..4, 4..6, 6..7]);
        // There are no more than there are events.
        let large = stages(vec![piece(0, 16, 1), piece(1 << 30, 100 * STAGE_BYTES, 2)]);
        assert!(large.len() <= STAGES, "{}", large.len());
        assert_eq!(large.last().map(|last| last.end), Some(1 + 200));
        let uneven = vec![piece(0, 12 << 19, 1); 17];
        let found = stages(uneven);
        assert!(found.len() == STAGES && found[STAGES - 1].end == 17, "{found:?}");
    }

    #[test]
    fn each_stage_adds_what_it_copies() {
        let most = BLOCK_VECTORS as usize * VECTOR_BYTES;
        let half = Piece { dtype: DataType::Float16, ..piece(9 << 20, 64, 1) };
        let pieces = vec![piece(0, most + 32, 1), half, piece(5 << 20, 16, 2)];
        let (stages, blocks) = planned(pieces, 1 << 30);
        let block = |to, from, vectors| Block { to, from: (1 << 30) + from, vectors };
        let (second, third) = (most as u64, most as u64 + 256);
        let expected = [
            block(0, 0, BLOCK_VECTORS),
            block(second, second, 2),
            block(9 << 20, third, 4),
            block(5 << 20, third + 256, 1),
        ];
        assert_eq!(blocks, expected);
        let batch = |dtype, first, count| Batch { dtype, first, count };
        let [first, last] = &stages[..] else { panic!("{} stages", stages.len()) };
        let expected = [batch(DataType::Float32, 0, 2), batch(DataType::Float16, 2, 1)];
        assert_eq!(first.batches, expected);
        assert_eq!(last.batches, [batch(DataType::Float32, 3, 1)]);
    }

    #[test]
    fn numbers_lie_behind_what_comes() {
        let mailbox = Mailbox { address: 1 << 30, bytes: 1000 };
        assert_eq!(mailbox.come(), (1 << 30) + 1024);
        assert!(mailbox.greeting() + 4 <= mailbox.address + Mailbox::size(1000) as u64);
    }

    /// Adds on the simulated machine, with more vectors than threads, and a vector behind them that is nobody's.
    fn added(kernel: &str, [to, from]: [&[u8]; 2]) -> Vec<u8> {
        let program = Program::parse(&kernels()).expect("it is PTX");
        let mut device = Device::new();
        let places = [to, from].map(|bytes| {
            let place = device.allocate(bytes.len() as u64);
            device.write(place, bytes).expect("it is there");
            place
        });
        // Two blocks, of which the first has more vectors than threads.
        let half = (to.len() / VECTOR_BYTES / 2) as u64;
        let rest = (to.len() / VECTOR_BYTES) as u64 - half - 1;
        let second = half * VECTOR_BYTES as u64;
        let numbers = [places[0], places[1], half, places[0] + second, places[1] + second, rest];
        let table: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let blocks = device.allocate(table.len() as u64);
        device.write(blocks, &table).expect("it is there");
        let launch = Launch {
            kernel: kernel.into(),
            grid: [2, 1, 1],
            block: [32, 1, 1],
            dynamic_shared: 0,
            arguments: vec![Argument::address(blocks)],
            reach: None,
        };
        device.launch(&program, &launch, &Options::default()).expect("it runs");
        device.read(places[0], to.len()).expect("it is there").0.clone()
    }

    #[test]
    fn kernels_round_each_sum_once_and_stop_in_time() {
        let count = 8 * 100;
        let [x, y]: [Vec<f32>; 2] = [3, 7].map(|by: u32| {
            let number = |i: u32| (i.wrapping_mul(by * 15_485_863) >> 8) as f32 / 65_536.0 - 100.0;
            (0..count).map(number).collect()
        });
        let bytes = |numbers: &[f32], bits: &dyn Fn(f32) -> Vec<u8>| {
            numbers.iter().flat_map(|x| bits(*x)).collect::<Vec<u8>>()
        };
        macro_rules! check {
            ($kernel:literal, $float:ty, $from:expr, $to:expr) => {
                let of = |x: f32| -> Vec<u8> { <$float>::to_le_bytes($from(x)).to_vec() };
                let found = added($kernel, [&bytes(&x, &of), &bytes(&y, &of)]);
                let last = count as usize - VECTOR_BYTES / size_of::<$float>();
                let sum = |i: usize| $to($from(x[i])) + $to($from(y[i]));
                let expected = (0..count as usize)
                    .flat_map(|i| of(if i < last { sum(i) } else { x[i] }))
                    .collect::<Vec<u8>>();
                assert!(found == expected, $kernel);
            };
        }
        check!("add_f32", f32, |x: f32| x, |x: f32| x);
        check!("add_f16", half::f16, half::f16::from_f32, half::f16::to_f32);
        check!("add_bf16", half::bf16, half::bf16::from_f32, half::bf16::to_f32);
    }

    #[test]
    fn pieces_are_whole_vectors_of_known_types() {
        assert!(serves(1 << 20, 4096, DataType::Bfloat16));
        assert!(!serves((1 << 20) + 4, 4096, DataType::Bfloat16));
        assert!(!serves(1 << 20, 4104, DataType::Float32));
        assert!(!serves(1 << 20, 0, DataType::Float32));
        assert!(!serves(1 << 20, 4096, DataType::Float64));
    }
}
