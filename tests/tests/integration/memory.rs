//! Memory: what an estimate says before training, a limit, and what is given back.

use blackburn::train::{
    memory::{MemoryError, MemoryMonitor, dry_run, set_limit},
    precision::{Precision, full_precision},
    trainer::{Trainer, TrainerConfig, TrainerError},
};
use blackburn_tests::{on_burn_device, run_alone, tensors::values};
use burn::{
    nn::{BatchNorm, BatchNormConfig, Gelu, Linear, LinearConfig},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs one test alone: pools, limits and dry runs are of the whole process.
const ALONE: &str = "BLACKBURN_TEST_MEMORY_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

const TESTS: [(&str, Test); 7] = [
    ("an_estimate_is_what_training_takes", one_by_one),
    ("an_estimate_is_what_recorded_training_takes", recorded),
    ("a_dry_run_counts_more_than_the_machine_has", counted),
    ("a_dry_run_leaves_what_was_there", left),
    ("a_step_beyond_the_limit_is_the_last", limited),
    ("what_cannot_fit_does_not_begin", refused),
    ("what_nothing_uses_is_given_back", released),
];

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |(name, test): (&str, Test)| {
        let name = format!("memory::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(ALONE) {
                Some(_) => test(&device.autodiff()),
                None => run_alone(&name, &[(ALONE, "1")]).map(drop),
            })
        })
    };
    TESTS.into_iter().map(trial).collect()
}

const WIDTH: usize = 256;
/// Numbers of a row of the batch. Fewer than of a layer's: a recording has a copy of the batch.
const INPUTS: usize = 32;
const ROWS: usize = 4096;
const MIB: u64 = 1 << 20;

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    layers: Vec<Linear>,
    gelu: Gelu,
    norm: BatchNorm,
}

impl Network {
    fn new(device: &Device) -> Self {
        let layer = LinearConfig::new(WIDTH, WIDTH);
        Self {
            first: LinearConfig::new(INPUTS, WIDTH).init(device),
            layers: (0..3).map(|_| layer.init(device)).collect(),
            gelu: Gelu::new(),
            norm: BatchNormConfig::new(WIDTH).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x: Tensor<2> =
            self.norm.forward::<3>(self.first.forward(x).unsqueeze_dim(2)).squeeze_dim(2);
        let x = self.layers.iter().fold(x, |x, layer| self.gelu.forward(layer.forward(x)));
        full_precision(x).powi_scalar(2).mean()
    }
}

fn batch(device: &Device) -> Tensor<2> {
    Tensor::ones([ROWS, INPUTS], &device.clone().without_autodiff())
}

fn config() -> TrainerConfig {
    TrainerConfig::new(1e-3).with_precision(Precision::F32)
}

fn reserved(device: &Device) -> Result<u64, Failed> {
    let memory = MemoryMonitor::new(device).read().ok_or("a GPU without pools")?;
    Ok(memory.reserved_bytes)
}

fn one_by_one(device: &Device) -> Result<(), Failed> {
    estimated(config().without_recording(), 1, device)
}

fn recorded(device: &Device) -> Result<(), Failed> {
    estimated(config().with_micro_batches(2), 2, device)
}

fn estimated(config: TrainerConfig, parts: u64, device: &Device) -> Result<(), Failed> {
    let before = reserved(device)?;
    let estimate = config.estimate(
        device,
        || Network::new(device),
        |trainer: &Trainer<Network, _>| trainer.input(batch(device)),
        Network::loss,
    )?;
    let after = reserved(device)?;
    if after > before + MIB {
        return Err(format!("the estimate left {after} bytes reserved, and found {before}").into());
    }
    let mut trainer = config.init(Network::new(device))?;
    // A recording is made after two steps that ran.
    for _ in 0..6 {
        trainer.step(trainer.input(batch(device)), Network::loss)?;
    }
    let real = reserved(device)? - before;
    let said = estimate.reserved_bytes.ok_or("no dry run was made")?;
    println!("reserved {real} bytes, {:?}; estimated: {}", trainer.graph_status(), estimate.line());
    // Pages that are filled otherwise, and some that a recording takes whatever its size.
    if said.abs_diff(real) > real / 8 + 16 * MIB {
        return Err(format!("reserves {real} bytes, and the estimate is {said}").into());
    }
    // The input of each layer and of each activation at least; GELU keeps no more than a few more.
    let activation = (4 * ROWS * WIDTH) as u64 / parts;
    let kept = estimate.activations_bytes.ok_or("no dry run was made")?;
    if !(8 * activation..40 * activation).contains(&kept) {
        return Err(format!("activations of {kept} bytes, one layer's of {activation}").into());
    }
    if trainer.memory()?.optimizer_bytes != estimate.optimizer_bytes {
        return Err(format!("{:?} {estimate:?}", trainer.memory()?).into());
    }
    Ok(())
}

fn counted(device: &Device) -> Result<(), Failed> {
    /// Of 64 MiB each: 64 GiB together.
    const TENSORS: usize = 1024;
    let before = reserved(device)?;
    let work = |monitor: &mut MemoryMonitor| {
        let zeros = || Tensor::<1>::zeros([16 << 20], &device.clone().without_autodiff()).exp();
        let all: Vec<_> = (0..TENSORS).map(|_| zeros()).collect();
        monitor.read();
        drop(all);
    };
    let ((), memory) = dry_run(device, work)?.ok_or("a GPU without pools")?;
    let least = TENSORS as u64 * 64 * MIB;
    if memory.in_use_bytes < least || memory.reserved_bytes < memory.in_use_bytes {
        return Err(format!("{memory:?} for {least} bytes").into());
    }
    match reserved(device)? {
        after if after <= before + MIB => Ok(()),
        after => Err(format!("{after} bytes stay reserved, and {before} were").into()),
    }
}

fn left(device: &Device) -> Result<(), Failed> {
    let device = device.clone().without_autodiff();
    let three = Tensor::<1>::ones([1000], &device).mul_scalar(3.0);
    // Not read before: what was asked for earlier still runs.
    let changed = dry_run(&device, |_| values(three.clone().mul_scalar(2.0)))?;
    if changed.ok_or("a GPU without pools")?.0? == vec![6.0; 1000] {
        return Err("the dry run has computed".into());
    }
    let (kept, doubled) = (values(three.clone())?, values(three.mul_scalar(2.0))?);
    match kept == vec![3.0; 1000] && doubled == vec![6.0; 1000] {
        true => Ok(()),
        false => Err(format!("{} {}", kept[0], doubled[0]).into()),
    }
}

fn limited(device: &Device) -> Result<(), Failed> {
    let mut trainer = config().without_recording().init(Network::new(device))?;
    let x = batch(device);
    device.sync()?;
    // More than the model with its states, and less than its activations.
    let limit = reserved(device)? + 12 * MIB;
    set_limit(Some(limit));
    let mut steps = 0;
    let error = loop {
        match trainer.step(x.clone(), Network::loss) {
            Ok(_) if steps < 3 => steps += 1,
            Ok(_) => return Err("no step was too large".into()),
            Err(error) => break error,
        }
    };
    set_limit(None);
    let text = error.to_string();
    match error {
        TrainerError::Memory(MemoryError::Limit { reserved_bytes, limit_bytes, .. })
            if reserved_bytes > limit
                && limit_bytes == limit
                && text.contains("with_micro_batches") => {}
        other => return Err(format!("{other}").into()),
    }
    // What was kept by an earlier phase is given back once. The next step needs as much again.
    if steps > 1 || trainer.steps_taken() != steps + 1 {
        return Err(format!("{steps} steps were beyond the limit before the error").into());
    }
    trainer.step(x, Network::loss)?;
    Ok(())
}

fn refused(device: &Device) -> Result<(), Failed> {
    set_limit(Some(MIB));
    let begun: Result<Trainer<Network, Tensor<2>>, _> = config().init(Network::new(device));
    match begun {
        Err(TrainerError::Memory(MemoryError::TooLarge { estimate, available_bytes: MIB })) => {
            let first = INPUTS * WIDTH + WIDTH;
            let numbers = (first + 3 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH) as u64;
            match estimate.optimizer_bytes == Some(8 * numbers) {
                true => Ok(()),
                false => Err(format!("{estimate:?}").into()),
            }
        }
        other => Err(format!("{other:?}").into()),
    }
}

fn released(device: &Device) -> Result<(), Failed> {
    let device = device.clone().without_autodiff();
    let kept = Tensor::<1>::ones([16 << 20], &device).exp();
    let dropped = Tensor::<1>::ones([16 << 20], &device).exp();
    device.sync()?;
    drop(dropped);
    let before = reserved(&device)?;
    let given_back = blackburn::release_memory(&device)?;
    let after = reserved(&device)?;
    // Tensors of 64 MiB.
    if given_back < 64 * MIB || after + given_back != before || after < 64 * MIB {
        return Err(format!("{before} bytes, gave back {given_back}, and {after} are left").into());
    }
    match values(kept.narrow(0, 0, 1))?[0] {
        e if (e - std::f64::consts::E).abs() < 1e-3 => Ok(()),
        other => Err(format!("what is in use has become {other}").into()),
    }
}
