//! Steps of AdamW on the device, against f64.

#[path = "adamw_layouts.rs"]
pub(crate) mod layouts;
#[path = "adamw_many.rs"]
mod many;
#[path = "adamw_steps.rs"]
mod steps;
#[path = "adamw_training.rs"]
pub(crate) mod training;

use crate::{
    gelu::{download, dtype, upload},
    step_many, step_model,
};
use blackburn_kernels::{
    KernelError,
    adamw::{AdamwStep, AdamwTensors, Chance, Gate, adamw_update},
    buffer::{Buffer, Rows},
};
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding, Step, bound, round_by_chance, update, word_of},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind, UIntKind},
};
use libtest_mimic::{Failed, Trial};

/// Around vectors and cubes (256 units by 4 elements), odd ones that take scalar loads, and more than
/// the grid takes at once.
const LENGTHS: [usize; 8] = [1, 2, 3, 255, 1024, 1027, 1028, 70_004];

const STEP: AdamwStep =
    AdamwStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 1e-2, time: 1 };

type Number = fn(&Element) -> f64;

/// What an element is made of.
const NUMBERS: [(&str, Number); 3] =
    [("p", |e| e.parameter), ("m", |e| e.first), ("v", |e| e.second)];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for parameter in Storage::ALL {
        for gradient in Storage::ALL {
            let name = format!("adamw::steps_are_within_bounds_in_{parameter:?}_by_{gradient:?}");
            trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
                on_device_with_both(parameter, gradient, move |client| {
                    LENGTHS.iter().try_for_each(|length| {
                        several_steps(client, parameter, gradient, *length)
                            .map_err(|error| told(&format!("{length} elements"), error))
                    })
                })
            }));
        }
    }
    for storage in [Storage::F16, Storage::Bf16] {
        let name = |what: &str| format!("adamw::{what}_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(
            name("rounding_by_chance_is_right_to_the_bit"),
            move || on_device_with(dtype(storage), |client| rounds_to_the_bit(client, storage)),
        ));
        trials.push(Trial::ignorable_test(
            name("rounding_by_chance_has_the_right_mean"),
            move || on_device_with(dtype(storage), |client| rounds_in_the_mean(client, storage)),
        ));
    }
    trials.extend([
        Trial::ignorable_test("adamw::a_closed_gate_keeps_every_bit", || on_device(closed_gate)),
        Trial::ignorable_test("adamw::a_factor_multiplies_the_gradient", || on_device(multiplied)),
        Trial::ignorable_test("adamw::skipped_steps_do_not_count", || on_device(skipped_steps)),
        Trial::ignorable_test("adamw::memory_is_used_again_where_nobody_holds_it", || {
            on_device(memory)
        }),
        Trial::ignorable_test("adamw::without_decay_infinite_parameters_stay", || {
            on_device(infinite_parameter)
        }),
        Trial::ignorable_test("adamw::planted_faults_are_caught", || on_device(planted_faults)),
        Trial::ignorable_test("adamw::empty_parameters_stay_empty", || on_device(empty)),
        Trial::ignorable_test("adamw::bad_arguments_are_named", || on_device(bad_arguments)),
    ]);
    trials.extend(layouts::trials());
    trials.extend(step_many::trials::<many::Adamw>());
    trials.extend(step_model::trials::<steps::Adamw>());
    trials.extend(training::trials());
    trials
}

pub(crate) fn on_device_with_both(
    parameter: Storage,
    gradient: Storage,
    test: impl FnOnce(&Client) -> Result<(), Failed>,
) -> Result<libtest_mimic::Completion, Failed> {
    // Of the two, bf16 is what a device may lack.
    let rarer = if gradient == Storage::Bf16 { gradient } else { parameter };
    on_device_with(dtype(rarer), test)
}

pub(crate) fn told(what: &str, error: Failed) -> Failed {
    format!("{what}: {}", error.message().unwrap_or_default()).into()
}

pub(crate) fn number(client: &Client, value: f64) -> Buffer {
    upload(client, &[value], Storage::F32)
}

pub(crate) fn gate(client: &Client, taken: f64, skipped: f64) -> Gate {
    let [taken, skipped, factor] = [taken, skipped, 1.0].map(|value| number(client, value));
    Gate { taken, skipped, factor }
}

pub(crate) fn chance(client: &Client, seed: [u32; 2], draw: u32) -> Chance {
    let bytes: Vec<u8> = seed.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let dtype = ElemType::UInt(UIntKind::U32);
    Chance { seed: Buffer { handle: client.create_from_slice(&bytes), elements: 2, dtype }, draw }
}

/// What the device holds, here.
fn elements(
    client: &Client,
    tensors: &AdamwTensors,
    stored: Storage,
) -> Result<Vec<Element>, Failed> {
    let parameter = download(client, tensors.parameter.buffer.clone(), stored)?;
    let first = download(client, tensors.first.buffer.clone(), Storage::F32)?;
    let second = download(client, tensors.second.buffer.clone(), Storage::F32)?;
    let moments = first.into_iter().zip(second);
    let element = |(parameter, (first, second))| Element { parameter, first, second };
    Ok(parameter.into_iter().zip(moments).map(element).collect())
}

fn start(client: &Client, length: usize, stored: Storage, gradient: Buffer) -> AdamwTensors {
    let moment = || Rows::one(upload(client, &vec![0.0; length], Storage::F32));
    AdamwTensors {
        parameter: upload(client, &normal(length as u64, length, 1.0, stored), stored).into(),
        gradient: gradient.into(),
        first: moment(),
        second: moment(),
    }
}

/// Whether the device's step from `old` to `new` is the reference's.
fn check(
    step: &Step,
    [old, new]: [&[Element]; 2],
    gradient: &[f64],
    stored: Storage,
    rounding: Rounding,
    by: Corrections,
) -> Result<(), Failed> {
    let pairs = || old.iter().zip(gradient);
    let expected: Vec<Element> = pairs().map(|(old, g)| update(step, *old, *g)).collect();
    let bounds: Vec<Element> =
        pairs().map(|(old, g)| bound(step, *old, *g, stored, rounding, by)).collect();
    for (name, of) in NUMBERS {
        let [new, expected, bounds] =
            [new, &expected[..], &bounds[..]].map(|all| all.iter().map(of).collect::<Vec<f64>>());
        compare(&new, &expected, &bounds).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

fn reference(step: &AdamwStep, taken: usize) -> Step {
    let AdamwStep { beta_1, beta_2, epsilon, weight_decay, rate, .. } = *step;
    Step { beta_1, beta_2, epsilon, weight_decay, rate, taken: taken as u32 }
}

/// The ways in which a step is asked for.
#[derive(Clone, Copy, Debug)]
struct Asked {
    weight_decay: f64,
    gated: bool,
    rounding: Rounding,
}

/// Each step from what the device made of the last one, so that every bound is that of one step. Later
/// steps come to where the corrections are computed in the other way.
fn several_steps(
    client: &Client,
    stored: Storage,
    gradients: Storage,
    length: usize,
) -> Result<(), Failed> {
    for asked in [
        Asked { weight_decay: 0.1, gated: false, rounding: Rounding::Nearest },
        Asked { weight_decay: 0.0, gated: true, rounding: Rounding::Nearest },
        Asked { weight_decay: 0.1, gated: true, rounding: Rounding::Chance },
    ] {
        let nothing = Buffer::empty(client, 0, dtype(gradients));
        let mut tensors = start(client, length, stored, nothing);
        let mut old = elements(client, &tensors, stored)?;
        for time in [1, 2, 3, 9, 40, 1000] {
            let gradient = normal((length + time) as u64, length, 0.5, gradients);
            tensors.gradient = upload(client, &gradient, gradients).into();
            let step = AdamwStep { time, weight_decay: asked.weight_decay, ..STEP };
            let gate = asked.gated.then(|| gate(client, 1.0, 0.0));
            let chance = (asked.rounding == Rounding::Chance)
                .then(|| chance(client, [time as u32, 5], length as u32));
            tensors = adamw_update(client, &step, tensors, gate, chance)?;
            let new = elements(client, &tensors, stored)?;
            let by = if asked.gated { Corrections::Device } else { Corrections::Host };
            let reference = reference(&step, time);
            check(&reference, [&old, &new], &gradient, stored, asked.rounding, by)
                .map_err(|error| told(&format!("{asked:?}, step {time}"), error))?;
            old = new;
        }
    }
    Ok(())
}

/// Without a gradient, and with a decay by a power of two, the result before rounding is exact in f32.
fn rounds_to_the_bit(client: &Client, stored: Storage) -> Result<(), Failed> {
    let step = AdamwStep { weight_decay: 2f64.powi(-12), rate: 1.0, time: 3, ..STEP };
    for length in [1024, 1026, 1027] {
        let mut parameter = normal(length as u64, length, 1.0, stored);
        // Numbers that f16 has few bits for.
        parameter.iter_mut().step_by(3).for_each(|p| *p = stored.round(*p * 1e-6));
        let mut tensors = start(client, length, stored, upload(client, &vec![0.0; length], stored));
        tensors.parameter = upload(client, &parameter, stored).into();
        let seed = [17, 0xffff_0001];
        let new = adamw_update(client, &step, tensors, None, Some(chance(client, seed, 9)))?;
        let new = download(client, new.parameter.buffer, stored)?;
        for (i, (p, new)) in parameter.iter().zip(new).enumerate() {
            let exact = (p - p * step.weight_decay) as f32;
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

/// Steps of a fifth of the distance between values: lost by rounding to the nearest, right in the mean.
fn rounds_in_the_mean(client: &Client, stored: Storage) -> Result<(), Failed> {
    let (length, share) = (40_000, 0.2);
    // Below 1 are twice as many values as above.
    let distance = stored.unit_roundoff();
    let step = AdamwStep { weight_decay: share * distance, rate: 1.0, ..STEP };
    let mean = |chance: Option<Chance>| -> Result<f64, Failed> {
        let mut tensors = start(client, length, stored, upload(client, &vec![0.0; length], stored));
        tensors.parameter = upload(client, &vec![1.0; length], stored).into();
        let new = adamw_update(client, &step, tensors, None, chance)?;
        let new = download(client, new.parameter.buffer, stored)?;
        if new.iter().any(|p| *p != 1.0 && *p != 1.0 - distance) {
            return Err("a value that is no neighbor".into());
        }
        Ok(new.iter().map(|p| (1.0 - p) / distance).sum::<f64>() / length as f64)
    };
    if mean(None)? != 0.0 {
        return Err("the control, which rounds to the nearest value, moved".into());
    }
    let mut seen = Vec::new();
    for (seed, draw) in [([1, 2], 0), ([1, 2], 1), ([2, 2], 0)] {
        let moved = mean(Some(chance(client, seed, draw)))?;
        let deviation = (share * (1.0 - share) / length as f64).sqrt();
        if (moved - share).abs() > 5.0 * deviation {
            return Err(format!("{moved} moved, expected {share} +- {deviation}").into());
        }
        seen.push(moved);
    }
    if seen.windows(2).any(|means| means[0] == means[1]) {
        return Err(format!("different draws gave the same mean: {seen:?}").into());
    }
    Ok(())
}

fn closed_gate(client: &Client) -> Result<(), Failed> {
    let length = 1027;
    let mut gradient = normal(1, length, 1.0, Storage::F32);
    gradient[5] = f64::NAN;
    gradient[1026] = f64::INFINITY;
    for is_held in [false, true] {
        let tensors = start(client, length, Storage::F32, upload(client, &gradient, Storage::F32));
        let held = is_held.then(|| tensors.clone());
        let old = elements(client, &tensors, Storage::F32)?;
        let gate = gate(client, 0.0, 1.0);
        let new = adamw_update(client, &STEP, tensors, Some(gate), None)?;
        if elements(client, &new, Storage::F32)? != old {
            return Err(format!("a step that is not taken moved something, held: {is_held}").into());
        }
        drop(held);
    }
    Ok(())
}

/// With two of five steps skipped, the corrections are those of the third step; with more skipped than
/// there were, those of the first.
fn skipped_steps(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (300, Storage::F32);
    for (time, skipped, taken) in [(5, 2.0, 3), (5, 4.0, 1), (5, 9.0, 1), (2000, 0.0, 2000)] {
        let gradient = normal(3, length, 1.0, storage);
        let tensors = start(client, length, storage, upload(client, &gradient, storage));
        let old = elements(client, &tensors, storage)?;
        let step = AdamwStep { time, ..STEP };
        let gate = gate(client, 1.0, skipped);
        let new = adamw_update(client, &step, tensors, Some(gate), None)?;
        let new = elements(client, &new, storage)?;
        let step = reference(&step, taken);
        check(&step, [&old, &new], &gradient, storage, Rounding::Nearest, Corrections::Device)
            .map_err(|error| told(&format!("{skipped} of {time} skipped"), error))?;
    }
    Ok(())
}

/// A factor multiplies the gradient. It is a power of two here, which leaves no rounding behind.
fn multiplied(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1029, Storage::F32);
    let gradient = normal(3, length, 1.0, storage);
    let update = |scale: f64, factor: f64| {
        let scaled: Vec<f64> = gradient.iter().map(|g| scale * g).collect();
        let tensors = start(client, length, storage, upload(client, &scaled, storage));
        let gate = Gate { factor: number(client, factor), ..gate(client, 1.0, 0.0) };
        let new = adamw_update(client, &STEP, tensors, Some(gate), None)?;
        elements(client, &new, storage)
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
fn memory(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1028, Storage::F32);
    let gradient = || upload(client, &normal(3, length, 1.0, storage), storage);
    let in_place =
        adamw_update(client, &STEP, start(client, length, storage, gradient()), None, None)?;
    let expected = elements(client, &in_place, storage)?;

    for held in 0..8 {
        let tensors = start(client, length, storage, gradient());
        let old = elements(client, &tensors, storage)?;
        let AdamwTensors { parameter, first, second, .. } = &tensors;
        let all = [parameter.clone(), first.clone(), second.clone()];
        let kept: Vec<Option<Rows>> = all
            .into_iter()
            .enumerate()
            .map(|(i, rows)| (held >> i & 1 == 1).then_some(rows))
            .collect();
        let places = |tensors: &AdamwTensors| {
            let AdamwTensors { parameter, first, second, .. } = tensors;
            [parameter, first, second].map(|rows| rows.buffer.handle.memory.descriptor().id)
        };
        let before = places(&tensors);
        let new = adamw_update(client, &STEP, tensors, None, None)?;
        for (i, (before, after)) in before.into_iter().zip(places(&new)).enumerate() {
            let is_held = held >> i & 1 == 1;
            if (before == after) == is_held {
                return Err(format!(
                    "{held:03b} held: tensor {i} went from {before:?} to {after:?}"
                )
                .into());
            }
        }
        if elements(client, &new, storage)? != expected {
            return Err(format!("holding {held:03b} of the tensors changed the result").into());
        }
        for (kept, (_, of)) in kept.into_iter().zip(NUMBERS) {
            let Some(kept) = kept else { continue };
            let before: Vec<f64> = old.iter().map(of).collect();
            if download(client, kept.buffer, storage)? != before {
                return Err(format!("what was held was overwritten, {held:03b}").into());
            }
        }
    }
    Ok(())
}

fn infinite_parameter(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let mut tensors = start(client, 2, storage, upload(client, &[1.0, 1.0], storage));
    tensors.parameter = upload(client, &[f64::INFINITY, f64::NAN], storage).into();
    let step = AdamwStep { weight_decay: 0.0, ..STEP };
    let new = adamw_update(client, &step, tensors, None, None)?;
    let new = download(client, new.parameter.buffer, storage)?;
    match new[..] {
        [infinite, nan] if infinite == f64::INFINITY && nan.is_nan() => Ok(()),
        _ => Err(format!("infinity and NaN became {new:?}").into()),
    }
}

/// The negative control: each of these is one thing that a kernel could get wrong.
fn planted_faults(client: &Client) -> Result<(), Failed> {
    // Small parameters, whose own rounding hides little.
    let (length, storage) = (1028, Storage::F32);
    let parameter = normal(8, length, 0.01, storage);
    let gradient = normal(3, length, 1.0, storage);
    let step = AdamwStep { time: 3, ..STEP };
    let run = |asked: AdamwStep, gradient: &[f64]| -> Result<[Vec<Element>; 2], Failed> {
        let mut tensors = start(client, length, storage, upload(client, gradient, storage));
        tensors.parameter = upload(client, &parameter, storage).into();
        let old = elements(client, &tensors, storage)?;
        let new = adamw_update(client, &asked, tensors, None, None)?;
        Ok([old, elements(client, &new, storage)?])
    };
    let verdict = |asked, given: &[f64]| -> Result<bool, Failed> {
        let [old, new] = run(asked, given)?;
        let step = reference(&step, 3);
        let [by, to] = [Corrections::Host, Corrections::Device];
        let is_right = |by| check(&step, [&old, &new], &gradient, storage, Rounding::Nearest, by);
        Ok(is_right(by).is_ok() && is_right(to).is_ok())
    };
    if !verdict(step, &gradient)? {
        return Err("the right step did not pass".into());
    }
    for (fault, wrong) in [
        ("a step too many", AdamwStep { time: 4, ..step }),
        ("no decay", AdamwStep { weight_decay: 0.0, ..step }),
        ("another epsilon", AdamwStep { epsilon: 1e-5, ..step }),
        ("another beta", AdamwStep { beta_2: 0.9501, ..step }),
    ] {
        if verdict(wrong, &gradient)? {
            return Err(format!("{fault} went unseen").into());
        }
    }
    let mut last = gradient.clone();
    last[length - 1] *= 1.0001;
    if verdict(step, &last)? {
        return Err("a fault in the last element went unseen".into());
    }
    Ok(())
}

fn empty(client: &Client) -> Result<(), Failed> {
    let tensors = start(client, 0, Storage::F32, Buffer::empty(client, 0, dtype(Storage::F16)));
    let new = adamw_update(client, &STEP, tensors, None, None)?;
    if new.parameter.elements() == 0 { Ok(()) } else { Err("elements from nothing".into()) }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let gradient = |count: usize| upload(client, &vec![1.0; count], Storage::F32);
    let tensors = |count| start(client, 4, Storage::F32, gradient(count));
    let named = |result: Result<AdamwTensors, KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(Failed::from(format!("`{name}` was expected to be named, got {other:?}"))),
    };
    named(adamw_update(client, &STEP, tensors(3), None, None), "gradient")?;
    let mut wrong = tensors(4);
    wrong.second.buffer.dtype = ElemType::Float(FloatKind::F16);
    named(adamw_update(client, &STEP, wrong, None, None), "second")?;
    let step = AdamwStep { time: 0, ..STEP };
    named(adamw_update(client, &step, tensors(4), None, None), "time")?;
    let long = Gate { skipped: gradient(2), ..gate(client, 1.0, 0.0) };
    named(adamw_update(client, &STEP, tensors(4), Some(long), None), "skipped")?;
    let short = Chance { seed: gradient(1), draw: 0 };
    named(adamw_update(client, &STEP, tensors(4), None, Some(short)), "seed")?;
    let mut wide = tensors(4);
    wide.parameter.buffer.dtype = ElemType::Float(FloatKind::F64);
    match adamw_update(client, &STEP, wide, None, None) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(format!("f64 gave {other:?}").into()),
    }
}
