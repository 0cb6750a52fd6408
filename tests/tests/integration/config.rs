//! Settings: what the environment says, what the program says, and what comes of it.
//!
//! Start-up happens once a process, so each setting is tried in a process of its own.

use blackburn::{Config, DeviceChoice, F32Precision};
use blackburn_backend::runtime::{RuntimeSettings, configure};
use blackburn_reference::{
    gelu::{PORTABLE_ERF_ERROR, forward_bound, gelu},
    matmul::{Layout, MatmulCase, MatmulPrecision, magnitudes, matmul},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::blocks_of,
    on_burn_device_and_client, run_alone, start_alone,
    tensors::{tensor, values},
};
use burn::nn::Gelu;
use libtest_mimic::{Completion, Failed, Trial};
use std::env;

/// Set in a process that was started with settings.
const SET: &str = "BLACKBURN_TEST_CONFIG_HERE";

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(SAME, same_as_program),
        Trial::test(EMPTY, empty_variables),
        Trial::test("config::values_that_mean_nothing_end_start_up_by_name", bad_values),
        Trial::ignorable_test(OFF, providers_off),
        Trial::ignorable_test(FULL, full_precision),
        Trial::ignorable_test(CACHE, kernel_cache),
    ]
}

const SAME: &str = "config::the_environment_says_what_a_program_can_say";
const EMPTY: &str = "config::empty_variables_say_nothing";
const OFF: &str = "config::providers_that_are_off_do_not_run";
const FULL: &str = "config::f32_products_keep_all_bits_on_request";
const CACHE: &str = "config::kernels_are_kept_on_disk_or_not";

fn is_set() -> bool {
    env::var_os(SET).is_some()
}

fn expect_equal<T: PartialEq + std::fmt::Debug>(actual: &T, expected: &T) -> Result<(), Failed> {
    match actual == expected {
        true => Ok(()),
        false => Err(format!("got {actual:?}, expected {expected:?}").into()),
    }
}

fn same_as_program() -> Result<(), Failed> {
    if !is_set() {
        let variables = [
            (SET, "1"),
            ("BLACKBURN_DEVICE", " flex "),
            ("BLACKBURN_DISABLE", "BlackburnGelu, Matmul,,"),
            ("BLACKBURN_ENABLE", "BlackburnGroupNorm"),
            ("BLACKBURN_F32_MATMUL", "FULL"),
            ("BLACKBURN_TUNE_MATMUL", "on"),
            ("BLACKBURN_DETERMINISTIC", "1"),
            ("BLACKBURN_KERNEL_CACHE", "0"),
            ("BLACKBURN_COMPILE_THREADS", "3"),
            ("BLACKBURN_MEMORY_LIMIT", "1.5 GiB"),
        ];
        return run_alone(SAME, &variables).map(drop);
    }
    let config = Config::from_env()?;
    let expected = Config::default()
        .with_device(DeviceChoice::Flex)
        .without_provider("BlackburnGelu")
        .without_provider("Matmul")
        .with_provider("BlackburnGroupNorm")
        .with_f32_matmul(F32Precision::Full)
        .with_tune_matmul(true)
        .with_deterministic(true)
        .with_kernel_cache(false)
        .with_compile_threads(3)
        .with_memory_limit(3 << 29);
    expect_equal(&config, &expected)?;
    // Start-up, which was before any test, followed it: the same settings are no others.
    let report = blackburn::init_with(expected.clone())?;
    expect_equal(&report.device.as_str(), &"flex")?;
    match blackburn::init_with(expected.with_kernel_cache(true)) {
        Err(blackburn::Error::InvalidSetting { .. }) => Ok(()),
        other => Err(format!("another setting of the cache gave {other:?}").into()),
    }
}

fn empty_variables() -> Result<(), Failed> {
    if !is_set() {
        let empty = [
            "DEVICE",
            "DISABLE",
            "ENABLE",
            "F32_MATMUL",
            "TUNE_MATMUL",
            "DETERMINISTIC",
            "KERNEL_CACHE",
            "COMPILE_THREADS",
            "MEMORY_LIMIT",
        ]
        .map(|name| format!("BLACKBURN_{name}"));
        let mut variables: Vec<(&str, &str)> =
            empty.iter().map(|name| (name.as_str(), "  ")).collect();
        variables.push((SET, "1"));
        return run_alone(EMPTY, &variables).map(drop);
    }
    expect_equal(&Config::from_env()?, &Config::default())
}

fn bad_values() -> Result<(), Failed> {
    for (name, value, expected) in [
        ("BLACKBURN_DEVICE", "warp", "warp"),
        ("BLACKBURN_DISABLE", "Warp", "Warp"),
        ("BLACKBURN_ENABLE", "Weft", "Weft"),
        ("BLACKBURN_F32_MATMUL", "fp64", "BLACKBURN_F32_MATMUL=fp64: expected tf32 or full"),
        ("BLACKBURN_TUNE_MATMUL", "2", "BLACKBURN_TUNE_MATMUL=2: expected 1 or 0"),
        ("BLACKBURN_DETERMINISTIC", "yes?", "BLACKBURN_DETERMINISTIC=yes?: expected 1 or 0"),
        ("BLACKBURN_KERNEL_CACHE", "maybe", "BLACKBURN_KERNEL_CACHE=maybe: expected 1 or 0"),
        ("BLACKBURN_COMPILE_THREADS", "all", "BLACKBURN_COMPILE_THREADS=all: expected a number"),
        (
            "BLACKBURN_COMPILE_THREADS",
            "9999",
            "COMPILE_THREADS=9999: expected a number from 0 to 1024",
        ),
        (
            "BLACKBURN_MEMORY_LIMIT",
            "101%",
            "BLACKBURN_MEMORY_LIMIT=101%: expected bytes, such as 40GiB",
        ),
    ] {
        let output = start_alone(EMPTY, &[(SET, "1"), (name, value)])?;
        let log = String::from_utf8_lossy(&output.stderr);
        if output.status.success() || !log.contains("error: ") || !log.contains(expected) {
            return Err(format!("{name}={value}: {}: {log}", output.status).into());
        }
    }
    Ok(())
}

/// Where a provider is off, Burn computes what it would have.
fn providers_off() -> Result<Completion, Failed> {
    on_burn_device_and_client(|device, _| {
        if !is_set() {
            let variables = [(SET, "1"), ("BLACKBURN_DISABLE", "blackburngelu")];
            return run_alone(OFF, &variables).map(drop);
        }
        let x = normal(1, 33 * 64, 1.0, F32);
        let input = tensor(&x, [33, 64], F32, device);
        let (y, blocks) = blocks_of(device, || values(Gelu::new().forward(input)))?;
        let kernels = || blocks.iter().flat_map(|block| &block.kernels);
        if kernels().count() == 0 || kernels().any(|kernel| kernel.contains("GeluForward")) {
            return Err(format!("GELU ran in {blocks:?}").into());
        }
        let expected: Vec<f64> = x.iter().map(|x| gelu(*x)).collect();
        let bounds: Vec<f64> =
            x.iter().map(|x| forward_bound(*x, F32, PORTABLE_ERF_ERROR)).collect();
        compare(&y, &expected, &bounds)?;
        Ok(())
    })
}

/// As Burn's products and Blackburn's compute it; where there are tensor cores, the default cuts operands
/// to 11 bits, and is seen to.
fn full_precision() -> Result<Completion, Failed> {
    const SIZE: usize = 96;

    on_burn_device_and_client(|device, client| {
        let [a, b] = [1, 2].map(|seed| normal(seed, SIZE * SIZE, 1.0, F32));
        let operand = |x: &[f64]| tensor(x, [SIZE, SIZE], F32, device);
        let product = values(operand(&a).matmul(operand(&b)))?;
        let case = MatmulCase {
            name: "a square",
            batch: 1,
            m: SIZE,
            n: SIZE,
            k: SIZE,
            lhs: Layout::RowMajor,
            rhs: Layout::RowMajor,
        };
        let expected = matmul(&case, &a, &b);
        let magnitudes = magnitudes(&case, &a, &b);
        let bounds = MatmulPrecision::exact(F32).bounds(&expected, &magnitudes, SIZE);
        let is_full = compare(&product, &expected, &bounds);
        if is_set() {
            is_full?;
            return Ok(());
        }
        match (client.name(), is_full) {
            ("cuda", Ok(_)) => return Err("products are full by default on CUDA".into()),
            ("cuda", Err(_)) => {}
            (_, is_full) => {
                is_full?;
            }
        }
        run_alone(FULL, &[(SET, "1"), ("BLACKBURN_F32_MATMUL", "full")]).map(drop)
    })
}

/// Where the build keeps kernels, the folder is told; CUDA's kernels are in it.
fn kernel_cache() -> Result<Completion, Failed> {
    on_burn_device_and_client(|_, client| {
        let folder = || {
            // It was settled at start-up: what is asked for here changes nothing.
            configure(&RuntimeSettings { kernel_cache: false, compile_threads: None }).kernel_cache
        };
        if is_set() {
            return expect_equal(&folder(), &None);
        }
        if client.name() == "cuda" && folder().is_none_or(|folder| !folder.is_dir()) {
            return Err(format!("kernels are kept in {:?}", folder()).into());
        }
        run_alone(CACHE, &[(SET, "1"), ("BLACKBURN_KERNEL_CACHE", "0")]).map(drop)
    })
}
