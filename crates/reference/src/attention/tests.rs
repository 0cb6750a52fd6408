use super::*;
use crate::{gradcheck::check_derivative, storage::Storage};
use std::f64::consts::LN_2;

const PLAIN: AttentionOptions = AttentionOptions::PLAIN;

const CASE: AttentionCase = AttentionCase {
    name: "test",
    batch: 2,
    heads_q: 4,
    heads_kv: 2,
    seq_q: 5,
    seq_kv: 7,
    head_dim: 3,
    options: PLAIN,
};

/// Every option on; the cap bends most scores.
const EVERYTHING: AttentionCase = AttentionCase {
    options: AttentionOptions {
        scale: Some(0.7),
        causal: true,
        window: Some(Window { left: Some(3), right: Some(1) }),
        softcap: Some(1.5),
        dropout: Some(Dropout { rate: 0.25, seed: 7 }),
        mask: Some(PairShape::PerBatch),
        dead_rows: true,
        documents: false,
        bias: Some(PairShape::PerHead),
    },
    ..CASE
};

fn inputs(case: &AttentionCase) -> AttentionInputs {
    AttentionInputs::generate(case, 1, Storage::F32)
}

fn run(case: AttentionCase, inputs: &AttentionInputs) -> (AttentionForward, AttentionGradients) {
    let attention = inputs.attention(case);
    (attention.forward(), attention.backward(&inputs.dout))
}

fn assert_near(actual: &[f64], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(a == e || (a - e).abs() < 1e-12, "element {i}: {a}, expected {e}");
    }
}

fn assert_same(
    a: &(AttentionForward, AttentionGradients),
    b: &(AttentionForward, AttentionGradients),
) {
    assert_near(&a.0.o, &b.0.o);
    assert_near(&a.0.lse, &b.0.lse);
    assert_near(&a.1.dq, &b.1.dq);
    assert_near(&a.1.dk, &b.1.dk);
    assert_near(&a.1.dv, &b.1.dv);
}

#[test]
fn two_queries_and_two_keys_worked_by_hand_come_out() {
    let options = AttentionOptions { scale: Some(1.0), ..PLAIN };
    let (batch, heads_q, heads_kv) = (1, 1, 1);
    let (seq_q, seq_kv, head_dim, name) = (2, 2, 2, "by hand");
    let case = AttentionCase { name, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options };
    // Scores ln 2 and 0, then 0 and 0: weights 2/3 and 1/3, then 1/2 and 1/2.
    let (q, k, v) = ([LN_2, 0.0, 0.0, 0.0], [1.0, 5.0, 0.0, 5.0], [3.0, 0.0, 0.0, 6.0]);
    let attention = Attention { case, q: &q, k: &k, v: &v, mask: None, bias: None, first_batch: 0 };
    let forward = attention.forward();
    assert_near(&forward.o, &[2.0, 2.0, 1.5, 3.0]);
    assert_near(&forward.lse, &[3f64.ln(), LN_2]);
    // Of the first row: dp = (3, 0), delta = 2, ds = (2/3, -2/3); of the second: none.
    let gradients = attention.backward(&[1.0, 0.0, 0.0, 0.0]);
    assert_near(&gradients.dv, &[2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]);
    assert_near(&gradients.dq, &[2.0 / 3.0, 0.0, 0.0, 0.0]);
    assert_near(&gradients.dk, &[2.0 / 3.0 * LN_2, 0.0, -2.0 / 3.0 * LN_2, 0.0]);
}

#[test]
fn weights_of_a_row_sum_to_one() {
    let options = AttentionOptions { dropout: None, dead_rows: false, ..EVERYTHING.options };
    for options in [PLAIN, AttentionOptions { mask: None, ..options }] {
        let case = AttentionCase { options, ..CASE };
        let mut inputs = inputs(&case);
        inputs.v.fill(1.0);
        assert_near(&inputs.attention(case).forward().o, &vec![1.0; case.q_len()]);
    }
}

#[test]
fn causality_and_windows_equal_explicit_masks() {
    let window = Some(Window { left: Some(2), right: Some(1) });
    for (seq_q, seq_kv) in [(5, 7), (7, 5)] {
        for (causal, window) in [(true, None), (false, window), (true, window)] {
            let options = AttentionOptions { causal, window, ..PLAIN };
            let case = AttentionCase { seq_q, seq_kv, options, ..CASE };
            let expected = run(case, &inputs(&case));

            let mask = Some(PairShape::Shared);
            let masked = AttentionCase { options: AttentionOptions { mask, ..PLAIN }, ..case };
            let mut inputs = inputs(&masked);
            let left_out = |pair: usize| {
                let (i, j) = ((pair / seq_kv) as isize, (pair % seq_kv) as isize);
                let behind = j - (i + seq_kv as isize - seq_q as isize);
                (causal && behind > 0) || (window.is_some() && !(-2..=1).contains(&behind))
            };
            inputs.mask = Some((0..seq_q * seq_kv).map(left_out).collect());
            assert_same(&run(masked, &inputs), &expected);
        }
    }
}

#[test]
fn rows_that_see_nothing_are_zero_and_pass_no_gradient_on() {
    let causal = AttentionOptions { causal: true, ..PLAIN };
    // Rows 0 and 1 lie behind the keys; row 2 is masked.
    let cases = [
        (AttentionCase { seq_q: 7, seq_kv: 5, options: causal, ..CASE }, vec![0, 1]),
        (EVERYTHING, vec![2]),
        (AttentionCase { seq_kv: 0, ..CASE }, vec![0, 1, 2, 3, 4]),
    ];
    for (case, dead) in cases {
        let inputs = inputs(&case);
        let (forward, gradients) = run(case, &inputs);
        for (row, lse) in forward.lse.iter().enumerate() {
            let elements = row * case.head_dim..(row + 1) * case.head_dim;
            let zero = |x: &[f64]| x[elements.clone()].iter().all(|x| *x == 0.0);
            if dead.contains(&(row % case.seq_q)) {
                assert!(zero(&forward.o) && zero(&gradients.dq) && *lse == f64::NEG_INFINITY);
            }
        }
        let AttentionGradients { dq, dk, dv, dbias } = &gradients;
        let dbias = dbias.as_deref().unwrap_or_default();
        assert!([&forward.o, dq, dk, dv, dbias].iter().all(|x| x.iter().all(|x| x.is_finite())));
        // What such a row was to pass on makes no difference.
        let mut other = inputs.clone();
        for (i, dout) in other.dout.iter_mut().enumerate() {
            let row = i / case.head_dim % case.seq_q;
            *dout = if dead.contains(&row) { 1e6 } else { *dout };
        }
        assert_eq!(run(case, &other).1, gradients);
    }
}

#[test]
fn a_bias_of_minus_infinity_masks() {
    let bias = Some(PairShape::Shared);
    let case = AttentionCase { options: AttentionOptions { bias, ..PLAIN }, ..CASE };
    let mut inputs = inputs(&case);
    let bias = inputs.bias.as_mut().unwrap();
    bias.iter_mut().enumerate().for_each(|(pair, bias)| {
        *bias = if pair / 7 == 1 || pair % 7 == 2 { f64::NEG_INFINITY } else { 0.0 };
    });
    let (forward, gradients) = run(case, &inputs);
    let mask = Some(PairShape::Shared);
    let masked = AttentionCase { options: AttentionOptions { mask, ..PLAIN }, ..CASE };
    inputs.mask = inputs.bias.take().map(|bias| bias.iter().map(|b| *b != 0.0).collect());
    assert_same(&(forward, gradients), &run(masked, &inputs));
}

#[test]
fn shared_heads_equal_repeated_ones_and_their_gradient_is_the_sum() {
    let expected_inputs = inputs(&EVERYTHING);
    let expected = run(EVERYTHING, &expected_inputs);
    let repeated = AttentionCase { heads_kv: EVERYTHING.heads_q, ..EVERYTHING };
    let head = EVERYTHING.seq_kv * EVERYTHING.head_dim;
    let repeat = |x: &[f64]| x.chunks(head).flat_map(|x| [x, x].concat()).collect::<Vec<_>>();
    let mut inputs = expected_inputs.clone();
    (inputs.k, inputs.v) = (repeat(&inputs.k), repeat(&inputs.v));
    let (forward, mut gradients) = run(repeated, &inputs);
    let sum = |x: &[f64]| -> Vec<f64> {
        x.chunks(2 * head).flat_map(|pair| (0..head).map(|i| pair[i] + pair[head + i])).collect()
    };
    (gradients.dk, gradients.dv) = (sum(&gradients.dk), sum(&gradients.dv));
    assert_near(gradients.dbias.as_deref().unwrap(), expected.1.dbias.as_deref().unwrap());
    assert_same(&(forward, gradients), &expected);
}

#[test]
fn gradients_are_those_of_central_differences() {
    let full = AttentionOptions { bias: Some(PairShape::Full), ..EVERYTHING.options };
    let shared = AttentionOptions { bias: Some(PairShape::Shared), ..PLAIN };
    for options in [EVERYTHING.options, full, shared] {
        let case = AttentionCase { options, ..EVERYTHING };
        let inputs = inputs(&case);
        let attention = inputs.attention(case);
        let AttentionGradients { dq, dk, dv, dbias } = attention.backward(&inputs.dout);
        // The scalar whose gradients these are.
        let loss = |attention: Attention<'_>| dot(&attention.forward().o, &inputs.dout);
        let check = |name: &str, values: &[f64], gradient: &[f64], loss: &dyn Fn(&[f64]) -> f64| {
            assert!(gradient.iter().any(|g| g.abs() > 0.01), "{name}");
            for i in 0..values.len() {
                let moved = |value| {
                    let mut values = values.to_vec();
                    values[i] = value;
                    loss(&values)
                };
                check_derivative(moved, |_| gradient[i], values[i])
                    .unwrap_or_else(|e| panic!("{name} {i}: {e}"));
            }
        };
        check("dq", &inputs.q, &dq, &|q| loss(Attention { q, ..attention }));
        check("dk", &inputs.k, &dk, &|k| loss(Attention { k, ..attention }));
        check("dv", &inputs.v, &dv, &|v| loss(Attention { v, ..attention }));
        let (bias, dbias) = (inputs.bias.as_deref().unwrap(), dbias.unwrap());
        check("dbias", bias, &dbias, &|b| loss(Attention { bias: Some(b), ..attention }));
    }
}

#[test]
fn dropout_keeps_lse_and_scales_what_it_keeps() {
    let dropout = Dropout { rate: 0.5, seed: 3 };
    let options = AttentionOptions { dropout: Some(dropout), ..PLAIN };
    // One value of 1 and otherwise zeros: the output is that key's weight.
    let case = AttentionCase { head_dim: 1, options, ..CASE };
    let mut inputs = inputs(&case);
    let key = 4;
    inputs.v.iter_mut().enumerate().for_each(|(j, v)| *v = f64::from(u8::from(j % 7 == key)));
    let dropped = inputs.attention(case).forward();
    let whole = inputs.attention(AttentionCase { options: PLAIN, ..case }).forward();
    assert_eq!(dropped.lse, whole.lse);
    for (row, (dropped, whole)) in dropped.o.iter().zip(&whole.o).enumerate() {
        let kept = dropout.keeps(row / 5, row % 5, key);
        assert_eq!(*dropped, if kept { 2.0 * whole } else { 0.0 });
    }
}

#[test]
fn packed_sequences_equal_separate_ones() {
    // The second has no query, the third more queries than keys.
    let (cu_seqlens_q, cu_seqlens_kv) = ([0, 3, 3, 8], [0, 4, 6, 9]);
    let options =
        AttentionOptions { mask: None, bias: None, dead_rows: false, ..EVERYTHING.options };
    let draw = |seed, rows: usize, heads: usize| {
        crate::random::normal(seed, rows * heads * 3, 1.0, Storage::F32)
    };
    let (q, dout) = (draw(1, 8, 4), draw(2, 8, 4));
    let (k, v) = (draw(3, 9, 2), draw(4, 9, 2));
    let (heads_q, heads_kv, head_dim) = (4, 2, 3);
    let (q_starts, kv_starts) = (&cu_seqlens_q, &cu_seqlens_kv);
    let packed = PackedAttention {
        heads_q,
        heads_kv,
        head_dim,
        options,
        cu_seqlens_q: q_starts,
        cu_seqlens_kv: kv_starts,
        q: &q,
        k: &k,
        v: &v,
    };
    let (forward, gradients) = (packed.forward(), packed.backward(&dout));
    let precision = AttentionPrecision::portable(Storage::Bf16);
    let bounds = packed.forward_bounds(&precision);
    let gradient_bounds = packed.backward_bounds(&dout, &precision);
    for b in 0..3 {
        let (rows_q, rows_kv) = (q_starts[b]..q_starts[b + 1], kv_starts[b]..kv_starts[b + 1]);
        let (seq_q, seq_kv) = (rows_q.len(), rows_kv.len());
        let case = AttentionCase { batch: 1, seq_q, seq_kv, options, ..CASE };
        // Element by element: [total, heads, head_dim] to [heads, seq, head_dim].
        let unpack = |x: &[f64], heads: usize, rows: &std::ops::Range<usize>| {
            let mut values = Vec::new();
            for h in 0..heads {
                for row in rows.clone() {
                    (0..3).for_each(|d| values.push(x[(row * heads + h) * 3 + d]));
                }
            }
            values
        };
        let of_q = |x: &[f64]| unpack(x, 4, &rows_q);
        let of_kv = |x: &[f64]| unpack(x, 2, &rows_kv);
        let (q, k, v, dout) = (of_q(&q), of_kv(&k), of_kv(&v), of_q(&dout));
        let attention =
            Attention { case, q: &q, k: &k, v: &v, mask: None, bias: None, first_batch: b };
        let (expected, expected_gradients) = (attention.forward(), attention.backward(&dout));
        assert_eq!(of_q(&bounds.o), attention.forward_bounds(&expected, &precision).o);
        let separate = attention.backward_bounds(&expected_gradients, &dout, &precision);
        assert_eq!(of_kv(&gradient_bounds.dk), separate.dk);
        let lse: Vec<f64> = (0..4)
            .flat_map(|h| rows_q.clone().map(move |row| h * 8 + row))
            .map(|i| forward.lse[i])
            .collect();
        assert_eq!((of_q(&forward.o), lse), (expected.o, expected.lse));
        assert_eq!(of_q(&gradients.dq), expected_gradients.dq);
        assert_eq!(of_kv(&gradients.dk), expected_gradients.dk);
        assert_eq!(of_kv(&gradients.dv), expected_gradients.dv);
    }
}

#[test]
fn empty_cases_have_results_of_their_shapes() {
    for case in cases::empty() {
        let (forward, gradients) = run(case, &inputs(&case));
        assert_eq!((forward.o.len(), forward.lse.len()), (case.q_len(), case.lse_len()));
        assert_eq!((gradients.dq.len(), gradients.dk.len()), (case.q_len(), case.kv_len()));
    }
}
