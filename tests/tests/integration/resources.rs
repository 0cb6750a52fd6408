//! What only a GPU with memory of its own shows: running out of it, and its sensors.

use blackburn::train::{
    auto_batch::{AutoBatch, auto_batch},
    memory::MemoryMonitor,
};
use blackburn_tests::{on_burn_cuda, run_alone};
use burn::{
    nn::LinearConfig,
    optim::{AdamWConfig, GradientsParams},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs one test alone: memory is everybody's.
const ALONE: &str = "BLACKBURN_TEST_RESOURCES_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 2] = [
        ("the_largest_micro_batch_is_found_by_running_out_of_memory", largest_micro_batch),
        ("pools_and_sensors_are_read", readings),
    ];
    let trial = |(name, test): (&str, Test)| alone_on_cuda(&format!("resources::{name}"), test);
    tests.into_iter().map(trial).collect()
}

/// A test of memory, which has a process of its own; ignored where no GPU has memory of its own.
pub(crate) fn alone_on_cuda(name: &str, test: fn(&Device) -> Result<(), Failed>) -> Trial {
    let name = name.to_string();
    Trial::ignorable_test(name.clone(), move || {
        on_burn_cuda(|device| match env::var_os(ALONE) {
            Some(_) => test(device),
            None => run_alone(&name, &[(ALONE, "1")]).map(drop),
        })
    })
}

/// Columns of a layer, and rows of a sample: 4 MiB in f32.
const WIDTH: usize = 1024;
const ROWS: usize = 1024;

fn largest_micro_batch(device: &Device) -> Result<(), Failed> {
    let training = &device.clone().autodiff();
    let model = LinearConfig::new(WIDTH, WIDTH).init(training);
    let step = |samples: usize| {
        let mut optimizer = AdamWConfig::new().init();
        let x = Tensor::<2>::ones([samples * ROWS, WIDTH], training);
        let loss = model.forward(x).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let trained = optimizer.step(1e-3, model.clone(), gradients);
        let written: f32 = trained.weight.val().inner().mean().try_into_scalar().map_err(told)?;
        device.sync().map_err(told)?;
        if written.is_finite() { Ok(()) } else { Err(format!("a weight of {written}")) }
    };
    // 256 GiB of input for the target: more than any one GPU has.
    let plan = auto_batch(device, AutoBatch::new(1 << 16), step).map_err(|e| e.to_string())?;
    println!("{plan:?}");
    let sum: usize = plan.micro_batches().sum();
    if sum != plan.target || plan.micro_batch >= plan.target || plan.largest_run < plan.micro_batch
    {
        return Err(format!("{plan:?}").into());
    }
    // What it found runs, after all that did not.
    step(plan.micro_batch).map_err(Into::into)
}

fn told(error: impl ToString) -> String {
    error.to_string()
}

fn readings(device: &Device) -> Result<(), Failed> {
    const BYTES: u64 = 1 << 30;
    let mut monitor = MemoryMonitor::new(device);
    let before = monitor.read().ok_or("CUDA's pools report")?;
    let held = Tensor::<1>::ones([BYTES as usize / 4], device);
    device.sync().map_err(|error| error.to_string())?;
    let with = monitor.read().ok_or("CUDA's pools report")?;
    drop(held);
    device.sync().map_err(|error| error.to_string())?;
    let after = monitor.read().ok_or("CUDA's pools report")?;
    let peak = monitor.peak().ok_or("three readings were taken")?;
    let is_right = with.in_use_bytes >= before.in_use_bytes + BYTES
        && with.reserved_bytes >= BYTES
        && after.in_use_bytes < with.in_use_bytes
        && peak.in_use_bytes >= with.in_use_bytes;
    if !is_right {
        return Err(format!("{before:?}, {with:?}, {after:?}, peak {peak:?}").into());
    }
    sensors()
}

/// The driver's numbers are those of a GPU that is on.
#[cfg(feature = "cuda")]
fn sensors() -> Result<(), Failed> {
    use blackburn::train::gpu::{Gpu, GpuMonitor};

    let reading = GpuMonitor::open(Gpu::Index(0))?.read();
    println!("{reading:?}");
    let within = |value: Option<f64>, range: std::ops::RangeInclusive<f64>| {
        value.is_some_and(|value| range.contains(&value))
    };
    let is_plausible = within(reading.utilization_percent, 0.0..=100.0)
        && within(reading.temperature_celsius, 5.0..=120.0)
        && within(reading.power_watts, 5.0..=2000.0);
    if is_plausible { Ok(()) } else { Err(format!("{reading:?}").into()) }
}

#[cfg(not(feature = "cuda"))]
fn sensors() -> Result<(), Failed> {
    Ok(())
}
