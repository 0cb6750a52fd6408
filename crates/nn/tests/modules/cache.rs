//! Token by token.

use crate::compare::{assert_same, tensor};
use blackburn_nn::{
    RotaryEncodingConfig,
    attention::{KvCache, MhaInput, MultiHeadAttentionConfig},
    flash,
    transformer::{TransformerCache, TransformerEncoderConfig, TransformerEncoderInput},
};
use burn::prelude::*;

const WIDTH: usize = 16;
/// A prompt, single tokens, and some at once.
const PARTS: [std::ops::Range<usize>; 4] = [0..3, 3..4, 4..5, 5..7];

/// `forward` of one part after the other, joined.
fn in_parts(x: &Tensor<3>, mut forward: impl FnMut(Tensor<3>, usize) -> Tensor<3>) -> Tensor<3> {
    let parts = PARTS.map(|part| forward(x.clone().slice([0..2, part.clone()]), part.end));
    Tensor::cat(parts.to_vec(), 1)
}

#[test]
fn attention_with_a_cache_is_attention_over_all() {
    let device = Device::flex();
    let module = MultiHeadAttentionConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_window(Some(3))
        .with_rope(Some(RotaryEncodingConfig::new(7, 4)))
        .init(&device);
    let x = tensor([2, 7, WIDTH], 0.5, &device);
    // The first key of the second sequence is padding.
    let padding = |keys: usize| {
        let padding: Vec<bool> = (0..2 * keys).map(|i| i == keys).collect();
        Tensor::<2, Bool>::from_data(TensorData::new(padding, [2, keys]), &device)
    };
    let all = MhaInput::self_attn(x.clone()).mask_pad(padding(7)).causal();
    let expected = module.forward(all).context;
    let mut cache = KvCache::new(7);
    for _ in 0..2 {
        let actual = in_parts(&x, |part, end| {
            let input = MhaInput::self_attn(part).mask_pad(padding(end));
            module.forward_cached(input, &mut cache)
        });
        assert_same("context", actual, expected.clone());
        assert_eq!((cache.len(), cache.capacity(), cache.is_empty()), (7, 7, false));
        cache.clear();
        assert!(cache.is_empty());
    }
    // Emptied, it serves another batch.
    let one = x.slice([0..1, 0..3]);
    let expected = module.forward(MhaInput::self_attn(one.clone()).causal()).context;
    let actual = module.forward_cached(MhaInput::self_attn(one), &mut cache);
    assert_same("another batch", actual, expected);
}

#[test]
fn a_mask_covers_what_is_in_the_cache() {
    let device = Device::flex();
    let module = MultiHeadAttentionConfig::new(WIDTH, 4).init(&device);
    let x = tensor([2, 7, WIDTH], 0.5, &device);
    let mask = tensor([2, 7, 7], 0.2, &device).greater_elem(0.3);
    let all = MhaInput::self_attn(x.clone()).mask_attn(mask.clone()).causal();
    let expected = module.forward(all).context;
    let mut cache = KvCache::new(7);
    let actual = in_parts(&x, |part, end| {
        let rows = mask.clone().slice([0..2, end - part.dims()[1]..end, 0..end]);
        module.forward_cached(MhaInput::self_attn(part).mask_attn(rows), &mut cache)
    });
    assert_same("context", actual, expected);
}

#[test]
fn an_encoder_with_a_cache_is_one_over_all() {
    let device = Device::flex();
    let x = tensor([2, 7, WIDTH], 0.5, &device);
    for norm_first in [false, true] {
        let module = TransformerEncoderConfig::new(WIDTH, 24, 4, 2)
            .with_norm_first(norm_first)
            .init(&device);
        let input = TransformerEncoderInput::new;
        let expected = module.forward(input(x.clone()).causal());
        // With more room than is needed.
        let mut cache = TransformerCache::new(2, 20);
        let actual = in_parts(&x, |part, _| module.forward_cached(input(part), &mut cache));
        assert_same("ours", actual, expected);
        assert_eq!(cache.len(), 7);

        let burn = burn::nn::transformer::TransformerEncoderConfig::new(WIDTH, 24, 4, 2)
            .with_norm_first(norm_first)
            .init(&device);
        let expected = flash::transformer_encoder(&burn, input(x.clone()).causal());
        cache.clear();
        let actual = in_parts(&x, |part, _| {
            flash::transformer_encoder_cached(&burn, input(part), &mut cache)
        });
        assert_same("Burn's", actual, expected);
    }
}

#[test]
fn layers_share_rotary_positions() {
    let device = Device::flex();
    let rope = RotaryEncodingConfig::new(7, 4);
    let config = TransformerEncoderConfig::new(WIDTH, 24, 4, 2).with_rope(Some(rope));
    let module = config.with_n_kv_heads(Some(1)).with_softcap(Some(5.0)).init(&device);
    let x = tensor([2, 7, WIDTH], 0.5, &device);
    let expected = module.forward(TransformerEncoderInput::new(x.clone()).causal());
    let mut cache = TransformerCache::new(2, 7);
    let actual = in_parts(&x, |part, _| {
        module.forward_cached(TransformerEncoderInput::new(part), &mut cache)
    });
    assert_same("context", actual, expected);
}

#[test]
#[should_panic(expected = "kv_cache: `capacity`: expected at least 5, got 4")]
fn a_full_cache_is_named() {
    let device = Device::flex();
    let module = MultiHeadAttentionConfig::new(WIDTH, 4).init(&device);
    let mut cache = KvCache::new(4);
    for seq in [3, 2] {
        let x = tensor([2, seq, WIDTH], 0.5, &device);
        module.forward_cached(MhaInput::self_attn(x), &mut cache);
    }
}

#[test]
#[should_panic(
    expected = "kv_cache: `key`: expected keys of shape [2, 4, 8, 4], as it was begun with, \
                got [1, 4, 8, 4]"
)]
fn another_batch_for_tokens_in_the_cache_is_named() {
    let device = Device::flex();
    let module = MultiHeadAttentionConfig::new(WIDTH, 4).init(&device);
    let mut cache = KvCache::new(8);
    for batch in [2, 1] {
        let x = tensor([batch, 3, WIDTH], 0.5, &device);
        module.forward_cached(MhaInput::self_attn(x), &mut cache);
    }
}

#[test]
#[should_panic(expected = "transformer_encoder: `cache`: expected 2 layers, got 1")]
fn a_cache_of_another_model_is_named() {
    let device = Device::flex();
    let module = TransformerEncoderConfig::new(WIDTH, 24, 4, 2).init(&device);
    let input = TransformerEncoderInput::new(tensor([2, 3, WIDTH], 0.5, &device));
    module.forward_cached(input, &mut TransformerCache::new(1, 4));
}

/// Where the first token of a part stands, which the module is not told otherwise.
fn positions<const B: usize>(starts: [usize; B], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(starts.map(|start| start as i32), device)
}

#[test]
fn tokens_placed_on_the_device_are_tokens_appended() {
    let device = Device::flex();
    let module = MultiHeadAttentionConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_window(Some(3))
        .with_softcap(Some(2.0))
        .with_rope(Some(RotaryEncodingConfig::new(7, 4)))
        .init(&device);
    let x = tensor([2, 7, WIDTH], 0.5, &device);
    let expected = module.forward(MhaInput::self_attn(x.clone()).causal()).context;
    let mut cache = KvCache::new(7);
    for _ in 0..2 {
        let actual = in_parts(&x, |part, end| {
            let start = positions([end - part.dims()[1]], &device);
            module.forward_placed(part, &mut cache, &start)
        });
        assert_same("context", actual, expected.clone());
        assert!(cache.is_empty());
    }
}

#[test]
fn sequences_are_placed_where_each_of_them_ends() {
    let device = Device::flex();
    let encoder =
        TransformerEncoderConfig::new(WIDTH, 32, 4, 2).with_norm_first(true).init(&device);
    let x = tensor([2, 7, WIDTH], 0.5, &device);
    let input = |x| TransformerEncoderInput::new(x);
    let expected = encoder.forward(input(x.clone()).causal());
    let mut cache = TransformerCache::new(2, 9);
    // Of the second sequence three tokens are known, of the first five.
    encoder.forward_placed(
        input(x.clone().slice([0..2, 0..5])),
        &mut cache,
        &positions([0], &device),
    );
    let next = |at: [usize; 2]| {
        let rows = [0, 1].map(|i| x.clone().slice([i..i + 1, at[i]..at[i] + 2]));
        Tensor::cat(rows.to_vec(), 0)
    };
    let at = [5, 3];
    let actual = encoder.forward_placed(input(next(at)), &mut cache, &positions(at, &device));
    let rows = [0, 1].map(|i| expected.clone().slice([i..i + 1, at[i]..at[i] + 2]));
    assert_same("tokens", actual, Tensor::cat(rows.to_vec(), 0));
}

#[test]
#[should_panic(
    expected = "argument `position`: expected at most 2 for 2 tokens and room for 4, got 3"
)]
fn a_position_beyond_the_room_is_refused_on_the_cpu() {
    let device = Device::flex();
    let module = MultiHeadAttentionConfig::new(WIDTH, 4).init(&device);
    let x = tensor([1, 2, WIDTH], 0.5, &device);
    module.forward_placed(x, &mut KvCache::new(4), &positions([3], &device));
}

#[test]
#[should_panic(expected = "`mask_attn`: expected none with a position on the device")]
fn a_mask_is_refused_with_a_position_on_the_device() {
    let device = Device::flex();
    let encoder = TransformerEncoderConfig::new(WIDTH, 32, 4, 1).init(&device);
    let x = tensor([1, 2, WIDTH], 0.5, &device);
    let mask = Tensor::<3, Bool>::full([1, 2, 2], false, &device);
    let input = TransformerEncoderInput::new(x).mask_attn(mask);
    encoder.forward_placed(input, &mut TransformerCache::new(1, 4), &positions([0], &device));
}
