use super::*;
use crate::{
    attention::{
        AttentionCase, AttentionInputs, AttentionOptions, Dropout, PairShape, Sampled, Window,
        cases,
    },
    tolerance::{Agreement, Mismatch, compare},
};

/// What a kernel computes: f32 arithmetic, an online softmax over tiles of keys, weights rounded to
/// storage before they are divided by their sum, `delta` from the stored `o`.
struct Kernel<'a> {
    attention: Attention<'a>,
    storage: Storage,
    operands: Operands,
}

/// What tensor cores take of operands in f32.
#[derive(Clone, Copy)]
enum Operands {
    Whole,
    /// The mantissa of TF32, truncated.
    Truncated,
    /// The same, rounded to nearest.
    Rounded,
}

const TILE: usize = 16;

impl Kernel<'_> {
    fn operand(&self, x: f32) -> f32 {
        match self.operands {
            Operands::Whole => x,
            Operands::Truncated => f32::from_bits(x.to_bits() & !0x1fff),
            Operands::Rounded => f32::from_bits((x.to_bits() + 0x1000) & !0x1fff),
        }
    }

    fn dot(&self, a: &[f64], b: &[f64]) -> f32 {
        let product = |(a, b): (&f64, &f64)| self.operand(*a as f32) * self.operand(*b as f32);
        a.iter().zip(b).map(product).sum()
    }

    fn add(&self, y: &mut [f32], factor: f32, x: &[f64]) {
        let factor = self.operand(self.storage.round(f64::from(factor)) as f32);
        y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * self.operand(*x as f32));
    }

    /// The score, the cap's slope and dropout's factor of a pair that is visible.
    fn score(&self, at: [usize; 3], pair: &Pair) -> [f32; 3] {
        let a = &self.attention;
        let product = self.dot(a.query(a.q, at), a.key(a.k, at, pair.j));
        let score = product * a.case.scale() as f32;
        let (score, slope) = match a.case.options.softcap {
            None => (score, 1.0),
            Some(cap) => {
                let t = (score / cap as f32).tanh();
                (t * cap as f32, 1.0 - t * t)
            }
        };
        [score + a.bias_at(at, pair.j) as f32, slope, pair.keep as f32]
    }

    fn forward(&self) -> AttentionForward {
        let a = &self.attention;
        let mut forward = AttentionForward { o: Vec::new(), lse: Vec::new() };
        for at in a.case.rows() {
            // Only which pairs are visible and kept is taken from the reference.
            let pairs = a.row(at, Rounding::NONE).pairs;
            let (mut max, mut sum) = (f32::NEG_INFINITY, 0f32);
            let mut o = vec![0f32; a.case.head_dim];
            for tile in pairs.chunks(TILE) {
                let scores: Vec<_> = tile.iter().map(|pair| self.score(at, pair)).collect();
                let largest = scores.iter().map(|[x, ..]| *x).fold(max, f32::max);
                let rescale = (max - largest).exp();
                sum *= rescale;
                o.iter_mut().for_each(|o| *o *= rescale);
                max = largest;
                for (pair, [x, _, keep]) in tile.iter().zip(scores) {
                    let p = (x - max).exp();
                    sum += p;
                    self.add(&mut o, p * keep, a.key(a.v, at, pair.j));
                }
            }
            let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
            forward.o.extend(o.iter().map(|o| self.storage.round(f64::from(o * inverse))));
            forward.lse.push(f64::from(max + sum.ln()));
        }
        forward
    }

    fn backward(&self, forward: &AttentionForward, dout: &[f64]) -> AttentionGradients {
        let a = &self.attention;
        let zeros = |len| vec![0f32; len];
        let (mut dq, mut dk) = (zeros(a.case.q_len()), zeros(a.case.kv_len()));
        let mut dv = zeros(a.case.kv_len());
        let mut dbias = a.case.options.bias.map(|shape| zeros(a.case.pair_len(shape)));
        let scale = a.case.scale() as f32;
        for (row, at) in a.case.rows().enumerate() {
            let (dout, o) = (a.query(dout, at), a.query(&forward.o, at));
            let delta: f32 = dout.iter().zip(o).map(|(a, b)| *a as f32 * *b as f32).sum();
            for pair in &a.row(at, Rounding::NONE).pairs {
                let [x, slope, keep] = self.score(at, pair);
                let p = (x - forward.lse[row] as f32).exp();
                let dx = p * (keep * self.dot(dout, a.key(a.v, at, pair.j)) - delta);
                let (q, k) = (a.case.q_start(at), a.case.kv_start(at, pair.j));
                let d = a.case.head_dim;
                self.add(&mut dq[q..q + d], dx * slope, &a.k[k..k + d]);
                self.add(&mut dk[k..k + d], dx * slope, &a.q[q..q + d]);
                self.add(&mut dv[k..k + d], p * keep, dout);
                if let Some((dbias, shape)) = dbias.as_mut().zip(a.case.options.bias) {
                    dbias[a.case.pair_index(shape, at, pair.j)] += dx;
                }
            }
        }
        let store = |x: Vec<f32>, factor: f32| -> Vec<f64> {
            x.iter().map(|x| self.storage.round(f64::from(x * factor))).collect()
        };
        AttentionGradients {
            dq: store(dq, scale),
            dk: store(dk, scale),
            dv: store(dv, 1.0),
            dbias: dbias.map(|dbias| store(dbias, 1.0)),
        }
    }
}

struct Expected<'a> {
    attention: Attention<'a>,
    forward: AttentionForward,
    gradients: AttentionGradients,
    forward_bounds: AttentionForward,
    bounds: AttentionGradients,
}

impl<'a> Expected<'a> {
    fn new(
        case: AttentionCase,
        inputs: &'a AttentionInputs,
        precision: AttentionPrecision,
    ) -> Self {
        let (attention, dout) = (inputs.attention(case), &inputs.dout);
        let (forward, gradients) = (attention.forward(), attention.backward(dout));
        let forward_bounds = attention.forward_bounds(&forward, &precision);
        let bounds = attention.backward_bounds(&gradients, dout, &precision);
        Self { attention, forward, gradients, forward_bounds, bounds }
    }

    /// Each tensor by name, with the verdict on it.
    fn judge(
        &self,
        forward: &AttentionForward,
        gradients: &AttentionGradients,
    ) -> [(&'static str, Result<Agreement, Mismatch>); 6] {
        let bias = |gradients: &AttentionGradients| gradients.dbias.clone().unwrap_or_default();
        let (e, b) = (&self.gradients, &self.bounds);
        [
            ("o", compare(&forward.o, &self.forward.o, &self.forward_bounds.o)),
            ("lse", compare(&forward.lse, &self.forward.lse, &self.forward_bounds.lse)),
            ("dq", compare(&gradients.dq, &e.dq, &b.dq)),
            ("dk", compare(&gradients.dk, &e.dk, &b.dk)),
            ("dv", compare(&gradients.dv, &e.dv, &b.dv)),
            ("dbias", compare(&bias(gradients), &bias(e), &bias(b))),
        ]
    }

    /// Panics if one of those tensors is within bounds.
    fn rejects(
        &self,
        fault: &str,
        (forward, gradients): &(AttentionForward, AttentionGradients),
        names: &[&str],
    ) {
        for (name, judged) in self.judge(forward, gradients) {
            let case = &self.attention.case;
            assert!(
                judged.is_err() || !names.contains(&name),
                "{case}, {fault}: {name} {judged:?}"
            );
        }
    }
}

fn precision(storage: Storage) -> AttentionPrecision {
    AttentionPrecision::cuda(match storage {
        Storage::F32 => MatmulPrecision::exact(storage),
        _ => MatmulPrecision::tensor_core(storage),
    })
}

fn devices() -> [(Storage, Operands, AttentionPrecision); 8] {
    let tf32 = AttentionPrecision::cuda(MatmulPrecision::tf32());
    let plain = |storage| (storage, Operands::Whole, precision(storage));
    let counted =
        |storage| (storage, Operands::Whole, precision(storage).with_roundings(Roundings::Counted));
    [
        plain(Storage::F32),
        (Storage::F32, Operands::Truncated, tf32),
        (Storage::F32, Operands::Rounded, tf32),
        plain(Storage::F16),
        plain(Storage::Bf16),
        counted(Storage::F32),
        counted(Storage::F16),
        counted(Storage::Bf16),
    ]
}

#[test]
fn kernels_are_within_bounds_in_all_small_cases() {
    for (storage, operands, precision) in devices() {
        let mut worst = [0f64; 6];
        for case in cases::small() {
            let inputs = AttentionInputs::generate(&case, 3, storage);
            let expected = Expected::new(case, &inputs, precision);
            let kernel = Kernel { attention: expected.attention, storage, operands };
            let forward = kernel.forward();
            let gradients = kernel.backward(&forward, &inputs.dout);
            let judged = expected.judge(&forward, &gradients);
            for ((tensor, judged), worst) in judged.into_iter().zip(&mut worst) {
                let agreement =
                    judged.unwrap_or_else(|e| panic!("{storage:?} {case}, {tensor}: {e}"));
                *worst = worst.max(agreement.worst_ratio);
            }
        }
        // Nor far within: sums of f32 never come near their worst case, but roundings do.
        let [o, _, gradients @ ..] = worst;
        let narrow = storage != Storage::F32 || !matches!(operands, Operands::Whole);
        let least = gradients.into_iter().fold(o, f64::min);
        assert!(least > if narrow { 0.2 } else { 1e-3 }, "{storage:?} {worst:?}");
    }
}

/// Counted one by one, errors of operands in TF32 leave room for small faults: a key in 16.
#[test]
fn counted_operands_of_tf32_are_within_bounds_and_a_dropped_scale_is_not() {
    let precision = AttentionPrecision::cuda(MatmulPrecision::tf32());
    let precision = precision.with_roundings(Roundings::Counted);
    let storage = Storage::F32;
    for case in cases::small() {
        let inputs = AttentionInputs::generate(&case, 3, storage);
        let expected = Expected::new(case, &inputs, precision);
        for operands in [Operands::Truncated, Operands::Rounded] {
            let kernel = Kernel { attention: expected.attention, storage, operands };
            let forward = kernel.forward();
            let gradients = kernel.backward(&forward, &inputs.dout);
            for (tensor, judged) in expected.judge(&forward, &gradients) {
                judged.unwrap_or_else(|e| panic!("{case}, {tensor}: {e}"));
            }
        }
    }
    for case in cases::edges().into_iter().filter(|case| case.seq_kv > 1) {
        let inputs = AttentionInputs::generate(&case, 3, storage);
        let expected = Expected::new(case, &inputs, precision);
        let mut unscaled = expected.attention;
        unscaled.case.options.scale = Some(1.0);
        let unscaled = run(unscaled, &inputs.dout);
        expected.rejects("dropped scale", &unscaled, &["o", "lse", "dq", "dk", "dv"]);
    }
}

fn run(attention: Attention<'_>, dout: &[f64]) -> (AttentionForward, AttentionGradients) {
    (attention.forward(), attention.backward(dout))
}

#[test]
fn a_dropped_scale_a_skipped_key_and_a_skipped_query_are_out_of_bounds() {
    for (storage, _, precision) in devices() {
        for case in cases::edges() {
            // A single key has a weight of 1, whatever its score.
            if case.seq_kv == 1 {
                continue;
            }
            let inputs = AttentionInputs::generate(&case, 3, storage);
            let expected = Expected::new(case, &inputs, precision);
            let (attention, dout) = (expected.attention, &inputs.dout);

            let mut unscaled = attention;
            unscaled.case.options.scale = Some(1.0);
            expected.rejects(
                "dropped scale",
                &run(unscaled, dout),
                &["o", "lse", "dq", "dk", "dv"],
            );

            // Where it is causal, the last key alone is seen by the last row alone.
            let skipped = if case.options.causal { TILE.min(case.seq_kv - 1) } else { 1 };
            let mask: Vec<bool> = (0..case.seq_q * case.seq_kv)
                .map(|pair| pair % case.seq_kv >= case.seq_kv - skipped)
                .collect();
            let mut skipped = Attention { mask: Some(&mask), ..attention };
            skipped.case.options.mask = Some(PairShape::Shared);
            let skipped = run(skipped, dout);
            expected.rejects("skipped key", &skipped, &["o", "lse", "dq", "dk", "dv"]);

            let mut partial = inputs.dout.clone();
            for head in partial.chunks_exact_mut(case.seq_q * case.head_dim) {
                head[(case.seq_q - 1) * case.head_dim..].fill(0.0);
            }
            expected.rejects("skipped query", &run(attention, &partial), &["dq", "dk", "dv"]);
        }
    }
}

#[test]
fn an_option_that_is_missing_or_another_is_out_of_bounds() {
    type Fault = fn(&mut AttentionOptions);
    let faults: [(&str, Fault); 8] = [
        ("softcap", |o| o.softcap = None),
        ("softcap", |o| o.softcap = Some(2.2)),
        ("dropout", |o| o.dropout = None),
        ("dropout", |o| o.dropout = Some(Dropout { rate: 0.2, seed: 1 })),
        ("window to both sides", |o| o.window = Some(Window { left: Some(16), right: Some(15) })),
        ("window to both sides", |o| o.window = Some(Window { left: Some(17), right: Some(16) })),
        ("window, causal", |o| o.causal = false),
        ("another scale", |o| o.scale = Some(0.28)),
    ];
    for (storage, _, precision) in devices() {
        for (name, fault) in faults {
            let case = *cases::small().iter().find(|case| case.name == name).unwrap();
            let inputs = AttentionInputs::generate(&case, 3, storage);
            let expected = Expected::new(case, &inputs, precision);
            let mut other = expected.attention;
            fault(&mut other.case.options);
            let actual = run(other, &inputs.dout);
            expected.rejects(name, &actual, &["o", "dq", "dk", "dv"]);
            if case.options.dropout.is_none() {
                expected.rejects(name, &actual, &["lse"]);
            }
        }
    }
}

#[test]
fn weights_that_dropout_keeps_must_be_scaled_up() {
    for (storage, _, precision) in devices() {
        for name in ["dropout", "dropout, causal", "everything"] {
            let case = *cases::small().iter().find(|case| case.name == name).unwrap();
            let inputs = AttentionInputs::generate(&case, 3, storage);
            let expected = Expected::new(case, &inputs, precision);
            let factor = case.options.dropout.map_or(1.0, |dropout| dropout.pair_rescale());
            let (mut forward, mut gradients) = run(expected.attention, &inputs.dout);
            let AttentionGradients { dq, dk, dv, .. } = &mut gradients;
            for tensor in [&mut forward.o, dq, dk, dv] {
                tensor.iter_mut().for_each(|value| *value /= factor);
            }
            expected.rejects("no rescale", &(forward, gradients), &["o", "dq", "dk", "dv"]);
        }
    }
}

#[test]
fn errors_of_a_kernel_are_as_large_as_independent_roundings_make_them() {
    let case = AttentionCase {
        name: "long",
        batch: 1,
        heads_q: 1,
        heads_kv: 1,
        seq_q: 260,
        seq_kv: 300,
        head_dim: 32,
        options: AttentionOptions { causal: true, ..AttentionOptions::PLAIN },
    };
    // Gradients of 2^-9 have parts that are subnormal numbers of f16.
    let of = |storage| [(storage, 1.0), (storage, 2f64.powi(-9))];
    for (storage, size) in [Storage::F16, Storage::Bf16].into_iter().flat_map(of) {
        let mut inputs = AttentionInputs::generate(&case, 5, storage);
        inputs.dout.iter_mut().for_each(|dout| *dout = storage.round(*dout * size));
        let (attention, dout) = (inputs.attention(case), &inputs.dout);
        let precision = precision(storage).with_roundings(Roundings::Counted);
        let rows: Vec<_> =
            case.rows().map(|at| attention.sampled_row(at, dout, &precision)).collect();
        let all: Vec<_> = (0..case.seq_kv).collect();
        let keys = attention.sampled_keys([0, 0], &all, dout, &precision);
        let squares = |scale: f64| {
            let mut scaled = attention;
            scaled.case.options.scale = Some(scale);
            let kernel = Kernel { attention: scaled, storage, operands: Operands::Whole };
            let forward = kernel.forward();
            let gradients = kernel.backward(&forward, dout);
            let square = |samples: Vec<_>, tensor: &[f64]| {
                let actual: Vec<_> =
                    tensor.chunks_exact(case.head_dim).map(<[f64]>::to_vec).collect();
                Sampled::mean_square(&samples, &actual)
            };
            [
                square(rows.iter().map(|row| row.o.clone()).collect(), &forward.o),
                square(rows.iter().map(|row| row.dq.clone()).collect(), &gradients.dq),
                square(keys.iter().map(|key| key.dk.clone()).collect(), &gradients.dk),
                square(keys.iter().map(|key| key.dv.clone()).collect(), &gradients.dv),
            ]
        };
        let right = squares(case.scale());
        assert!(
            right.iter().all(|square| (0.05..1.0).contains(square)),
            "{storage:?} {size} {right:?}"
        );
        let wrong = squares(1.02 * case.scale());
        assert!(wrong.iter().all(|square| *square > 1.0), "{storage:?} {size} {wrong:?}");
    }
}

#[test]
fn the_naive_computation_is_within_its_own_bounds() {
    let is_naive = |device: &(_, _, AttentionPrecision)| device.2.roundings == Roundings::Naive;
    for (storage, _, precision) in devices().into_iter().filter(is_naive) {
        for case in cases::options() {
            let inputs = AttentionInputs::generate(&case, 3, storage);
            let expected = Expected::new(case, &inputs, precision);
            let forward = expected.attention.naive_forward(&precision.product);
            let gradients = expected.attention.naive_backward(&inputs.dout, &precision.product);
            for (name, judged) in expected.judge(&forward, &gradients) {
                // Its `lse` is of scores that were rounded to storage.
                if name != "lse" {
                    judged.unwrap_or_else(|e| panic!("{storage:?} {case} {name}: {e}"));
                }
            }
        }
    }
}

#[test]
fn bounds_in_f32_are_small_and_tell_tf32_apart() {
    let case = *cases::small().iter().find(|c| c.name.starts_with("127 by 129")).unwrap();
    let inputs = AttentionInputs::generate(&case, 3, Storage::F32);
    let expected = Expected::new(case, &inputs, precision(Storage::F32));
    let largest = |bounds: &[f64]| bounds.iter().copied().fold(0.0, f64::max);
    assert!(largest(&expected.forward_bounds.o) < 1e-4);
    assert!(largest(&expected.forward_bounds.lse) < 1e-4);
    let AttentionGradients { dq, dk, dv, .. } = &expected.bounds;
    assert!(largest(dq).max(largest(dk)).max(largest(dv)) < 1e-3);

    let kernel = Kernel {
        attention: expected.attention,
        storage: Storage::F32,
        operands: Operands::Rounded,
    };
    let forward = kernel.forward();
    let gradients = kernel.backward(&forward, &inputs.dout);
    let names = ["o", "lse", "dq", "dk", "dv"];
    expected.rejects("TF32", &(forward, gradients), &names);
}
