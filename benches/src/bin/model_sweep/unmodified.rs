//! Models of `burn::nn` as it is.

use burn::{
    nn,
    tensor::{module::attention, ops::AttentionModuleOptions},
};

/// Heads of keys are repeated, since Burn's attention does not share them.
fn causal_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let [batch, heads, length, size] = q.dims();
    let shared = k.dims()[1];
    let repeated = |x: Tensor<4>| {
        let x = x.unsqueeze_dim::<5>(2);
        x.expand([batch, shared, heads / shared, length, size])
            .reshape([batch, heads, length, size])
    };
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    attention(q, repeated(k), repeated(v), None, None, options)
}

fn biased_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: Scores) -> Tensor<4> {
    let Scores { bias, mask, is_scaled, is_causal } = options;
    let [batch, heads, tokens, size] = q.dims();
    let q = if is_scaled { q * (size as f64).powf(-0.5) } else { q };
    let mut scores = q.matmul(k.swap_dims(2, 3));
    if let Some(bias) = bias {
        scores = scores + bias;
    }
    if let Some(mask) = mask {
        let windows = mask.dims()[0];
        let apart = scores.reshape([batch / windows, windows, heads, tokens, tokens]);
        scores = (apart + mask.unsqueeze()).reshape([batch, heads, tokens, tokens]);
    }
    if is_causal {
        let mask = generate_autoregressive_mask(1, tokens, &scores.device());
        scores = scores.mask_fill(mask.unsqueeze_dim::<4>(1), -1e4);
    }
    activation::softmax(scores, 3).matmul(v)
}

/// The sum, and its norm.
fn add_rms_norm(norm: &RmsNorm, x: Tensor<3>, addend: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    let sum = x + addend;
    (sum.clone(), norm.forward(sum))
}

fn criterion(
    config: CrossEntropyLossConfig,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    config.init(&logits.device()).forward(full_precision(logits), targets)
}

include!("models.rs");
include!("volumes.rs");
include!("networks.rs");
include!("convolutions.rs");
include!("transformers.rs");
include!("graphs.rs");
include!("systems.rs");
include!("detector.rs");
include!("language.rs");
