//! The optimizer of `blackburn::train` on the kernel.

use super::kind::Sgd;
use crate::{
    adamw::training::{SHAPES, blocks_of_a_step, gradients, is_one_step, network, numbers, train},
    step_model::{Kind, Test, counted},
};
use blackburn::train::{optim::SgdGroups, scaler::GradScalerConfig};
use blackburn_backend::{
    adamw::{Draw, Taken},
    sgd::{self, Step, Tensors},
};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    on_burn_device,
    tensors::{float, tensor, values},
};
use burn::{optim::ModuleOptimizer, prelude::*, tensor::Distribution};
use libtest_mimic::{Failed, Trial};

const COUNTS: [(&str, Test); 2] = [
    ("a_step_is_one_kernel", one_kernel),
    ("a_step_that_rounds_by_chance_is_one_kernel_and_a_seed", one_kernel_by_chance),
];

const TESTS: [(&str, Test); 5] = [
    ("training_is_that_of_the_cpu", as_on_the_cpu),
    ("a_saved_and_loaded_optimizer_continues_bit_for_bit", restored),
    ("an_overflow_takes_the_step_back", overflow),
    ("strided_gradients_are_read_right", strided_gradient),
    ("what_the_operation_does_not_take_is_refused_where_it_is_asked_for", refusals),
];

pub(super) const DAMPENED: SgdGroups = SgdGroups {
    momentum: 0.9,
    dampening: 0.25,
    nesterov: true,
    weight_decay: 0.1,
    decays_vectors: false,
    stochastic_rounding: false,
};

pub(super) fn trials() -> Vec<Trial> {
    let test = |(name, test): (&str, Test)| {
        Trial::ignorable_test(format!("sgd::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let count = |(name, test)| counted("sgd", name, test);
    COUNTS.into_iter().map(count).chain(TESTS.into_iter().map(test)).collect()
}

fn one_kernel(device: &Device) -> Result<(), Failed> {
    let groups = SgdGroups::default();
    let blocks =
        blocks_of_a_step(|model, device| groups.init(model, device), Storage::F32, device)?;
    is_one_step(&blocks, Sgd::RULE, 0)
}

/// Besides, each step draws a seed.
fn one_kernel_by_chance(device: &Device) -> Result<(), Failed> {
    let groups = SgdGroups { stochastic_rounding: true, ..SgdGroups::default() };
    let blocks =
        blocks_of_a_step(|model, device| groups.init(model, device), Storage::F16, device)?;
    is_one_step(&blocks, Sgd::RULE, 1)
}

/// The same gradients on the kernel and through Burn's operations on the CPU.
fn as_on_the_cpu(device: &Device) -> Result<(), Failed> {
    const STEPS: u64 = 5;
    for (groups, storage) in [
        (DAMPENED, Storage::F32),
        (SgdGroups::default(), Storage::F32),
        (SgdGroups { momentum: 0.0, ..DAMPENED }, Storage::F32),
        (DAMPENED, Storage::F16),
    ] {
        let run = |device: Device| -> Result<Vec<f64>, Failed> {
            let device = device.autodiff();
            let network = network(storage, &device);
            let optimizer = groups.init(&network, &device);
            let (_, network) = train(optimizer, network, 0..STEPS, storage, &device)?;
            numbers(&network)
        };
        let (actual, expected) = (run(device.clone())?, run(Device::flex())?);
        // A step is 0.01 of at most some 10 by some ten roundings in f32. Stored in f16, each step may be
        // rounded to the other side.
        let bounds: Vec<f64> = expected
            .iter()
            .map(|p| {
                let in_f32 = Storage::F32.unit_roundoff() * (10.0 * 0.1 + 2.0 * p.abs());
                let stored = match storage {
                    Storage::F32 => 0.0,
                    other => 2.0 * other.unit_roundoff() * p.abs() + other.underflow(),
                };
                STEPS as f64 * (in_f32 + stored)
            })
            .collect();
        compare(&actual, &expected, &bounds)
            .map_err(|error| format!("{groups:?} in {storage:?}: {error}"))?;
    }
    Ok(())
}

fn restored(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let storage = Storage::F32;
    let start = network(storage, device);
    let optimizer = DAMPENED.init(&start, device);
    let (optimizer, middle) = train(optimizer, start, 0..3, storage, device)?;
    let bytes = optimizer.into_bytes().map_err(|error| error.to_string())?;
    let fresh = || DAMPENED.init(&middle, device);
    let loaded = fresh().from_bytes(bytes).map_err(|error| error.to_string())?;
    let rest = |optimizer: ModuleOptimizer| -> Result<Vec<f64>, Failed> {
        numbers(&train(optimizer, middle.clone(), 3..5, storage, device)?.1)
    };
    let (straight, resumed) = (rest(optimizer)?, rest(loaded)?);
    if straight != resumed {
        return Err("a restored optimizer went another way".into());
    }
    if straight == rest(fresh())? {
        return Err("the state made no difference, so this test shows nothing".into());
    }
    Ok(())
}

/// A gradient that is not finite leaves the model as it is and does not count as a step, before the first
/// step that is taken and after it.
fn overflow(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let storage = Storage::F32;
    let run = |overflows: &[u64]| -> Result<Vec<f64>, Failed> {
        // At the least scale, where it stays.
        let config = GradScalerConfig { initial_scale: 1.0, ..GradScalerConfig::default() };
        let mut scaler = config.init(device)?;
        let mut model = network(storage, device);
        let mut optimizer = DAMPENED.init_gated(&model, device, scaler.gate());
        for step in 0..3 {
            if overflows.contains(&step) {
                let mut bad = gradients(&model, 99, storage, device)?;
                let plain = device.clone().without_autodiff();
                let inf = Tensor::<2>::full(SHAPES.0, f32::INFINITY, &plain);
                bad.register::<2>(model.first.weight.id, inf);
                let before = numbers(&model)?;
                scaler.unscale(&mut bad, &model)?;
                model = optimizer.step(0.01, model, bad);
                scaler.update()?;
                if numbers(&model)? != before {
                    return Err("the step was not taken back".into());
                }
            }
            let mut gradients = gradients(&model, step, storage, device)?;
            scaler.unscale(&mut gradients, &model)?;
            model = optimizer.step(0.01, model, gradients);
            scaler.update()?;
        }
        numbers(&model)
    };
    let without = run(&[])?;
    for overflows in [&[0][..], &[1], &[0, 1, 2]] {
        if run(overflows)? != without {
            return Err(format!("overflows before {overflows:?} left their trace").into());
        }
    }
    Ok(())
}

/// The gradient of a weight may come as a view.
fn strided_gradient(device: &Device) -> Result<(), Failed> {
    let [rows, columns] = [7, 12];
    let count = rows * columns;
    let storage = Storage::F32;
    let of = |seed, deviation| -> Tensor<2> {
        tensor(&normal(seed, count, deviation, storage), [rows, columns], storage, device)
    };
    let run = |gradient: Tensor<2>| -> Result<Vec<f64>, Failed> {
        let tensors = Tensors { parameter: of(1, 1.0), gradient, velocity: of(3, 0.5) };
        values(sgd::step(tensors, STEP, None, None).parameter)
    };
    let straight = of(2, 1.0);
    // The same numbers, one column after the other in memory.
    let columns_first = straight.clone().swap_dims(0, 1).into_data();
    let turned = Tensor::<2>::from_data(columns_first, device).swap_dims(0, 1);
    if run(straight)? == run(turned)? { Ok(()) } else { Err("a view was read as it lies".into()) }
}

const STEP: Step =
    Step { momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.1, rate: 0.01, time: 3 };

fn refusals(device: &Device) -> Result<(), Failed> {
    let ones = |shape: [usize; 2], storage: Storage, device: &Device| -> Tensor<2> {
        Tensor::<2>::ones(shape, device).cast(float(storage))
    };
    let tensors = |gradient: [usize; 2], velocity: Storage, device: &Device| Tensors {
        parameter: ones([2, 3], Storage::F32, device),
        gradient: ones(gradient, Storage::F32, device),
        velocity: ones([2, 3], velocity, device),
    };
    let served = tensors([2, 3], Storage::F32, device);
    if !sgd::serves(&served) {
        return Err("tensors that fit each other are refused".into());
    }
    for (what, refused) in [
        ("another shape", tensors([3, 2], Storage::F32, device)),
        ("a velocity in f16", tensors([2, 3], Storage::F16, device)),
        ("the CPU", tensors([2, 3], Storage::F32, &Device::flex())),
    ] {
        if sgd::serves(&refused) {
            return Err(format!("{what} was taken").into());
        }
    }
    let two = || Tensor::<1>::ones([2], device);
    let taken = || Taken { taken: two(), skipped: two(), factor: two() };
    let draw = || Draw {
        seed: Tensor::<1, Int>::random([3], Distribution::Uniform(0.0, 9.0), device),
        number: 0,
    };
    let calls: [(&str, Step, Option<Taken>, Option<Draw>); 4] = [
        ("`momentum`", Step { momentum: -1.0, ..STEP }, None, None),
        ("`time`", Step { time: 0, ..STEP }, None, None),
        ("`taken`", STEP, Some(taken()), None),
        ("`seed`", STEP, None, Some(draw())),
    ];
    for (argument, step, gate, draw) in calls {
        let tensors = served.clone();
        let call = std::panic::AssertUnwindSafe(|| sgd::step(tensors, step, gate, draw));
        let Err(panic) = std::panic::catch_unwind(call) else {
            return Err(format!("a bad {argument} was taken").into());
        };
        let literal = panic.downcast_ref::<&str>().copied();
        let message = panic.downcast_ref::<String>().map(String::as_str).or(literal);
        let message = message.ok_or("a panic without a message")?;
        if !message.contains(argument) || !message.contains("sgd") {
            return Err(format!("{argument} is not named: {message}").into());
        }
    }
    Ok(())
}
