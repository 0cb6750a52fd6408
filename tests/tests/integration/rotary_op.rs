//! Rotary positions as an operation of tensors, and as modules.

use blackburn::nn::{RotaryEncodingConfig, positions};
use blackburn_reference::{
    random::normal,
    rotary::{Rotation, table},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::blocks_of,
    on_burn_device, on_burn_device_with,
    tensors::{float, tensor, values},
};
use burn::{nn as burns, prelude::*, tensor::FloatDType};
use libtest_mimic::{Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};

type Test = fn(&Device) -> Result<(), Failed>;

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("rotary::heads_and_gradients_are_within_bounds_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_burn_device_with(storage, |device, _| {
                gradients(&Device::flex(), storage)?;
                gradients(device, storage)
            })
        }));
    }
    let tests: [(&str, Test); 7] = [
        ("the_module_gives_what_burn_s_gives", module),
        ("every_rank_is_taken", ranks),
        ("heads_side_by_side_are_not_copied", no_copies),
        ("tables_of_other_types_are_taken", tables),
        ("doubles_are_computed_in_doubles", doubles),
        ("tensors_without_elements_stay_empty", empty),
        ("bad_tensors_are_named", bad_tensors),
    ];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(format!("rotary::{name}"), move || {
            on_burn_device(|device| {
                test(&Device::flex())?;
                test(&device)
            })
        })
    }));
    trials
}

/// Batch, rows, heads and columns, as a linear layer has them.
const JOINED: [usize; 4] = [2, 7, 3, 12];
const START: usize = 2;
const POSITIONS: usize = 11;

/// From the order of a linear layer to that of attention.
fn heads_first(x: &[f64]) -> Vec<f64> {
    let [batch, seq, heads, head_dim] = JOINED;
    let mut all = Vec::new();
    for (batch, head) in (0..batch).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        for row in 0..seq {
            let first = ((batch * seq + row) * heads + head) * head_dim;
            all.extend(&x[first..first + head_dim]);
        }
    }
    all
}

fn judge(
    what: &str,
    actual: &[f64],
    (expected, bounds): &(Vec<f64>, Vec<f64>),
) -> Result<(), Failed> {
    compare(actual, expected, bounds).map_err(|mismatch| format!("{what}: {mismatch}"))?;
    Ok(())
}

/// Heads behind a linear layer, which are a view, with the gradient of what they are a view of.
fn gradients(device: &Device, storage: Storage) -> Result<(), Failed> {
    let [_, seq, _, head_dim] = JOINED;
    let device = &device.clone().autodiff();
    let numbers = |seed| normal(seed, JOINED.iter().product(), 1.0, storage);
    let (x, dy) = (numbers(1), numbers(2));
    let factors = table(POSITIONS, head_dim, 7.0);
    let by: Tensor<3> = tensor(&factors, [POSITIONS, head_dim, 2], Storage::F32, device);
    let view = |x: Tensor<4>| x.swap_dims(1, 2);
    let joined = tensor(&x, JOINED, storage, device).require_grad();
    let y = blackburn_backend::rotary::rotary(view(joined.clone()), by, START);
    let grads = (y.clone() * view(tensor(&dy, JOINED, storage, device))).sum().backward();
    if joined.grad(&grads).map(|dx| dx.dims()) != Some(JOINED) {
        return Err("the heads have no gradient".into());
    }
    let dx = joined.grad(&grads).ok_or("no gradient")?;
    let forward = Rotation { table: &factors, head_dim, start: START, gradient: false };
    judge("y", &values(y)?, &forward.of(&heads_first(&x), seq, storage))?;
    let backward = Rotation { gradient: true, ..forward };
    let expected = backward.of(&heads_first(&dy), seq, storage);
    judge("dx", &heads_first(&values(dx)?), &expected)
}

/// The drop-in, and the function on Burn's module, against Burn's `apply`, whose roundings are as many.
fn module(device: &Device) -> Result<(), Failed> {
    let (storage, head_dim, seq) = (Storage::F32, 10, 7);
    let device = &device.clone().autodiff();
    let burn = burns::RotaryEncodingConfig::new(POSITIONS, head_dim).init(device);
    let ours = RotaryEncodingConfig::new(POSITIONS, head_dim).init(device);
    let numbers = normal(1, 3 * seq * head_dim, 1.0, storage);
    let factors = values(burn.freq_complex.clone())?;
    let run = |apply: &dyn Fn(Tensor<3>) -> Tensor<3>| -> Result<[Vec<f64>; 2], Failed> {
        let x = tensor(&numbers, [3, seq, head_dim], storage, device).require_grad();
        let y = apply(x.clone());
        // A gradient that differs by element.
        let grads = (y.clone() * y.clone().detach()).sum().backward();
        Ok([values(y)?, values(x.grad(&grads).ok_or("no gradient")?)?])
    };
    for start in [0, START] {
        let rotation = Rotation { table: &factors, head_dim, start, gradient: false };
        let (exact, bounds) = rotation.of(&numbers, seq, storage);
        // Burn turns by a matrix product, which CUDA multiplies as TF32: the CPU says what its module gives.
        let [expected, dx] = match device.clone().without_autodiff() == Device::flex() {
            true => run(&|x| burn.apply(x, start))?,
            false => {
                let (dx, _) = Rotation { gradient: true, ..rotation }.of(&exact, seq, storage);
                [exact, dx]
            }
        };
        let (_, of_dx) = Rotation { gradient: true, ..rotation }.of(&expected, seq, storage);
        // The gradient of one is turned from a y that is off by its bound, by at most the root of two.
        let twice = |bounds: &[f64], before: f64| -> Vec<f64> {
            bounds.iter().map(|bound| 2.0 * (bound + before)).collect()
        };
        let worst = bounds.iter().copied().fold(0.0, f64::max);
        for (what, [y, gradient]) in [
            ("the module", run(&|x| ours.apply(x, start))?),
            ("the function", run(&|x| positions::rotary(&burn, x, start))?),
        ] {
            judge(what, &y, &(expected.clone(), twice(&bounds, 0.0)))?;
            judge(what, &gradient, &(dx.clone(), twice(&of_dx, 1.5 * worst)))?;
        }
    }
    Ok(())
}

/// Two, three and five dimensions, with leading ones in order and exchanged.
fn ranks(device: &Device) -> Result<(), Failed> {
    let (storage, head_dim, seq) = (Storage::F32, 8, 5);
    let factors = table(POSITIONS, head_dim, 7.0);
    let by: Tensor<3> = tensor(&factors, [POSITIONS, head_dim, 2], storage, device);
    let rotation = Rotation { table: &factors, head_dim, start: START, gradient: false };
    let outer = 2 * 3 * 4;
    let numbers = normal(3, outer * seq * head_dim, 1.0, storage);
    let expected = rotation.of(&numbers, seq, storage);
    let all: Tensor<5> = tensor(&numbers, [2, 3, 4, seq, head_dim], storage, device);
    let turn = |x: Tensor<5>| blackburn_backend::rotary::rotary(x, by.clone(), START);
    judge("five", &values(turn(all.clone()))?, &expected)?;
    // Each exchange makes a view with other strides.
    for [a, b] in [[0, 1], [1, 2], [0, 2], [1, 3], [2, 3], [0, 3]] {
        let copy = all.clone().swap_dims(a, b).add_scalar(0.0).swap_dims(a, b);
        judge(&format!("{a} and {b} exchanged"), &values(turn(copy))?, &expected)?;
    }
    let rows: Tensor<3> = all.clone().reshape([outer, seq, head_dim]);
    let y = blackburn_backend::rotary::rotary(rows, by.clone(), START);
    judge("three", &values(y)?, &expected)?;
    // Columns that lie apart.
    let apart: Tensor<3> = all.clone().reshape([outer, seq, head_dim]);
    let apart = apart.swap_dims(1, 2).add_scalar(0.0).swap_dims(1, 2);
    let y = blackburn_backend::rotary::rotary(apart, by.clone(), START);
    judge("columns apart", &values(y)?, &expected)?;
    let first: Tensor<2> = all.slice([0..1, 0..1, 0..1]).reshape([seq, head_dim]);
    let y = blackburn_backend::rotary::rotary(first, by, START);
    let expected = rotation.of(&numbers[..seq * head_dim], seq, storage);
    judge("two", &values(y)?, &expected)
}

/// From a linear layer's order and back to it: one kernel, which neither copies heads nor the result.
fn no_copies(device: &Device) -> Result<(), Failed> {
    const TRIES: usize = 20;
    if *device == Device::flex() {
        return Ok(());
    }
    let [batch, seq, heads, head_dim] = JOINED;
    let numbers = normal(1, JOINED.iter().product(), 1.0, Storage::F32);
    let joined = [batch, seq, heads * head_dim];
    let x: Tensor<3> = tensor(&numbers, joined, Storage::F32, device);
    let by =
        tensor(&table(POSITIONS, head_dim, 7.0), [POSITIONS, head_dim, 2], Storage::F32, device);
    let mut kernels = Vec::new();
    // What other tests launch through Burn at the same time shows, too.
    for _ in 0..TRIES {
        let work = || {
            let heads = x.clone().reshape(JOINED).swap_dims(1, 2);
            let y = blackburn_backend::rotary::rotary(heads, by.clone(), START);
            values(y.swap_dims(1, 2).reshape(joined))
        };
        let (_, blocks) = blocks_of(device, work)?;
        kernels = blocks.into_iter().flat_map(|block| block.kernels).collect();
        if matches!(kernels[..], [kernel] if kernel.contains("::rotary::")) {
            return Ok(());
        }
    }
    Err(format!("more than the rotation was launched: {kernels:#?}").into())
}

/// A table that a program casts is as good as it is exact.
fn tables(device: &Device) -> Result<(), Failed> {
    let (storage, head_dim, seq) = (Storage::F32, 8, 5);
    let numbers = normal(1, seq * head_dim, 1.0, storage);
    for of_table in [Storage::F32, Storage::F16, Storage::Bf16] {
        if !device.supports_dtype(float(of_table)) {
            continue;
        }
        let factors: Vec<f64> =
            table(POSITIONS, head_dim, 7.0).into_iter().map(|it| of_table.round(it)).collect();
        let by = tensor(&factors, [POSITIONS, head_dim, 2], of_table, device);
        let x: Tensor<2> = tensor(&numbers, [seq, head_dim], storage, device);
        let y = blackburn_backend::rotary::rotary(x, by, START);
        let rotation = Rotation { table: &factors, head_dim, start: START, gradient: false };
        judge(&format!("{of_table:?}"), &values(y)?, &rotation.of(&numbers, seq, storage))?;
    }
    Ok(())
}

fn doubles(device: &Device) -> Result<(), Failed> {
    if !device.supports_dtype(FloatDType::F64) {
        return Ok(());
    }
    let (head_dim, seq) = (8, 5);
    let numbers = normal(1, seq * head_dim, 1.0, Storage::F32);
    let factors = table(POSITIONS, head_dim, 7.0);
    let by = tensor(&factors, [POSITIONS, head_dim, 2], Storage::F32, device);
    let x: Tensor<2> = tensor(&numbers, [seq, head_dim], Storage::F32, device);
    let y = blackburn_backend::rotary::rotary(x.cast(FloatDType::F64), by, START);
    let rotation = Rotation { table: &factors, head_dim, start: START, gradient: false };
    let (expected, _) = rotation.of(&numbers, seq, Storage::F32);
    judge("doubles", &values(y)?, &(expected, vec![1e-14; numbers.len()]))
}

fn empty(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let module = RotaryEncodingConfig::new(POSITIONS, 8).init(device);
    for dims in [[0, 2, 3, 8], [2, 0, 3, 8], [2, 2, 0, 8]] {
        let x = Tensor::<4>::zeros(dims, device).require_grad();
        let y = module.forward(x.clone());
        let grads = y.clone().sum().backward();
        let found = [Some(y.dims()), x.grad(&grads).map(|dx| dx.dims())];
        if found != [Some(dims); 2] {
            return Err(format!("{dims:?} gave {found:?}").into());
        }
    }
    Ok(())
}

fn bad_tensors(device: &Device) -> Result<(), Failed> {
    let by = |dims: [usize; 3]| Tensor::<3>::ones(dims, device);
    let refused = |call: &dyn Fn() -> Vec<usize>, expected: &str| -> Result<(), Failed> {
        let panic = match catch_unwind(AssertUnwindSafe(call)) {
            Ok(dims) => return Err(format!("no panic but {dims:?}, where {expected:?}").into()),
            Err(panic) => panic,
        };
        match panic.downcast_ref::<String>() {
            Some(said) if said.contains(&format!("rotary: argument {expected}")) => Ok(()),
            other => Err(format!("{other:?} does not say {expected:?}").into()),
        }
    };
    let call = |dims: [usize; 3], table: [usize; 3], start: usize| {
        let y =
            blackburn_backend::rotary::rotary(Tensor::<3>::ones(dims, device), by(table), start);
        y.dims().to_vec()
    };
    let (x, table) = ([2, 5, 4], [7, 4, 2]);
    refused(
        &|| call([2, 5, 6], table, 0),
        "`x`: expected 4 columns, as the table has, got [2, 5, 6]",
    )?;
    refused(&|| call(x, [7, 4, 3], 0), "`table`: expected [positions, d_model, 2]")?;
    refused(&|| call([2, 5, 3], [7, 3, 2], 0), "`table`: expected [positions, d_model, 2]")?;
    refused(
        &|| call(x, table, 3),
        "`start`: expected at most 2, for 5 rows and a table of 7 positions, got 3",
    )?;
    refused(&|| call(x, table, usize::MAX), "`start`: expected at most 2")?;
    let one = || {
        let x = Tensor::<1>::ones([4], device);
        blackburn_backend::rotary::rotary(x, by(table), 0).dims().to_vec()
    };
    refused(&one, "`x`: expected at least 2 dimensions, got 1")
}
