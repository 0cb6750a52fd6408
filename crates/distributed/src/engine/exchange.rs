//! Sums of two ranks of one machine, which move while the GPUs go on with the pass that they are of.
//!
//! NCCL moves numbers by kernels. Beside a backward pass these take multiprocessors from products that are laid out for
//! all of them, and what those have left over is a second round. A GPU's copy engines take none. So each rank copies
//! gradients into the other's memory as soon as the pass has made them, and a short kernel adds what has come from there.
//!
//! ```text
//! rank 0, copies:  wait until the pass has made part n  ->  wait for a free slot of rank 1  ->  copy  ->  "n has come"
//! rank 1, sums:    wait for "n has come", and until its own part n is copied  ->  own += slot  ->  "slot is free"
//! ```
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
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Where it is "off", gradients move over NCCL alone.
const COPIES_VARIABLE: &str = "BLACKBURN_COPIES";
/// Parts that may be on their way.
const SLOTS: usize = 4;
/// Bytes of the largest part. Large copies are fast; small ones leave less to do behind the pass.
const SLOT_BYTES: usize = 16 << 20;
/// Numbers lie behind the slots, each in a line of its own.
const LINE: u64 = 128;
/// What the kernel adds up at a time.
pub(super) const VECTOR_BYTES: usize = 16;
const THREADS: u32 = 256;
/// Enough to have all of a GPU's memory at work.
const MOST_BLOCKS: u64 = 264;
/// How long the ranks wait for their first words.
const FIRST_WORDS: Duration = Duration::from_secs(5);
/// How long a rank that ends waits for what still moves.
const LAST_NUMBERS: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);
/// Beyond all parts that anybody waits for, and still ahead of them modulo 2^32.
const FAR: u32 = 1 << 30;

/// Numbers to add up where they lie, which are there at a milestone of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) address: Address,
    /// A multiple of [`VECTOR_BYTES`].
    pub(super) bytes: usize,
    pub(super) dtype: DataType,
    pub(super) milestone: u32,
}

/// Numbers that go into one slot, one behind the other.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    milestone: u32,
    pieces: Vec<Piece>,
}

/// `pieces` in the order in which they are there, in parts of `most` bytes each.
fn parts(mut pieces: Vec<Piece>, most: usize) -> Vec<Part> {
    pieces.sort_by_key(|piece| piece.milestone);
    let mut parts: Vec<Part> = Vec::new();
    let mut free = 0;
    for mut piece in pieces {
        while piece.bytes > 0 {
            let goes_on = parts.last().is_some_and(|part| part.milestone == piece.milestone);
            if free == 0 || !goes_on {
                parts.push(Part { milestone: piece.milestone, pieces: Vec::new() });
                free = most;
            }
            let bytes = piece.bytes.min(free);
            if let Some(part) = parts.last_mut() {
                part.pieces.push(Piece { bytes, ..piece });
            }
            free -= bytes;
            piece.address += bytes as u64;
            piece.bytes -= bytes;
        }
    }
    parts
}

/// A kernel for each type that adds numbers from one place to those in another.
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
.visible .entry {name}(.param .u64 to, .param .u64 from, .param .u64 vectors)
{{
    .reg .pred %done;
    .reg .b32 %block, %threads, %thread, %blocks, %first, %one;
    .reg .b32 %a<4>;
    .reg .b32 %b<4>;
    .reg .b64 %to, %from, %vectors, %at, %step, %offset, %x, %y;
    ld.param.u64 %to, [to];
    ld.param.u64 %from, [from];
    ld.param.u64 %vectors, [vectors];
    cvta.to.global.u64 %to, %to;
    cvta.to.global.u64 %from, %from;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.b32 %one, 0x3F803F80;
    mad.lo.u32 %first, %block, %threads, %thread;
    cvt.u64.u32 %at, %first;
    mul.wide.u32 %step, %threads, %blocks;
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
struct Mailbox(Address);

impl Mailbox {
    const BYTES: usize = SLOTS * SLOT_BYTES + 3 * LINE as usize;

    /// Where part `number` comes to.
    fn slot(self, number: u32) -> Address {
        self.0 + (number as usize % SLOTS * SLOT_BYTES) as u64
    }

    /// How many parts have come.
    fn come(self) -> Address {
        self.0 + (SLOTS * SLOT_BYTES) as u64
    }

    /// How many of the parts that its owner has sent are added up there.
    fn freed(self) -> Address {
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
    copies: Stream,
    sums: Stream,
    /// When the part in each slot is copied.
    copied: [Event; SLOTS],
    add_f32: Function,
    add_f16: Function,
    add_bf16: Function,
}

// SAFETY: streams, events and functions may be used by any thread, one at a time, which the mutex around them sees to.
unsafe impl Send for Exchange {}

/// What ends waits for a rank that is gone.
pub(super) struct Reach {
    cuda: Cuda,
    driver: CudaCopies,
    context: Context,
    own: Mailbox,
    /// Parts so far.
    sent: AtomicU32,
    rescue: Stream,
}

// SAFETY: as above; the stream is used once, by the thread that ends the waits.
unsafe impl Send for Reach {}
// SAFETY: as above.
unsafe impl Sync for Reach {}

impl Reach {
    /// Has all waits be over.
    pub(super) fn end(&self) -> Result<(), CallFailed> {
        let far = self.sent.load(Ordering::Relaxed).wrapping_add(FAR);
        // SAFETY: the context, the stream and the memory live as long as the process.
        unsafe {
            self.cuda.enter(self.context)?;
            self.driver.write(self.rescue, self.own.come(), far)?;
            self.driver.write(self.rescue, self.own.freed(), far)
        }
    }
}

impl Exchange {
    /// Finds the other rank, `None` where one of the two cannot reach the other's memory. Both come here together.
    ///
    /// # Errors
    ///
    /// When a rank has failed meanwhile.
    pub(super) fn meet(control: &Control, ordinal: usize) -> Result<Option<Self>, String> {
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
        let prepared = Self::prepare(control, ordinal);
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

    fn prepare(control: &Control, ordinal: usize) -> Result<(Prepared, SharedMemory), String> {
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
            let streams = [driver.urgent_stream()?, driver.urgent_stream()?, cuda.stream()?];
            let events = [cuda.event()?, cuda.event()?, cuda.event()?, cuda.event()?];
            let (own, shared) = driver.memory(Mailbox::BYTES)?;
            Ok::<_, CallFailed>((context, functions, streams, events, own, shared))
        };
        let (context, functions, [copies, sums, rescue], copied, own, shared) =
            made().map_err(|error| error.to_string())?;
        let (own, sent) = (Mailbox(own), AtomicU32::new(0));
        let reach = Arc::new(Reach { cuda, driver, context, own, sent, rescue });
        Ok((Prepared { reach, copies, sums, copied, functions }, shared))
    }

    /// Writes to the other rank's memory, and waits until it has done the same.
    fn greet(&self) -> Result<(), String> {
        let Reach { driver, own, .. } = &*self.reach;
        let since = Instant::now();
        let heard = || {
            // SAFETY: both memories live, and nobody uses them yet.
            unsafe {
                driver.copy_now(own.slot(0), self.theirs.slot(0), VECTOR_BYTES)?;
                driver.write(self.copies, self.theirs.greeting(), 1)?;
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

    /// Adds the other rank's numbers to `pieces`, and those to the other rank's, beside what the device does. They are
    /// there when `counter` has reached what `count_at` says of their milestones. Records `start` when the first of them
    /// move, and `end` behind the last.
    ///
    /// # Safety
    ///
    /// The numbers stay where they are, and nothing else uses them between their milestone and `end`. The other rank
    /// calls this with pieces of the same sizes, types and milestones.
    pub(super) unsafe fn add(
        &self,
        pieces: Vec<Piece>,
        counter: Address,
        count_at: impl Fn(u32) -> u32,
        [start, end]: [Event; 2],
    ) -> Result<(), CallFailed> {
        let Self { reach, theirs, copies, sums, .. } = self;
        let Reach { cuda, driver, own, .. } = &**reach;
        let (copies, sums) = (*copies, *sums);
        let mut last = None;
        for part in parts(pieces, SLOT_BYTES) {
            let number = reach.sent.fetch_add(1, Ordering::Relaxed);
            let next = number.wrapping_add(1);
            let copied = self.copied[number as usize % SLOTS];
            // SAFETY: memory of both ranks, streams and events live as long as this; the rest is the caller's.
            unsafe {
                if last != Some(part.milestone) {
                    driver.wait_for_number(copies, counter, count_at(part.milestone))?;
                    if last.is_none() {
                        cuda.record(start, copies)?;
                    }
                }
                // At the first parts this asks for less than none.
                driver.wait_for_number(copies, own.freed(), next.wrapping_sub(SLOTS as u32))?;
                let mut place = 0;
                for Piece { address, bytes, .. } in &part.pieces {
                    driver.copy(copies, *address, theirs.slot(number) + place, *bytes)?;
                    place += *bytes as u64;
                }
                driver.write(copies, theirs.come(), next)?;
                cuda.record(copied, copies)?;

                driver.wait(sums, copied)?;
                driver.wait_for_number(sums, own.come(), next)?;
                let mut place = 0;
                for Piece { address, bytes, dtype, .. } in &part.pieces {
                    let vectors = (bytes / VECTOR_BYTES) as u64;
                    let blocks = vectors.div_ceil(THREADS.into()).min(MOST_BLOCKS) as u32;
                    let parameters = [*address, own.slot(number) + place, vectors];
                    driver.launch(sums, self.adds(*dtype), [blocks, THREADS], parameters)?;
                    place += *bytes as u64;
                }
                driver.write(sums, theirs.freed(), next)?;
            }
            last = Some(part.milestone);
        }
        // SAFETY: as above.
        unsafe { cuda.record(end, sums) }
    }

    fn adds(&self, dtype: DataType) -> Function {
        match dtype {
            DataType::Float16 => self.add_f16,
            DataType::Bfloat16 => self.add_bf16,
            _ => self.add_f32,
        }
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
    copies: Stream,
    sums: Stream,
    copied: [Event; SLOTS],
    functions: [Function; 3],
}

impl Prepared {
    fn opened(self, theirs: &[u8]) -> Result<Exchange, String> {
        let Self { reach, copies, sums, copied, functions: [add_f32, add_f16, add_bf16] } = self;
        let theirs = theirs.try_into().map_err(|_| "the other rank's memory has no name")?;
        let opened = reach.driver.opened(SharedMemory(theirs));
        let theirs = Mailbox(opened.map_err(|error| error.to_string())?);
        Ok(Exchange { reach, theirs, copies, sums, copied, add_f32, add_f16, add_bf16 })
    }
}

impl Drop for Exchange {
    /// Streams and events live as long as the process, as the memory does, which the other rank may still use.
    fn drop(&mut self) {
        let Reach { cuda, driver, context, .. } = &*self.reach;
        let since = Instant::now();
        // SAFETY: the context and the streams live. What another rank's memory is for this one is used by the streams
        // alone, which have nothing to do any more.
        let ended = unsafe { cuda.enter(*context) }.and_then(|()| unsafe {
            while !(cuda.is_done(self.copies)? && cuda.is_done(self.sums)?) {
                if since.elapsed() > LAST_NUMBERS {
                    return Ok(());
                }
                std::thread::sleep(PAUSE);
            }
            driver.close(self.theirs.0)
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
    fn parts_go_by_milestones_and_fill_slots() {
        let found = parts(vec![piece(1000, 48, 2), piece(2000, 16, 1), piece(3000, 32, 2)], 64);
        let expected = [
            Part { milestone: 1, pieces: vec![piece(2000, 16, 1)] },
            Part { milestone: 2, pieces: vec![piece(1000, 48, 2), piece(3000, 16, 2)] },
            Part { milestone: 2, pieces: vec![piece(3016, 16, 2)] },
        ];
        assert_eq!(found, expected);
        assert_eq!(parts(Vec::new(), 64), []);
    }

    #[test]
    fn slots_lie_behind_each_other_and_numbers_behind_them() {
        let mailbox = Mailbox(1 << 30);
        assert_eq!(mailbox.slot(SLOTS as u32 + 1), mailbox.slot(0) + SLOT_BYTES as u64);
        assert_eq!(mailbox.come(), mailbox.slot(SLOTS as u32 - 1) + SLOT_BYTES as u64);
        assert!(mailbox.greeting() + 4 <= mailbox.0 + Mailbox::BYTES as u64);
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
        let vectors = (to.len() / VECTOR_BYTES - 1) as u64;
        let launch = Launch {
            kernel: kernel.into(),
            grid: [2, 1, 1],
            block: [32, 1, 1],
            dynamic_shared: 0,
            arguments: vec![
                Argument::address(places[0]),
                Argument::address(places[1]),
                Argument::address(vectors),
            ],
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
