//! Modules in the place of those of `burn::nn`, by what programs that do not compute see of them.

use crate::compare::{assert_same, loaded, tensor, values};
use blackburn_nn as nn;
use burn::{config::Config, nn as burns, prelude::*};
use std::panic::{AssertUnwindSafe, catch_unwind};

const WIDTH: usize = 12;

fn device() -> Device {
    Device::flex()
}

#[test]
fn descriptions_and_configurations_are_burns() {
    let device = device();
    /// A module, its configuration, and those of Burn.
    macro_rules! assert_alike {
        ($($config:ident($($argument:expr),*).init($($device:ident)?)),+ $(,)?) => {$(
            let (ours, theirs) =
                (nn::$config::new($($argument),*), burns::$config::new($($argument),*));
            assert_eq!(ours.to_string(), theirs.to_string());
            let read = nn::$config::load_binary(theirs.to_string().as_bytes());
            let read = read.expect("Burn's configuration is one of ours");
            assert_eq!(read.to_string(), ours.to_string());
            let (ours, theirs) = (ours.init($(&$device)?), theirs.init($(&$device)?));
            assert_eq!(ours.to_string(), theirs.to_string());
            assert_eq!(Module::num_params(&ours), Module::num_params(&theirs));
        )+};
    }
    assert_alike![
        LayerNormConfig(WIDTH).init(device),
        RmsNormConfig(WIDTH).init(device),
        GroupNormConfig(3, WIDTH).init(device),
        InstanceNormConfig(WIDTH).init(device),
        EmbeddingConfig(7, WIDTH).init(device),
        SwiGluConfig(WIDTH, 7).init(device),
        DropoutConfig(0.25).init(),
        GaussianNoiseConfig(0.25).init(),
        RotaryEncodingConfig(9, WIDTH).init(device),
        PositionalEncodingConfig(WIDTH).init(device),
        RnnConfig(4, WIDTH, true).init(device),
        BiRnnConfig(4, WIDTH, true).init(device),
        LstmConfig(4, WIDTH, false).init(device),
        BiLstmConfig(4, WIDTH, true).init(device),
        GruConfig(4, WIDTH, true).init(device),
        BiGruConfig(4, WIDTH, true).init(device),
    ];
}

#[test]
fn fields_are_reached_and_modules_go_both_ways() {
    let mut norm = nn::LayerNormConfig::new(WIDTH).init(&device());
    norm.gamma = norm.gamma.clone().map(|gamma| gamma * 3.0);
    let theirs = burns::LayerNorm::from(norm.clone());
    let x = tensor([2, WIDTH], 0.3, &device());
    assert_same("there", theirs.forward(x.clone()), norm.forward(x.clone()));
    let ours = nn::LayerNorm::from(theirs);
    assert_same("and back", ours.forward(x.clone()), norm.forward(x.clone()));
    // The functions take either.
    let (_, sum) = nn::norm::add_layer_norm(&norm, x.clone(), x.clone());
    assert_same("a function", sum, ours.forward(x.clone() + x));
}

#[test]
fn each_norm_of_a_choice_is_burns() {
    use burns::norm::NormalizationConfig as Theirs;
    use nn::norm::NormalizationConfig as Ours;
    let device = device();
    for (ours, theirs) in [
        (Ours::Identity, Theirs::Identity),
        (burns::BatchNormConfig::new(0).into(), burns::BatchNormConfig::new(0).into()),
        (nn::GroupNormConfig::new(2, 0).into(), burns::GroupNormConfig::new(2, 0).into()),
        (nn::InstanceNormConfig::new(0).into(), burns::InstanceNormConfig::new(0).into()),
        (nn::LayerNormConfig::new(0).into(), burns::LayerNormConfig::new(0).into()),
        (nn::RmsNormConfig::new(0).into(), burns::RmsNormConfig::new(0).into()),
    ] {
        let ours: Ours = ours;
        let theirs: Theirs = theirs;
        let (ours, theirs) = (ours.with_num_features(4), theirs.with_num_features(4));
        assert_eq!(ours.num_features(), theirs.num_features());
        let theirs = theirs.init(&device);
        let ours = loaded(ours.init(&device), &theirs);
        assert_eq!(ours.num_features(), theirs.num_features());
        let x = tensor([3, 4, 4], 0.3, &device);
        assert_same("norm", ours.forward(x.clone()), theirs.forward(x));
    }
}

/// All tokens so far: two, and one more each time. Of the two, the first must not see the second.
fn growing(shape: [usize; 3], start: f32) -> Vec<Tensor<3>> {
    let [batch, seq, width] = shape;
    let all = tensor(shape, start, &device());
    (2..=seq).map(|end| all.clone().slice([0..batch, 0..end, 0..width])).collect()
}

#[test]
fn attention_decodes_with_burns_cache() {
    use nn::attention::{MhaCache, MhaInput, MultiHeadAttentionConfig};
    let device = device();
    let module = MultiHeadAttentionConfig::new(WIDTH, 3).init(&device);
    let mut cache = MhaCache::autoregressive();
    for x in growing([2, 4, WIDTH], 0.4) {
        let input = MhaInput::self_attn(x.clone()).causal();
        let output = module.forward_cache(input.clone(), &mut cache);
        assert_same("context", output.context, module.forward(input).context);
        assert_eq!(
            output.weights.expect("Burn returns them").dims(),
            [2, 3, x.dims()[1], x.dims()[1]]
        );
    }
    let module = MultiHeadAttentionConfig::new(WIDTH, 3).with_window(Some(1)).init(&device);
    let input = MhaInput::self_attn(tensor([2, 4, WIDTH], 0.4, &device));
    let panic = catch_unwind(AssertUnwindSafe(|| module.forward_cache(input, &mut cache)));
    let panic = panic.expect_err("Burn has no windows");
    let text = panic.downcast_ref::<String>().expect("a message");
    assert!(text.starts_with("multi_head_attention: `cache`: expected"), "{text}");
}

#[test]
fn transformers_decode_with_burns_caches() {
    use nn::transformer::{
        TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoderConfig,
        TransformerEncoderInput,
    };
    let device = device();
    for norm_first in [false, true] {
        let config = TransformerEncoderConfig::new(WIDTH, 20, 3, 2).with_norm_first(norm_first);
        let encoder = config.init(&device);
        let mut cache = encoder.new_autoregressive_cache();
        for x in growing([2, 4, WIDTH], 0.4) {
            let input = TransformerEncoderInput::new(x).causal();
            let decoded = encoder.forward_autoregressive_inference(input.clone(), &mut cache);
            assert_same("encoder", decoded, encoder.forward(input));
        }
        let config = TransformerDecoderConfig::new(WIDTH, 20, 3, 2).with_norm_first(norm_first);
        let decoder = config.init(&device);
        let mut cache = decoder.new_autoregressive_cache();
        let memory = tensor([2, 5, WIDTH], 0.9, &device);
        for x in growing([2, 4, WIDTH], 0.4) {
            let input = TransformerDecoderInput::new(x, memory.clone()).causal();
            let decoded = decoder.forward_autoregressive_inference(input.clone(), &mut cache);
            assert_same("decoder", decoded, decoder.forward(input));
        }
        let mut cache = nn::transformer::TransformerDecoderLayerAutoregressiveCache::empty();
        for x in growing([2, 3, WIDTH], 0.4) {
            let input = TransformerDecoderInput::new(x, memory.clone()).causal();
            let layer = &decoder.layers[0];
            let decoded = layer.forward_autoregressive_inference(input.clone(), &mut cache);
            let [decoded, expected] = [decoded, layer.forward(input)].map(|input| {
                // What a decoder without layers gives back.
                TransformerDecoderConfig::new(WIDTH, 20, 3, 0).init(&device).forward(input)
            });
            assert_same("layer", decoded, expected);
        }
    }
}

#[test]
fn a_layer_takes_masks_as_burns_does() {
    let device = device();
    let theirs = burns::transformer::TransformerEncoderConfig::new(WIDTH, 20, 3, 1).init(&device);
    let config = nn::transformer::TransformerEncoderConfig::new(WIDTH, 20, 3, 1);
    let ours = loaded(config.init(&device), &theirs);
    let x = tensor([2, 5, WIDTH], 0.4, &device);
    let mask = nn::attention::generate_autoregressive_mask(2, 5, &device);
    let pad = Tensor::<2>::from_data([[0.0, 0.0, 0.0, 0.0, 1.0]; 2], &device).greater_elem(0.5);
    for (pad, mask) in [(None, None), (Some(pad), Some(mask))] {
        let expected = theirs.layers[0].forward(x.clone(), pad.clone(), mask.clone());
        assert_same("layer", ours.layers[0].forward(x.clone(), pad, mask), expected);
    }
}

#[test]
fn cross_attention_is_burns_with_its_cache() {
    let device = device();
    for quiet in [false, true] {
        let theirs = burns::attention::CrossAttentionConfig::new(WIDTH, 10, 4, 2, 5);
        let theirs = theirs.with_quiet_softmax(quiet).init(&device);
        let config = nn::attention::CrossAttentionConfig::new(WIDTH, 10, 4, 2, 5);
        let ours = loaded(config.with_quiet_softmax(quiet).init(&device), &theirs);
        let query = |seq| tensor([2, seq, WIDTH], 0.4, &device);
        let context = tensor([2, 6, 10], 0.8, &device);
        let pad = [[0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0.0; 6]];
        let pad = Tensor::<2>::from_data(pad, &device).greater_elem(0.5);
        let mut cache = nn::attention::CrossAttentionCache::new();
        for (seq, mask) in [(3, None), (1, Some(pad))] {
            let expected = theirs.forward(query(seq), context.clone(), mask.clone());
            let actual = ours.forward(query(seq), context.clone(), mask.clone());
            assert_same("forward", actual, expected.clone());
            let cached = ours.forward_cache(query(seq), context.clone(), mask, &mut cache);
            assert_same("cached", cached, expected);
        }
        // Keys and values are those of the first context.
        let other = tensor([2, 6, 10], 5.0, &device);
        let cached = ours.forward_cache(query(3), other, None, &mut cache);
        assert_same("cached", cached, theirs.forward(query(3), context, None));
        let smaller = tensor([1, 6, 10], 5.0, &device);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            ours.forward_cache(query(3), smaller, None, &mut cache)
        }));
        let panic = panic.expect_err("the batch is another");
        let text = panic.downcast_ref::<String>().expect("a message");
        assert_eq!(text, "cross_attention: `context`: expected 2 sequences, as cached, got 1");
    }
}

#[test]
fn noise_is_drawn_in_training_alone() {
    let module = nn::GaussianNoiseConfig::new(0.5).init();
    let x = tensor([40, 50], 0.4, &device());
    assert_same("inference", module.forward(x.clone()), x.clone());
    let x = Tensor::from_inner(x);
    let noise = values((module.forward(x.clone()) - x).inner());
    let deviation = (noise.iter().map(|n| n * n).sum::<f32>() / noise.len() as f32).sqrt();
    // Five standard errors: 0.5 / sqrt(2 * 2000) each.
    assert!((deviation - 0.5).abs() < 0.04, "{deviation}");
}

/// Interpolation is linear: what a gradient makes of any input is what the input makes of the result.
#[test]
fn interpolation_has_gradients_in_a_mode_that_burn_has_none_for() {
    use nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode};
    for align_corners in [false, true] {
        let config = || {
            let config = Interpolate2dConfig::new().with_align_corners(align_corners);
            config.with_mode(InterpolateMode::Lanczos)
        };
        for config in
            [config().with_output_size(Some([7, 5])), config().with_scale_factor(Some([0.5, 1.7]))]
        {
            let module = config.init();
            let x = tensor([2, 3, 4, 6], 0.4, &device());
            let expected = module.forward(x.clone());
            let leaf = Tensor::from_inner(x).require_grad();
            let y = module.forward(leaf.clone());
            assert_same("result", y.clone().inner(), expected);
            let dy = tensor(y.dims(), 0.9, &device().autodiff());
            let gradients = (y * dy.clone()).sum().backward();
            let gradient = leaf.grad(&gradients).expect("it was read");
            let other = tensor([2, 3, 4, 6], 2.4, &device());
            let of_gradient = (gradient * other.clone()).sum();
            assert_same("gradient", of_gradient, (module.forward(other) * dy.inner()).sum());
        }
        let config = Interpolate1dConfig::new().with_output_size(Some(9));
        let config = config.with_align_corners(align_corners).with_mode(InterpolateMode::Lanczos);
        let module = config.init();
        let x = tensor([2, 3, 6], 0.4, &device());
        let expected = module.forward(x.clone());
        assert_same("line", module.forward(Tensor::from_inner(x)).inner(), expected);
    }
}
