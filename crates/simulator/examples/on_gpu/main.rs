//! Asks a CUDA device to run what the simulator ran, and compares every byte.
//!
//! ```bash
//! cargo xtask simulate --all --dump target/dump
//! cargo run --release -p blackburn-simulator --features gpu --example on_gpu -- target/dump
//! ```
//!
//! A line for each case goes to the standard output, as columns of `benches/results/simulator.tsv` behind date
//! and commit: kernel, architecture, launches, whether all bytes agree, schedules, reports. What differs is
//! told on the standard error. The device has to run the PTX: launches of `sm_90a` need a Hopper GPU.

mod device;
mod launch;

use anyhow::{Context as _, Result, ensure};
use device::Gpu;
use launch::Recorded;
use std::{collections::BTreeMap, env, fs, path::PathBuf};

/// Launches of one case.
#[derive(Default)]
struct Tally {
    launches: u32,
    agreeing: u32,
    schedules: u64,
}

/// How far two runs of a buffer are apart.
struct Difference {
    bytes: usize,
    /// The largest difference over the largest value, with the buffer seen as f32, f16 and bf16.
    relative: [f64; 3],
}

impl Difference {
    fn between(simulated: &[u8], real: &[u8]) -> Option<Self> {
        let bytes = simulated.iter().zip(real).filter(|(one, other)| one != other).count();
        let relative = [
            relative::<4>(simulated, real, |word| f64::from(f32::from_le_bytes(word))),
            relative::<2>(simulated, real, |word| half::f16::from_le_bytes(word).to_f64()),
            relative::<2>(simulated, real, |word| half::bf16::from_le_bytes(word).to_f64()),
        ];
        (bytes > 0).then_some(Self { bytes, relative })
    }
}

fn relative<const N: usize>(one: &[u8], other: &[u8], number: impl Fn([u8; N]) -> f64) -> f64 {
    let numbers = |bytes: &[u8]| -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|word| number(*word)).collect()
    };
    let (one, other) = (numbers(one), numbers(other));
    let largest =
        one.iter().filter(|value| value.is_finite()).fold(0.0, |a: f64, b| a.max(b.abs()));
    let apart = one.iter().zip(&other).map(|(a, b)| (a - b).abs());
    // NaN on both sides is no difference; `max` passes over it.
    apart.fold(0.0, f64::max) / largest
}

fn main() -> Result<()> {
    let usage = "usage: on_gpu FOLDER, as `cargo xtask simulate --dump FOLDER` wrote it";
    let folder = PathBuf::from(env::args_os().nth(1).context(usage)?);
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let mut places: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    places.sort();
    let gpu = Gpu::first()?;
    eprintln!("{}", gpu.name()?);

    let mut cases: BTreeMap<(String, String), Tally> = BTreeMap::new();
    for place in &places {
        let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let recorded = Recorded::read(place).with_context(|| name.clone())?;
        let after = gpu.run(&recorded).with_context(|| name.clone())?;
        let mut agrees = true;
        for (address, simulated) in &recorded.after {
            let real = after.get(address).context("a buffer is lost")?;
            if let Some(Difference { bytes, relative }) = Difference::between(simulated, real) {
                agrees = false;
                let [f32, f16, bf16] = relative;
                eprintln!(
                    "{name}: {bytes} of {} bytes differ at {address:#x}; relative to the largest value \
                     {f32:.2e} as f32, {f16:.2e} as f16, {bf16:.2e} as bf16",
                    simulated.len()
                );
            }
        }
        let (architecture, rest) = name.split_once('-').context("the folder has another name")?;
        let (case, _) = rest.rsplit_once('-').context("the folder has another name")?;
        let tally = cases.entry((case.to_owned(), architecture.to_owned())).or_default();
        tally.launches += 1;
        tally.agreeing += u32::from(agrees);
        tally.schedules = recorded.launch.schedules;
    }
    for ((case, architecture), Tally { launches, agreeing, schedules }) in &cases {
        let agrees = if launches == agreeing { "yes" } else { "no" };
        println!("{case}\t{architecture}\t{launches} launches\t{agrees}\t{schedules}\t0");
    }
    ensure!(!cases.is_empty(), "{} holds no launches", folder.display());
    Ok(())
}
