//! The providers of optimizers' steps on models of many parameters.

use crate::step_training::{Groups, counted, launches};
use blackburn::train::scaler::GradScalerConfig;
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
};
use burn::{
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    prelude::*,
};
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials<G: Groups>() -> Vec<Trial> {
    vec![
        counted::<G>("many_parameters_take_few_launches", |device| {
            few_launches::<G>(device, false)
        }),
        counted::<G>("parameters_of_a_model_that_is_kept_take_few_launches", |device| {
            few_launches::<G>(device, true)
        }),
        counted::<G>("many_parameters_take_few_launches_with_a_gate", few_launches_gated::<G>),
        Trial::ignorable_test(format!("{}::steps_of_many_are_those_of_each", G::NAME), || {
            on_burn_device(|device| as_each::<G>(&device))
        }),
    ]
}

/// Twenty matrices and as many vectors.
#[derive(Module, Debug)]
struct Deep {
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
const RATES: [f64; 5] = [0.01, 0.003, 0.02, 0.004, 0.01];

/// At best sixteen of the forty go together, in one launch where the device binds enough buffers. Steps that
/// share nothing are put together by Burn as far as it goes.
fn are_few<G: Groups>(blocks: &[Block]) -> Result<(), Failed> {
    let launches = launches::<G>;
    let steps: Vec<&Block> = blocks.iter().filter(|block| launches(block) > 0).collect();
    let operations: usize = steps.iter().map(|block| block.operations).sum();
    let is_shared = |block: &&Block| launches(block) <= block.operations.div_ceil(4);
    if steps.len() == 3 && operations == 2 * LAYERS && steps.iter().all(is_shared) {
        return Ok(());
    }
    Err(format!("{} parameters took {steps:?}", 2 * LAYERS).into())
}

/// If the model `is_kept`, as by `model = optimizer.step(rate, model.clone(), gradients)`, its parameters
/// stay, and those of the next one are in new memory.
fn few_launches<G: Groups>(device: &Device, is_kept: bool) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let mut model = deep(device);
    let mut optimizer = G::sample().optimizer(&model, device, None);
    for (step, rate) in RATES.into_iter().enumerate() {
        let gradients = gradients(&model, step, device)?;
        let kept = is_kept.then(|| model.clone());
        let (next, blocks) = blocks_of(device, || Ok(optimizer.step(rate, model, gradients)))?;
        model = next;
        drop(kept);
        // The first one makes the states, between steps.
        if step > 0 {
            are_few::<G>(&blocks).map_err(|error| at_step(step, error))?;
        }
    }
    Ok(())
}

fn at_step(step: usize, error: Failed) -> Failed {
    format!("step {step}: {}", error.message().unwrap_or_default()).into()
}

fn few_launches_gated<G: Groups>(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let mut model = deep(device);
    let mut scaler = GradScalerConfig::default().init(device)?;
    let mut optimizer = G::sample().optimizer(&model, device, Some(scaler.gate()));
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
            are_few::<G>(&blocks).map_err(|error| at_step(step, error))?;
        }
    }
    Ok(())
}

/// To the bit, with another rate and time in every step, a decay of matrices alone, and the model before every
/// second step kept. Steps are not waited
/// for, so that one may follow the other in the stream.
fn as_each<G: Groups>(device: &Device) -> Result<(), Failed> {
    let plain = &device.clone().without_autodiff();
    let device = &device.clone().autodiff();
    let mut model = deep(device);
    let mut optimizer = G::sample().optimizer(&model, device, None);
    let all: Result<Vec<_>, Failed> =
        (0..RATES.len()).map(|step| gradients(&model, step, device)).collect();
    for (step, (rate, gradients)) in RATES.into_iter().zip(all?).enumerate() {
        let kept = (step % 2 == 1).then(|| model.clone());
        model = optimizer.step(rate, model, gradients);
        drop(kept);
    }
    for (number, layer) in model.layers.iter().enumerate() {
        let of_weight = |step| layer_gradients(number, step, plain).0;
        let of_bias = |step| layer_gradients(number, step, plain).1;
        let bias_of = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        if values(layer.weight.val())?
            != values(G::alone(weight(number, plain), of_weight, &RATES)?)?
        {
            return Err(format!("the weight of layer {number} is another").into());
        }
        if values(bias_of.val())? != values(G::alone(bias(number, plain), of_bias, &RATES)?)? {
            return Err(format!("the bias of layer {number} is another").into());
        }
    }
    Ok(())
}
