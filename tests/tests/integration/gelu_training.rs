//! Models in training: every GELU of theirs runs on the kernels in both passes, and from the third
//! step on from plans that Burn's fusion has found before.
//!
//! Only its log says when it searches, and the log is the process's: so each of these tests runs in
//! a process of its own, where no other test adds to it or to the kernels.

use super::F32;
use blackburn_reference::random::normal;
use blackburn_tests::{blocks::blocks_of, on_burn_device, run_alone, tensors::tensor};
use burn::{
    nn::{
        Gelu, LayerNormConfig, LinearConfig,
        activation::ActivationConfig,
        attention::generate_autoregressive_mask,
        transformer::{TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamWConfig, GradientsParams},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Takes a step of training each time it is called.
type Step = Box<dyn FnMut()>;

/// A model, how many GELUs it has, the kernel of their gradients, and its training.
type Model = (&'static str, usize, &'static str, fn(&Device) -> Step);

/// With the gradient of the bias.
const WITH_SUM: &str = "GeluBackwardSumKernel";
const ALONE: &str = "GeluBackwardKernel";

const MODELS: [Model; 5] = [
    ("every_gelu_of_a_residual_perceptron_is_served_in_training", 3, WITH_SUM, |device| {
        perceptron(device, false)
    }),
    ("every_gelu_of_a_normalized_perceptron_is_served_in_training", 3, WITH_SUM, |device| {
        perceptron(device, true)
    }),
    ("every_gelu_of_a_transformer_is_served_in_training", 3, WITH_SUM, |device| {
        transformer(device, false)
    }),
    ("every_gelu_of_a_gpt_is_served_in_training", 3, WITH_SUM, |device| transformer(device, true)),
    // Too narrow for one kernel of both.
    ("a_gelu_at_the_end_of_a_graph_is_served_in_training", 1, ALONE, last),
];

pub(super) fn trials() -> Vec<Trial> {
    let trial = |(name, gelus, gradient, training): Model| {
        let name = format!("gelu::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(CHILD) {
                Some(_) => train(&device, gradient, training),
                None => check(&name, gelus),
            })
        })
    };
    MODELS.into_iter().map(trial).collect()
}

/// Set in the process that runs one test only.
const CHILD: &str = "BLACKBURN_TEST_TRAINS_HERE";
/// What such a process starts the line with that it writes after each step.
const MARK: &str = "gelu kernels of a step, forward and backward:";
const STEPS: usize = 5;

/// Trains, and says after each step how many GELU kernels it launched, those called `gradient` backward.
fn train(device: &Device, gradient: &str, training: fn(&Device) -> Step) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let mut step = training(&device);
    for _ in 0..STEPS {
        let ((), blocks) = blocks_of(&device, || {
            step();
            Ok(())
        })?;
        let launches = |name: &str| {
            let kernels = blocks.iter().flat_map(|block| &block.kernels);
            kernels.filter(|kernel| kernel.ends_with(name)).count()
        };
        let [forward, backward] = ["GeluForwardKernel", gradient].map(launches);
        eprintln!("{MARK} {forward} {backward}");
    }
    Ok(())
}

/// Runs the test of that name in a process of its own, and reads what it says.
fn check(name: &str, gelus: usize) -> Result<(), Failed> {
    let output = run_alone(name, &[(CHILD, "1"), ("BURN_FUSION_LOG", "full")])?;
    let log = String::from_utf8_lossy(&output.stderr);
    let (mut steps, mut searches) = (Vec::new(), 0);
    for line in log.lines() {
        match line.strip_prefix(MARK) {
            Some(kernels) => steps.push((kernels.trim(), std::mem::take(&mut searches))),
            None => searches += usize::from(line.contains("exploration completed")),
        }
    }
    let [first, second, rest @ ..] = &steps[..] else {
        return Err(format!("no step was reported: {log}").into());
    };
    if first.1 == 0 {
        return Err("Burn's log says nothing of the searches of the first step".into());
    }
    let served = format!("{gelus} {gelus}");
    let is_settled = |(kernels, searches): &(&str, usize)| *kernels == served && *searches == 0;
    let all_served = [first, second].iter().all(|(kernels, _)| *kernels == served);
    match all_served && rest.len() == STEPS - 2 && rest.iter().all(is_settled) {
        true => Ok(()),
        false => Err(format!("not {gelus} GELUs a pass, or searches go on: {steps:?}").into()),
    }
}

const BATCH: usize = 2;
const TOKENS: usize = 16;
const WIDTH: usize = 32;

fn tokens(seed: u64, device: &Device) -> Tensor<3> {
    let values = normal(seed, BATCH * TOKENS * WIDTH, 1.0, F32);
    tensor(&values, [BATCH, TOKENS, WIDTH], F32, device)
}

/// Gradients are computed, and then dropped.
fn backward(loss: Tensor<1>) {
    let device = loss.device();
    let gradients = loss.backward();
    device.flush().expect("the device failed");
    drop(gradients);
}

fn perceptron(device: &Device, normalizes: bool) -> Step {
    let (x, factors) = (tokens(1, device), tokens(2, device));
    let layer = |_| {
        let norm = normalizes.then(|| LayerNormConfig::new(WIDTH).init(device));
        let inner = LinearConfig::new(WIDTH, 4 * WIDTH).init(device);
        (norm, inner, LinearConfig::new(4 * WIDTH, WIDTH).init(device))
    };
    let layers: [_; 3] = std::array::from_fn(layer);
    Box::new(move || {
        let out = layers.iter().fold(x.clone(), |x, (norm, inner, outer)| {
            let input = norm.as_ref().map_or_else(|| x.clone(), |norm| norm.forward(x.clone()));
            x + outer.forward(Gelu::new().forward(inner.forward(input)))
        });
        backward((out * factors.clone()).sum());
    })
}

/// Post-norm as by default, or as `examples/gpt` has it: pre-norm, under a mask, with `AdamW`.
fn transformer(device: &Device, is_gpt: bool) -> Step {
    let (x, factors) = (tokens(1, device), tokens(2, device));
    let mut model = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 3)
        .with_dropout(0.0)
        .with_norm_first(is_gpt)
        .with_activation(ActivationConfig::Gelu)
        .init(device);
    let mask = generate_autoregressive_mask(BATCH, TOKENS, &device.clone().without_autodiff());
    let mut optimizer = AdamWConfig::new().init();
    Box::new(move || {
        let mut input = TransformerEncoderInput::new(x.clone());
        if is_gpt {
            input = input.mask_attn(mask.clone());
        }
        let loss = (model.forward(input) * factors.clone()).sum();
        if is_gpt {
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model.clone(), gradients);
        } else {
            backward(loss);
        }
    })
}

/// The gradient of GELU's output is nothing but ones.
fn last(device: &Device) -> Step {
    let x = tokens(1, device);
    let layer = LinearConfig::new(WIDTH, 2 * WIDTH).init(device);
    Box::new(move || {
        let y = Gelu::new().forward(layer.forward(x.clone()));
        let device = y.device();
        let gradients = y.clone().backward();
        device.flush().expect("the device failed");
        drop((y, gradients));
    })
}
