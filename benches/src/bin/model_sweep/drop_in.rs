//! The same models of `blackburn::nn`, under the same names.

use blackburn::{
    attention::{AttentionOptions, attention},
    nn,
};

fn causal_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    attention(q, k, v, AttentionOptions { causal: true, ..Default::default() })
}

fn biased_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: Scores) -> Tensor<4> {
    let Scores { bias, mask, is_scaled, is_causal } = options;
    let [batch, _, tokens, _] = q.dims();
    // All windows share the bias, and the windows of a place in each image the mask.
    let mask = mask.map(|mask| {
        let windows = mask.dims()[0];
        let hidden = mask.lower_elem(0.0).unsqueeze::<5>();
        let hidden = hidden.expand([batch / windows, windows, 1, tokens, tokens]);
        hidden.reshape([batch, 1, tokens, tokens])
    });
    let scale = if is_scaled { None } else { Some(1.0) };
    let causal = is_causal;
    attention(q, k, v, AttentionOptions { scale, bias, mask, causal, ..Default::default() })
}

fn add_rms_norm(norm: &RmsNorm, x: Tensor<3>, addend: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    nn::norm::add_rms_norm(norm, x, addend)
}

fn criterion(
    config: CrossEntropyLossConfig,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    nn::loss::cross_entropy(&config.init(&logits.device()), logits, targets)
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
