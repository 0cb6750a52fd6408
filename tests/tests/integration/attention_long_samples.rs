//! What is expected of some rows and keys.

use super::placed::Computed;
use blackburn_kernels::attention::AttentionProblem;
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionPrecision, Sampled},
    tolerance::compare,
};
use libtest_mimic::Failed;

/// Rows and keys are sampled from each stretch of so many: no tile of any family is smaller, but for
/// those of heads of 256.
pub(super) const STRETCH: usize = 64;

/// Samples of a tensor: where each begins.
#[derive(Default)]
pub(super) struct Samples {
    starts: Vec<usize>,
    expected: Vec<Sampled>,
}

impl Samples {
    pub(super) fn add(&mut self, start: usize, expected: Sampled) {
        self.starts.push(start);
        self.expected.push(expected);
    }

    /// Within bounds, and as a whole within what independent roundings give.
    pub(super) fn judge(&self, what: &str, tensor: &[f64]) -> Result<(), Failed> {
        let places = self.starts.iter().zip(&self.expected);
        let actual: Vec<Vec<f64>> = places
            .map(|(start, expected)| tensor[*start..start + expected.values.len()].to_vec())
            .collect();
        let all = |of: fn(&Sampled) -> &[f64]| -> Vec<f64> {
            self.expected.iter().flat_map(|sample| of(sample).to_vec()).collect()
        };
        let (values, bounds) = (all(|s| &s.values), all(|s| &s.bounds));
        compare(&actual.concat(), &values, &bounds).map_err(|error| format!("{what}: {error}"))?;
        let square = Sampled::mean_square(&self.expected, &actual);
        // NaN, where NaN is expected, was compared.
        if square > 1.0 {
            let reason = format!("the mean square of errors is {square} times that of roundings");
            return Err(format!("{what}: {reason}").into());
        }
        Ok(())
    }
}

/// What is expected of a case.
#[derive(Default)]
pub(super) struct Expected {
    pub(super) out: Samples,
    pub(super) lse: Samples,
    pub(super) dq: Samples,
    pub(super) dk: Samples,
    pub(super) dv: Samples,
}

impl Expected {
    /// Of a case in memory as the problem says.
    pub(super) fn of(
        case: &AttentionCase,
        inputs: &AttentionInputs,
        problem: &AttentionProblem,
        precision: &AttentionPrecision,
    ) -> Self {
        let mut expected = Self::default();
        let attention = inputs.attention(*case);
        let (out, kv) = (problem.out(), problem.kv_gradients());
        for (index, at) in sampled_rows(case).into_iter().enumerate() {
            let [b, h, i] = at;
            // Another row of each stretch in each head.
            let row = attention.sampled_row(at, &inputs.dout, precision);
            let start = b * out.batch + h * out.head + i * out.row;
            expected.lse.add((b * case.heads_q + h) * case.seq_q + i, row.lse);
            expected.out.add(start, row.o);
            // Half of them: gradients take as long as the forward pass again.
            if index % 2 == 0 {
                expected.dq.add(start, row.dq);
            }
        }
        let keys = in_stretches(case.seq_kv, 3);
        let mut heads = vec![[0, 0], [case.batch - 1, case.heads_kv - 1]];
        heads.dedup();
        for [b, h] in heads {
            let sampled = attention.sampled_keys([b, h], &keys, &inputs.dout, precision);
            for (j, sample) in keys.iter().zip(sampled) {
                let start = b * kv.batch + h * kv.head + j * kv.row;
                expected.dk.add(start, sample.dk);
                expected.dv.add(start, sample.dv);
            }
        }
        expected
    }

    pub(super) fn judge(&self, computed: &Computed, by: &str) -> Result<(), Failed> {
        match computed {
            Computed::Forward { out, lse } => {
                self.lse.judge(&format!("lse {by}"), lse)?;
                self.out.judge(&format!("out {by}"), out)
            }
            Computed::Backward { dq, dk, dv } => {
                self.dq.judge(&format!("dq {by}"), dq)?;
                self.dk.judge(&format!("dk {by}"), dk)?;
                self.dv.judge(&format!("dv {by}"), dv)
            }
        }
    }
}

/// One of each stretch, the first and the last among them.
pub(super) fn in_stretches(len: usize, seed: usize) -> Vec<usize> {
    let stretches = len.div_ceil(STRETCH);
    let place = |stretch: usize| match stretch {
        0 => 0,
        last if last + 1 == stretches => len - 1,
        _ => (stretch * STRETCH + (stretch * 29 + seed * 13) % STRETCH).min(len - 1),
    };
    (0..stretches).map(place).collect()
}

/// Of every head, one row of each stretch.
fn sampled_rows(case: &AttentionCase) -> Vec<[usize; 3]> {
    let heads = (0..case.batch).flat_map(|b| (0..case.heads_q).map(move |h| [b, h]));
    heads
        .flat_map(|[b, h]| {
            let rows = in_stretches(case.seq_q, b * case.heads_q + h);
            rows.into_iter().map(move |i| [b, h, i])
        })
        .collect()
}
