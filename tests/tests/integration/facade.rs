//! Start-up: what is found, what is refused, what is reported.

use blackburn::{Config, DeviceChoice, Error};
use blackburn_tests::{on_burn_cuda, run_alone, tensors::values};
use burn::tensor::Tensor;
use libtest_mimic::{Completion, Failed, Trial};
use std::env;

/// Set in a process that is started to find its GPU broken.
const BROKEN: &str = "BLACKBURN_TEST_BROKEN_GPU_HERE";
const PASSED_OVER: &str = "facade::auto_passes_over_a_gpu_that_cannot_compile";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("facade::start_up_is_idempotent_and_reports", start_up),
        Trial::test("facade::the_cpu_is_among_the_devices_found", cpu_is_found),
        Trial::test("facade::a_name_that_means_nothing_lists_those_that_do", unknown_name),
        Trial::test("facade::a_missing_device_lists_those_found", missing_device),
        Trial::ignorable_test(PASSED_OVER, broken_gpu),
    ]
}

fn start_up() -> Result<(), Failed> {
    let first = blackburn::init()?;
    let second = blackburn::init()?;
    if first != second {
        return Err("a second init reported something else".into());
    }
    let json = serde_json::to_value(&first)?;
    for field in [
        "runtime",
        "device",
        "device_name",
        "tensor_cores",
        "f32_matmul",
        "tune_matmul",
        "dtypes",
        "providers",
        "found",
    ] {
        if json.get(field).is_none() {
            return Err(format!("the report's JSON lacks `{field}`: {json}").into());
        }
    }
    let text = first.to_string();
    if !text.contains(&first.device) || !text.contains("burn 0.22.1") {
        return Err(format!("the report's text lacks device or versions: {text}").into());
    }
    // Later settings cannot take effect, and say so.
    let other = Config::default().with_device(DeviceChoice::Cuda(77));
    match blackburn::init_with(other) {
        Err(Error::InvalidSetting { .. }) => Ok(()),
        other => Err(format!("other settings after start-up gave {other:?}").into()),
    }
}

fn cpu_is_found() -> Result<(), Failed> {
    let found = blackburn::available_devices();
    let names: Vec<String> = found.iter().map(ToString::to_string).collect();
    if names.last().map(String::as_str) != Some("flex") {
        return Err(format!("expected the CPU as the last choice, found {names:?}").into());
    }
    blackburn::device_from("flex")?;
    Ok(())
}

fn unknown_name() -> Result<(), Failed> {
    match blackburn::device_from("warp") {
        Err(error @ Error::UnknownDevice { .. }) if error.to_string().contains("cuda:N") => Ok(()),
        other => Err(format!("device `warp` gave {other:?}").into()),
    }
}

fn missing_device() -> Result<(), Failed> {
    // The hundredth GPU is nowhere; which error it is depends on the build's features.
    match blackburn::device_from("cuda:99") {
        Err(error @ (Error::FeatureMissing { .. } | Error::DeviceNotFound { .. }))
            if error.to_string().contains("flex") =>
        {
            Ok(())
        }
        other => Err(format!("device `cuda:99` gave {other:?}").into()),
    }
}

/// A driver that may not compile PTX runs no kernel: the GPU is there, and fails its first one.
fn broken_gpu() -> Result<Completion, Failed> {
    on_burn_cuda(|_| {
        if env::var_os(BROKEN).is_none() {
            let variables = [
                (BROKEN, "1"),
                ("CUDA_DISABLE_PTX_JIT", "1"),
                ("BLACKBURN_DEVICE", "auto"),
                // A kernel that was kept, here or by the driver, need not be compiled.
                ("BLACKBURN_KERNEL_CACHE", "0"),
                ("CUDA_CACHE_DISABLE", "1"),
            ];
            return run_alone(PASSED_OVER, &variables).map(drop);
        }
        let report = blackburn::init()?;
        if report.device != "flex" || !report.found.contains(&"cuda:0".to_string()) {
            return Err(format!("a broken cuda:0 gave {report}").into());
        }
        // By its name it is refused, with the reason.
        match blackburn::device_from("cuda:0") {
            Err(Error::DeviceFailed { .. }) => {}
            other => return Err(format!("a broken cuda:0 gave {other:?}").into()),
        }
        let sum = values(Tensor::<1>::ones([5], &blackburn::device()?).sum())?;
        if sum == [5.0] { Ok(()) } else { Err(format!("five ones sum to {sum:?}").into()) }
    })
}
