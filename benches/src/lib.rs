//! What the benches share: the device, its inputs, and timing without the host's latency.

pub mod conv;
pub mod gpt2;
pub mod matmul;
pub mod optimizer;

use blackburn_kernels::{buffer::Buffer, family::offer_unproven};
use blackburn_reference::{fp8::Fp8, random::normal, storage::Storage, tolerance::compare};
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
        Ok(device) => {
            // Results are verified before they are timed.
            offer_unproven();
            Some(device)
        }
        Err(reason) => {
            eprintln!("skipped: {reason}. Benches need a GPU and --features cuda");
            None
        }
    }
}

/// CubeCL's name of a storage type.
pub fn dtype_of(storage: Storage) -> ElemType {
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
    (values, Buffer { handle, elements: count, dtype: dtype_of(storage) })
}

/// A large operand: normal numbers that repeat after [`Rotated::PERIOD`], since drawing billions of
/// them would take longer than anything measured with them.
#[derive(Debug)]
pub struct Rotated {
    values: Vec<f64>,
    /// On the device.
    pub buffer: Buffer,
}

impl Rotated {
    /// A prime, so that no stride of a matrix meets the same numbers row after row.
    pub const PERIOD: usize = 1_000_003;

    /// `elements` numbers of that type: f32, f16, bf16 or 8-bit floats.
    ///
    /// # Panics
    ///
    /// On other types.
    pub fn new(client: &Client, seed: u64, elements: usize, dtype: ElemType) -> Self {
        let distinct = elements.min(Self::PERIOD);
        let drawn = |storage| normal(seed, distinct, 1.0, storage);
        let (values, bytes) = match dtype {
            ElemType::Float(FloatKind::E4M3) => {
                let bytes = Fp8::E4m3.encode(&drawn(Storage::F32));
                (Fp8::E4m3.decode(&bytes), bytes)
            }
            ElemType::Float(FloatKind::E5M2) => {
                let bytes = Fp8::E5m2.encode(&drawn(Storage::F32));
                (Fp8::E5m2.decode(&bytes), bytes)
            }
            other => {
                let storage = Storage::ALL.into_iter().find(|storage| dtype_of(*storage) == other);
                let storage = storage.expect("a floating-point type");
                let values = drawn(storage);
                let bytes = storage.encode(&values);
                (values, bytes)
            }
        };
        let mut all = Vec::with_capacity(elements * dtype.size());
        while all.len() < elements * dtype.size() {
            let rest = elements * dtype.size() - all.len();
            all.extend_from_slice(&bytes[..rest.min(bytes.len())]);
        }
        let handle = client.create_from_slice(&all);
        Self { values, buffer: Buffer { handle, elements, dtype } }
    }

    /// Element `index`.
    pub fn at(&self, index: usize) -> f64 {
        self.values[index % self.values.len()]
    }
}

/// Median, least and most of 15 batches of launches, in milliseconds a launch. A batch is long
/// enough (8 ms or so) that the wait at its end does not count.
pub fn median_ms(client: &Client, launch: impl FnMut()) -> [f64; 3] {
    median_of_batches(|| sync(client), launch)
}

/// As [`median_ms`], with a way of waiting for the device.
pub fn median_of_batches(wait: impl Fn(), mut launch: impl FnMut()) -> [f64; 3] {
    const BATCHES: usize = 15;
    const BATCH_MS: f64 = 8.0;
    let mut batch = |launches: usize| {
        wait();
        let start = Instant::now();
        for _ in 0..launches {
            launch();
        }
        wait();
        start.elapsed().as_secs_f64() * 1e3 / launches as f64
    };
    batch(3);
    let launches = (BATCH_MS / batch(5)).ceil().clamp(1.0, 200.0) as usize;
    let mut times: Vec<f64> = (0..BATCHES).map(|_| batch(launches)).collect();
    times.sort_by(f64::total_cmp);
    [times[BATCHES / 2], times[0], times[BATCHES - 1]]
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
/// device's where a kernel takes longer than its launch. One launch before that is not timed: the first of
/// all compiles, and criterion would take that for what each one takes, and make too few at once.
pub fn time<T>(bencher: &mut Bencher<'_>, client: &Client, mut launch: impl FnMut() -> T) {
    launch();
    sync(client);
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
