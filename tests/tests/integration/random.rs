//! Random numbers by a key on the device, against f64 with the generator's words.

use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    random::{RandomDistribution, RandomProblem, random},
};
use blackburn_reference::{
    attention::dropout::philox4x32, random::normal, storage::Storage, tolerance::compare,
};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_device, on_device_with,
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};
use libtest_mimic::{Failed, Trial};
use std::f64::consts::TAU;

const F32: Storage = Storage::F32;
const KEY: [u32; 2] = [0x9abc_def0, 0x1234_5678];
const DISTRIBUTIONS: [RandomDistribution; 5] = [
    RandomDistribution::Bernoulli(0.9),
    RandomDistribution::Bernoulli(1e-3),
    RandomDistribution::Uniform { low: 0.0, high: 1.0 },
    RandomDistribution::Uniform { low: -3.0, high: 0.5 },
    RandomDistribution::Normal { mean: 0.25, deviation: 2.0 },
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("random::numbers_are_the_generators_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| each_length(client, storage))
        }));
    }
    trials.push(Trial::ignorable_test("random::a_planted_fault_is_caught", || {
        on_device(planted_fault)
    }));
    trials.push(Trial::ignorable_test("random::bad_arguments_are_named", || on_device(arguments)));
    trials
}

fn key(client: &Client) -> Buffer {
    let bytes: Vec<u8> = KEY.iter().flat_map(|word| word.to_le_bytes()).collect();
    let dtype = ElemType::UInt(UIntKind::U32);
    Buffer { handle: client.create_from_slice(&bytes), elements: 2, dtype }
}

fn problem(elements: usize, storage: Storage, distribution: RandomDistribution) -> RandomProblem {
    RandomProblem { elements, dtype: dtype(storage), distribution, number: 7 }
}

/// Bits of a number just below 1.
fn bits(storage: Storage) -> i32 {
    match storage {
        Storage::F32 => 24,
        Storage::F16 => 11,
        Storage::Bf16 => 8,
    }
}

/// Element `i`, and what it may be off. Vulkan allows sine and cosine to be off by 2^-11, and logarithms of
/// numbers near 1 by 2^-21, of which a small radius has a large share.
fn expected(i: usize, distribution: RandomDistribution, storage: Storage) -> (f64, f64) {
    let words = philox4x32([(i / 4) as u32, 7, 0, 1], KEY);
    let share = |word: u32, bits: i32| f64::from(word >> (32 - bits)) * 2f64.powi(-bits);
    let u = F32.unit_roundoff();
    let (y, error) = match distribution {
        RandomDistribution::Bernoulli(p) if (1.0 / 64.0..=63.0 / 64.0).contains(&p) => {
            let word = philox4x32([(i / 8) as u32, 7, 0, 1], KEY)[i / 2 % 4];
            let half = if i.is_multiple_of(2) { word & 0xffff } else { word >> 16 };
            (f64::from(u8::from(f64::from(half) < (p * 2f64.powi(16)).round())), 0.0)
        }
        RandomDistribution::Bernoulli(p) => {
            (f64::from(u8::from(f64::from(words[i % 4]) < (p * 2f64.powi(32)).round())), 0.0)
        }
        RandomDistribution::Uniform { low, high } => {
            let part = (high - low) * share(words[i % 4], bits(storage));
            (low + part, u * (part.abs() + 2.0 * (low + part).abs()))
        }
        RandomDistribution::Normal { mean, deviation } => {
            let pair = i % 4 / 2 * 2;
            let radius = (-2.0 * (share(words[pair], 24) + 2f64.powi(-24)).ln()).sqrt();
            let angle = TAU * share(words[pair + 1], 24);
            let wave = if i.is_multiple_of(2) { angle.cos() } else { angle.sin() };
            let y = mean + deviation * radius * wave;
            let of_radius = 2f64.powi(-21) / radius;
            (y, deviation * (radius * 2f64.powi(-11) + of_radius) + 4.0 * u * y.abs())
        }
    };
    (y, error + storage.unit_roundoff() * (y.abs() + error) + storage.underflow())
}

fn each_length(client: &Client, storage: Storage) -> Result<(), Failed> {
    for distribution in DISTRIBUTIONS {
        for elements in [0, 1, 3, 4, 5, 1023, 1024, 1025, 30_002, 30_004] {
            let y = random(client, &problem(elements, storage, distribution), &key(client))?;
            let y = download(client, y, storage)?;
            let (values, bounds): (Vec<f64>, Vec<f64>) =
                (0..elements).map(|i| expected(i, distribution, storage)).unzip();
            compare(&y, &values, &bounds).map_err(|error| {
                Failed::from(format!("{distribution:?}, {elements} elements: {error}"))
            })?;
            let is_below = |y: &f64| *y < 1.0;
            if distribution == DISTRIBUTIONS[2] && !y.iter().all(is_below) {
                return Err("a uniform number below 1 was rounded up to 1".into());
            }
        }
    }
    Ok(())
}

fn planted_fault(client: &Client) -> Result<(), Failed> {
    let distribution = DISTRIBUTIONS[2];
    let other = RandomProblem { number: 8, ..problem(1000, F32, distribution) };
    let y = download(client, random(client, &other, &key(client))?, F32)?;
    let (values, bounds): (Vec<f64>, Vec<f64>) =
        (0..1000).map(|i| expected(i, distribution, F32)).unzip();
    match compare(&y, &values, &bounds) {
        Ok(_) => Err("another tensor's numbers went unnoticed".into()),
        Err(_) => Ok(()),
    }
}

fn arguments(client: &Client) -> Result<(), Failed> {
    let sound = problem(8, F32, DISTRIBUTIONS[0]);
    let wrong = upload(client, &normal(1, 2, 1.0, F32), F32);
    match random(client, &sound, &wrong) {
        Err(KernelError::InvalidProblem { argument: "key", .. }) => Ok(()),
        other => Err(format!("a key of floats: {other:?}").into()),
    }
}
