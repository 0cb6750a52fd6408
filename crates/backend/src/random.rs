//! Random numbers that kernels draw.
//!
//! Blackburn's generator has no state: a number is a function of its place, of a seed and of a key. The host
//! knows the seed, and it is part of a launch. The key lies on the device. A recorded pass repeats its
//! launches, seeds and all, so a new key is what makes a replay draw other numbers.
//!
//! | where | seeds | key |
//! |---|---|---|
//! | outside a [`KeyedPass`] | of the process, from [`seed`] on | none |
//! | in a pass | numbered from its start, the same in each | the pass's own, for its whole length |
//!
//! In a pass, Burn's random numbers in floating point come from this generator too: see the provider
//! `BlackburnRandom`. So unmodified dropout can be recorded.

use crate::graph::{self, GraphError};
#[cfg(feature = "gpu")]
use crate::tensors::contiguous_buffer;
#[cfg(feature = "gpu")]
use blackburn_kernels::buffer::Buffer;
use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::IntTensor},
    tensor::{DType, Device, Int, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
#[cfg(feature = "gpu")]
use burn_std::id::StreamId;
use std::{
    cell::Cell,
    hash::{BuildHasher, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};
#[cfg(feature = "gpu")]
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// One for the process, as Burn's devices have one each. It begins anywhere.
static STATE: LazyLock<AtomicU64> =
    LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(0u64)));

/// The step of `SplitMix64`, 2^64 over the golden ratio (Steele et al., "Fast splittable
/// pseudorandom number generators", 2014).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Seeds the dropout of Blackburn's modules and functions, and the keys of passes, as `Device::seed` seeds
/// Burn's random numbers. Call both to repeat a step.
///
/// This generator is the host's, because Burn's live on devices: asking one for a number would wait for the device
/// in every layer.
pub fn seed(seed: u64) {
    // Mixed, so that neighboring seeds do not give sequences that are each other's, shifted.
    STATE.store(mixed(seed), Ordering::Relaxed);
}

fn next_seed() -> u64 {
    mixed(STATE.fetch_add(STEP, Ordering::Relaxed))
}

fn mixed(mut z: u64) -> u64 {
    z = z.wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What an operation draws by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Told to the kernel by the host.
    pub seed: u64,
    /// What the device combines the seed with, if it does.
    pub key: Option<KeyId>,
}

impl Draw {
    /// A draw that no other operation has, of this thread's pass or of the process.
    pub fn next() -> Self {
        PASS.with(|pass| match pass.get() {
            Some(InPass { key, draws }) => {
                pass.set(Some(InPass { key, draws: draws + 1 }));
                Self { seed: mixed(draws.wrapping_mul(STEP)), key: Some(key) }
            }
            None => Self { seed: next_seed(), key: None },
        })
    }
}

/// Names the key of a [`KeyedPass`] for operations that run later than they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(u64);

impl KeyId {
    /// The key's two words.
    #[cfg(feature = "gpu")]
    pub(crate) fn words(self) -> Option<Buffer> {
        keys().get(&self).cloned().map(contiguous_buffer)
    }
}

/// Where keys lie.
#[cfg(feature = "gpu")]
static KEYS: LazyLock<Mutex<HashMap<KeyId, CubeTensor>>> = LazyLock::new(Mutex::default);

#[cfg(feature = "gpu")]
fn keys() -> MutexGuard<'static, HashMap<KeyId, CubeTensor>> {
    KEYS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy)]
struct InPass {
    key: KeyId,
    draws: u64,
}

thread_local! {
    /// The pass that this thread is in.
    static PASS: Cell<Option<InPass>> = const { Cell::new(None) };
}

/// Random tensors of Burn's that a queue's pass has drawn: they are made when the stream runs, which another
/// thread may do.
#[cfg(feature = "gpu")]
static RANDOM_TENSORS: LazyLock<Mutex<HashMap<StreamId, InPass>>> = LazyLock::new(Mutex::default);

#[cfg(feature = "gpu")]
fn random_tensors() -> MutexGuard<'static, HashMap<StreamId, InPass>> {
    RANDOM_TENSORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The key of the pass that runs in this queue, where it lies, and the number of the next random tensor.
#[cfg(feature = "gpu")]
pub(crate) fn next_random_tensor() -> Option<(CubeTensor, u32)> {
    let mut all = random_tensors();
    let pass = all.get_mut(&StreamId::current())?;
    let key = keys().get(&pass.key).cloned()?;
    pass.draws += 1;
    Some((key, pass.draws as u32))
}

/// Passes that draw by a key on the device.
#[derive(Debug)]
pub struct KeyedPass {
    id: KeyId,
}

impl Default for KeyedPass {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: KeyId(NEXT.fetch_add(1, Ordering::Relaxed)) }
    }
}

impl Drop for KeyedPass {
    fn drop(&mut self) {
        #[cfg(feature = "gpu")]
        keys().remove(&self.id);
    }
}

impl KeyedPass {
    /// A key that no pass had, of the sequence that [`seed`] begins: two words on `device`.
    pub fn next_key(device: &Device) -> Tensor<1, Int> {
        let key = next_seed();
        let words = [key as u32, (key >> 32) as u32].map(|word| word as i32);
        Tensor::from_data(words, (&device.clone().without_autodiff(), DType::I32))
    }

    /// Runs `pass` with that key. Its operations are handed to the device when this returns, unless the device
    /// records: there they are when the recording ends.
    pub fn run<R>(
        &self,
        device: &Device,
        key: Tensor<1, Int>,
        pass: impl FnOnce() -> R,
    ) -> KeyedResult<R> {
        let hand_over = || match graph::is_recording() {
            true => Ok(()),
            false => graph::hand_over(device),
        };
        let _key: Tensor<1, Int> = Tensor::from_dispatch(<Dispatch as KeyPrimitives>::keep_key(
            key.into_dispatch(),
            self.id.0,
        ));
        // What was asked for before the pass is no part of it.
        let before = hand_over();
        let _left = Left(PASS.replace(Some(InPass { key: self.id, draws: 0 })));
        #[cfg(feature = "gpu")]
        random_tensors().insert(StreamId::current(), InPass { key: self.id, draws: 0 });
        let done = pass();
        let handed_over = before.and(hand_over());
        let draws = PASS.get().map_or(0, |pass| pass.draws);
        #[cfg(feature = "gpu")]
        let draws = draws + random_tensors().get(&StreamId::current()).map_or(0, |own| own.draws);
        KeyedResult { done, draws, handed_over }
    }
}

/// What a [`KeyedPass`] came to.
#[derive(Debug)]
pub struct KeyedResult<R> {
    /// What the pass returned.
    pub done: R,
    /// How often it drew. Unknown while the device records.
    pub draws: u64,
    /// What the device says of operations that it was handed.
    pub handed_over: Result<(), GraphError>,
}

/// Takes the thread out of a pass, whichever way that ends.
struct Left(Option<InPass>);

impl Drop for Left {
    fn drop(&mut self) {
        PASS.set(self.0);
        if !graph::is_recording() {
            leave_pass();
        }
    }
}

/// Ends a pass for random tensors of this queue, once its operations were handed to the device.
pub(crate) fn leave_pass() {
    #[cfg(feature = "gpu")]
    random_tensors().remove(&StreamId::current());
}

/// The operation under [`KeyedPass`].
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait KeyPrimitives: Backend {
    /// `key`, whose memory has the name `id` from here on.
    #[fusion(dtype = key, shape = key)]
    fn keep_key(key: IntTensor<Self>, id: u64) -> IntTensor<Self>;
}

#[cfg(feature = "flex")]
impl KeyPrimitives for burn::backend::Flex {
    fn keep_key(key: IntTensor<Self>, _: u64) -> IntTensor<Self> {
        key
    }
}

#[cfg(feature = "gpu")]
impl KeyPrimitives for CubeBackend {
    fn keep_key(key: IntTensor<Self>, id: u64) -> IntTensor<Self> {
        keys().insert(KeyId(id), key.clone());
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_of_a_pass_are_numbered_and_those_outside_follow_the_seed() {
        let device = Device::flex();
        let passes = KeyedPass::default();
        let drawn = || {
            let pass = || [Draw::next(), Draw::next()];
            passes.run(&device, KeyedPass::next_key(&device), pass)
        };
        let (first, second) = (drawn(), drawn());
        assert!(first.handed_over.is_ok());
        assert_eq!((first.done, first.draws), (second.done, 2));
        let [a, b] = first.done;
        assert_ne!(a.seed, b.seed);
        assert_eq!((a.key, b.key), (Some(passes.id), Some(passes.id)));

        let outside = || {
            seed(5);
            [Draw::next(), Draw::next()]
        };
        let [a, b] = outside();
        assert_eq!((a.key, b.key), (None, None));
        assert_eq!([a, b], outside());
        assert_ne!(a.seed, b.seed);
    }

    #[test]
    fn a_pass_that_panics_leaves_the_thread_outside() {
        let device = Device::flex();
        let key = KeyedPass::next_key(&device);
        let panicked = std::panic::catch_unwind(|| {
            KeyedPass::default().run(&device, key, || panic!("on purpose"));
        });
        assert!(panicked.is_err());
        assert_eq!(Draw::next().key, None);
    }
}
