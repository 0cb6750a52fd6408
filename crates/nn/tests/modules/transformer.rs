//! Encoders and decoders.

use crate::compare::{
    assert_same, assert_same_gradients, drawing, gradients, loaded, tensor, values,
};
use blackburn_nn::{
    RotaryEncodingConfig, flash,
    transformer::{
        TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoderConfig,
        TransformerEncoderInput, TransformerEncoderLayer,
    },
};
use burn::{
    nn::{
        activation::ActivationConfig, attention::generate_autoregressive_mask, transformer as burns,
    },
    prelude::*,
};

const WIDTH: usize = 12;

/// The last key of the second sequence.
fn padding(keys: usize, device: &Device) -> Tensor<2, Bool> {
    let padding: Vec<bool> = (0..2 * keys).map(|i| i == 2 * keys - 1).collect();
    Tensor::from_data(TensorData::new(padding, [2, keys]), device)
}

#[test]
fn an_encoder_is_that_of_burn_with_its_gradients() {
    let device = Device::flex().autodiff();
    for norm_first in [false, true] {
        let burn = burns::TransformerEncoderConfig::new(WIDTH, 20, 3, 2)
            .with_dropout(0.0)
            .with_norm_first(norm_first)
            .with_activation(ActivationConfig::Relu)
            .init(&device);
        let config = TransformerEncoderConfig::new(WIDTH, 20, 3, 2)
            .with_dropout(0.0)
            .with_norm_first(norm_first)
            .with_activation(ActivationConfig::Relu);
        let ours = loaded(config.init(&device), &burn);
        let x = tensor([2, 5, WIDTH], 0.5, &device);
        let mask = generate_autoregressive_mask(2, 5, &device);
        let expected = burn.forward(
            burns::TransformerEncoderInput::new(x.clone())
                .mask_attn(mask.clone())
                .mask_pad(padding(5, &device)),
        );
        let expected_gradients = gradients(&burn, expected.clone());
        assert_eq!(expected_gradients.len(), 2 * 16);
        // A mask needs no automatic differentiation.
        let input = TransformerEncoderInput::new(x).mask_pad(padding(5, &Device::flex()));
        for input in [input.clone().causal(), input.mask_attn(mask)] {
            let actual = ours.forward(input.clone());
            assert_same("ours", actual.clone(), expected.clone());
            assert_same_gradients(&gradients(&ours, actual), &expected_gradients);
            let actual = flash::transformer_encoder(&burn, input);
            assert_same("unmodified", actual.clone(), expected.clone());
            assert_same_gradients(&gradients(&burn, actual), &expected_gradients);
        }
    }
}

#[test]
fn a_decoder_is_that_of_burn_with_its_gradients() {
    let device = Device::flex().autodiff();
    for norm_first in [false, true] {
        let burn = burns::TransformerDecoderConfig::new(WIDTH, 20, 3, 2)
            .with_dropout(0.0)
            .with_norm_first(norm_first)
            .init(&device);
        let config = TransformerDecoderConfig::new(WIDTH, 20, 3, 2)
            .with_dropout(0.0)
            .with_norm_first(norm_first);
        let ours = loaded(config.init(&device), &burn);
        let target = tensor([2, 5, WIDTH], 0.5, &device);
        let memory = tensor([2, 7, WIDTH], 0.7, &device);
        let mask = generate_autoregressive_mask(2, 5, &device);
        let memory_mask = tensor([2, 5, 7], 0.2, &device).greater_elem(0.6);
        let expected = burn.forward(
            burns::TransformerDecoderInput::new(target.clone(), memory.clone())
                .target_mask_attn(mask.clone())
                .target_mask_pad(padding(5, &device))
                .memory_mask_attn(memory_mask.clone())
                .memory_mask_pad(padding(7, &device)),
        );
        let expected_gradients = gradients(&burn, expected.clone());
        let input = TransformerDecoderInput::new(target, memory)
            .target_mask_pad(padding(5, &device))
            .memory_mask_attn(memory_mask)
            .memory_mask_pad(padding(7, &device));
        for input in [input.clone().causal(), input.target_mask_attn(mask)] {
            let actual = ours.forward(input);
            assert_same("ours", actual.clone(), expected.clone());
            assert_same_gradients(&gradients(&ours, actual), &expected_gradients);
        }
    }
}

#[test]
fn records_go_back_to_burn() {
    let device = Device::flex();
    let x = tensor([2, 5, WIDTH], 0.5, &device);
    let ours = TransformerEncoderConfig::new(WIDTH, 20, 3, 2).init(&device);
    let burn = burns::TransformerEncoderConfig::new(WIDTH, 20, 3, 2).init(&device);
    let expected = ours.forward(TransformerEncoderInput::new(x.clone()));
    let burn = loaded(burn, &ours);
    assert_same("encoder", burn.forward(burns::TransformerEncoderInput::new(x.clone())), expected);

    let memory = tensor([2, 7, WIDTH], 0.7, &device);
    let ours = TransformerDecoderConfig::new(WIDTH, 20, 3, 2).init(&device);
    let burn = burns::TransformerDecoderConfig::new(WIDTH, 20, 3, 2).init(&device);
    let expected = ours.forward(TransformerDecoderInput::new(x.clone(), memory.clone()));
    let burn = loaded(burn, &ours);
    let actual = burn.forward(burns::TransformerDecoderInput::new(x, memory));
    assert_same("decoder", actual, expected);
}

#[test]
fn the_options_that_burn_has_mean_the_same() {
    let device = Device::flex();
    let x = tensor([2, 5, WIDTH], 0.5, &device);
    let burn = burns::TransformerEncoderConfig::new(WIDTH, 20, 3, 1)
        .with_quiet_softmax(true)
        .with_activation(ActivationConfig::Relu)
        .with_layer_norm_eps(0.5)
        .init(&device);
    let config = TransformerEncoderConfig::new(WIDTH, 20, 3, 1)
        .with_quiet_softmax(true)
        .with_activation(ActivationConfig::Relu)
        .with_layer_norm_eps(0.5);
    let ours = loaded(config.init(&device), &burn);
    let expected = burn.forward(burns::TransformerEncoderInput::new(x.clone()));
    assert_same("encoder", ours.forward(TransformerEncoderInput::new(x.clone())), expected);

    let memory = tensor([2, 7, WIDTH], 0.7, &device);
    let burn = burns::TransformerDecoderConfig::new(WIDTH, 20, 3, 1)
        .with_quiet_softmax(true)
        .with_activation(ActivationConfig::Relu)
        .with_layer_norm_eps(0.5)
        .init(&device);
    let config = TransformerDecoderConfig::new(WIDTH, 20, 3, 1)
        .with_quiet_softmax(true)
        .with_activation(ActivationConfig::Relu)
        .with_layer_norm_eps(0.5);
    let ours = loaded(config.init(&device), &burn);
    let input = burns::TransformerDecoderInput::new(x.clone(), memory.clone());
    let expected = burn.forward(input);
    assert_same("decoder", ours.forward(TransformerDecoderInput::new(x, memory)), expected);
}

#[test]
fn options_of_attention_reach_the_layers() {
    let device = Device::flex();
    let encoder = TransformerEncoderConfig::new(16, 20, 4, 2)
        .with_dropout(0.25)
        .with_n_kv_heads(Some(2))
        .with_window(Some(3))
        .with_softcap(Some(5.0))
        .with_rope(Some(RotaryEncodingConfig::new(7, 4)))
        .init(&device);
    for TransformerEncoderLayer { mha, .. } in &encoder.layers {
        assert_eq!((mha.n_kv_heads, mha.window, mha.softcap), (2, Some(3), Some(5.0)));
        assert!(mha.rope.is_some());
        assert_eq!(mha.dropout.prob, 0.25);
    }
    let decoder = TransformerDecoderConfig::new(16, 20, 4, 2)
        .with_dropout(0.25)
        .with_n_kv_heads(Some(2))
        .init(&device);
    for attention in decoder.layers.iter().flat_map(|layer| [&layer.self_attn, &layer.cross_attn]) {
        assert_eq!((attention.n_kv_heads, attention.dropout.prob), (2, 0.25));
    }
}

/// Dropout of weights and of activations, in layers on top of each other.
#[test]
fn training_with_dropout_gives_finite_gradients() {
    let _guard = drawing();
    let device = Device::flex().autodiff();
    let config = burns::TransformerEncoderConfig::new(WIDTH, 20, 3, 2).with_dropout(0.3);
    let burn = config.init(&device);
    let x = tensor([2, 5, WIDTH], 0.5, &device);
    let train = || {
        let input = TransformerEncoderInput::new(x.clone()).causal();
        flash::transformer_encoder(&burn, input)
    };
    let output = train();
    assert_ne!(values(output.clone()), values(train()), "each step draws anew");
    let found = gradients(&burn, output);
    assert!(found.iter().flatten().all(|gradient| gradient.is_finite()));
}
