//! Training in f16 with loss scaling and without, where gradients are small.

use blackburn::{
    nn::{embedding::embedding, flash, loss, transformer::TransformerEncoderInput},
    train::{
        optim::AdamWGroups,
        precision::{Precision, PrecisionPolicy},
        scaler::{GradScaler, GradScalerConfig},
    },
};
use blackburn_tests::{on_burn_device, run_alone};
use burn::{
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig,
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig},
    },
    optim::GradientsParams,
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs the test alone: others watch what Burn runs at the same time.
const ALONE: &str = "BLACKBURN_TEST_SCALING_HERE";

pub(crate) fn trials() -> Vec<Trial> {
    const NAME: &str = "loss_scaling::a_gpt_in_f16_learns_with_it_and_stands_still_without";
    const LATE: &str = "loss_scaling::a_parameter_that_joins_late_steps_as_a_new_one";
    vec![
        Trial::ignorable_test(NAME, || {
            on_burn_device(|device| match env::var_os(ALONE) {
                Some(_) => learns(device),
                None => run_alone(NAME, &[(ALONE, "1")]).map(drop),
            })
        }),
        Trial::ignorable_test(LATE, || on_burn_device(joins_late)),
    ]
}

/// Seven overflows, two steps without the bias, then ten with it. Its gradients do not change, so that bias
/// correction has each of its steps move it by the learning rate.
fn joins_late(device: Device) -> Result<(), Failed> {
    const RATE: f64 = 0.1;
    let plain = device.clone();
    let device = device.autodiff();
    let mut model = LinearConfig::new(3, 2).init(&device);
    let mut scaler = GradScalerConfig::default().init(&device)?;
    let groups = AdamWGroups { beta_2: 0.999, weight_decay: 0.0, ..AdamWGroups::default() };
    let mut optimizer = groups.init_gated(&model, &device, scaler.gate());
    let bias = model.bias.as_ref().ok_or("LinearConfig gives a bias")?.id;
    let read = |model: &Linear| -> Result<f32, Failed> {
        let bias = model.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        Ok(bias.val().mean().into_scalar())
    };
    for step in 0..19 {
        let scale = scaler.state().scale;
        let of_weight = if step < 7 { f32::INFINITY } else { 0.5 * scale };
        let mut gradients = GradientsParams::new();
        gradients.register(model.weight.id, Tensor::<2>::full([3, 2], of_weight, &plain));
        let has_bias = step >= 9;
        if has_bias {
            gradients.register(bias, Tensor::<1>::full([2], 0.5 * scale, &plain));
        }
        scaler.unscale_and_clip_in_step(&gradients, &model, f64::INFINITY)?;
        let before = read(&model)?;
        model = optimizer.step(RATE, model, gradients);
        scaler.update()?;
        let moved = (before - read(&model)?) / RATE as f32;
        let expected = if has_bias { 1.0 } else { 0.0 };
        // The corrections are computed in f32: 1 - 0.999^t has lost ten bits at first, and a device's powers
        // may lose three more. The bias, below 2, has an error of a unit for itself and for its step.
        let bound = 8.0 * 1024.0 * f32::EPSILON + 4.0 * f32::EPSILON / RATE as f32;
        let is_within = (moved - expected).abs() < bound;
        if !is_within {
            return Err(format!("step {step} moved by {moved} rates, expected {expected}").into());
        }
    }
    Ok(())
}

const WORDS: usize = 11;
const WIDTH: usize = 32;
const TOKENS: [usize; 2] = [4, 16];
const STEPS: usize = 40;
/// What losses are multiplied by, as in a mean over 2^24 tokens of which a pass sees some: gradients
/// below 6e-8, the least number of f16, are zero.
const SHARE: f64 = 1.0 / 16_777_216.0;

#[derive(Module, Debug)]
struct Gpt {
    words: Embedding,
    blocks: TransformerEncoder,
    head: Linear,
}

impl Gpt {
    fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let input = TransformerEncoderInput::new(embedding(&self.words, ids)).causal();
        let x = flash::transformer_encoder(&self.blocks, input);
        let rows = TOKENS[0] * TOKENS[1];
        let logits = self.head.forward(x.reshape([rows, WIDTH]));
        let criterion = CrossEntropyLossConfig::new().init(&logits.device());
        loss::cross_entropy(&criterion, logits, targets.reshape([rows]))
    }
}

/// Losses of the first and the last step.
fn train(device: &Device, mut scaler: GradScaler) -> Result<[f32; 2], Failed> {
    device.seed(5);
    let policy = PrecisionPolicy::new(Precision::F16);
    let blocks = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 2, 1).with_norm_first(true);
    let mut model = policy.apply(Gpt {
        words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
        blocks: blocks.with_dropout(0.0).init(device),
        head: LinearConfig::new(WIDTH, WORDS).init(device),
    })?;
    let groups = AdamWGroups { epsilon: 1e-12, weight_decay: 0.0, ..AdamWGroups::default() };
    let mut optimizer = groups.init_gated(&model, device, scaler.gate());
    // Each word has one that follows it.
    let ids = |shift: usize| {
        let ids = (0..TOKENS[0] * TOKENS[1]).map(|i| ((3 * (i + shift)) % WORDS) as i32);
        Tensor::<2, Int>::from_data(TensorData::new(ids.collect::<Vec<_>>(), TOKENS), device)
    };
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = model.loss(ids(0), ids(1));
        losses.push(loss.clone().inner());
        let backward = scaler.scale(loss.mul_scalar(SHARE)).backward();
        let gradients = GradientsParams::from_grads(backward, &model);
        scaler.unscale_and_clip_in_step(&gradients, &model, f64::INFINITY)?;
        model = optimizer.step(1e-2, model, gradients);
        scaler.update()?;
    }
    let read = |loss: &Tensor<1>| -> f32 { loss.clone().into_scalar() };
    Ok([read(&losses[0]), read(&losses[STEPS - 1])])
}

fn learns(device: Device) -> Result<(), Failed> {
    let device = device.autodiff();
    let config = GradScalerConfig { initial_scale: 16_777_216.0, ..GradScalerConfig::default() };
    let [first, last] = train(&device, config.init(&device)?)?;
    let has_learned = last < 0.2 * first;
    if !has_learned {
        return Err(format!("with scaling the loss went from {first} to {last}").into());
    }
    let [first, last] = train(&device, GradScaler::disabled(&device))?;
    let stands_still = (last - first).abs() < 0.2 * first;
    if !stands_still {
        return Err(format!("without scaling the loss went from {first} to {last}").into());
    }
    Ok(())
}
