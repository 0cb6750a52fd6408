//! Between the references' numbers and buffers of a simulated GPU.

use blackburn_kernels::{buffer::Buffer, recorder::Recorder};
use blackburn_reference::{storage::Storage, tolerance::compare};
use cubecl::ir::{ElemType, FloatKind, IntKind};
use libtest_mimic::Failed;

/// What kernels call the type.
pub(crate) fn dtype(storage: Storage) -> ElemType {
    ElemType::Float(match storage {
        Storage::F32 => FloatKind::F32,
        Storage::F16 => FloatKind::F16,
        Storage::Bf16 => FloatKind::BF16,
    })
}

/// A buffer of `values`, rounded to `storage`.
pub(crate) fn upload(recorder: &Recorder, values: &[f64], storage: Storage) -> Buffer {
    let handle = recorder.client().create_from_slice(&storage.encode(values));
    Buffer { handle, elements: values.len(), dtype: dtype(storage) }
}

/// As [`upload`], with `front` zeros before the values in their memory.
pub(crate) fn upload_behind(
    recorder: &Recorder,
    front: usize,
    values: &[f64],
    storage: Storage,
) -> Buffer {
    let memory = upload(recorder, &[vec![0.0; front].as_slice(), values].concat(), storage);
    let bytes = (front * storage.bytes()) as u64;
    Buffer { handle: memory.handle.offset_start(bytes), elements: values.len(), ..memory }
}

/// A buffer of 32-bit integers.
pub(crate) fn upload_integers(recorder: &Recorder, values: &[i32]) -> Buffer {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let handle = recorder.client().create_from_slice(&bytes);
    Buffer { handle, elements: values.len(), dtype: ElemType::Int(IntKind::I32) }
}

/// The numbers in a buffer of that type.
pub(crate) fn download(
    recorder: &Recorder,
    buffer: &Buffer,
    storage: Storage,
) -> Result<Vec<f64>, Failed> {
    let bytes = recorder.read(buffer).map_err(|error| error.to_string())?;
    Ok(storage.decode(&bytes))
}

/// Whole numbers from `-most` to `most`, the same ones for the same seed.
pub(crate) fn whole_numbers(seed: u64, count: usize, most: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) % (2 * most + 1)
    };
    (0..count).map(|_| draw() as f64 - most as f64).collect()
}

/// That a buffer holds what is expected, within bounds.
pub(crate) fn within(
    recorder: &Recorder,
    buffer: &Buffer,
    storage: Storage,
    expected: &[f64],
    bounds: &[f64],
) -> Result<(), Failed> {
    let actual = download(recorder, buffer, storage)?;
    compare(&actual, expected, bounds).map(drop).map_err(|mismatch| mismatch.to_string().into())
}
