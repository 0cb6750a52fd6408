//! What is asked: sizes, options, which pairs are visible, and what they cost.

use super::{Dropout, Roundings};
use std::{fmt, ops::Range};

/// Attention to test or to time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionCase {
    /// What it stands for, such as "causal, one query".
    pub name: &'static str,
    /// Sequences.
    pub batch: usize,
    /// Heads of the queries, a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Heads of the keys and values, each of which serves `heads_q / heads_kv` neighboring heads.
    pub heads_kv: usize,
    /// Queries of a sequence.
    pub seq_q: usize,
    /// Keys of a sequence.
    pub seq_kv: usize,
    /// Elements of a query, key or value.
    pub head_dim: usize,
    /// What else is asked.
    pub options: AttentionOptions,
}

/// What may be added to plain attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the scores; `1 / sqrt(head_dim)` if none is given.
    pub scale: Option<f64>,
    /// Whether a query sees no key behind its diagonal.
    pub causal: bool,
    /// How far from its diagonal a query sees.
    pub window: Option<Window>,
    /// What scores are kept below, smoothly.
    pub softcap: Option<f64>,
    /// Which weights are left out at random.
    pub dropout: Option<Dropout>,
    /// The shape of the mask, if there is one.
    pub mask: Option<PairShape>,
    /// Whether a generated mask leaves out whole rows, too: 2, 7, 12 and so on.
    pub dead_rows: bool,
    /// Whether a generated mask tells documents apart, where it has rows: runs of queries that see a run of keys each.
    pub documents: bool,
    /// The shape of the bias, if there is one.
    pub bias: Option<PairShape>,
}

impl AttentionOptions {
    /// None of it.
    pub const PLAIN: Self = Self {
        scale: None,
        causal: false,
        window: None,
        softcap: None,
        dropout: None,
        mask: None,
        dead_rows: false,
        documents: false,
        bias: None,
    };
}

/// A sliding window around the diagonal, in keys; `None` is without limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Before it.
    pub left: Option<usize>,
    /// Behind it.
    pub right: Option<usize>,
}

/// The shape of a mask or bias over pairs of query and key, broadcast where it has length 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PairShape {
    /// `[batch, 1, 1, seq_kv]`: padding of the keys.
    Keys,
    /// `[1, 1, seq_q, seq_kv]`
    Shared,
    /// `[batch, 1, seq_q, seq_kv]`
    PerBatch,
    /// `[1, heads_q, seq_q, seq_kv]`
    PerHead,
    /// `[batch, heads_q, seq_q, seq_kv]`
    Full,
}

impl AttentionCase {
    /// Query heads that share a key/value head.
    pub fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }

    /// Factor of the scores.
    pub fn scale(&self) -> f64 {
        self.options.scale.unwrap_or_else(|| 1.0 / (self.head_dim as f64).sqrt())
    }

    /// How roundings enter the bounds of tests. The naive computation errs little by luck in one of so many small heads, so
    /// that no bound follows from its error.
    pub fn roundings(&self) -> Roundings {
        const MANY_HEADS: usize = 100;
        const SMALL_HEAD: usize = 256;
        let is_small = self.seq_q.min(self.seq_kv) * self.head_dim < SMALL_HEAD;
        match is_small && self.batch * self.heads_kv > MANY_HEADS {
            true => Roundings::Counted,
            false => Roundings::Naive,
        }
    }

    /// Elements of `q`, `o` and their gradients.
    pub fn q_len(&self) -> usize {
        self.lse_len() * self.head_dim
    }

    /// Elements of `k`, `v` and their gradients.
    pub fn kv_len(&self) -> usize {
        self.batch * self.heads_kv * self.seq_kv * self.head_dim
    }

    /// Elements of `lse`: all rows.
    pub fn lse_len(&self) -> usize {
        self.batch * self.heads_q * self.seq_q
    }

    /// The dimensions of a mask or bias of that shape.
    pub fn pair_dims(&self, shape: PairShape) -> [usize; 4] {
        let Self { batch, heads_q, seq_q, seq_kv, .. } = *self;
        match shape {
            PairShape::Keys => [batch, 1, 1, seq_kv],
            PairShape::Shared => [1, 1, seq_q, seq_kv],
            PairShape::PerBatch => [batch, 1, seq_q, seq_kv],
            PairShape::PerHead => [1, heads_q, seq_q, seq_kv],
            PairShape::Full => [batch, heads_q, seq_q, seq_kv],
        }
    }

    /// Elements of a mask or bias of that shape.
    pub fn pair_len(&self, shape: PairShape) -> usize {
        self.pair_dims(shape).iter().product()
    }

    /// The keys that query `i` may see, by causality and window; a mask may leave out more.
    pub fn keys(&self, i: usize) -> Range<usize> {
        let signed = |n: usize| isize::try_from(n).unwrap_or(isize::MAX);
        let diagonal = signed(i + self.seq_kv) - signed(self.seq_q);
        let window = self.options.window.unwrap_or(Window { left: None, right: None });
        let right = if self.options.causal { Some(0) } else { window.right };
        let clamped = |j: isize| usize::try_from(j).unwrap_or(0).min(self.seq_kv);
        let start = window.left.map_or(0, |left| clamped(diagonal.saturating_sub(signed(left))));
        let end = right.map_or(self.seq_kv, |right| {
            clamped(diagonal.saturating_add(signed(right)).saturating_add(1))
        });
        start.min(end)..end
    }

    /// Pairs of query and key that causality and window leave, over all batches and query heads.
    pub fn visible_pairs(&self) -> usize {
        let pairs: usize = (0..self.seq_q).map(|i| self.keys(i).len()).sum();
        self.batch * self.heads_q * pairs
    }

    /// Multiplications and additions of forward's two products, over the visible pairs.
    pub fn forward_flops(&self) -> f64 {
        4.0 * self.visible_pairs() as f64 * self.head_dim as f64
    }

    /// Those of backward: five products, for it computes the scores again.
    pub fn backward_flops(&self) -> f64 {
        2.5 * self.forward_flops()
    }

    /// Those of both.
    pub fn forward_backward_flops(&self) -> f64 {
        3.5 * self.forward_flops()
    }

    /// The sizes as results of benchmarks have them, such as `B4H16Q4096K4096D128 causal`; `H16:4`
    /// where 4 heads of keys serve 16 of queries.
    pub fn shape(&self) -> String {
        let Self { batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options, .. } = self;
        let shared = if heads_q == heads_kv { String::new() } else { format!(":{heads_kv}") };
        let causal = if options.causal { " causal" } else { "" };
        format!("B{batch}H{heads_q}{shared}Q{seq_q}K{seq_kv}D{head_dim}{causal}")
    }

    /// All rows, as batch, query head and query, in the order in which they lie in memory.
    pub(super) fn rows(&self) -> impl Iterator<Item = [usize; 3]> + use<> {
        let Self { heads_q, seq_q, .. } = *self;
        (0..self.lse_len()).map(move |row| {
            let head = row / seq_q;
            [head / heads_q, head % heads_q, row % seq_q]
        })
    }

    /// Where the row lies in `q`.
    pub(super) fn q_start(&self, [b, h, i]: [usize; 3]) -> usize {
        ((b * self.heads_q + h) * self.seq_q + i) * self.head_dim
    }

    /// Where key `j` of that row's head lies in `k`.
    pub(super) fn kv_start(&self, [b, h, _]: [usize; 3], j: usize) -> usize {
        ((b * self.heads_kv + h / self.group()) * self.seq_kv + j) * self.head_dim
    }

    /// Where the pair lies in a mask or bias of that shape.
    pub(super) fn pair_index(&self, shape: PairShape, [b, h, i]: [usize; 3], j: usize) -> usize {
        let [batch, heads, rows, keys] = self.pair_dims(shape);
        ((b % batch * heads + h % heads) * rows + i % rows) * keys + j
    }

    pub(super) fn check(&self) {
        let AttentionOptions { softcap, dropout, .. } = self.options;
        assert!(self.heads_kv > 0, "{self} has no heads of keys");
        assert!(self.head_dim > 0, "{self} has heads of nothing");
        assert_eq!(self.heads_q % self.heads_kv, 0, "heads of {self} do not divide");
        let cap_fits = softcap.is_none_or(|cap| cap > 0.0 && cap.is_finite());
        assert!(cap_fits, "the softcap of {self} is above zero");
        let rate_fits = dropout.is_none_or(|dropout| (0.0..1.0).contains(&dropout.rate));
        assert!(rate_fits, "the dropout rate of {self} is in 0..1");
    }
}

impl fmt::Display for AttentionCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.shape())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: AttentionCase = AttentionCase {
        name: "test",
        batch: 2,
        heads_q: 4,
        heads_kv: 2,
        seq_q: 3,
        seq_kv: 5,
        head_dim: 8,
        options: AttentionOptions::PLAIN,
    };

    fn ranges(seq_q: usize, seq_kv: usize, options: AttentionOptions) -> Vec<Range<usize>> {
        let case = AttentionCase { seq_q, seq_kv, options, ..CASE };
        (0..seq_q).map(|i| case.keys(i)).collect()
    }

    #[test]
    fn causality_is_aligned_bottom_right() {
        let causal = AttentionOptions { causal: true, ..AttentionOptions::PLAIN };
        assert_eq!(ranges(3, 5, causal), [0..3, 0..4, 0..5]);
        assert_eq!(ranges(4, 2, causal), [0..0, 0..0, 0..1, 0..2]);
        assert_eq!(ranges(2, 2, CASE.options), [0..2, 0..2]);
    }

    #[test]
    fn windows_follow_the_same_diagonal_and_causality_cuts_them() {
        let window = |left, right, causal| AttentionOptions {
            window: Some(Window { left, right }),
            causal,
            ..AttentionOptions::PLAIN
        };
        assert_eq!(ranges(3, 5, window(Some(1), Some(1), false)), [1..4, 2..5, 3..5]);
        assert_eq!(ranges(3, 5, window(Some(1), Some(1), true)), [1..3, 2..4, 3..5]);
        assert_eq!(ranges(4, 2, window(Some(0), None, false)), [0..2, 0..2, 0..2, 1..2]);
        assert_eq!(ranges(4, 2, window(None, Some(0), false)), [0..0, 0..0, 0..1, 0..2]);
        // Queries far behind the keys have none within their window.
        let behind = ranges(2, 1, window(Some(usize::MAX), Some(usize::MAX), false));
        assert_eq!(behind, [0..1, 0..1]);
    }

    #[test]
    fn the_cost_is_that_of_visible_pairs() {
        assert_eq!(CASE.forward_flops(), (4 * 2 * 4 * 3 * 5 * 8) as f64);
        let options = AttentionOptions { causal: true, ..AttentionOptions::PLAIN };
        let causal = AttentionCase { seq_q: 4, seq_kv: 4, options, ..CASE };
        assert_eq!(causal.visible_pairs(), 2 * 4 * 10);
        assert_eq!(
            causal.forward_backward_flops(),
            causal.forward_flops() + causal.backward_flops()
        );
    }

    #[test]
    fn shapes_read_as_results_have_them() {
        assert_eq!(CASE.to_string(), "test (B2H4:2Q3K5D8)");
        let options = AttentionOptions { causal: true, ..AttentionOptions::PLAIN };
        let causal = AttentionCase { heads_kv: 4, options, ..CASE };
        assert_eq!(causal.shape(), "B2H4Q3K5D8 causal");
    }

    #[test]
    fn masks_are_broadcast_where_they_have_length_one() {
        let at = [1, 3, 2];
        let indices = [
            (PairShape::Keys, 5 + 4),
            (PairShape::Shared, 2 * 5 + 4),
            (PairShape::PerBatch, 15 + 2 * 5 + 4),
            (PairShape::PerHead, 3 * 15 + 2 * 5 + 4),
            (PairShape::Full, 119),
        ];
        for (shape, index) in indices {
            assert_eq!(CASE.pair_index(shape, at, 4), index, "{shape:?}");
            assert_eq!(CASE.pair_len(shape), index + 1, "{shape:?}");
        }
    }
}
