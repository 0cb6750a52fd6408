//! Plans that are chosen by measurement.

use super::{Product, case, plans};
use blackburn_kernels::{
    Family, KernelError,
    buffer::Buffer,
    matmul::{
        Activation, Epilogue, MatmulBlueprint, MatmulProblem, matmul, matmul_tuned, matmul_with,
    },
};
use blackburn_reference::{
    matmul::{
        Layout::{ColumnMajor, RowMajor},
        MatmulPrecision,
    },
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_cuda_with, on_device};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("matmul::{name}"), move || on_device(test))
    };
    vec![
        trial("a_tuned_product_equals_the_untuned_one", equals_untuned),
        trial("tuning_picks_a_plan_that_runs_and_leaves_operands_alone", picks_what_runs),
        trial("tuning_works_on_the_devices_own_thread", on_device_thread),
        trial("tuning_among_plans_that_all_fail_ends_with_the_launch_error", all_fail),
        trial("tuning_names_bad_arguments", bad_arguments),
        Trial::ignorable_test("matmul::a_tuned_plan_is_a_candidate_and_stays", || {
            on_cuda_with(dtype(Storage::Bf16), tuned_candidates)
        }),
    ]
}

/// A plan that every device refuses.
const REFUSED: MatmulBlueprint = MatmulBlueprint {
    family: Family::Mma,
    tile_m: 8,
    tile_n: 8,
    stages: 2,
    splits: 1,
    promotion: 0,
    bulk: false,
};

/// Plans of ordinary arithmetic, which run everywhere; software devices offer only one.
fn portable() -> [MatmulBlueprint; 2] {
    [64, 32].map(|tile| MatmulBlueprint {
        family: Family::Portable,
        tile_m: tile,
        tile_n: tile,
        stages: 1,
        ..REFUSED
    })
}

fn equals_untuned(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let product = Product::new(case(65, 136, 72, RowMajor, ColumnMajor), storage);
    let problem = product.problem(storage)?;
    let [lhs, rhs] = product.upload(client);
    let residual = normal(8, product.case.out_len(), 1.0, storage);
    let with_residual =
        Epilogue { residual: Some(upload(client, &residual, storage)), ..Epilogue::default() };
    let sum: Vec<f64> = product.expected.iter().zip(&residual).map(|(y, r)| y + r).collect();
    let precision = match client.name() {
        "cuda" => MatmulPrecision::tf32(),
        _ => MatmulPrecision::exact(storage),
    };
    // One more term, of magnitude |residual|.
    let magnitudes: Vec<f64> =
        product.magnitudes.iter().zip(&residual).map(|(m, r)| m + r.abs()).collect();
    for (epilogue, expected) in [(Epilogue::default(), &product.expected), (with_residual, &sum)] {
        let bounds = precision.bounds(expected, &magnitudes, product.case.k + 1);
        let untuned = matmul(client, &problem, &lhs, &rhs, &epilogue)?;
        let untuned = download(client, untuned.out, storage)?;
        // Measured the first time, remembered the second.
        for _ in 0..2 {
            let tuned = matmul_tuned(client, &problem, &lhs, &rhs, &epilogue)?;
            let tuned = download(client, tuned.out, storage)?;
            compare(&tuned, expected, &bounds).map_err(|error| error.to_string())?;
            if plans(client, &problem).len() == 1 && tuned != untuned {
                return Err("the only plan gave different bits when tuned".into());
            }
        }
    }
    Ok(())
}

fn picks_what_runs(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let product = Product::new(case(96, 80, 64, RowMajor, RowMajor), storage);
    let problem = product.problem(storage)?;
    let [lhs, rhs] = product.upload(client);
    let [wide, narrow] = portable();
    let offered = [REFUSED, wide, narrow];
    let epilogue = Epilogue::default();
    let pick = || MatmulBlueprint::fastest_of(&offered, &problem, &epilogue, client, &lhs, &rhs);
    let picked = pick()?;
    let Some(plan) = picked.filter(|plan| portable().contains(plan)) else {
        return Err(format!("of {offered:?} it picked {picked:?}").into());
    };
    if pick()? != picked {
        return Err("it picked another plan the second time".into());
    }
    for (name, buffer, before) in [("lhs", &lhs, &product.lhs), ("rhs", &rhs, &product.rhs)] {
        if download(client, buffer.clone(), storage)? != *before {
            return Err(format!("tuning changed {name}").into());
        }
    }
    let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue)?;
    let bounds = MatmulPrecision::exact(storage).bounds(
        &product.expected,
        &product.magnitudes,
        product.case.k,
    );
    compare(&download(client, output.out, storage)?, &product.expected, &bounds)
        .map_err(|error| error.to_string())?;
    Ok(())
}

/// Burn's fusion runs what it fused there, while it holds the device.
fn on_device_thread(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(64, 48, 40, RowMajor, RowMajor), Storage::F32);
    let problem = product.problem(Storage::F32)?;
    let [lhs, rhs] = product.upload(client);
    let picked = client
        .exclusive(|| {
            let epilogue = Epilogue::default();
            MatmulBlueprint::fastest_of(&portable(), &problem, &epilogue, client, &lhs, &rhs)
        })
        .map_err(|error| error.to_string())??;
    match picked {
        Some(plan) if portable().contains(&plan) => Ok(()),
        other => Err(format!("it picked {other:?}").into()),
    }
}

fn all_fail(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(16, 24, 40, RowMajor, RowMajor), Storage::F32);
    let problem = product.problem(Storage::F32)?;
    let [lhs, rhs] = product.upload(client);
    let epilogue = Epilogue::default();
    let offered = [REFUSED, MatmulBlueprint { stages: 3, ..REFUSED }];
    match MatmulBlueprint::fastest_of(&offered, &problem, &epilogue, client, &lhs, &rhs)? {
        None => {}
        Some(plan) if plan == REFUSED => {
            match matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue) {
                Err(KernelError::Unsupported { .. }) => {}
                other => return Err(format!("a plan of no kernel gave {other:?}").into()),
            }
        }
        other => return Err(format!("it picked {other:?}").into()),
    }
    // The device goes on as before.
    product.check(client, Storage::F32)
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(4, 6, 5, RowMajor, RowMajor), Storage::F32);
    let problem = product.problem(Storage::F32)?;
    let [_, rhs] = product.upload(client);
    let short = upload(client, &[0.0; 19], Storage::F32);
    match matmul_tuned(client, &problem, &short, &rhs, &Epilogue::default()) {
        Err(KernelError::InvalidProblem { argument: "lhs", .. }) => Ok(()),
        other => Err(format!("a bad lhs gave {other:?}").into()),
    }
}

fn tuned_candidates(client: &Client) -> Result<(), Failed> {
    let storage = Storage::Bf16;
    let dtype = dtype(storage);
    // Many tiles, few, and few with a long k, which splits share.
    for [m, n, k] in [[2048, 3072, 768], [512, 768, 768], [768, 768, 8192]] {
        for activation in [Activation::Identity, Activation::Gelu] {
            let layout =
                |shape, strides| blackburn_kernels::matmul::TensorLayout { shape, strides, dtype };
            let problem = MatmulProblem::new(
                layout(&[m, k], &[k, 1]),
                layout(&[k, n], &[n, 1]),
                dtype,
                Default::default(),
            )?;
            let buffer = |seed, elements| -> Buffer {
                upload(client, &normal(seed, elements, 1.0, storage), storage)
            };
            let (lhs, rhs) = (buffer(1, m * k), buffer(2, k * n));
            let epilogue = Epilogue { activation, ..Epilogue::default() };
            let tuned = || MatmulBlueprint::tuned(&problem, &epilogue, client, &lhs, &rhs);
            let plan = tuned()?;
            println!("{m}x{n}x{k}, {activation:?}: {plan}");
            if !plans(client, &problem).contains(&plan) {
                return Err(format!("{plan} is no candidate for {m}x{n}x{k}").into());
            }
            if tuned()? != plan {
                return Err(format!("{m}x{n}x{k} was given another plan than {plan}").into());
            }
        }
    }
    Ok(())
}
