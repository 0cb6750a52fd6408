//! Engines that move bytes of the host.

use super::{Clock, Engine, EngineError, Moved};
use burn::tensor::{DType, Device, Tensor, TensorData};
use half::{bf16, f16};
use std::{
    fmt,
    ops::{AddAssign, Range},
    time::Duration,
};

/// Moves bytes between ranks.
pub(crate) trait Link: Send + Sync + fmt::Debug {
    /// Adds numbers up over all ranks, in the order of ranks.
    fn sum(&self, numbers: &mut Numbers) -> Result<(), EngineError>;

    /// Makes `bytes` those of `root` on all ranks, which know their number.
    fn spread(&self, bytes: &mut [u8], root: usize) -> Result<(), EngineError>;

    /// Ends what is under way, and all that comes after.
    fn abort(&self);
}

/// Numbers of one type of floats, as they lie in memory.
#[derive(Debug)]
pub(crate) struct Numbers {
    bytes: Vec<u8>,
    dtype: DType,
}

/// An engine of a link: tensors go through the memory of the host.
#[derive(Debug)]
pub(crate) struct OverHost<L> {
    link: L,
    clock: Clock,
}

impl<L: Link> OverHost<L> {
    pub(crate) fn new(link: L) -> Self {
        Self { link, clock: Clock::default() }
    }
}

/// What tensors of one type are while they move.
struct Packed {
    dtype: DType,
    device: Device,
    /// Which tensor each is, and how long.
    places: Vec<(usize, usize)>,
    bytes: Vec<u8>,
}

/// Puts tensors of the same type and the same key together.
fn packed<K: PartialEq + Copy>(tensors: Vec<(Tensor<1>, K)>) -> Vec<(Packed, K)> {
    let mut all: Vec<(Packed, K)> = Vec::new();
    for (index, (tensor, key)) in tensors.into_iter().enumerate() {
        let (dtype, device, length) = (tensor.dtype(), tensor.device(), tensor.dims()[0]);
        let data = tensor.into_data();
        let fits = |(packed, its): &&mut (Packed, K)| packed.dtype == dtype && *its == key;
        let place = match all.iter_mut().find(fits) {
            Some((packed, _)) => packed,
            None => {
                let (places, bytes) = (Vec::new(), Vec::new());
                all.push((Packed { dtype, device, places, bytes }, key));
                match all.last_mut() {
                    Some((packed, _)) => packed,
                    None => continue,
                }
            }
        };
        place.bytes.extend_from_slice(data.as_bytes());
        place.places.push((index, length));
    }
    all
}

/// The tensors in their order.
fn unpacked(all: Vec<Packed>) -> Vec<Tensor<1>> {
    let mut tensors: Vec<(usize, Tensor<1>)> = Vec::new();
    for Packed { dtype, device, places, bytes } in all {
        let mut rest = bytes.as_slice();
        for (index, length) in places {
            let (own, others) = rest.split_at(length * dtype.size());
            rest = others;
            let data = TensorData::from_bytes_vec(own.to_vec(), [length], dtype);
            tensors.push((index, Tensor::from_data(data, (&device, dtype))));
        }
    }
    tensors.sort_by_key(|(index, _)| *index);
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

impl<L: Link> Engine for OverHost<L> {
    fn sum(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, EngineError> {
        let keyed = tensors.into_iter().map(|tensor| (tensor, ())).collect();
        let mut summed = Vec::new();
        for (mut packed, ()) in packed(keyed) {
            let mut numbers = Numbers::of(packed.bytes, packed.dtype)?;
            self.clock.timed(|| self.link.sum(&mut numbers))?;
            packed.bytes = numbers.bytes;
            summed.push(packed);
        }
        Ok(unpacked(summed))
    }

    fn spread(&self, tensors: Vec<(Tensor<1>, usize)>) -> Result<Vec<Tensor<1>>, EngineError> {
        let mut spread = Vec::new();
        for (mut packed, root) in packed(tensors) {
            self.clock.timed(|| self.link.spread(&mut packed.bytes, root))?;
            spread.push(packed);
        }
        Ok(unpacked(spread))
    }

    fn spread_bytes(&self, mut bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, EngineError> {
        let mut length = (bytes.len() as u64).to_le_bytes();
        self.link.spread(&mut length, root)?;
        bytes.resize(u64::from_le_bytes(length) as usize, 0);
        self.link.spread(&mut bytes, root)?;
        Ok(bytes)
    }

    fn moving(&self) -> Moved {
        Moved { all: self.clock.total(), beside: Duration::ZERO }
    }

    fn abort(&self) {
        self.link.abort();
    }
}

impl Numbers {
    fn of(bytes: Vec<u8>, dtype: DType) -> Result<Self, EngineError> {
        match dtype {
            DType::F32 | DType::F64 | DType::BF16 | DType::F16 => Ok(Self { bytes, dtype }),
            other => Err(EngineError {
                rank: 0,
                what: format!("was asked for a sum of {other:?}, and sums are of floats"),
            }),
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / self.size()
    }

    /// Bytes of one.
    pub(crate) fn size(&self) -> usize {
        self.dtype.size()
    }

    /// The bytes of those in `range`.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range.start * self.size()..range.end * self.size()]
    }

    /// Replaces those from `start` on.
    pub(crate) fn set(&mut self, start: usize, bytes: &[u8]) {
        let start = start * self.size();
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Sums of the numbers in `parts`, which are as many: in f32 (f64 in f64), from the first part to the last,
    /// rounded once.
    pub(crate) fn summed(&self, parts: &[&[u8]]) -> Vec<u8> {
        match self.dtype {
            DType::F64 => summed(parts, f64::from_ne_bytes, f64::to_ne_bytes),
            DType::BF16 => summed(
                parts,
                |bytes| bf16::from_ne_bytes(bytes).to_f32(),
                |sum: f32| bf16::from_f32(sum).to_ne_bytes(),
            ),
            DType::F16 => summed(
                parts,
                |bytes| f16::from_ne_bytes(bytes).to_f32(),
                |sum: f32| f16::from_f32(sum).to_ne_bytes(),
            ),
            _ => summed(parts, f32::from_ne_bytes, f32::to_ne_bytes),
        }
    }
}

fn summed<T: Copy + AddAssign, const BYTES: usize>(
    parts: &[&[u8]],
    number: impl Fn([u8; BYTES]) -> T,
    rounded: impl Fn(T) -> [u8; BYTES],
) -> Vec<u8> {
    let [first, others @ ..] = parts else { return Vec::new() };
    let numbers = |part: &[u8]| -> Vec<T> {
        part.as_chunks::<BYTES>().0.iter().map(|chunk| number(*chunk)).collect()
    };
    let mut sums = numbers(first);
    for part in others {
        for (sum, chunk) in sums.iter_mut().zip(part.as_chunks::<BYTES>().0) {
            *sum += number(*chunk);
        }
    }
    sums.into_iter().flat_map(rounded).collect()
}
