//! Steps of one parameter by any optimizer's kernel.

use crate::step_kind::{
    Kind, chance, gate, kept, number, numbers, on_device_with_both, place_of, told,
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Chance, Gate},
};
use blackburn_reference::{
    adamw::{round_by_chance, word_of},
    random::normal,
    storage::Storage,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use libtest_mimic::{Failed, Trial};

/// Around vectors and cubes (256 units by 4 elements), odd ones that take scalar loads, and more than
/// the grid takes at once.
const LENGTHS: [usize; 8] = [1, 2, 3, 255, 1024, 1027, 1028, 70_004];

pub(crate) fn trials<K: Kind<N>, const N: usize>() -> Vec<Trial> {
    let mut trials = Vec::new();
    for parameter in Storage::ALL {
        for gradient in Storage::ALL {
            let name =
                format!("{}::steps_are_within_bounds_in_{parameter:?}_by_{gradient:?}", K::NAME);
            trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
                on_device_with_both(parameter, gradient, move |client| {
                    LENGTHS.iter().try_for_each(|length| {
                        (K::SEVERAL_STEPS)(client, parameter, gradient, *length)
                            .map_err(|error| told(&format!("{length} elements"), error))
                    })
                })
            }));
        }
    }
    for storage in [Storage::F16, Storage::Bf16] {
        let name = format!("{}::rounding_by_chance_is_right_to_the_bit_in_{storage:?}", K::NAME);
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| rounds_to_the_bit::<K, N>(client, storage))
        }));
    }
    let tests: [(&str, Test); 6] = [
        ("a_closed_gate_keeps_every_bit", closed_gate::<K, N>),
        ("a_factor_multiplies_the_gradient", multiplied::<K, N>),
        ("memory_is_used_again_where_nobody_holds_it", memory::<K, N>),
        ("without_decay_infinite_parameters_stay", infinite_parameter::<K, N>),
        ("empty_parameters_stay_empty", empty::<K, N>),
        ("bad_arguments_are_named", bad_arguments::<K, N>),
    ];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(format!("{}::{name}", K::NAME), move || on_device(test))
    }));
    trials
}

type Test = fn(&Client) -> Result<(), Failed>;

/// Tensors of which the parameter is this.
fn start_from<K: Kind<N>, const N: usize>(
    client: &Client,
    [parameter, gradient]: [&[f64]; 2],
    stored: Storage,
) -> K::Tensors {
    let gradient = upload(client, gradient, stored);
    let mut all = (K::START)(client, parameter.len(), stored, gradient).into();
    all[0] = upload(client, parameter, stored).into();
    all.into()
}

fn parameter_of<K: Kind<N>, const N: usize>(
    client: &Client,
    tensors: K::Tensors,
    stored: Storage,
) -> Result<Vec<f64>, Failed> {
    Ok(download(client, tensors.into()[0].buffer.clone(), stored)?)
}

/// Without a gradient, in the first step, and with a decay by a power of two, the result before rounding is
/// exact in f32.
fn rounds_to_the_bit<K: Kind<N>, const N: usize>(
    client: &Client,
    stored: Storage,
) -> Result<(), Failed> {
    let decay = 2f64.powi(-12);
    let mut step = K::STEP;
    *K::decay(&mut step) = decay;
    *K::rate(&mut step) = 1.0;
    *K::time(&mut step) = 1;
    for length in [1024, 1026, 1027] {
        let mut parameter = normal(length as u64, length, 1.0, stored);
        // Numbers that f16 has few bits for.
        parameter.iter_mut().step_by(3).for_each(|p| *p = stored.round(*p * 1e-6));
        let tensors = start_from::<K, N>(client, [&parameter, &vec![0.0; length]], stored);
        let seed = [17, 0xffff_0001];
        let new = (K::ONE)(client, &step, tensors, None, Some(chance(client, seed, 9)))?;
        let new = parameter_of::<K, N>(client, new, stored)?;
        for (i, (p, new)) in parameter.iter().zip(new).enumerate() {
            let exact = (p - p * decay) as f32;
            let expected = round_by_chance(exact, word_of(i as u32, 9, seed), stored);
            // Some devices have no subnormal numbers of f16.
            let is_flushed = new == 0.0 && expected.abs() < stored.underflow();
            if new != expected && !is_flushed {
                return Err(format!("{length}: element {i}, {exact}: {new}, not {expected}").into());
            }
        }
    }
    Ok(())
}

fn closed_gate<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1027, Storage::F32);
    let mut gradient = normal(1, length, 1.0, storage);
    gradient[5] = f64::NAN;
    gradient[1026] = f64::INFINITY;
    for is_held in [false, true] {
        let tensors = (K::START)(client, length, storage, upload(client, &gradient, storage));
        let held = is_held.then(|| tensors.clone());
        let old = numbers::<K, N>(client, &tensors, storage)?;
        let new = (K::ONE)(client, &K::STEP, tensors, Some(gate(client, 0.0, 1.0)), None)?;
        if numbers::<K, N>(client, &new, storage)? != old {
            return Err(format!("a step that is not taken moved something, held: {is_held}").into());
        }
        drop(held);
    }
    Ok(())
}

/// A factor multiplies the gradient before anything else. It is a power of two here, which leaves no rounding
/// behind.
fn multiplied<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1029, Storage::F32);
    let gradient = normal(3, length, 1.0, storage);
    let update = |scale: f64, factor: f64| {
        let scaled: Vec<f64> = gradient.iter().map(|g| scale * g).collect();
        let tensors = (K::START)(client, length, storage, upload(client, &scaled, storage));
        let gate = Gate { factor: number(client, factor), ..gate(client, 1.0, 0.0) };
        let new = (K::ONE)(client, &K::STEP, tensors, Some(gate), None)?;
        numbers::<K, N>(client, &new, storage)
    };
    if update(65536.0, 1.0 / 65536.0)? != update(1.0, 1.0)? {
        return Err("scaled and unscaled in the step, the gradient gave another result".into());
    }
    if update(65536.0, 1.0)? == update(1.0, 1.0)? {
        return Err("the control, without a factor, gave the same".into());
    }
    Ok(())
}

/// In place or not, the result is the same to the bit, and what others hold stays.
fn memory<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1028, Storage::F32);
    let tensors = || {
        let gradient = upload(client, &normal(3, length, 1.0, storage), storage);
        (K::START)(client, length, storage, gradient)
    };
    let places = |tensors: &K::Tensors| {
        kept::<K, N>(tensors).map(|rows| place_of(&rows)).collect::<Vec<_>>()
    };
    let in_place = (K::ONE)(client, &K::STEP, tensors(), None, None)?;
    let expected = numbers::<K, N>(client, &in_place, storage)?;

    for held in 0..1 << (N - 1) {
        let tensors = tensors();
        let old = numbers::<K, N>(client, &tensors, storage)?;
        let is_held = |i: usize| held >> i & 1 == 1;
        let all = kept::<K, N>(&tensors).enumerate();
        let kept: Vec<Option<Rows>> = all.map(|(i, rows)| is_held(i).then_some(rows)).collect();
        let before = places(&tensors);
        let new = (K::ONE)(client, &K::STEP, tensors, None, None)?;
        for (i, (before, after)) in before.into_iter().zip(places(&new)).enumerate() {
            if (before == after) == is_held(i) {
                return Err(format!("{held:03b} held: tensor {i} moved, or did not").into());
            }
        }
        if numbers::<K, N>(client, &new, storage)? != expected {
            return Err(format!("holding {held:03b} of the tensors changed the result").into());
        }
        for (kept, before) in kept.into_iter().zip(old) {
            let Some(kept) = kept else { continue };
            if download(client, kept.buffer, storage)? != before {
                return Err(format!("what was held was overwritten, {held:03b}").into());
            }
        }
    }
    Ok(())
}

fn infinite_parameter<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let tensors = start_from::<K, N>(client, [&[f64::INFINITY, f64::NAN], &[1.0; 2]], storage);
    let mut step = K::STEP;
    *K::decay(&mut step) = 0.0;
    let new = (K::ONE)(client, &step, tensors, None, None)?;
    let new = parameter_of::<K, N>(client, new, storage)?;
    match new[..] {
        [infinite, nan] if infinite == f64::INFINITY && nan.is_nan() => Ok(()),
        _ => Err(format!("infinity and NaN became {new:?}").into()),
    }
}

fn empty<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let nothing = Buffer::empty(client, 0, dtype(Storage::F16));
    let tensors = (K::START)(client, 0, Storage::F32, nothing);
    let new = (K::ONE)(client, &K::STEP, tensors, None, None)?;
    if new.into()[0].elements() == 0 { Ok(()) } else { Err("elements from nothing".into()) }
}

fn bad_arguments<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let numbers = |count: usize| upload(client, &vec![1.0; count], Storage::F32);
    let tensors = |count| (K::START)(client, 4, Storage::F32, numbers(count));
    let name_of_op = format!("{}_update", K::NAME);
    let named = |result: Result<K::Tensors, KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { op, argument, .. })
            if argument == name && op == name_of_op =>
        {
            Ok(())
        }
        Err(other) => Err(Failed::from(format!("`{name}` was expected to be named, got {other}"))),
        Ok(_) => Err(Failed::from(format!("a bad `{name}` was taken"))),
    };
    let step = |tensors, gate, chance| (K::ONE)(client, &K::STEP, tensors, gate, chance);
    named(step(tensors(3), None, None), "gradient")?;
    for (state, name) in K::NAMES.into_iter().enumerate().skip(2) {
        let mut wrong = tensors(4).into();
        wrong[state].buffer.dtype = ElemType::Float(FloatKind::F16);
        named(step(wrong.into(), None, None), name)?;
    }
    let mut early = K::STEP;
    *K::time(&mut early) = 0;
    named((K::ONE)(client, &early, tensors(4), None, None), "time")?;
    let long = Gate { skipped: numbers(2), ..gate(client, 1.0, 0.0) };
    named(step(tensors(4), Some(long), None), "skipped")?;
    let short = Chance { seed: numbers(1), draw: 0 };
    named(step(tensors(4), None, Some(short)), "seed")?;
    let mut wide = tensors(4).into();
    wide[0].buffer.dtype = ElemType::Float(FloatKind::F64);
    match step(wide.into(), None, None) {
        Err(KernelError::Unsupported { op, .. }) if op == name_of_op => Ok(()),
        Err(other) => Err(format!("f64 gave {other}").into()),
        Ok(_) => Err("f64 was taken".into()),
    }
}
