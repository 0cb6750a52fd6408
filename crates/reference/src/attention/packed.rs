//! Sequences of different lengths, one behind the other.

use super::{
    Attention, AttentionCase, AttentionForward, AttentionGradients, AttentionOptions,
    AttentionPrecision,
};
use std::ops::Range;

/// Attention over sequences that are packed without padding: each attends to itself alone.
///
/// `q`, `o`, `dout` and `dq` are `[total, heads_q, head_dim]`; `k`, `v`, `dk` and `dv` are
/// `[total, heads_kv, head_dim]`; `lse` is `[heads_q, total]`. Dropout counts sequences as batches.
/// There is neither mask nor bias.
#[derive(Clone, Copy, Debug)]
pub struct PackedAttention<'a> {
    /// Heads of the queries, a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Heads of the keys and values.
    pub heads_kv: usize,
    /// Elements of a query, key or value.
    pub head_dim: usize,
    /// What else is asked.
    pub options: AttentionOptions,
    /// Where sequences of queries start: 0 and ascending, the last being where the last one ends.
    pub cu_seqlens_q: &'a [usize],
    /// The same of keys and values.
    pub cu_seqlens_kv: &'a [usize],
    /// Queries.
    pub q: &'a [f64],
    /// Keys.
    pub k: &'a [f64],
    /// Values.
    pub v: &'a [f64],
}

/// A sequence in memory of its own, `[heads, seq, head_dim]`.
#[derive(Clone, Debug)]
pub struct PackedSequence {
    /// Its rows of q.
    pub rows_q: Range<usize>,
    /// Its rows of k and v.
    pub rows_kv: Range<usize>,
    number: usize,
    case: AttentionCase,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

impl PackedSequence {
    /// Attention over it alone.
    pub fn attention(&self) -> Attention<'_> {
        let Self { number, case, q, k, v, .. } = self;
        Attention { case: *case, q, k, v, mask: None, bias: None, first_batch: *number }
    }
}

impl PackedAttention<'_> {
    /// `o` and `lse`.
    ///
    /// # Panics
    ///
    /// When the sizes make no sense, or a slice has another length than its shape.
    pub fn forward(&self) -> AttentionForward {
        self.forward_of(|attention| attention.forward())
    }

    /// The gradients, given that of `o`.
    ///
    /// # Panics
    ///
    /// When the sizes make no sense, or a slice has another length than its shape.
    pub fn backward(&self, dout: &[f64]) -> AttentionGradients {
        self.backward_of(dout, |attention, dout| attention.backward(dout))
    }

    /// How far off `o` and `lse` may be.
    ///
    /// # Panics
    ///
    /// When the sizes make no sense, or a slice has another length than its shape.
    pub fn forward_bounds(&self, precision: &AttentionPrecision) -> AttentionForward {
        self.forward_of(|attention| attention.forward_bounds(&attention.forward(), precision))
    }

    /// How far off the gradients may be.
    ///
    /// # Panics
    ///
    /// When the sizes make no sense, or a slice has another length than its shape.
    pub fn backward_bounds(
        &self,
        dout: &[f64],
        precision: &AttentionPrecision,
    ) -> AttentionGradients {
        self.backward_of(dout, |attention, dout| {
            attention.backward_bounds(&attention.backward(dout), dout, precision)
        })
    }

    fn forward_of(&self, compute: impl Fn(&Attention<'_>) -> AttentionForward) -> AttentionForward {
        let rows = self.rows_q();
        let mut all =
            AttentionForward { o: vec![0.0; self.q.len()], lse: vec![0.0; rows * self.heads_q] };
        for sequence in self.sequences() {
            let AttentionForward { o, lse } = compute(&sequence.attention());
            self.scatter(&mut all.o, self.heads_q, &sequence.rows_q, &o);
            let seq_q = sequence.case.seq_q;
            for (i, lse) in lse.iter().enumerate() {
                all.lse[i / seq_q * rows + sequence.rows_q.start + i % seq_q] = *lse;
            }
        }
        all
    }

    fn backward_of(
        &self,
        dout: &[f64],
        compute: impl Fn(&Attention<'_>, &[f64]) -> AttentionGradients,
    ) -> AttentionGradients {
        assert_eq!(dout.len(), self.q.len(), "dout differs in length from q");
        let zeros = |like: &[f64]| vec![0.0; like.len()];
        let (dq, dk, dv) = (zeros(self.q), zeros(self.k), zeros(self.v));
        let mut all = AttentionGradients { dq, dk, dv, dbias: None };
        for sequence in self.sequences() {
            let dout = self.gather(dout, self.heads_q, &sequence.rows_q);
            let AttentionGradients { dq, dk, dv, .. } = compute(&sequence.attention(), &dout);
            self.scatter(&mut all.dq, self.heads_q, &sequence.rows_q, &dq);
            self.scatter(&mut all.dk, self.heads_kv, &sequence.rows_kv, &dk);
            self.scatter(&mut all.dv, self.heads_kv, &sequence.rows_kv, &dv);
        }
        all
    }

    fn rows_q(&self) -> usize {
        self.cu_seqlens_q.last().copied().unwrap_or(0)
    }

    /// Each sequence for itself.
    ///
    /// # Panics
    ///
    /// When the sizes make no sense, or a slice has another length than its shape.
    pub fn sequences(&self) -> impl Iterator<Item = PackedSequence> {
        let Self { heads_q, heads_kv, head_dim, options, .. } = *self;
        let (starts_q, starts_kv) = (self.cu_seqlens_q, self.cu_seqlens_kv);
        assert_eq!(starts_q.len(), starts_kv.len(), "as many sequences of queries as of keys");
        for starts in [starts_q, starts_kv] {
            assert!(starts.first().is_none_or(|first| *first == 0), "sequences start at 0");
            assert!(starts.is_sorted(), "sequences ascend");
        }
        let rows_kv = starts_kv.last().copied().unwrap_or(0);
        assert_eq!(self.q.len(), self.rows_q() * heads_q * head_dim, "q differs in length");
        assert_eq!(self.k.len(), rows_kv * heads_kv * head_dim, "k differs in length");
        assert_eq!(self.v.len(), self.k.len(), "v differs in length from k");
        let ranges = starts_q.windows(2).zip(starts_kv.windows(2)).enumerate();
        ranges.map(move |(number, (of_q, of_kv))| {
            let (rows_q, rows_kv) = (of_q[0]..of_q[1], of_kv[0]..of_kv[1]);
            let case = AttentionCase {
                name: "packed sequence",
                batch: 1,
                heads_q,
                heads_kv,
                seq_q: rows_q.len(),
                seq_kv: rows_kv.len(),
                head_dim,
                options,
            };
            let q = self.gather(self.q, heads_q, &rows_q);
            let k = self.gather(self.k, heads_kv, &rows_kv);
            let v = self.gather(self.v, heads_kv, &rows_kv);
            PackedSequence { number, case, rows_q, rows_kv, q, k, v }
        })
    }

    /// `[heads, seq, head_dim]` of those rows of a tensor `[total, heads, head_dim]`.
    pub fn gather(&self, packed: &[f64], heads: usize, rows: &Range<usize>) -> Vec<f64> {
        self.starts(heads, rows)
            .flat_map(|start| &packed[start..start + self.head_dim])
            .copied()
            .collect()
    }

    fn scatter(&self, packed: &mut [f64], heads: usize, rows: &Range<usize>, values: &[f64]) {
        for (start, values) in self.starts(heads, rows).zip(values.chunks_exact(self.head_dim)) {
            packed[start..start + self.head_dim].copy_from_slice(values);
        }
    }

    /// Where the elements of each head and row start, row by row within a head.
    fn starts(&self, heads: usize, rows: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
        let (rows, head_dim) = (rows.clone(), self.head_dim);
        (0..heads).flat_map(move |h| rows.clone().map(move |row| (row * heads + h) * head_dim))
    }
}
