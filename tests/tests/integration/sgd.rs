//! Steps of gradient descent with momentum on the device, against f64.

#[path = "sgd_kind.rs"]
mod kind;
#[path = "sgd_training.rs"]
mod training;

use crate::{
    step_copies,
    step_kind::{Numbers, chance, gate, numbers, told},
    step_layouts, step_many, step_one, step_training,
};
use blackburn::train::optim::SgdGroups;
use blackburn_kernels::{
    buffer::{Buffer, Rows},
    sgd::{SgdStep, SgdTensors, sgd_update},
};
use blackburn_reference::{
    adamw::Rounding,
    random::normal,
    sgd::{Element, Step, bound, update},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{dtype, upload};
use blackburn_tests::on_device;
use cubecl::client::Client;
use kind::Sgd;
use libtest_mimic::{Failed, Trial};

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

const TESTS: [(&str, Test); 3] = [
    ("the_first_step_is_the_first_that_is_taken", first_taken),
    ("the_first_step_reads_no_velocity", unread_velocity),
    ("planted_faults_are_caught", planted_faults),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = step_one::trials::<Sgd, 3>();
    trials.extend(step_layouts::trials::<Sgd, 3>());
    trials.extend(step_many::trials::<Sgd, 3>());
    trials.extend(step_copies::trials::<Sgd, 3>());
    trials.extend(TESTS.map(|(name, test)| {
        Trial::ignorable_test(format!("sgd::{name}"), move || on_device(test))
    }));
    trials.extend(step_training::trials::<SgdGroups>());
    trials
}

/// What the device holds, here.
fn elements(
    client: &Client,
    tensors: &SgdTensors,
    stored: Storage,
) -> Result<Vec<Element>, Failed> {
    Ok(elements_of(&numbers::<Sgd, 3>(client, tensors, stored)?))
}

/// What numbers stand for.
fn elements_of(numbers: &Numbers) -> Vec<Element> {
    let element = |(parameter, velocity): (&f64, &f64)| Element {
        parameter: *parameter,
        velocity: *velocity,
    };
    numbers[0].iter().zip(&numbers[1]).map(element).collect()
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
