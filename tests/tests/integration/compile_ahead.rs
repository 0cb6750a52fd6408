//! Kernels that were compiled before the device's thread came to them.

use blackburn_reference::tolerance::compare;
use blackburn_tests::{on_burn_device_and_client, tensors::values};
use burn::{
    nn::{Gelu, LayerNormConfig, LinearConfig},
    prelude::*,
};
use cubecl_environment::{persistence::Database, records::Records};
use cubecl_server::compiler::{CompilationOutcome, CompilationRecord};
use libtest_mimic::{Completion, Failed, Trial};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const NAME: &str = "compile_ahead::kernels_are_there_when_the_device_comes_to_them";
/// Where a process of its own puts its results.
const RESULT: &str = "BLACKBURN_TEST_COMPILE_AHEAD";

pub(crate) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test(NAME, compiled)]
}

/// What the process of its own found.
#[derive(serde::Serialize, serde::Deserialize)]
struct Found {
    /// How many of Blackburn's kernels came from the cache, and how many the device's thread compiled.
    loaded: usize,
    compiled: usize,
    numbers: Vec<f64>,
}

fn compiled() -> Result<Completion, Failed> {
    on_burn_device_and_client(|device, client| {
        if client.name() != "cuda" {
            return Ok(());
        }
        if let Some(result) = env::var_os(RESULT) {
            return compute(device, &PathBuf::from(result));
        }
        let [ahead, in_turn] = [alone("4")?, alone("0")?];
        // A norm, two products, a GELU, their gradients: no kernel less than these.
        let counts = |found: &Found| (found.loaded, found.compiled);
        match [counts(&ahead), counts(&in_turn)] {
            [(6.., 0), (0, compiled)] if compiled == ahead.loaded => {}
            other => {
                return Err(format!("loaded and compiled, ahead and in turn: {other:?}").into());
            }
        }
        // The driver's compiler may fuse other products with additions than NVRTC's.
        let bounds: Vec<_> =
            in_turn.numbers.iter().map(|value| 1e-5 * value.abs().max(1.0)).collect();
        compare(&ahead.numbers, &in_turn.numbers, &bounds)?;
        Ok(())
    })
}

/// What a process with a cache of its own finds.
fn alone(threads: &str) -> Result<Found, Failed> {
    let folder = tempfile::tempdir()?;
    let settings = format!("[environment.path]\ndirectory = {:?}\n", folder.path().join("cache"));
    fs::write(folder.path().join("cubecl.toml"), settings)?;
    let result = folder.path().join("result.json");
    let output = Command::new(env::current_exe()?)
        .args(["--exact", NAME])
        .env(RESULT, &result)
        .env("BLACKBURN_COMPILE_THREADS", threads)
        .current_dir(folder.path())
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stdout).into_owned().into());
    }
    Ok(serde_json::from_slice(&fs::read(&result)?)?)
}

fn compute(device: &Device, result: &Path) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    device.seed(1);
    let norm = LayerNormConfig::new(256).init(&device);
    let [up, down] = [[256, 512], [512, 256]]
        .map(|[input, output]| LinearConfig::new(input, output).init(&device));
    let x = Tensor::<2>::random([192, 256], burn::tensor::Distribution::Default, &device);
    let x = x.require_grad();
    let y = down.forward(Gelu::new().forward(up.forward(norm.forward(x.clone()))));
    let gradient = x.grad(&y.clone().powi_scalar(2).mean().backward()).ok_or("no gradient")?;
    let numbers = [values(y)?, values(gradient)?].concat();

    let database = Database::open_active().ok_or("no cache")?;
    let mut found = Found { loaded: 0, compiled: 0, numbers };
    for record in Records::new(&database).read::<CompilationRecord>() {
        let of_ours = record.record.kernel.starts_with("blackburn_kernels::");
        match record.record.outcome {
            CompilationOutcome::Loaded if of_ours => found.loaded += 1,
            CompilationOutcome::Compiled if of_ours => found.compiled += 1,
            _ => {}
        }
    }
    fs::write(result, serde_json::to_vec(&found)?)?;
    Ok(())
}
