//! Multi-head attention.

use crate::compare::{
    assert_same, assert_same_gradients, drawing, gradients, loaded, tensor, values,
};
use blackburn_nn::{
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    flash,
};
use burn::{nn::attention as theirs, prelude::*};

const WIDTH: usize = 12;
const HEADS: usize = 3;

fn pair(device: &Device) -> (MultiHeadAttention, theirs::MultiHeadAttention) {
    let burn = theirs::MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0).init(device);
    let config = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
    (loaded(config.init(device), &burn), burn)
}

/// Queries, and keys and values.
fn tokens(seq_q: usize, seq_kv: usize, device: &Device) -> [Tensor<3>; 3] {
    [
        tensor([2, seq_q, WIDTH], 0.1, device),
        tensor([2, seq_kv, WIDTH], 0.2, device),
        tensor([2, seq_kv, WIDTH], 0.3, device),
    ]
}

/// The last two keys of the second sequence.
fn padding(keys: usize, device: &Device) -> Tensor<2, Bool> {
    let padding: Vec<bool> = (0..2 * keys).map(|i| i >= 2 * keys - 2).collect();
    Tensor::from_data(TensorData::new(padding, [2, keys]), device)
}

/// A third of all pairs, and never the first key.
fn mask(seq_q: usize, seq_kv: usize, device: &Device) -> Tensor<3, Bool> {
    let left_out = |i: usize| !i.is_multiple_of(seq_kv) && (i * i) % 3 == 1;
    let mask: Vec<bool> = (0..2 * seq_q * seq_kv).map(left_out).collect();
    Tensor::from_data(TensorData::new(mask, [2, seq_q, seq_kv]), device)
}

#[test]
fn outputs_and_weights_are_those_of_burn() {
    let device = Device::flex();
    let (ours, burn) = pair(&device);
    for (seq_q, seq_kv, pad, attn) in
        [(5, 5, false, false), (5, 7, true, false), (7, 5, false, true), (6, 6, true, true)]
    {
        let [q, k, v] = tokens(seq_q, seq_kv, &device);
        let mut input = MhaInput::new(q.clone(), k.clone(), v.clone());
        let mut burns = theirs::MhaInput::new(q, k, v);
        if pad {
            input = input.mask_pad(padding(seq_kv, &device));
            burns = burns.mask_pad(padding(seq_kv, &device));
        }
        if attn {
            input = input.mask_attn(mask(seq_q, seq_kv, &device));
            burns = burns.mask_attn(mask(seq_q, seq_kv, &device));
        }
        let expected = burn.forward(burns);
        let flash = ours.forward(input.clone());
        assert!(flash.weights.is_none());
        assert_same("context", flash.context, expected.context.clone());
        let unmodified = flash::multi_head_attention(&burn, input.clone());
        assert_same("context of Burn's module", unmodified, expected.context.clone());
        let naive = ours.forward(input.return_weights());
        assert_same("naive context", naive.context, expected.context);
        assert_same("weights", naive.weights.expect("they were asked for"), expected.weights);
    }
}

#[test]
fn one_mask_serves_all_sequences() {
    let device = Device::flex();
    let (ours, burn) = pair(&device);
    let x = tensor([2, 6, WIDTH], 0.5, &device);
    let pad = padding(6, &device).slice([1..2, 0..6]);
    let attn = mask(6, 6, &device).slice([1..2, 0..6, 0..6]);
    let burns = theirs::MhaInput::self_attn(x.clone());
    let expected = burn.forward(burns.mask_pad(pad.clone()).mask_attn(attn.clone())).context;
    let input = MhaInput::self_attn(x).mask_pad(pad).mask_attn(attn);
    assert_same("flash", ours.forward(input.clone()).context, expected.clone());
    assert_same("naive", ours.forward(input.return_weights()).context, expected);
}

#[test]
fn causal_attention_needs_no_mask() {
    let device = Device::flex();
    let (ours, burn) = pair(&device);
    let x = tensor([2, 6, WIDTH], 0.5, &device);
    let mask = theirs::generate_autoregressive_mask(2, 6, &device);
    let expected = burn.forward(theirs::MhaInput::self_attn(x.clone()).mask_attn(mask)).context;
    let input = MhaInput::self_attn(x).causal();
    assert_same("flash", ours.forward(input.clone()).context, expected.clone());
    assert_same("naive", ours.forward(input.return_weights()).context, expected);
}

#[test]
fn gradients_are_those_of_burn() {
    let device = Device::flex().autodiff();
    let (ours, burn) = pair(&device);
    let [q, k, v] = tokens(5, 7, &device);
    let burns = theirs::MhaInput::new(q.clone(), k.clone(), v.clone())
        .mask_attn(mask(5, 7, &device))
        .mask_pad(padding(7, &device));
    let input = MhaInput::new(q, k, v).mask_attn(mask(5, 7, &device)).mask_pad(padding(7, &device));
    let expected = gradients(&burn, burn.forward(burns).context);
    assert_eq!(expected.len(), 8);
    assert_same_gradients(&gradients(&ours, ours.forward(input.clone()).context), &expected);
    let naive = ours.forward(input.clone().return_weights()).context;
    assert_same_gradients(&gradients(&ours, naive), &expected);
    let unmodified = flash::multi_head_attention(&burn, input);
    assert_same_gradients(&gradients(&burn, unmodified), &expected);
}

#[test]
fn records_go_both_ways() {
    let device = Device::flex();
    let x = tensor([1, 4, WIDTH], 0.5, &device);
    let config = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_key_bias(false);
    let burns = theirs::MultiHeadAttentionConfig::new(WIDTH, HEADS).with_key_bias(false);
    let ours = config.init(&device);
    let burn = loaded(burns.init(&device), &ours);
    let expected = burn.forward(theirs::MhaInput::self_attn(x.clone())).context;
    let forward = |ours: MultiHeadAttention| ours.forward(MhaInput::self_attn(x.clone())).context;
    assert_same("to Burn", forward(ours), expected.clone());
    assert_same("and back", forward(loaded(config.init(&device), &burn)), expected);
    // Rotary positions and the like are no part of a record.
    let rope = blackburn_nn::RotaryEncodingConfig::new(8, WIDTH / HEADS);
    loaded(config.with_rope(Some(rope)).with_window(Some(2)).init(&device), &burn);
}

#[test]
fn quiet_softmax_is_that_of_burn() {
    let device = Device::flex();
    let burns = theirs::MultiHeadAttentionConfig::new(WIDTH, HEADS).with_quiet_softmax(true);
    let burn = burns.init(&device);
    let config = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_quiet_softmax(true);
    let ours = loaded(config.init(&device), &burn);
    let x = tensor([2, 6, WIDTH], 0.5, &device);
    let expected = burn.forward(theirs::MhaInput::self_attn(x.clone())).context;
    let input = MhaInput::self_attn(x);
    assert_same("ours", ours.forward(input.clone()).context, expected.clone());
    assert_same("unmodified", flash::multi_head_attention(&burn, input), expected);
}

/// The operation takes heads of up to 256 on GPUs.
#[test]
fn heads_too_wide_for_the_operation_take_the_naive_path() {
    let device = Device::flex();
    let burn = theirs::MultiHeadAttentionConfig::new(514, 2).init(&device);
    let x = tensor([1, 3, 514], 0.5, &device);
    let mask = theirs::generate_autoregressive_mask(1, 3, &device);
    let expected = burn.forward(theirs::MhaInput::self_attn(x.clone()).mask_attn(mask)).context;
    let actual = flash::multi_head_attention(&burn, MhaInput::self_attn(x).causal());
    assert_same("context", actual, expected);
}

#[test]
fn a_query_that_sees_nothing_finds_zero_and_gives_finite_gradients() {
    let device = Device::flex().autodiff();
    let (ours, _) = pair(&device);
    let x = tensor([2, 4, WIDTH], 0.5, &device);
    let all = Tensor::<2>::from_data([[0.0; 4], [1.0; 4]], &device).greater_elem(0.5);
    let input = MhaInput::self_attn(x).mask_pad(all);
    let bias = ours.output.bias.as_ref().expect("the output has a bias").val();
    for input in [input.clone(), input.return_weights()] {
        let output = ours.forward(input);
        let rows = output.context.clone().slice([1..2, 0..4, 0..WIDTH]);
        assert_same("context", rows, bias.clone().reshape([1, 1, WIDTH]).expand([1, 4, WIDTH]));
        if let Some(weights) = output.weights {
            let sum: f32 = weights.slice([1..2, 0..HEADS]).abs().sum().into_scalar();
            assert_eq!(sum, 0.0);
        }
        let gradients = gradients(&ours, output.context);
        assert!(gradients.iter().flatten().all(|gradient| gradient.is_finite()));
    }
}

#[test]
fn dropout_follows_the_seed_and_stays_out_of_evaluation() {
    let _guard = drawing();
    let device = Device::flex();
    let config = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.5);
    let module = config.init(&device.clone().autodiff());
    let x = |device: &Device| MhaInput::self_attn(tensor([2, 8, WIDTH], 0.5, device));
    let train = |seed| {
        blackburn_nn::seed(seed);
        let forward = || values(module.forward(x(&device.clone().autodiff())).context);
        [forward(), forward()]
    };
    let first = train(1);
    assert_eq!(first, train(1));
    assert_ne!(first, train(2));
    // Each call draws anew.
    assert_ne!(first[0], first[1]);

    let quiet = loaded(config.with_dropout(0.0).init(&device), &module);
    let expected = quiet.forward(x(&device)).context;
    assert_same("evaluation", module.valid().forward(x(&device)).context, expected.clone());
    let frozen = module.freeze();
    assert_same("frozen", frozen.forward(x(&device.autodiff())).context.inner(), expected);
}

/// The negative control: with one flag less, results must not pass.
#[test]
#[should_panic(expected = "context: ")]
fn a_flag_that_is_left_out_is_caught() {
    let device = Device::flex();
    let (ours, burn) = pair(&device);
    let x = tensor([2, 6, WIDTH], 0.5, &device);
    let mask = theirs::generate_autoregressive_mask(2, 6, &device);
    let expected = burn.forward(theirs::MhaInput::self_attn(x.clone()).mask_attn(mask)).context;
    assert_same("context", ours.forward(MhaInput::self_attn(x)).context, expected);
}
