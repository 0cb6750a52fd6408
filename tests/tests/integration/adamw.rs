//! Steps of AdamW on the device, against f64.

#[path = "adamw_kind.rs"]
mod kind;
#[path = "adamw_training.rs"]
mod training;

use crate::{
    step_copies,
    step_kind::{Numbers, chance, gate, numbers, told},
    step_layouts, step_many, step_one, step_training,
};
use blackburn::train::optim::AdamWGroups;
use blackburn_kernels::{
    adamw::{AdamwStep, AdamwTensors, Chance, adamw_update},
    buffer::{Buffer, Rows},
};
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding, Step, bound, update},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use kind::Adamw;
use libtest_mimic::{Failed, Trial};

const STEP: AdamwStep =
    AdamwStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 1e-2, time: 1 };

type Number = fn(&Element) -> f64;

/// What an element is made of.
const NUMBERS: [(&str, Number); 3] =
    [("p", |e| e.parameter), ("m", |e| e.first), ("v", |e| e.second)];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = step_one::trials::<Adamw, 4>();
    trials.extend(step_layouts::trials::<Adamw, 4>());
    trials.extend(step_many::trials::<Adamw, 4>());
    trials.extend(step_copies::trials::<Adamw, 4>());
    for storage in [Storage::F16, Storage::Bf16] {
        let name = format!("adamw::rounding_by_chance_has_the_right_mean_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| rounds_in_the_mean(client, storage))
        }));
    }
    trials.extend([
        Trial::ignorable_test("adamw::skipped_steps_do_not_count", || on_device(skipped_steps)),
        Trial::ignorable_test("adamw::a_small_correction_loses_no_digits", || {
            on_device(small_corrections)
        }),
        Trial::ignorable_test("adamw::planted_faults_are_caught", || on_device(planted_faults)),
    ]);
    trials.extend(step_training::trials::<AdamWGroups>());
    trials
}

/// What the device holds, here.
fn elements(
    client: &Client,
    tensors: &AdamwTensors,
    stored: Storage,
) -> Result<Vec<Element>, Failed> {
    Ok(elements_of(&numbers::<Adamw, 4>(client, tensors, stored)?))
}

/// What numbers stand for.
fn elements_of(numbers: &Numbers) -> Vec<Element> {
    let [parameter, first, second] = [0, 1, 2].map(|which| &numbers[which]);
    let moments = first.iter().zip(second);
    let element = |(parameter, (first, second)): (&f64, (&f64, &f64))| Element {
        parameter: *parameter,
        first: *first,
        second: *second,
    };
    parameter.iter().zip(moments).map(element).collect()
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

/// The first steps with betas close to 1, where `1 - exp` of the device would lose most digits. The
/// parameter is 0, so that its own rounding hides nothing.
fn small_corrections(client: &Client) -> Result<(), Failed> {
    let (length, storage) = (300, Storage::F32);
    for (beta_1, beta_2, time) in [(0.9, 0.999, 1), (0.999, 0.9999, 1), (0.999, 0.9999, 30)] {
        let gradient = normal(3, length, 1.0, storage);
        let mut tensors = start(client, length, storage, upload(client, &gradient, storage));
        tensors.parameter = upload(client, &vec![0.0; length], storage).into();
        let old = elements(client, &tensors, storage)?;
        let step = AdamwStep { beta_1, beta_2, time, ..STEP };
        let new = adamw_update(client, &step, tensors, Some(gate(client, 1.0, 0.0)), None)?;
        let new = elements(client, &new, storage)?;
        let step = reference(&step, time);
        check(&step, [&old, &new], &gradient, storage, Rounding::Nearest, Corrections::Device)
            .map_err(|error| told(&format!("step {time} by {beta_1} and {beta_2}"), error))?;
    }
    Ok(())
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
