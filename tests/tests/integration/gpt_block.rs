//! A GPT as `examples/gpt` builds it: pre-norm blocks under a causal mask.

use super::{F32, expect_products, trial};
use blackburn_reference::random::normal;
use blackburn_tests::{blocks::blocks_of, tensors::tensor};
use burn::{
    nn::{
        attention::generate_autoregressive_mask,
        transformer::{TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamWConfig, GradientsParams},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    vec![trial("every_product_of_a_gpt_is_served_from_the_second_step_on", every_product)]
}

fn every_product(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    const LAYERS: usize = 3;
    let [batch, length, width] = [2, 16, 32];
    let mut model = TransformerEncoderConfig::new(width, 4 * width, 4, LAYERS)
        .with_dropout(0.0)
        .with_norm_first(true)
        .init(device);
    let mut optimizer = AdamWConfig::new().init();
    let mask = generate_autoregressive_mask(batch, length, &device.clone().without_autodiff());
    let shape = [batch, length, width];
    let x = tensor(&normal(1, batch * length * width, 1.0, F32), shape, F32, device);
    let factors = tensor(&normal(2, batch * length * width, 1.0, F32), shape, F32, device);
    for step in 0..4 {
        let (next, blocks) = blocks_of(device, || {
            let input = TransformerEncoderInput::new(x.clone()).mask_attn(mask.clone());
            let loss = (model.forward(input) * factors.clone()).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            Ok(optimizer.step(1e-3, model.clone(), gradients))
        })?;
        model = next;
        for block in &blocks {
            if block.kernels.iter().any(|k| k.contains("atmul")) && block.kernels.len() > 1 {
                eprintln!("step {step} {block:?}");
            }
        }
        if step > 0 {
            // The gradient of the input of the first layer's projections is not asked for.
            expect_products(&blocks, 3 * 8 * LAYERS - 3)?;
        }
    }
    Ok(())
}
