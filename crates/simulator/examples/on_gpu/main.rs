//! Asks a CUDA device to run what the simulator ran, and compares every byte.
//!
//! ```bash
//! cargo xtask simulate --all --dump target/dump
//! cargo run --release -p blackburn-simulator --features gpu --example on_gpu -- target/dump
//! ```
//!
//! Where bytes differ, the launch is simulated again with what PTX leaves to the hardware done as the device does
//! it: products are added as its tensor cores add them, and each approximate instruction gives what the device gave
//! for the same argument, which is held against the error that PTX states. Where bytes still differ, the device runs the
//! PTX again with `.rn` at each `add`, `sub` and `mul` of f32: without it the assembler may fuse a product and a sum.
//!
//! A line for each case goes to the standard output, as columns of `benches/results/simulator.tsv` behind date
//! and commit: kernel, architecture, launches and how many of them agreed in the second or third run only, whether all
//! bytes agree, schedules, reports. What differs then is told on the standard error, and the device's bytes lie as
//! `gpu-ADDRESS.bin` beside those of the recording.
//! Launches of an architecture that the device does not run, as those of `sm_90a` on any GPU but Hopper's, are left out.

mod again;
mod device;
mod launch;

use again::{Again, Errors};
use anyhow::{Context as _, Result, anyhow, ensure};
use device::Gpu;
use launch::{Memory, Recorded};
use std::{collections::BTreeMap, env, fs, path::PathBuf, sync::Mutex, thread};

/// Approximations that follow from others, at most so often.
const MOST_ROUNDS: usize = 12;

/// Launches of one case.
#[derive(Default)]
struct Tally {
    launches: u32,
    agreeing: u32,
    agreeing_again: u32,
    agreeing_unfused: u32,
    schedules: u64,
}

/// A launch whose bytes were others on the device.
struct Differing {
    name: String,
    again: Again,
    real: Memory,
    simulated: Memory,
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

impl Differing {
    fn differences(&self) -> Vec<String> {
        differences(&self.simulated, &self.real)
    }
}

/// PTX whose products and sums the assembler has to round one by one.
fn unfused(ptx: &str) -> String {
    let rounded = |line: &str| {
        let instruction = line.trim_start();
        let name = ["add", "sub", "mul"].into_iter().find_map(|name| {
            let operands = instruction.strip_prefix(name)?.strip_prefix(".f32")?;
            Some(format!("{name}.rn.f32{operands}\n"))
        });
        name.unwrap_or_else(|| format!("{line}\n"))
    };
    ptx.lines().map(rounded).collect()
}

/// The buffers that differ, told in words.
fn differences(simulated: &Memory, real: &Memory) -> Vec<String> {
    let found = simulated.iter().filter_map(|(address, simulated)| {
        let Difference { bytes, relative } = Difference::between(simulated, real.get(address)?)?;
        let [f32, f16, bf16] = relative;
        Some(format!(
            "{bytes} of {} bytes differ at {address:#x}; relative to the largest value {f32:.2e} as f32, \
             {f16:.2e} as f16, {bf16:.2e} as bf16",
            simulated.len()
        ))
    });
    found.collect()
}

/// What `work` makes of each item, in any order.
fn on_all_cores<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Result<Vec<R>> {
    let (items, results) = (Mutex::new(items), Mutex::new(Vec::new()));
    let next = || items.lock().ok()?.pop();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(item) = next() {
                    let result = work(item);
                    if let Ok(mut results) = results.lock() {
                        results.push(result);
                    }
                }
            });
        }
    });
    results.into_inner().map_err(|error| anyhow!("{error}"))
}

/// Simulates launches again, on all cores, until every approximation is the device's.
fn approximate_alike(gpu: &Gpu, launches: &mut [Differing]) -> Result<BTreeMap<String, Errors>> {
    let mut errors: BTreeMap<String, Errors> = BTreeMap::new();
    let mut waiting: Vec<&mut Differing> = launches.iter_mut().collect();
    for _ in 0..MOST_ROUNDS {
        let results = on_all_cores(waiting, |launch| {
            let ran = launch.again.run();
            (launch, ran)
        })?;
        waiting = Vec::new();
        for (launch, ran) in results {
            let (memory, missing) = ran.with_context(|| launch.name.clone())?;
            launch.simulated = memory;
            if missing.is_empty() {
                continue;
            }
            for (opcode, arguments) in missing {
                let arguments: Vec<_> = arguments.into_iter().collect();
                let errors = errors.entry(opcode.clone()).or_default();
                let answers = errors.ask(gpu, &opcode, &arguments)?;
                launch.again.answer(&opcode, answers.into_iter());
            }
            waiting.push(launch);
        }
        if waiting.is_empty() {
            return Ok(errors);
        }
    }
    let names: Vec<_> = waiting.iter().map(|launch| launch.name.as_str()).collect();
    Err(anyhow!("after {MOST_ROUNDS} rounds new approximations are needed by {}", names.join(", ")))
}

/// `sm_90a` and the case of `sm_90a-case-0`.
fn parts(name: &str) -> Result<(String, String)> {
    let (architecture, rest) = name.split_once('-').context("the folder has another name")?;
    let (case, _) = rest.rsplit_once('-').context("the folder has another name")?;
    Ok((case.to_owned(), architecture.to_owned()))
}

/// Whether a device of a compute capability runs PTX for `sm_80` (it and all newer ones) or `sm_90a` (it alone).
fn is_run(architecture: &str, capability: u32) -> Result<bool> {
    let name = architecture.strip_prefix("sm_").context("the folder has another name")?;
    Ok(match name.strip_suffix('a') {
        Some(only) => only.parse::<u32>()? == capability,
        None => name.parse::<u32>()? <= capability,
    })
}

fn main() -> Result<()> {
    let usage = "usage: on_gpu FOLDER, as `cargo xtask simulate --dump FOLDER` wrote it";
    let folder = PathBuf::from(env::args_os().nth(1).context(usage)?);
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let mut places: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    places.sort();
    let gpu = Gpu::first()?;
    let capability = gpu.capability()?;
    eprintln!("{}, compute capability {capability}", gpu.name()?);

    let mut names = Vec::new();
    for place in &places {
        let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_run(&parts(&name)?.1, capability)? {
            names.push(name);
        }
    }
    let left_out = places.len() - names.len();
    // Most of the time goes into the driver's compiler.
    let ran = on_all_cores(names, |name| {
        let run = || {
            let recorded = Recorded::read(&folder.join(&name))?;
            let real = Gpu::first()?.run(&recorded)?;
            Ok::<_, anyhow::Error>((recorded, real))
        };
        let ran = run().with_context(|| name.clone());
        ran.map(|(recorded, real)| (name, recorded, real))
    })?;
    let mut cases: BTreeMap<(String, String), Tally> = BTreeMap::new();
    let mut differing = Vec::new();
    let mut failed = 0;
    for ran in ran {
        let (name, recorded, real) = match ran {
            Ok(ran) => ran,
            Err(error) => {
                eprintln!("{error:#}");
                failed += 1;
                continue;
            }
        };
        let tally = cases.entry(parts(&name)?).or_default();
        tally.launches += 1;
        tally.schedules = recorded.launch.schedules;
        if differences(&recorded.after, &real).is_empty() {
            tally.agreeing += 1;
        } else {
            let again = Again::new(&recorded, capability).with_context(|| name.clone())?;
            differing.push(Differing { name, again, real, simulated: recorded.after });
        }
    }
    ensure!(!cases.is_empty(), "{} holds no launches that this device runs", folder.display());
    if left_out > 0 {
        eprintln!("{left_out} launches of other architectures are left out");
    }
    for (opcode, errors) in approximate_alike(&gpu, &mut differing)? {
        eprintln!("{opcode}: {errors}");
    }
    let (agreeing, differing): (Vec<_>, Vec<_>) =
        differing.into_iter().partition(|launch| launch.differences().is_empty());
    for Differing { name, .. } in &agreeing {
        cases.entry(parts(name)?).or_default().agreeing_again += 1;
    }
    let unfused = on_all_cores(differing, |mut launch| {
        let run = || {
            let mut recorded = Recorded::read(&folder.join(&launch.name))?;
            recorded.ptx = unfused(&recorded.ptx);
            Gpu::first()?.run(&recorded)
        };
        let ran = run().with_context(|| launch.name.clone());
        ran.map(|real| {
            launch.real = real;
            launch
        })
    })?;
    for launch in unfused {
        let launch = launch?;
        let found = launch.differences();
        let Differing { name, real, .. } = &launch;
        cases.entry(parts(name)?).or_default().agreeing_unfused += u32::from(found.is_empty());
        found.iter().for_each(|found| eprintln!("{name}: {found}"));
        for (address, data) in real.iter().filter(|_| !found.is_empty()) {
            fs::write(folder.join(name).join(format!("gpu-{address:x}.bin")), data)?;
        }
    }
    for ((case, architecture), tally) in &cases {
        let Tally { launches, agreeing, agreeing_again, agreeing_unfused, schedules } = *tally;
        let all = agreeing + agreeing_again + agreeing_unfused == launches;
        let agrees = if all { "yes" } else { "no" };
        let mut how = String::new();
        if agreeing_again > 0 {
            how += &format!(", {agreeing_again} with the GPU's sums and approximations");
        }
        if agreeing_unfused > 0 {
            how += &format!(", {agreeing_unfused} with these and without fused products");
        }
        println!("{case}\t{architecture}\t{launches} launches{how}\t{agrees}\t{schedules}\t0");
    }
    ensure!(failed == 0, "{failed} launches failed");
    Ok(())
}
