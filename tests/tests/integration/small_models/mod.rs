//! Small models of many kinds, as users write them: of `burn::nn` and tensor operations, trained for some steps by a
//! `Trainer` in every precision. Losses are those of Burn's CPU backend in f32, as far as roundings let them be. So
//! operations meet in ways that no test of one of them thinks of, recorded where the device records.

mod images;
mod others;
mod scenes;
mod sequences;
mod transformers;

use blackburn::train::{
    graph::GraphStatus, precision::Precision, scaler::GradScalerConfig, trainer::TrainerConfig,
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    computes, modules::seeded, on_burn_device_and_client, run_alone, tensors::tensor,
};
use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Device, Int, Tensor, TensorData},
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs one test alone: a recording is of one thread.
const ALONE: &str = "BLACKBURN_TEST_SMALL_MODELS_HERE";

/// Steps of a training: more than a trainer takes to begin to replay.
const STEPS: u64 = 8;

/// Numbers of a batch, and whole numbers below [`Small::BELOW`], in the order in which they are drawn.
type Batch = (Tensor<1>, Tensor<1, Int>);

/// A model, and what it is trained on.
trait Small: Module + ModuleDisplay + 'static {
    const NAME: &'static str;
    /// Numbers of a batch.
    const NUMBERS: usize;
    /// Whole numbers of a batch.
    const WHOLE: usize;
    /// What whole numbers are below.
    const BELOW: i64 = 2;
    /// Whether nothing in it asks the device for a value, as Burn's sorts and `one_hot` do.
    const IS_RECORDED: bool = true;

    fn new(device: &Device) -> Self;

    fn loss(&self, batch: Batch) -> Tensor<1>;
}

pub(crate) fn trials() -> Vec<Trial> {
    let mut all = images::trials();
    all.extend(sequences::trials());
    all.extend(others::trials());
    all.extend(scenes::trials());
    all.extend(transformers::trials());
    all
}

fn trial<M: Small>() -> Trial {
    let name = format!("small_models::{}_trains_as_on_the_cpu", M::NAME);
    Trial::ignorable_test(name.clone(), move || {
        on_burn_device_and_client(|device, client| match env::var_os(ALONE) {
            Some(_) => trains::<M>(device, client.name() == "cuda"),
            None => run_alone(&name, &[(ALONE, "1")]).map(drop),
        })
    })
}

fn trains<M: Small>(device: &Device, is_recording: bool) -> Result<(), Failed> {
    let expected = losses::<M>(&Device::flex(), Precision::F32, false)?;
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        // Whether the device computes in it is a policy's to say.
        let found = match losses::<M>(device, precision, is_recording) {
            Err(error) if is_unsupported(&error) => continue,
            found => found?,
        };
        if !computes() {
            continue;
        }
        let bound = match precision {
            // Products may be of operands of 11 bits.
            Precision::F32 => 4e-3,
            Precision::F16 => 0.02,
            _ => 0.08,
        };
        let far = expected.iter().zip(&found).position(|(expected, found)| {
            let most = bound * expected.abs().max(0.1);
            (expected - found).abs() > most || found.is_nan()
        });
        if let Some(step) = far {
            return Err(format!(
                "in {precision}, the loss of step {step} is {}, and on the CPU {}: {found:?}, {expected:?}",
                found[step], expected[step]
            )
            .into());
        }
    }
    Ok(())
}

fn is_unsupported(error: &Failed) -> bool {
    error.message().is_some_and(|message| message.contains("is not among what"))
}

/// What each step loses. Devices that record have to.
fn losses<M: Small>(
    device: &Device,
    precision: Precision,
    is_recording: bool,
) -> Result<Vec<f32>, Failed> {
    let model = seeded(M::new(&device.clone().autodiff()), Storage::F32, |_, _, _| {});
    let mut config = TrainerConfig::new(1e-3).with_precision(precision);
    if precision == Precision::F16 {
        // No gradient of these overflows, so that no step is left out.
        config = config
            .with_loss_scaling(GradScalerConfig { initial_scale: 16.0, ..Default::default() });
    }
    let mut trainer = config.init::<M, Batch, ()>(model)?;
    let step = |step| {
        let numbers = normal(3 * step, M::NUMBERS, 1.0, Storage::F32);
        let numbers = tensor::<1>(&numbers, [M::NUMBERS], Storage::F32, device);
        let whole = normal(3 * step + 1, M::WHOLE.max(1), 1e4, Storage::F32);
        let whole: Vec<i64> =
            whole.into_iter().map(|number| (number as i64).rem_euclid(M::BELOW)).collect();
        let whole = Tensor::from_data(TensorData::new(whole, [M::WHOLE.max(1)]), device);
        let batch = (trainer.input(numbers), whole);
        Ok(trainer.step(batch, |model: &M, batch| model.loss(batch))?.loss())
    };
    // The same two batches in turns.
    let losses = (0..STEPS).map(|number| number % 2).map(step).collect();
    match trainer.graph_status() {
        status @ GraphStatus::Unrecorded { .. } if is_recording && M::IS_RECORDED => {
            Err(format!("in {precision}: {status:?}").into())
        }
        _ => losses,
    }
}
