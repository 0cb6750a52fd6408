use super::*;
use crate::{
    ema::EmaConfig,
    optim::SgdGroups,
    precision::{Masters, Precision, PrecisionPolicy, full_precision},
    trainer::{Trainer, TrainerConfig, TrainerError},
};
use burn::{
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::SgdConfig,
    prelude::*,
};

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    /// The same parameters as the first.
    again: Linear,
    norm: BatchNorm,
}

impl Network {
    fn new(device: &Device) -> Self {
        let first = LinearConfig::new(6, 6).init(device);
        Self { again: first.clone(), first, norm: BatchNormConfig::new(6).init(device) }
    }
}

/// A matrix and a bias, and what a norm learns.
const TRAINED: u64 = 6 * 6 + 6 + 6 + 6;
/// A norm's running mean and variance.
const STATISTICS: u64 = 6 + 6;

/// In f32, in two micro-batches.
fn config() -> TrainerConfig {
    TrainerConfig::new(1e-3).with_precision(Precision::F32).with_micro_batches(2)
}

fn trainer(config: &TrainerConfig) -> Trainer<Network, Tensor<2>> {
    config.init(Network::new(&Device::flex().autodiff())).unwrap()
}

#[test]
fn a_backend_without_pools_has_no_reading_no_dry_run_and_nothing_to_give_back() {
    let device = Device::flex();
    let mut memory = MemoryMonitor::new(&device);
    assert_eq!((memory.read(), memory.peak()), (None, None));
    assert_eq!(dry_run(&device, |_| panic!("nothing to measure")).unwrap().map(|((), _)| ()), None);
    assert_eq!(release(&device).unwrap(), 0);
    assert!(MemoryWatch::new(&device).check().is_ok());
}

#[test]
fn parameters_count_once_and_statistics_are_not_trained() {
    let memory = trainer(&config()).memory().unwrap();
    let expected = MemoryEstimate {
        parameters_bytes: 4 * (TRAINED + STATISTICS),
        copies_bytes: 0,
        gradients_bytes: 2 * 4 * TRAINED,
        optimizer_bytes: Some(8 * TRAINED),
        average_bytes: 0,
        activations_bytes: None,
        reserved_bytes: None,
    };
    assert_eq!(memory, expected);
    assert_eq!(memory.expected_bytes(), 4 * (TRAINED + STATISTICS) + 16 * TRAINED);
    // Activations and gradients are not there at once: what the pools reserve may be less than the sum.
    let reserved_bytes = Some(1000);
    let found = MemoryEstimate { activations_bytes: Some(900), reserved_bytes, ..memory };
    assert_eq!(found.expected_bytes(), 1000);
}

#[test]
fn optimizers_have_the_state_that_they_keep() {
    let bytes = |config: TrainerConfig| trainer(&config).memory().unwrap().optimizer_bytes;
    assert_eq!(bytes(config().with_optimizer(SgdGroups::default())), Some(4 * TRAINED));
    let plain = SgdGroups { momentum: 0.0, ..SgdGroups::default() };
    assert_eq!(bytes(config().with_optimizer(plain)), Some(0));
    assert_eq!(bytes(config().with_optimizer(SgdConfig::new().init())), None);
}

#[test]
fn numbers_take_what_the_precision_says() {
    let of = |policy: PrecisionPolicy, is_gpu: bool| {
        let memory = TrainerConfig::new(1e-3).with_policy(policy).memory_of(1000, is_gpu);
        [memory.parameters_bytes, memory.copies_bytes, memory.gradients_bytes]
    };
    let bf16 = || PrecisionPolicy::new(Precision::Bf16);
    // What README says of a recorded step: 16 bytes with the 8 of AdamW.
    assert_eq!(of(bf16(), true), [4000, 2000, 2000]);
    assert_eq!(of(bf16(), false), [4000, 2000, 4000]);
    assert_eq!(of(bf16().with_masters(Masters::None), false), [2000, 0, 2000]);
    assert_eq!(of(PrecisionPolicy::new(Precision::F32), true), [4000, 4000, 4000]);
}

#[test]
fn more_numbers_than_any_memory_has_do_not_overflow() {
    let config = config().with_ema(EmaConfig { decay: 0.9, warmup: false });
    assert!(config.memory_of(u64::MAX, true).check(u64::MAX / 8).is_err());
}

#[test]
fn a_model_takes_what_its_numbers_do() {
    let device = Device::flex().autodiff();
    let config = TrainerConfig::new(1e-3).with_precision(Precision::Bf16);
    let trainer: Trainer<Linear, Tensor<2>> =
        config.init(LinearConfig::new(30, 10).init(&device)).unwrap();
    assert_eq!(trainer.memory().unwrap(), config.memory_of(310, false));
}

#[test]
fn without_pools_an_estimate_lacks_activations_alone() {
    let device = Device::flex().autodiff();
    let estimate = config()
        .estimate(
            &device,
            || Network::new(&device),
            |_| panic!("no step is taken"),
            |model, x: Tensor<2>| full_precision(model.first.forward(x)).mean(),
        )
        .unwrap();
    assert_eq!(estimate, trainer(&config()).memory().unwrap());
}

#[test]
fn what_does_not_fit_says_what_it_needs_what_there_is_and_what_to_do() {
    let memory = trainer(&config()).memory().unwrap();
    assert!(memory.check(memory.expected_bytes()).is_ok());
    let error = TrainerError::from(memory.check(1000).unwrap_err()).to_string();
    for part in
        ["at least 1.10 KiB", "there is 1000 B", "activations not known", "with_micro_batches"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(crate::auto_batch::names_lack_of_memory(&error), "{error}");
}

#[test]
fn a_table_has_a_row_for_each_part() {
    let table = trainer(&config()).memory().unwrap().to_string();
    assert_eq!(table.lines().count(), 7, "{table}");
    assert!(table.contains("optimizer                      432 B"), "{table}");
}

#[test]
fn bytes_are_shown_in_the_largest_unit() {
    let shown = [5, 2048, 3 << 20, (5 << 30) / 2].map(shown);
    assert_eq!(shown, ["5 B", "2.00 KiB", "3.00 MiB", "2.50 GiB"]);
}
