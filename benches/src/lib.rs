//! What the benches share: the device, its inputs, and timing without the host's latency.

use blackburn_kernels::buffer::Buffer;
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use criterion::Bencher;
use cubecl::{
    Device,
    client::Client,
    ir::{ElemType, FloatKind},
};
use std::time::Instant;

/// The GPU to measure on: CUDA's first. Without one a bench says "skipped" and measures nothing.
pub fn device() -> Option<Device> {
    match Device::cuda(0) {
        Ok(device) => Some(device),
        Err(reason) => {
            eprintln!("skipped: {reason}. Benches need a GPU and --features cuda");
            None
        }
    }
}

/// CubeCL's name of a storage type.
pub fn dtype(storage: Storage) -> ElemType {
    ElemType::Float(match storage {
        Storage::F32 => FloatKind::F32,
        Storage::F16 => FloatKind::F16,
        Storage::Bf16 => FloatKind::BF16,
    })
}

/// Normal numbers, here and on the device.
pub fn input(client: &Client, seed: u64, count: usize, storage: Storage) -> (Vec<f64>, Buffer) {
    let values = normal(seed, count, 1.0, storage);
    let handle = client.create_from_slice(&storage.encode(&values));
    (values, Buffer { handle, elements: count, dtype: dtype(storage) })
}

/// A kernel proves itself before it is timed.
///
/// # Panics
///
/// When the result is out of bounds: its speed would mean nothing.
pub fn verify(client: &Client, actual: Buffer, storage: Storage, expected: &[f64], bounds: &[f64]) {
    let bytes = client.read_one(actual.handle).expect("the device failed during a bench");
    let values = &storage.decode(&bytes)[..actual.elements];
    if let Err(mismatch) = compare(values, expected, bounds) {
        panic!("wrong results are not timed: {mismatch}");
    }
}

/// Times `launch`: as many launches as criterion asks for, then one wait, so that the time is the
/// device's where a kernel takes longer than its launch.
pub fn time<T>(bencher: &mut Bencher<'_>, client: &Client, mut launch: impl FnMut() -> T) {
    bencher.iter_custom(|iterations| {
        sync(client);
        let start = Instant::now();
        for _ in 0..iterations {
            launch();
        }
        sync(client);
        start.elapsed()
    });
}

fn sync(client: &Client) {
    cubecl::future::block_on(client.sync()).expect("the device failed during a bench");
}
