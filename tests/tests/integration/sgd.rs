//! Steps of gradient descent with momentum on the device, against f64.

#[path = "sgd_layouts.rs"]
mod layouts;
#[path = "sgd_many.rs"]
mod many;
#[path = "sgd_steps.rs"]
mod steps;
#[path = "sgd_training.rs"]
mod training;

use crate::{
    adamw::{chance, gate, number, on_device_with_both, told},
    gelu::{download, dtype, upload},
    step_many, step_model,
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    sgd::{Chance, Gate, SgdStep, SgdTensors, sgd_update},
};
use blackburn_reference::{
    adamw::{Rounding, round_by_chance, word_of},
    random::normal,
    sgd::{Element, Step, bound, update},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use libtest_mimic::{Failed, Trial};

/// Around vectors and cubes (256 units by 4 elements), odd ones that take scalar loads, and more than
/// the grid takes at once.
const LENGTHS: [usize; 8] = [1, 2, 3, 255, 1024, 1027, 1028, 70_004];

const STEP: SgdStep = SgdStep {
    momentum: 0.9,
    dampening: 0.25,
    nesterov: false,
    weight_decay: 0.1,
    rate: 1e-2,
    time: 2,
};

type Number = fn(&Element) -> f64;

/// What an element is made of.
const NUMBERS: [(&str, Number); 2] = [("p", |e| e.parameter), ("v", |e| e.velocity)];

type Test = fn(&Client) -> Result<(), Failed>;

const TESTS: [(&str, Test); 9] = [
    ("a_closed_gate_keeps_every_bit", closed_gate),
    ("a_factor_multiplies_the_gradient", multiplied),
    ("the_first_step_is_the_first_that_is_taken", first_taken),
    ("the_first_step_reads_no_velocity", unread_velocity),
    ("memory_is_used_again_where_nobody_holds_it", memory),
    ("without_decay_infinite_parameters_stay", infinite_parameter),
    ("planted_faults_are_caught", planted_faults),
    ("empty_parameters_stay_empty", empty),
    ("bad_arguments_are_named", bad_arguments),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for parameter in Storage::ALL {
        for gradient in Storage::ALL {
            let name = format!("sgd::steps_are_within_bounds_in_{parameter:?}_by_{gradient:?}");
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
        let name = format!("sgd::rounding_by_chance_is_right_to_the_bit_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| rounds_to_the_bit(client, storage))
        }));
    }
    trials.extend(TESTS.map(|(name, test)| {
        Trial::ignorable_test(format!("sgd::{name}"), move || on_device(test))
    }));
    trials.extend(layouts::trials());
    trials.extend(step_many::trials::<many::Sgd>());
    trials.extend(step_model::trials::<steps::Sgd>());
    trials.extend(training::trials());
    trials
}

/// What the device holds, here.
fn elements(
    client: &Client,
    tensors: &SgdTensors,
    stored: Storage,
) -> Result<Vec<Element>, Failed> {
    let parameter = download(client, tensors.parameter.buffer.clone(), stored)?;
    let velocity = download(client, tensors.velocity.buffer.clone(), Storage::F32)?;
    let element = |(parameter, velocity)| Element { parameter, velocity };
    Ok(parameter.into_iter().zip(velocity).map(element).collect())
}

/// A parameter on its way, with a velocity.
fn start(client: &Client, length: usize, stored: Storage, gradient: Buffer) -> SgdTensors {
    let velocity = normal(length as u64 + 9, length, 0.3, Storage::F32);
    SgdTensors {
        parameter: upload(client, &normal(length as u64, length, 1.0, stored), stored).into(),
        gradient: gradient.into(),
        velocity: Rows::one(upload(client, &velocity, Storage::F32)),
    }
}

/// Whether the device's step from `old` to `new` is the reference's.
fn check(
    step: &Step,
    [old, new]: [&[Element]; 2],
    gradient: &[f64],
    stored: Storage,
    rounding: Rounding,
) -> Result<(), Failed> {
    let pairs = || old.iter().zip(gradient);
    let expected: Vec<Element> = pairs().map(|(old, g)| update(step, *old, *g)).collect();
    let bounds: Vec<Element> =
        pairs().map(|(old, g)| bound(step, *old, *g, stored, rounding)).collect();
    for (name, of) in NUMBERS {
        let [new, expected, bounds] =
            [new, &expected[..], &bounds[..]].map(|all| all.iter().map(of).collect::<Vec<f64>>());
        compare(&new, &expected, &bounds).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

fn reference(step: &SgdStep, is_first: bool) -> Step {
    let SgdStep { momentum, dampening, nesterov, weight_decay, rate, .. } = *step;
    Step { momentum, dampening, nesterov, weight_decay, rate, is_first }
}

/// The ways in which a step is asked for.
#[derive(Clone, Copy, Debug)]
struct Asked {
    momentum: f64,
    dampening: f64,
    nesterov: bool,
    weight_decay: f64,
    gated: bool,
    rounding: Rounding,
}

const PLAIN: Asked = Asked {
    momentum: 0.9,
    dampening: 0.0,
    nesterov: false,
    weight_decay: 0.0,
    gated: false,
    rounding: Rounding::Nearest,
};

/// Each thing by itself, and all of them together.
const ASKED: [Asked; 6] = [
    PLAIN,
    Asked { dampening: 0.25, weight_decay: 0.1, ..PLAIN },
    Asked { nesterov: true, weight_decay: 0.1, ..PLAIN },
    Asked { dampening: 0.25, gated: true, ..PLAIN },
    Asked { momentum: 0.0, rounding: Rounding::Chance, ..PLAIN },
    Asked {
        dampening: 0.25,
        nesterov: true,
        weight_decay: 0.1,
        gated: true,
        rounding: Rounding::Chance,
        ..PLAIN
    },
];

/// Each step from what the device made of the last one, so that every bound is that of one step.
fn several_steps(
    client: &Client,
    stored: Storage,
    gradients: Storage,
    length: usize,
) -> Result<(), Failed> {
    for asked in ASKED {
        let nothing = Buffer::empty(client, 0, dtype(gradients));
        let mut tensors = start(client, length, stored, nothing);
        let mut old = elements(client, &tensors, stored)?;
        for (seed, time) in [(1, 1), (2, 2), (3, 3), (4, usize::MAX)] {
            let gradient = normal((length + seed) as u64, length, 0.5, gradients);
            tensors.gradient = upload(client, &gradient, gradients).into();
            let Asked { momentum, dampening, nesterov, weight_decay, .. } = asked;
            let step = SgdStep { momentum, dampening, nesterov, weight_decay, time, ..STEP };
            let gate = asked.gated.then(|| gate(client, 1.0, 0.0));
            let chance = (asked.rounding == Rounding::Chance)
                .then(|| chance(client, [seed as u32, 5], length as u32));
            tensors = sgd_update(client, &step, tensors, gate, chance)?;
            let new = elements(client, &tensors, stored)?;
            let reference = reference(&step, time == 1);
            check(&reference, [&old, &new], &gradient, stored, asked.rounding)
                .map_err(|error| told(&format!("{asked:?}, step {time}"), error))?;
            old = new;
        }
    }
    Ok(())
}

/// Without a gradient and a velocity, and with powers of two, the result before rounding is exact in f32.
fn rounds_to_the_bit(client: &Client, stored: Storage) -> Result<(), Failed> {
    let step = SgdStep { weight_decay: 2f64.powi(-12), rate: 1.0, time: 1, ..STEP };
    for length in [1024, 1026, 1027] {
        let mut parameter = normal(length as u64, length, 1.0, stored);
        // Numbers that f16 has few bits for.
        parameter.iter_mut().step_by(3).for_each(|p| *p = stored.round(*p * 1e-6));
        let mut tensors = start(client, length, stored, upload(client, &vec![0.0; length], stored));
        tensors.parameter = upload(client, &parameter, stored).into();
        let seed = [17, 0xffff_0001];
        let new = sgd_update(client, &step, tensors, None, Some(chance(client, seed, 9)))?;
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
        let new = sgd_update(client, &STEP, tensors, Some(gate), None)?;
        if elements(client, &new, Storage::F32)? != old {
            return Err(format!("a step that is not taken moved something, held: {is_held}").into());
        }
        drop(held);
    }
    Ok(())
}

/// A factor multiplies the gradient before it decays. It is a power of two here, which leaves no rounding
/// behind.
fn multiplied(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1029, Storage::F32);
    let gradient = normal(3, length, 1.0, storage);
    let update = |scale: f64, factor: f64| {
        let scaled: Vec<f64> = gradient.iter().map(|g| scale * g).collect();
        let tensors = start(client, length, storage, upload(client, &scaled, storage));
        let gate = Gate { factor: number(client, factor), ..gate(client, 1.0, 0.0) };
        let new = sgd_update(client, &STEP, tensors, Some(gate), None)?;
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

fn first_taken(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (300, Storage::F32);
    for (time, skipped, is_first) in
        [(1, 0.0, true), (2, 0.0, false), (5, 4.0, true), (5, 3.0, false), (usize::MAX, 9.0, false)]
    {
        let gradient = normal(3, length, 1.0, storage);
        let tensors = start(client, length, storage, upload(client, &gradient, storage));
        let old = elements(client, &tensors, storage)?;
        let step = SgdStep { time, ..STEP };
        let new = sgd_update(client, &step, tensors, Some(gate(client, 1.0, skipped)), None)?;
        let new = elements(client, &new, storage)?;
        let told = |what: &str, error| told(&format!("{skipped} of {time} skipped{what}"), error);
        let by = |is_first| {
            let step = reference(&step, is_first);
            check(&step, [&old, &new], &gradient, storage, Rounding::Nearest)
        };
        by(is_first).map_err(|error| told("", error))?;
        if by(!is_first).is_ok() {
            return Err(told(" passes for both", Failed::without_message()));
        }
    }
    Ok(())
}

fn unread_velocity(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1029, Storage::F32);
    let step = SgdStep { time: 1, ..STEP };
    let run = |velocity: f64| {
        let gradient = normal(3, length, 1.0, storage);
        let mut tensors = start(client, length, storage, upload(client, &gradient, storage));
        tensors.velocity = upload(client, &vec![velocity; length], storage).into();
        elements(client, &sgd_update(client, &step, tensors, None, None)?, storage)
    };
    if run(f64::NAN)? == run(0.0)? { Ok(()) } else { Err("a velocity of NaN showed".into()) }
}

/// In place or not, the result is the same to the bit, and what others hold stays.
fn memory(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (1028, Storage::F32);
    let gradient = || upload(client, &normal(3, length, 1.0, storage), storage);
    let in_place =
        sgd_update(client, &STEP, start(client, length, storage, gradient()), None, None)?;
    let expected = elements(client, &in_place, storage)?;

    for held in 0..4 {
        let tensors = start(client, length, storage, gradient());
        let old = elements(client, &tensors, storage)?;
        let is_held = |i: usize| held >> i & 1 == 1;
        let all = [tensors.parameter.clone(), tensors.velocity.clone()];
        let kept: Vec<Option<Rows>> =
            all.into_iter().enumerate().map(|(i, rows)| is_held(i).then_some(rows)).collect();
        let places = |tensors: &SgdTensors| {
            [&tensors.parameter, &tensors.velocity]
                .map(|rows| rows.buffer.handle.memory.descriptor().id)
        };
        let before = places(&tensors);
        let new = sgd_update(client, &STEP, tensors, None, None)?;
        for (i, (before, after)) in before.into_iter().zip(places(&new)).enumerate() {
            if (before == after) == is_held(i) {
                let moved = format!("tensor {i} went from {before:?} to {after:?}");
                return Err(format!("{held:02b} held: {moved}").into());
            }
        }
        if elements(client, &new, storage)? != expected {
            return Err(format!("holding {held:02b} of the tensors changed the result").into());
        }
        for (kept, (_, of)) in kept.into_iter().zip(NUMBERS) {
            let Some(kept) = kept else { continue };
            let before: Vec<f64> = old.iter().map(of).collect();
            if download(client, kept.buffer, storage)? != before {
                return Err(format!("what was held was overwritten, {held:02b}").into());
            }
        }
    }
    Ok(())
}

fn infinite_parameter(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let mut tensors = start(client, 2, storage, upload(client, &[1.0, 1.0], storage));
    tensors.parameter = upload(client, &[f64::INFINITY, f64::NAN], storage).into();
    let step = SgdStep { weight_decay: 0.0, ..STEP };
    let new = sgd_update(client, &step, tensors, None, None)?;
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
    let verdict = |asked: SgdStep, given: &[f64]| -> Result<bool, Failed> {
        let mut tensors = start(client, length, storage, upload(client, given, storage));
        tensors.parameter = upload(client, &parameter, storage).into();
        let old = elements(client, &tensors, storage)?;
        let new = sgd_update(client, &asked, tensors, None, None)?;
        let new = elements(client, &new, storage)?;
        let step = reference(&STEP, false);
        Ok(check(&step, [&old, &new], &gradient, storage, Rounding::Nearest).is_ok())
    };
    if !verdict(STEP, &gradient)? {
        return Err("the right step did not pass".into());
    }
    for (fault, wrong) in [
        ("a first step", SgdStep { time: 1, ..STEP }),
        ("no decay", SgdStep { weight_decay: 0.0, ..STEP }),
        ("no dampening", SgdStep { dampening: 0.0, ..STEP }),
        ("another momentum", SgdStep { momentum: 0.9001, ..STEP }),
        ("Nesterov's form", SgdStep { nesterov: true, ..STEP }),
        ("another rate", SgdStep { rate: 1.0001e-2, ..STEP }),
    ] {
        if verdict(wrong, &gradient)? {
            return Err(format!("{fault} went unseen").into());
        }
    }
    let mut last = gradient.clone();
    last[length - 1] *= 1.0001;
    if verdict(STEP, &last)? {
        return Err("a fault in the last element went unseen".into());
    }
    Ok(())
}

fn empty(client: &Client) -> Result<(), Failed> {
    let tensors = start(client, 0, Storage::F32, Buffer::empty(client, 0, dtype(Storage::F16)));
    let new = sgd_update(client, &STEP, tensors, None, None)?;
    if new.parameter.elements() == 0 { Ok(()) } else { Err("elements from nothing".into()) }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let gradient = |count: usize| upload(client, &vec![1.0; count], Storage::F32);
    let tensors = |count| start(client, 4, Storage::F32, gradient(count));
    let named = |result: Result<SgdTensors, KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { op: "sgd_update", argument, .. }) if argument == name => {
            Ok(())
        }
        other => Err(Failed::from(format!("`{name}` was expected to be named, got {other:?}"))),
    };
    named(sgd_update(client, &STEP, tensors(3), None, None), "gradient")?;
    let mut wrong = tensors(4);
    wrong.velocity.buffer.dtype = ElemType::Float(FloatKind::F16);
    named(sgd_update(client, &STEP, wrong, None, None), "velocity")?;
    let step = SgdStep { time: 0, ..STEP };
    named(sgd_update(client, &step, tensors(4), None, None), "time")?;
    let long = Gate { skipped: gradient(2), ..gate(client, 1.0, 0.0) };
    named(sgd_update(client, &STEP, tensors(4), Some(long), None), "skipped")?;
    let short = Chance { seed: gradient(1), draw: 0 };
    named(sgd_update(client, &STEP, tensors(4), None, Some(short)), "seed")?;
    let mut wide = tensors(4);
    wide.parameter.buffer.dtype = ElemType::Float(FloatKind::F64);
    match sgd_update(client, &STEP, wide, None, None) {
        Err(KernelError::Unsupported { op: "sgd_update", .. }) => Ok(()),
        other => Err(format!("f64 gave {other:?}").into()),
    }
}
