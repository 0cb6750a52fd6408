//! The providers of optimizers' steps on models of many parameters.

use blackburn::train::{optim::StepGate, scaler::GradScalerConfig};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device, run_alone,
    tensors::{tensor, values},
};
use burn::{
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs one test alone: others would add to the blocks that are observed.
const ALONE: &str = "BLACKBURN_TEST_STEPS_HERE";

pub(crate) type Test = fn(&Device) -> Result<(), Failed>;

/// A test of an optimizer that counts blocks.
pub(crate) fn counted(optimizer: &str, name: &str, test: Test) -> Trial {
    let name = format!("{optimizer}::{name}");
    Trial::ignorable_test(name.clone(), move || {
        on_burn_device(|device| match env::var_os(ALONE) {
            Some(_) => test(&device),
            None => run_alone(&name, &[(ALONE, "1")]).map(drop),
        })
    })
}

/// Launches of a step by a rule, which the end of the kernel's name tells.
pub(crate) fn launches(block: &Block, rule: &str) -> usize {
    let is_step = |kernel: &&&str| kernel.contains("OptimizerStepKernel") && kernel.ends_with(rule);
    block.kernels.iter().filter(is_step).count()
}

/// An optimizer with its numbers.
pub(crate) trait Kind: 'static {
    const NAME: &'static str;
    /// The end of its kernel's name.
    const RULE: &'static str;

    /// The optimizer, which may take steps back.
    fn optimizer(model: &Deep, device: &Device, gate: Option<&StepGate>) -> ModuleOptimizer;

    /// A parameter after one step of each of [`RATES`], each waited for.
    fn alone<const D: usize>(
        parameter: Tensor<D>,
        gradient: impl Fn(usize) -> Tensor<D>,
        device: &Device,
    ) -> Result<Tensor<D>, Failed>;
}

pub(crate) fn trials<K: Kind>() -> Vec<Trial> {
    vec![
        counted(K::NAME, "many_parameters_take_few_launches", few_launches::<K>),
        counted(K::NAME, "many_parameters_take_few_launches_with_a_gate", few_launches_gated::<K>),
        Trial::ignorable_test(format!("{}::steps_of_many_are_those_of_each", K::NAME), || {
            on_burn_device(|device| as_each::<K>(&device))
        }),
    ]
}

/// Twenty matrices and as many vectors.
#[derive(Module, Debug)]
pub(crate) struct Deep {
    layers: Vec<Linear>,
}

const LAYERS: usize = 20;

/// Inputs and outputs of a layer. Rows are 512 bytes or a multiple: CUDA's runtime pads others.
fn sizes(layer: usize) -> [usize; 2] {
    [3 + layer % 4, 128 * (1 + layer % 3)]
}

fn weight(layer: usize, device: &Device) -> Tensor<2> {
    let [inputs, outputs] = sizes(layer);
    let numbers = normal(layer as u64, inputs * outputs, 1.0, Storage::F32);
    tensor(&numbers, [inputs, outputs], Storage::F32, device)
}

fn bias(layer: usize, device: &Device) -> Tensor<1> {
    let [_, outputs] = sizes(layer);
    tensor(&normal(500 + layer as u64, outputs, 1.0, Storage::F32), [outputs], Storage::F32, device)
}

fn deep(device: &Device) -> Deep {
    let layer = |number: usize| {
        let [inputs, outputs] = sizes(number);
        let mut layer = LinearConfig::new(inputs, outputs).init(device);
        layer.weight = layer.weight.map(|_| weight(number, device).detach().require_grad());
        layer.bias =
            layer.bias.map(|param| param.map(|_| bias(number, device).detach().require_grad()));
        layer
    };
    Deep { layers: (0..LAYERS).map(layer).collect() }
}

/// Gradients of a layer's parameters, drawn by step.
fn layer_gradients(layer: usize, step: usize, device: &Device) -> (Tensor<2>, Tensor<1>) {
    let [inputs, outputs] = sizes(layer);
    let seed = (1000 * (1 + step) + 2 * layer) as u64;
    let storage = Storage::F32;
    let of_weight = normal(seed, inputs * outputs, 0.1, storage);
    let of_bias = normal(seed + 1, outputs, 0.1, storage);
    (
        tensor(&of_weight, [inputs, outputs], storage, device),
        tensor(&of_bias, [outputs], storage, device),
    )
}

fn gradients(model: &Deep, step: usize, device: &Device) -> Result<GradientsParams, Failed> {
    let device = &device.clone().without_autodiff();
    let mut all = GradientsParams::new();
    for (number, layer) in model.layers.iter().enumerate() {
        let (of_weight, of_bias) = layer_gradients(number, step, device);
        all.register::<2>(layer.weight.id, of_weight);
        let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        all.register::<1>(bias.id, of_bias);
    }
    device.sync().map_err(|error| error.to_string())?;
    Ok(all)
}

/// Rates of steps: no two steps have the same numbers.
pub(crate) const RATES: [f64; 5] = [0.01, 0.003, 0.02, 0.004, 0.01];

/// At best sixteen of the forty go together, in one launch where the device binds enough buffers. Steps that
/// share nothing are put together by Burn as far as it goes.
fn are_few<K: Kind>(blocks: &[Block]) -> Result<(), Failed> {
    let launches = |block: &Block| launches(block, K::RULE);
    let steps: Vec<&Block> = blocks.iter().filter(|block| launches(block) > 0).collect();
    let operations: usize = steps.iter().map(|block| block.operations).sum();
    let is_shared = |block: &&Block| launches(block) <= block.operations.div_ceil(4);
    if steps.len() == 3 && operations == 2 * LAYERS && steps.iter().all(is_shared) {
        return Ok(());
    }
    Err(format!("{} parameters took {steps:?}", 2 * LAYERS).into())
}

fn few_launches<K: Kind>(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let mut model = deep(device);
    let mut optimizer = K::optimizer(&model, device, None);
    for (step, rate) in RATES.into_iter().enumerate() {
        let gradients = gradients(&model, step, device)?;
        let (next, blocks) = blocks_of(device, || Ok(optimizer.step(rate, model, gradients)))?;
        model = next;
        // The first one makes the states, between steps.
        if step > 0 {
            are_few::<K>(&blocks).map_err(|error| at_step(step, error))?;
        }
    }
    Ok(())
}

fn at_step(step: usize, error: Failed) -> Failed {
    format!("step {step}: {}", error.message().unwrap_or_default()).into()
}

fn few_launches_gated<K: Kind>(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let mut model = deep(device);
    let mut scaler = GradScalerConfig::default().init(device)?;
    let mut optimizer = K::optimizer(&model, device, Some(scaler.gate()));
    for (step, rate) in RATES.into_iter().enumerate() {
        let mut gradients = gradients(&model, step, device)?;
        let (next, blocks) = blocks_of(device, || {
            scaler.unscale(&mut gradients, &model)?;
            let next = optimizer.step(rate, model, gradients);
            scaler.update()?;
            Ok(next)
        })?;
        model = next;
        if step > 0 {
            are_few::<K>(&blocks).map_err(|error| at_step(step, error))?;
        }
    }
    Ok(())
}

/// To the bit, with another rate and time in every step, and a decay of matrices alone. Steps are not waited
/// for, so that one may follow the other in the stream.
fn as_each<K: Kind>(device: &Device) -> Result<(), Failed> {
    let plain = &device.clone().without_autodiff();
    let device = &device.clone().autodiff();
    let mut model = deep(device);
    let mut optimizer = K::optimizer(&model, device, None);
    let all: Result<Vec<_>, Failed> =
        (0..RATES.len()).map(|step| gradients(&model, step, device)).collect();
    for (rate, gradients) in RATES.into_iter().zip(all?) {
        model = optimizer.step(rate, model, gradients);
    }
    for (number, layer) in model.layers.iter().enumerate() {
        let of_weight = |step| layer_gradients(number, step, plain).0;
        let of_bias = |step| layer_gradients(number, step, plain).1;
        let bias_of = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        if values(layer.weight.val())?
            != values(K::alone(weight(number, plain), of_weight, plain)?)?
        {
            return Err(format!("the weight of layer {number} is another").into());
        }
        if values(bias_of.val())? != values(K::alone(bias(number, plain), of_bias, plain)?)? {
            return Err(format!("the bias of layer {number} is another").into());
        }
    }
    Ok(())
}
