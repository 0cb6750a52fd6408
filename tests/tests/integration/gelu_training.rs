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

/// A model.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    gelus: usize,
    /// The kernel of their gradients.
    gradient: &'static str,
    /// How many launches do nothing but add, where that is known.
    additions: Option<usize>,
    training: fn(&Device) -> Step,
}

/// The gradient of GELU with that of the bias.
const WITH_SUM: &str = "GeluBackwardSumKernel";
/// The gradient of GELU.
const ALONE: &str = "GeluBackwardKernel";

const MODEL: Model =
    Model { name: "", gelus: 3, gradient: WITH_SUM, additions: None, training: last };

const MODELS: [Model; 6] = [
    Model {
        name: "every_gelu_of_a_residual_perceptron_is_served_in_training",
        training: |device| perceptron(device, false),
        ..MODEL
    },
    Model {
        name: "every_gelu_of_a_normalized_perceptron_is_served_in_training",
        training: |device| perceptron(device, true),
        ..MODEL
    },
    // What waits for a sum that does not come must not keep residuals from their products: without that
    // search too, one addition runs by itself.
    Model {
        name: "a_perceptron_without_biases_keeps_residuals_in_its_products",
        gradient: ALONE,
        additions: Some(1),
        training: unbiased,
        ..MODEL
    },
    Model {
        name: "every_gelu_of_a_transformer_is_served_in_training",
        training: |device| transformer(device, false),
        ..MODEL
    },
    Model {
        name: "every_gelu_of_a_gpt_is_served_in_training",
        training: |device| transformer(device, true),
        ..MODEL
    },
    // Too narrow for one kernel of both gradients.
    Model {
        name: "a_gelu_at_the_end_of_a_graph_is_served_in_training",
        gelus: 1,
        gradient: ALONE,
        ..MODEL
    },
];

pub(super) fn trials() -> Vec<Trial> {
    let trial = |model: Model| {
        let name = format!("gelu::{}", model.name);
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(CHILD) {
                Some(_) => train(&device, &model),
                None => check(&name, &model),
            })
        })
    };
    MODELS.into_iter().map(trial).collect()
}

/// Set in the process that runs one test only.
const CHILD: &str = "BLACKBURN_TEST_TRAINS_HERE";
/// What such a process starts the line with that it writes after each step.
const MARK: &str = "gelu kernels of a step, forward and backward, and additions:";
const STEPS: usize = 5;

/// Trains, and says after each step how many GELU kernels and additions it launched.
fn train(device: &Device, model: &Model) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let mut step = (model.training)(&device);
    for _ in 0..STEPS {
        let ((), blocks) = blocks_of(&device, || {
            step();
            Ok(())
        })?;
        let launches = |is_it: &dyn Fn(&str) -> bool| {
            let kernels = blocks.iter().flat_map(|block| &block.kernels);
            kernels.filter(|kernel| is_it(kernel)).count()
        };
        let forward = launches(&|kernel| kernel.ends_with("GeluForwardKernel"));
        let backward = launches(&|kernel| kernel.ends_with(model.gradient));
        let additions = launches(&|kernel| kernel.contains("AddOp"));
        eprintln!("{MARK} {forward} {backward} {additions}");
    }
    Ok(())
}

/// Runs the test of that name in a process of its own, and reads what it says.
fn check(name: &str, model: &Model) -> Result<(), Failed> {
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
    let gelus = model.gelus;
    let additions = model.additions.map_or_else(String::new, |additions| additions.to_string());
    let served = format!("{gelus} {gelus} {additions}");
    let is_settled =
        |(kernels, searches): &(&str, usize)| kernels.starts_with(&served) && *searches == 0;
    let all_served = [first, second].iter().all(|(kernels, _)| kernels.starts_with(&served));
    match all_served && rest.len() == STEPS - 2 && rest.iter().all(is_settled) {
        true => Ok(()),
        false => Err(format!("not {served}, or searches go on: {steps:?}").into()),
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
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        (norm, linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH))
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

/// A residual perceptron without biases, whose input has a gradient too.
fn unbiased(device: &Device) -> Step {
    const WIDTH: usize = 16;

    let input = |seed| {
        let values = normal(seed, BATCH * TOKENS * WIDTH, 1.0, F32);
        tensor(&values, [BATCH, TOKENS, WIDTH], F32, device)
    };
    let (x, factors) = (input(1).require_grad(), input(2));
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(device);
    let layers: [_; 3] = std::array::from_fn(|_| (linear(WIDTH, 128), linear(128, WIDTH)));
    Box::new(move || {
        let out = layers.iter().fold(x.clone(), |x, (inner, outer)| {
            x.clone() + outer.forward(Gelu::new().forward(inner.forward(x)))
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
