//! Between the references' numbers and buffers of a device.

use blackburn_kernels::{buffer::Buffer, magnitude::Magnitudes};
use blackburn_reference::storage::Storage;
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind, IntKind},
    prelude::CubeElement,
};

/// What kernels call the type.
pub fn dtype(storage: Storage) -> ElemType {
    ElemType::Float(match storage {
        Storage::F32 => FloatKind::F32,
        Storage::F16 => FloatKind::F16,
        Storage::Bf16 => FloatKind::BF16,
    })
}

/// A buffer of `values`, rounded to `storage`.
pub fn upload(client: &Client, values: &[f64], storage: Storage) -> Buffer {
    let bytes = storage.encode(values);
    Buffer {
        handle: client.create_from_slice(&bytes),
        elements: values.len(),
        dtype: dtype(storage),
    }
}

/// A buffer of `values`, with `front` elements of NaN before it in its memory.
pub fn upload_behind(client: &Client, front: usize, values: &[f64], storage: Storage) -> Buffer {
    let memory = upload(client, &[vec![f64::NAN; front].as_slice(), values].concat(), storage);
    let bytes = (front * storage.bytes()) as u64;
    Buffer { handle: memory.handle.offset_start(bytes), elements: values.len(), ..memory }
}

/// A buffer of 32-bit integers.
pub fn upload_integers(client: &Client, values: &[i32]) -> Buffer {
    Buffer {
        handle: client.create_from_slice(i32::as_bytes(values)),
        elements: values.len(),
        dtype: ElemType::Int(IntKind::I32),
    }
}

/// The numbers in a buffer of that type.
///
/// # Errors
///
/// What the device reports.
pub fn download(client: &Client, buffer: Buffer, storage: Storage) -> Result<Vec<f64>, String> {
    let bytes = client.read_one(buffer.handle).map_err(|error| error.to_string())?;
    Ok(storage.decode(&bytes)[..buffer.elements].to_vec())
}

/// The 32-bit integers in a buffer.
///
/// # Errors
///
/// What the device reports.
pub fn download_integers(client: &Client, buffer: Buffer) -> Result<Vec<i32>, String> {
    let bytes = client.read_one(buffer.handle).map_err(|error| error.to_string())?;
    Ok(i32::from_bytes(&bytes)[..buffer.elements].to_vec())
}

/// The logarithms of attention's sums, from the two parts that kernels keep: all of the largest scores, then all
/// logarithms of what is left.
pub fn lse_of(parts: &[f64]) -> Vec<f64> {
    let (largest, logarithms) = parts.split_at(parts.len() / 2);
    largest.iter().zip(logarithms).map(|(largest, logarithm)| largest + logarithm).collect()
}

/// The largest magnitude that a kernel told in parts.
///
/// # Errors
///
/// When the device fails.
pub fn largest_magnitude(client: &Client, magnitudes: &Magnitudes) -> Result<f64, String> {
    let bytes =
        client.read_one(magnitudes.parts().handle.clone()).map_err(|error| error.to_string())?;
    let (words, _) = bytes.as_chunks::<4>();
    let most = words.iter().map(|word| u32::from_le_bytes(*word)).max();
    Ok(f32::from_bits(most.unwrap_or(0)).into())
}
