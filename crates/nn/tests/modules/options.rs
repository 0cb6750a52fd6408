//! What multi-head attention has beyond Burn's, and what it refuses.

use crate::compare::{assert_same, tensor, values};
use blackburn_backend::attention::{AttentionOptions, attention};
use blackburn_nn::{
    RotaryEncodingConfig,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};
use burn::{module::Param, prelude::*, tensor::activation::softmax};

fn config() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0)
}

/// Each head of keys or values twice.
fn repeated(param: &Param<Tensor<2>>) -> Param<Tensor<2>> {
    let [rows, _] = param.dims();
    let heads = param.val().reshape([rows, 2, 1, 4]).repeat_dim(2, 2);
    Param::from_tensor(heads.reshape([rows, 16]))
}

#[test]
fn shared_heads_of_keys_are_repeated_heads() {
    let device = Device::flex();
    let biases = config().with_key_bias(false).with_value_bias(false);
    let shared = biases.clone().with_n_kv_heads(Some(2)).init(&device);
    let mut full = biases.init(&device);
    full.query = shared.query.clone();
    full.output = shared.output.clone();
    full.key.weight = repeated(&shared.key.weight);
    full.value.weight = repeated(&shared.value.weight);
    let input = MhaInput::self_attn(tensor([2, 5, 16], 0.5, &device)).causal();
    let expected = full.forward(input.clone()).context;
    assert_same("flash", shared.forward(input.clone()).context, expected.clone());
    assert_same("naive", shared.forward(input.return_weights()).context, expected);
}

#[test]
fn windows_and_soft_caps_are_the_same_on_both_paths() {
    let device = Device::flex();
    for (window, softcap) in [(Some(0), None), (Some(2), Some(0.1)), (Some(usize::MAX), Some(2.0))]
    {
        let module = config().with_window(window).with_softcap(softcap).init(&device);
        for (seq_q, seq_kv) in [(5, 5), (3, 7), (7, 3)] {
            let kv = tensor([2, seq_kv, 16], 0.5, &device);
            let input = MhaInput::new(tensor([2, seq_q, 16], 0.1, &device), kv.clone(), kv);
            for input in [input.clone(), input.causal()] {
                let naive = module.forward(input.clone().return_weights()).context;
                assert_same("context", module.forward(input).context, naive);
            }
        }
    }
}

#[test]
fn a_window_leaves_out_what_is_further_away() {
    let device = Device::flex();
    let module = config().with_window(Some(1)).init(&device);
    let x = tensor([1, 5, 16], 0.5, &device);
    let weights = |input: MhaInput| {
        let weights = module.forward(input.return_weights()).weights.expect("they were asked for");
        values(weights.slice([0..1, 0..1])).into_iter().map(|w| w > 0.0).collect::<Vec<_>>()
    };
    let seen = |right: usize| -> Vec<bool> {
        (0..25).map(|i| (i / 5, i % 5)).map(|(i, j)| j <= i + right && i <= j + 1).collect()
    };
    assert_eq!(weights(MhaInput::self_attn(x.clone())), seen(1));
    assert_eq!(weights(MhaInput::self_attn(x).causal()), seen(0));
}

#[test]
fn a_soft_cap_bounds_scores() {
    let device = Device::flex();
    let module = config().with_softcap(Some(0.1)).init(&device);
    let x = tensor([1, 5, 16], 0.5, &device);
    let heads = |x: Tensor<3>| x.reshape([1, 5, 4, 4]).swap_dims(1, 2);
    let [q, k] = [&module.query, &module.key].map(|linear| heads(linear.forward(x.clone())));
    let scores = q.matmul(k.transpose()) / 2.0;
    let expected = softmax((scores / 0.1).tanh() * 0.1, 3);
    let weights = module.forward(MhaInput::self_attn(x).return_weights()).weights;
    assert_same("weights", weights.expect("they were asked for"), expected);
}

/// Heads `[1, 4, seq, 4]` of a projection, rotated by hand: neighboring numbers are a plane each.
fn rotated(projected: Tensor<3>) -> Tensor<4> {
    let (device, seq) = (projected.device(), projected.dims()[1]);
    let heads = projected.reshape([1, seq, 4, 4]).swap_dims(1, 2);
    let mut numbers = values(heads);
    for (i, plane) in numbers.chunks_mut(2).enumerate() {
        let (position, frequency) = ((i / 2) % seq, i % 2);
        let angle = position as f64 / 10_000f64.powf(frequency as f64 / 2.0);
        let (x, y) = (f64::from(plane[0]), f64::from(plane[1]));
        plane[0] = (x * angle.cos() - y * angle.sin()) as f32;
        plane[1] = (x * angle.sin() + y * angle.cos()) as f32;
    }
    Tensor::from_data(TensorData::new(numbers, [1, 4, seq, 4]), &device)
}

#[test]
fn rotary_positions_rotate_queries_and_keys() {
    let device = Device::flex();
    let module = config().with_rope(Some(RotaryEncodingConfig::new(9, 4))).init(&device);
    let x = tensor([1, 6, 16], 0.5, &device);
    let q = rotated(module.query.forward(x.clone()));
    let k = rotated(module.key.forward(x.clone()));
    let v = module.value.forward(x.clone()).reshape([1, 6, 4, 4]).swap_dims(1, 2);
    let context = attention(q, k, v, AttentionOptions::default());
    let expected = module.output.forward(context.swap_dims(1, 2).reshape([1, 6, 16]));
    assert_same("context", module.forward(MhaInput::self_attn(x)).context, expected);
}

/// The last queries alone see what they saw among all: causal or not, they stand at the last keys.
#[test]
fn fewer_queries_than_keys_stand_at_the_last_ones() {
    let device = Device::flex();
    let module = config().with_rope(Some(RotaryEncodingConfig::new(9, 4))).init(&device);
    let x = tensor([2, 6, 16], 0.5, &device);
    let last = |x: Tensor<3>| x.slice([0..2, 4..6]);
    for causal in [false, true] {
        let asked = |input: MhaInput| if causal { input.causal() } else { input };
        let all = module.forward(asked(MhaInput::self_attn(x.clone()))).context;
        let few = asked(MhaInput::new(last(x.clone()), x.clone(), x.clone()));
        assert_same("context", module.forward(few).context, last(all));
    }
}

/// The last keys alone give what they gave among all with the others left out.
#[test]
fn fewer_keys_than_queries_are_the_last_ones() {
    let device = Device::flex();
    let module = config().with_rope(Some(RotaryEncodingConfig::new(9, 4))).init(&device);
    let x = tensor([2, 6, 16], 0.5, &device);
    let first = Tensor::<1, Int>::arange(0..6, &device).lower_elem(4).unsqueeze::<2>();
    let last = x.clone().slice([0..2, 4..6]);
    for causal in [false, true] {
        let asked = |input: MhaInput| if causal { input.causal() } else { input };
        let all = asked(MhaInput::self_attn(x.clone()).mask_pad(first.clone()));
        let few = asked(MhaInput::new(x.clone(), last.clone(), last.clone()));
        assert_same("context", module.forward(few).context, module.forward(all).context);
    }
}

#[test]
fn each_bias_is_left_out_by_its_own_option() {
    let biases = |config: MultiHeadAttentionConfig| {
        let module = config.init(&Device::flex());
        [module.query, module.key, module.value, module.output].map(|part| part.bias.is_some())
    };
    assert_eq!(biases(config().with_query_bias(false)), [false, true, true, true]);
    assert_eq!(biases(config().with_key_bias(false)), [true, false, true, true]);
    assert_eq!(biases(config().with_value_bias(false)), [true, true, false, true]);
    assert_eq!(biases(config().with_output_bias(false)), [true, true, true, false]);
}

fn refused(module: impl FnOnce() -> MultiHeadAttention + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(module).expect_err("it has to be refused");
    *panic.downcast::<String>().expect("a message")
}

#[test]
fn what_is_configured_wrongly_is_named() {
    let new = MultiHeadAttentionConfig::new;
    let rope = RotaryEncodingConfig::new(8, 6);
    for (config, expected) in [
        (new(10, 4), "`n_heads`: expected a divisor of d_model (10), got 4"),
        (new(10, 0), "`n_heads`: expected a divisor of d_model (10), got 0"),
        (new(0, 1), "`d_model`: expected at least 1, got 0"),
        (
            new(12, 4).with_n_kv_heads(Some(3)),
            "`n_kv_heads`: expected a divisor of n_heads (4), got 3",
        ),
        (
            new(12, 4).with_n_kv_heads(Some(0)),
            "`n_kv_heads`: expected a divisor of n_heads (4), got 0",
        ),
        (
            new(12, 4).with_dropout(1.0),
            "`dropout`: expected a rate of at least 0 and below 1, got 1",
        ),
        (
            new(12, 4).with_softcap(Some(0.0)),
            "`softcap`: expected a finite number above zero, got 0",
        ),
        (
            new(16, 4).with_rope(Some(rope)),
            "`rope`: expected a d_model of 4, the size of a head, got a d_model of 6",
        ),
    ] {
        let message = refused(move || config.init(&Device::flex()));
        assert_eq!(message, format!("multi_head_attention: {expected}"));
    }
}

#[test]
#[should_panic(expected = "multi_head_attention: `mask_pad`: expected shape [2, 5], got [2, 4]")]
fn a_mask_of_another_shape_is_named() {
    let device = Device::flex();
    let mask = Tensor::<2>::zeros([2, 4], &device).greater_elem(0.5);
    let input = MhaInput::self_attn(tensor([2, 5, 16], 0.5, &device)).mask_pad(mask);
    config().init(&device).forward(input);
}

#[test]
#[should_panic(
    expected = "multi_head_attention: `value`: expected shape [2, 5, 16], got [2, 4, 16]"
)]
fn values_of_another_shape_are_named() {
    let device = Device::flex();
    let x = |seq| tensor([2, seq, 16], 0.5, &device);
    config().init(&device).forward(MhaInput::new(x(3), x(5), x(4)));
}

#[test]
#[should_panic(expected = "multi_head_attention: `rope`: expected at least 5 positions, got 4")]
fn positions_beyond_the_last_are_named() {
    let device = Device::flex();
    let module = config().with_rope(Some(RotaryEncodingConfig::new(4, 4))).init(&device);
    module.forward(MhaInput::self_attn(tensor([2, 5, 16], 0.5, &device)));
}
