//! Attention as programs call it, on the CPU and on the device that kernels are tested on, against
//! the formula in f64.

#[path = "attention_op_arguments.rs"]
mod arguments;
#[path = "attention_op_layout.rs"]
mod layout;

use crate::attention::{default_precision, masks};
use blackburn::attention::{AttentionOptions, Dropout, Window, attention, attention_packed};
use blackburn_reference::{
    attention::{
        AttentionCase, AttentionForward, AttentionGradients, AttentionInputs,
        AttentionOptions as CaseOptions, AttentionPrecision, PackedAttention, PairShape, Roundings,
        cases,
    },
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    on_burn_device, on_device,
    tensors::{float, tensor, values},
};
use burn::prelude::*;
use libtest_mimic::{Completion, Failed, Trial};

/// Together they have every option, queries that see nothing by mask and by causality, and
/// sequences that end within, at and behind tiles.
const CASES: [&str; 11] = [
    "1 by 65, heads of 64",
    "127 by 16, heads of 128, causal",
    "another scale",
    "two heads to each key",
    "window to the right",
    "padded keys, causal",
    "mask with rows that see nothing",
    "bias for each sequence",
    "bias for each key",
    "everything",
    "everything, more queries",
];

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let mut tests: Vec<(&str, Test)> = vec![
        ("both_passes_are_within_bounds", bounds),
        ("a_planted_fault_is_caught", planted_faults),
        ("packed_sequences_are_within_bounds", packed_bounds),
        ("packed_sequences_equal_separate_ones", packed_equals_separate),
        ("queries_that_see_nothing_give_zeros", dead_queries),
        ("additive_masks_are_what_f32_makes_of_them", additive_masks),
        ("mask_and_padding_leave_out_what_either_does", mask_and_padding),
        ("gradients_that_nobody_asks_for_are_left_out", partly_tracked),
        ("a_bias_may_be_wider_than_queries", wide_bias),
    ];
    tests.extend(arguments::TESTS);
    tests.extend(layout::TESTS);
    let mut trials = Vec::new();
    for (name, test) in tests {
        trials.push(Trial::ignorable_test(format!("attention::op::{name}"), move || {
            on_burn_device(|device| test(&device))
        }));
        trials
            .push(Trial::ignorable_test(format!("attention::op::{name}_on_the_cpu"), move || {
                test(&Device::flex()).map(|()| Completion::Completed)
            }));
    }
    trials
}

pub(crate) fn case(name: &str) -> Result<AttentionCase, Failed> {
    let found = cases::small().into_iter().find(|case| case.name == name);
    found.ok_or_else(|| format!("the catalogue has no case {name:?}").into())
}

fn window_of(options: &CaseOptions) -> Option<Window> {
    options.window.map(|window| Window { left: window.left, right: window.right })
}

fn dropout_of(options: &CaseOptions) -> Option<Dropout> {
    options.dropout.map(|dropout| Dropout::new(dropout.rate, dropout.seed))
}

/// Options without tensors.
fn plain_options(options: &CaseOptions) -> AttentionOptions {
    AttentionOptions {
        scale: options.scale,
        causal: options.causal,
        window: window_of(options),
        softcap: options.softcap,
        dropout: dropout_of(options),
        ..Default::default()
    }
}

pub(crate) fn mask_of<const D: usize>(
    mask: &[bool],
    dims: [usize; D],
    device: &Device,
) -> Tensor<D, Bool> {
    Tensor::from_data(TensorData::new(mask.to_vec(), dims), device)
}

/// Options with tensors; masks of keys as padding.
fn options_of(
    case: &AttentionCase,
    inputs: &AttentionInputs,
    storage: Storage,
    device: &Device,
) -> AttentionOptions {
    let mut options = plain_options(&case.options);
    if let Some((shape, mask)) = case.options.mask.zip(inputs.mask.as_ref()) {
        if shape == PairShape::Keys {
            options.key_padding = Some(mask_of(mask, [case.batch, case.seq_kv], device));
        } else {
            options.mask = Some(mask_of(mask, case.pair_dims(shape), device));
        }
    }
    options.bias =
        case.options.bias.zip(inputs.bias.as_ref()).map(|(shape, bias)| {
            tensor(bias, case.pair_dims(shape), storage, device).require_grad()
        });
    options
}

/// Output and gradients.
struct Results {
    out: Vec<f64>,
    gradients: AttentionGradients,
}

/// Runs `attend` on tensors of these numbers and back.
fn run<const D: usize>(
    numbers: [(&[f64], [usize; D]); 3],
    bias: Option<&Tensor<4>>,
    dout: &[f64],
    storage: Storage,
    device: &Device,
    attend: impl FnOnce([Tensor<D>; 3]) -> Tensor<D>,
) -> Result<Results, Failed> {
    let qkv = numbers.map(|(values, dims)| tensor(values, dims, storage, device).require_grad());
    let [q, k, v] = qkv.clone();
    let y = attend(qkv);
    if y.dtype() != q.dtype() || y.dims() != q.dims() {
        return Err(format!("the output is {:?} {:?}", y.dims(), y.dtype()).into());
    }
    // In f32, so that the gradient that arrives is dout itself.
    let dout: Tensor<D> = tensor(dout, y.dims(), Storage::F32, device);
    let grads = (y.clone().cast(float(Storage::F32)) * dout).sum().backward();
    let gradient = |tensor: &Tensor<D>| match tensor.grad(&grads) {
        Some(gradient) => values(gradient),
        None => Err("a gradient is missing".into()),
    };
    let dbias = bias.and_then(|bias| bias.grad(&grads)).map(values).transpose()?;
    Ok(Results {
        out: values(y.inner())?,
        gradients: AttentionGradients {
            dq: gradient(&q)?,
            dk: gradient(&k)?,
            dv: gradient(&v)?,
            dbias,
        },
    })
}

fn run_case(
    case: &AttentionCase,
    inputs: &AttentionInputs,
    storage: Storage,
    device: &Device,
    change: impl FnOnce(&mut AttentionOptions),
) -> Result<Results, Failed> {
    let device = &device.clone().autodiff();
    let mut options = options_of(case, inputs, storage, device);
    change(&mut options);
    let bias = options.bias.clone();
    let q = [case.batch, case.heads_q, case.seq_q, case.head_dim];
    let kv = [case.batch, case.heads_kv, case.seq_kv, case.head_dim];
    let numbers = [(&inputs.q[..], q), (&inputs.k[..], kv), (&inputs.v[..], kv)];
    run(numbers, bias.as_ref(), &inputs.dout, storage, device, |[q, k, v]| {
        attention(q, k, v, options)
    })
}

/// The formula's results, and how far off others may be.
type Expected = (AttentionForward, AttentionForward, AttentionGradients, AttentionGradients);

/// What programs compute attention in.
fn precision(device: &Device, storage: Storage) -> Result<AttentionPrecision, Failed> {
    let mut precision = AttentionPrecision::portable(storage);
    if *device != Device::flex() {
        on_device(|client| {
            precision = default_precision(client, storage);
            Ok(())
        })?;
    }
    Ok(precision)
}

fn expected(
    case: AttentionCase,
    inputs: &AttentionInputs,
    precision: AttentionPrecision,
) -> Expected {
    let reference = inputs.attention(case);
    let (forward, backward) = (reference.forward(), reference.backward(&inputs.dout));
    let bounds = reference.forward_bounds(&forward, &precision);
    let gradient_bounds = reference.backward_bounds(&backward, &inputs.dout, &precision);
    (forward, bounds, backward, gradient_bounds)
}

fn check(actual: &Results, expected: &Expected) -> Result<(), Failed> {
    let (forward, bounds, backward, backward_bounds) = expected;
    let one = |what: &str, actual: &[f64], expected: &[f64], bounds: &[f64]| {
        compare(actual, expected, bounds).map(|_| ()).map_err(|error| format!("{what}: {error}"))
    };
    let gradients = &actual.gradients;
    one("out", &actual.out, &forward.o, &bounds.o)?;
    one("dq", &gradients.dq, &backward.dq, &backward_bounds.dq)?;
    one("dk", &gradients.dk, &backward.dk, &backward_bounds.dk)?;
    one("dv", &gradients.dv, &backward.dv, &backward_bounds.dv)?;
    match (&gradients.dbias, &backward.dbias, &backward_bounds.dbias) {
        (None, None, None) => Ok(()),
        (Some(actual), Some(expected), Some(bounds)) => Ok(one("dbias", actual, expected, bounds)?),
        _ => Err("the gradient of the bias is missing".into()),
    }
}

fn bounds(device: &Device) -> Result<(), Failed> {
    for storage in Storage::ALL {
        if !device.supports_dtype(float(storage)) {
            continue;
        }
        for name in CASES {
            let case = case(name)?;
            let inputs = AttentionInputs::generate(&case, 1, storage);
            let expected = expected(case, &inputs, precision(device, storage)?);
            let actual = run_case(&case, &inputs, storage, device, |_| {})?;
            check(&actual, &expected).map_err(|error| {
                format!("{case} in {storage:?}: {}", error.message().unwrap_or(""))
            })?;
        }
    }
    Ok(())
}

/// What is a little wrong is out of bounds: the negative control of [`bounds`].
fn planted_faults(device: &Device) -> Result<(), Failed> {
    let case = case("everything")?;
    let inputs = AttentionInputs::generate(&case, 1, Storage::F32);
    let expected = expected(case, &inputs, precision(device, Storage::F32)?);
    type Fault = fn(&mut AttentionOptions);
    let faults: [(&str, Fault); 5] = [
        ("a scale that is 1% off", |o| o.scale = o.scale.map(|scale| 1.01 * scale)),
        ("a bias that is left away", |o| o.bias = None),
        ("a mask that is left away", |o| o.mask = None),
        ("another seed", |o| o.dropout = o.dropout.map(|d| Dropout { seed: d.seed + 1, ..d })),
        ("a window one key wider", |o| o.window = Some(Window { left: Some(21), right: None })),
    ];
    for (fault, plant) in faults {
        let actual = run_case(&case, &inputs, Storage::F32, device, plant)?;
        if check(&actual, &expected).is_ok() {
            return Err(format!("{fault} passes").into());
        }
    }
    Ok(())
}

/// As kernels are held to, on the CPU as well.
fn additive_masks(device: &Device) -> Result<(), Failed> {
    let precision =
        precision(device, Storage::F32)?.with_roundings(Roundings::CountedBehindExactScores);
    for value in masks::values(Storage::F32) {
        let inputs = masks::inputs(Storage::F32, value);
        let actual = run_case(&masks::CASE, &inputs, Storage::F32, device, |_| {})?;
        check(&actual, &expected(masks::CASE, &masks::as_added(&inputs), precision))
            .map_err(|error| format!("masks of {value:e}: {}", error.message().unwrap_or("")))?;
    }
    Ok(())
}

const STARTS_Q: [usize; 5] = [0, 5, 5, 38, 55];
const STARTS_KV: [usize; 5] = [0, 7, 11, 31, 71];

fn packed_bounds(device: &Device) -> Result<(), Failed> {
    let everything = case("everything")?;
    let options = CaseOptions { mask: None, dead_rows: false, bias: None, ..everything.options };
    let (heads_q, heads_kv, head_dim) = (4, 2, 32);
    let (rows_q, rows_kv) = (STARTS_Q[4], STARTS_KV[4]);
    let draw = |seed, elements| normal(seed, elements, 1.0, Storage::F32);
    let (q, dout) = (draw(1, rows_q * heads_q * head_dim), draw(2, rows_q * heads_q * head_dim));
    let (k, v) = (draw(3, rows_kv * heads_kv * head_dim), draw(4, rows_kv * heads_kv * head_dim));
    let (cu_seqlens_q, cu_seqlens_kv) = (&STARTS_Q[..], &STARTS_KV[..]);
    let reference = PackedAttention {
        heads_q,
        heads_kv,
        head_dim,
        options,
        cu_seqlens_q,
        cu_seqlens_kv,
        q: &q,
        k: &k,
        v: &v,
    };
    let precision = precision(device, Storage::F32)?;
    let expected = (
        reference.forward(),
        reference.forward_bounds(&precision),
        reference.backward(&dout),
        reference.backward_bounds(&dout, &precision),
    );
    let kv = [rows_kv, heads_kv, head_dim];
    let numbers = [(&q[..], [rows_q, heads_q, head_dim]), (&k[..], kv), (&v[..], kv)];
    let device = &device.clone().autodiff();
    let actual = run(numbers, None, &dout, Storage::F32, device, |[q, k, v]| {
        attention_packed(q, k, v, &STARTS_Q, &STARTS_KV, plain_options(&options))
    })?;
    check(&actual, &expected)
}

fn packed_equals_separate(device: &Device) -> Result<(), Failed> {
    let draw = |seed, rows| {
        let numbers = normal(seed, rows * 2 * 16, 1.0, Storage::F32);
        tensor::<3>(&numbers, [rows, 2, 16], Storage::F32, device)
    };
    let (q, k, v) = (draw(1, STARTS_Q[4]), draw(2, STARTS_KV[4]), draw(3, STARTS_KV[4]));
    let causal = || AttentionOptions { causal: true, ..Default::default() };
    let packed = attention_packed(q.clone(), k.clone(), v.clone(), &STARTS_Q, &STARTS_KV, causal());
    let mut separate = Vec::new();
    for (of_q, of_kv) in STARTS_Q.windows(2).zip(STARTS_KV.windows(2)) {
        if of_q[0] == of_q[1] {
            continue;
        }
        let part = |x: &Tensor<3>, ends: &[usize]| {
            x.clone().slice_dim(0, ends[0]..ends[1]).swap_dims(0, 1).unsqueeze::<4>()
        };
        let out = attention(part(&q, of_q), part(&k, of_kv), part(&v, of_kv), causal());
        separate.extend(values(out.squeeze_dim::<3>(0).swap_dims(0, 1))?);
    }
    let off = values(packed)?.iter().zip(&separate).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    // The order of sums may be another one.
    if off < 1e-5 { Ok(()) } else { Err(format!("off by {off}").into()) }
}

/// A sequence of padding alone, and one whose third query is masked.
fn dead_queries(device: &Device) -> Result<(), Failed> {
    let (seq, head_dim) = (5, 8);
    let padding: Vec<bool> = (0..2 * seq).map(|i| i < seq).collect();
    let mask: Vec<bool> = (0..seq * seq).map(|i| i / seq == 2).collect();
    let numbers = |seed| normal(seed, 2 * seq * head_dim, 1.0, Storage::F32);
    let (q, k, v, dout) = (numbers(1), numbers(2), numbers(3), numbers(4));
    let dims = [2, 1, seq, head_dim];
    let device = &device.clone().autodiff();
    let options = AttentionOptions {
        key_padding: Some(mask_of(&padding, [2, seq], device)),
        mask: Some(mask_of(&mask, [1, 1, seq, seq], device)),
        ..Default::default()
    };
    let qkv = [(&q[..], dims), (&k[..], dims), (&v[..], dims)];
    let Results { out, gradients } =
        run(qkv, None, &dout, Storage::F32, device, |[q, k, v]| attention(q, k, v, options))?;
    let AttentionGradients { dq, dk, dv, .. } = gradients;
    let whole = seq * head_dim;
    let third = whole + 2 * head_dim..whole + 3 * head_dim;
    for (what, values, dead) in [
        ("out", &out, [0..whole, third.clone()]),
        ("dq", &dq, [0..whole, third]),
        ("dk", &dk, [0..whole, 0..0]),
        ("dv", &dv, [0..whole, 0..0]),
    ] {
        for (i, value) in values.iter().enumerate() {
            let is_dead = dead.iter().any(|range| range.contains(&i));
            if !value.is_finite() || (*value == 0.0) != is_dead {
                return Err(format!("{what}: element {i} is {value}").into());
            }
        }
    }
    Ok(())
}

fn mask_and_padding(device: &Device) -> Result<(), Failed> {
    let case = case("mask for each head")?;
    let inputs = AttentionInputs::generate(&case, 1, Storage::F32);
    let mask = inputs.mask.as_ref().ok_or("the case has a mask")?;
    let (batch, keys) = (case.batch, case.seq_kv);
    let is_padding = |batch: usize, key: usize| key + 7 * batch >= keys - 3;
    let padding: Vec<bool> = (0..batch * keys).map(|i| is_padding(i / keys, i % keys)).collect();
    let pairs = case.heads_q * case.seq_q * keys;
    let either: Vec<bool> =
        (0..batch * pairs).map(|i| mask[i % pairs] || is_padding(i / pairs, i % keys)).collect();
    // Tensors without gradients go with those that have them.
    let padded = run_case(&case, &inputs, Storage::F32, device, |options| {
        options.key_padding = Some(mask_of(&padding, [batch, keys], device));
    })?;
    let masked = run_case(&case, &inputs, Storage::F32, device, |options| {
        options.mask = Some(mask_of(&either, case.pair_dims(PairShape::Full), device));
    })?;
    match padded.out == masked.out && padded.gradients == masked.gradients {
        true => Ok(()),
        false => Err("mask and padding differ from the mask of either".into()),
    }
}

/// Values come from a device without gradients.
fn partly_tracked(plain: &Device) -> Result<(), Failed> {
    let case = case("everything")?;
    let inputs = AttentionInputs::generate(&case, 1, Storage::F32);
    let all = run_case(&case, &inputs, Storage::F32, plain, |_| {})?;
    let gradients = &all.gradients;
    let dbias = gradients.dbias.as_ref().ok_or("the case has a bias")?;
    let expected = [&gradients.dq, &gradients.dk, &gradients.dv, dbias];
    let device = &plain.clone().autodiff();
    let q = [case.batch, case.heads_q, case.seq_q, case.head_dim];
    let kv = [case.batch, case.heads_kv, case.seq_kv, case.head_dim];
    for tracked in [[true, false, false, false], [false, true, false, true], [false; 4]] {
        let options = options_of(&case, &inputs, Storage::F32, device);
        let bias = options.bias.clone().ok_or("the case has a bias")?.detach();
        let numbers = [(&inputs.q, q, device), (&inputs.k, kv, device), (&inputs.v, kv, plain)];
        let [q, k, v] =
            numbers.map(|(values, dims, device)| tensor(values, dims, Storage::F32, device));
        let tensors: Vec<Tensor<4>> = [q, k, v, bias]
            .into_iter()
            .zip(tracked)
            .map(|(tensor, tracked)| tensor.set_require_grad(tracked))
            .collect();
        let [q, k, v, bias] = [0, 1, 2, 3].map(|i| tensors[i].clone());
        let y = attention(q, k, v, AttentionOptions { bias: Some(bias), ..options });
        if values(y.clone().inner())? != all.out {
            return Err(format!("{tracked:?}: the output differs").into());
        }
        if tracked == [false; 4] {
            continue;
        }
        let dout: Tensor<4> = tensor(&inputs.dout, y.dims(), Storage::F32, device);
        let grads = (y * dout).sum().backward();
        for ((tensor, tracked), expected) in tensors.iter().zip(tracked).zip(expected) {
            match tensor.grad(&grads) {
                Some(gradient) if tracked && values(gradient.clone())? == *expected => {}
                None if !tracked => {}
                other => return Err(format!("tracked {tracked}: {other:?}").into()),
            }
        }
    }
    Ok(())
}

/// The gradient of a bias in f32 is not rounded to the 16 bits of the queries.
fn wide_bias(device: &Device) -> Result<(), Failed> {
    let case = case("bias for each sequence")?;
    let halves = [Storage::F16, Storage::Bf16].into_iter();
    for storage in halves.filter(|storage| device.supports_dtype(float(*storage))) {
        let inputs = AttentionInputs::generate(&case, 1, storage);
        let narrow = run_case(&case, &inputs, storage, device, |_| {})?;
        let wide = run_case(&case, &inputs, storage, device, |options| {
            let bias = options.bias.take().map(|bias| bias.cast(float(Storage::F32)).detach());
            options.bias = bias.map(Tensor::require_grad);
        })?;
        let (narrow, wide) = narrow.gradients.dbias.zip(wide.gradients.dbias).ok_or("no dbias")?;
        let rounded: Vec<f64> = wide.iter().map(|value| storage.round(*value)).collect();
        if rounded != narrow || rounded == wide {
            return Err(format!("{storage:?}: the gradient of a bias in f32 is another").into());
        }
    }
    Ok(())
}
