//! A loss scaler on the device, against the same one by Burn's operations on the CPU.

use blackburn::train::scaler::{GradScaler, GradScalerConfig};
use blackburn_kernels::{
    KernelError,
    loss_scale::{Scaler, ScalerRules, loss_scale_measure, loss_scale_update},
    square_sum::PLACES,
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::buffers::{download, upload};
use blackburn_tests::{
    on_burn_device, on_device,
    tensors::{tensor, values},
};
use burn::{
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    prelude::*,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let on_burn = |name: &str, test: fn(Device) -> Result<(), Failed>| {
        Trial::ignorable_test(name.to_string(), move || on_burn_device(test))
    };
    vec![
        on_burn("loss_scale::a_scaler_goes_the_way_of_the_one_on_the_cpu", as_on_the_cpu),
        on_burn("loss_scale::a_disabled_scaler_clips_all_the_same", disabled),
        Trial::ignorable_test("loss_scale::a_measurement_is_that_of_all_sums", || {
            on_device(measurement)
        }),
        Trial::ignorable_test("loss_scale::bad_arguments_are_named", || on_device(refusals)),
    ]
}

const CONFIG: GradScalerConfig = GradScalerConfig {
    initial_scale: 1024.0,
    growth_factor: 4.0,
    backoff_factor: 0.25,
    growth_interval: 3,
    min_scale: 64.0,
    max_scale: 8192.0,
};

/// A layer, the same on all devices but for its numbers, and gradients for it.
fn given(device: &Device, values: &[f64]) -> (Linear, GradientsParams) {
    let model = LinearConfig::new(5, 7).with_bias(false).init(device);
    let mut gradients = GradientsParams::new();
    let gradient = tensor(values, [5, 7], Storage::F32, device);
    gradients.register::<2>(model.weight.id, gradient);
    (model, gradients)
}

/// What a step makes of gradients: their norm, and they themselves.
fn stepped(
    scaler: &mut GradScaler,
    device: &Device,
    gradient: &[f64],
    max_norm: f64,
) -> Result<Vec<f64>, Failed> {
    let (model, mut gradients) = given(device, gradient);
    let norm = scaler.unscale_and_clip(&mut gradients, &model, max_norm)?;
    let gradient = gradients.get::<2>(model.weight.id).ok_or("the weight has a gradient")?;
    let mut all = values(norm)?;
    all.extend(values(gradient)?);
    Ok(all)
}

/// Sums in another order, a root, two quotients and two products: some sixty roundings.
fn agree(found: &[f64], expected: &[f64]) -> bool {
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(a, b)| {
            a == b
                || a.is_nan() && b.is_nan()
                || (a - b).abs() <= 64.0 * f64::from(f32::EPSILON) * b.abs()
        })
}

/// Growth up to the largest scale, overflows down to the least, infinite ones and missing numbers.
fn as_on_the_cpu(device: Device) -> Result<(), Failed> {
    let cpu = Device::flex();
    let mut scalers = [CONFIG.init(&device)?, CONFIG.init(&cpu)?];
    let mut scales = Vec::new();
    for step in 0..24 {
        let mut gradient = normal(step, 35, 100.0, Storage::F32);
        match step {
            12 | 13 | 20 => gradient[34] = f64::INFINITY,
            14..=16 => gradient[0] = f64::NAN,
            _ => {}
        }
        let max_norm = [f64::INFINITY, 1.0, 1e-3][step as usize % 3];
        let [on_device, on_cpu] = &mut scalers;
        let found = stepped(on_device, &device, &gradient, max_norm)?;
        let expected = stepped(on_cpu, &cpu, &gradient, max_norm)?;
        if !agree(&found, &expected) {
            return Err(format!("step {step}: {found:?}, not {expected:?}").into());
        }
        if on_device.overflowed() != on_cpu.overflowed() {
            return Err(format!("step {step}: the devices differ about an overflow").into());
        }
        on_device.update()?;
        on_cpu.update()?;
        let states = [on_device.state(), on_cpu.state()];
        if states[0] != states[1] {
            return Err(format!("step {step}: {states:?}").into());
        }
        scales.push(states[0].scale);
    }
    if !(scales.contains(&CONFIG.min_scale) && scales.contains(&CONFIG.max_scale)) {
        return Err(format!("the bounds were not reached: {scales:?}").into());
    }
    Ok(())
}

fn disabled(device: Device) -> Result<(), Failed> {
    let cpu = Device::flex();
    for max_norm in [f64::INFINITY, 1.0] {
        for bad in [None, Some(f64::NAN)] {
            let mut gradient = normal(3, 35, 100.0, Storage::F32);
            gradient[7] = bad.unwrap_or(gradient[7]);
            let run = |device: &Device| {
                stepped(&mut GradScaler::disabled(device), device, &gradient, max_norm)
            };
            let (found, expected) = (run(&device)?, run(&cpu)?);
            if !agree(&found, &expected) {
                return Err(format!("{max_norm}, {bad:?}: {found:?}, not {expected:?}").into());
            }
        }
    }
    Ok(())
}

fn measurement(client: &Client) -> Result<(), Failed> {
    // Whole numbers, whose sum is exact, and one apart in the last place.
    let mut sums: Vec<f64> = (0..PLACES).map(|i| (i % 7) as f64).collect();
    sums[PLACES - 1] = 10_000.0;
    let exact: f64 = sums.iter().sum();
    let sums = upload(client, &sums, Storage::F32);
    let scale = upload(client, &[8.0], Storage::F32);
    let number = |buffer| download(client, buffer, Storage::F32).map(|all| all[0]);
    let norm = exact.sqrt() / 8.0;
    for (largest, clipping) in [(f32::INFINITY, 1.0), (1.0, 1.0 / (norm + 1e-6)), (1e6, 1.0)] {
        let measured = loss_scale_measure(client, &sums, Some(&scale), largest)?;
        let found = [number(measured.norm)?, number(measured.finite)?, number(measured.factor)?];
        if !agree(&found, &[norm, 1.0, clipping / 8.0]) {
            return Err(format!("{largest}: {found:?} of the norm {norm}").into());
        }
    }
    Ok(())
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let floats = |count: usize| upload(client, &vec![1.0; count], Storage::F32);
    let named = |result: Result<(), KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(Failed::from(format!("`{name}` was expected to be named, got {other:?}"))),
    };
    let measure = |sums, scale: Option<usize>, largest| {
        let scale = scale.map(floats);
        loss_scale_measure(client, &floats(sums), scale.as_ref(), largest).map(drop)
    };
    named(measure(3, None, 1.0), "sums")?;
    named(measure(PLACES, Some(2), 1.0), "scale")?;
    named(measure(PLACES, None, 0.0), "largest")?;
    named(measure(PLACES, None, f32::NAN), "largest")?;
    let rules = ScalerRules { growth: 2.0, backoff: 0.5, interval: 2, least: 1.0, largest: 8.0 };
    let old = |count| Scaler {
        scale: floats(1),
        clean: floats(1),
        skipped: floats(count),
        in_a_row: floats(1),
    };
    let update =
        |finite, count| loss_scale_update(client, &rules, &floats(finite), &old(count)).map(drop);
    named(update(2, 1), "finite")?;
    named(update(1, 2), "skipped")
}
