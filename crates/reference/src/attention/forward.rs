//! Forward, row by row.

use super::{Attention, AttentionForward, add_scaled, dot, rounding::Rounding};

/// A key that a query sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// The key.
    pub(super) j: usize,
    /// `s_ij`
    pub(super) product: f64,
    /// `c_ij`
    pub(super) capped: f64,
    /// `x_ij`
    pub(super) score: f64,
    /// `p_ij`
    pub(super) p: f64,
    /// What dropout multiplies it by.
    pub(super) keep: f64,
    /// `w_ij`
    pub(super) weight: f64,
}

/// What a query sees.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) pairs: Vec<Pair>,
    pub(super) lse: f64,
}

impl Attention<'_> {
    pub(super) fn forward_rounded(&self, rounding: Rounding) -> AttentionForward {
        self.check();
        let [q, k, v] = [self.q, self.k, self.v].map(|x| rounding.operands(x));
        let operands = Attention { q: &q, k: &k, v: &v, ..*self };
        let mut forward = AttentionForward { o: Vec::new(), lse: Vec::new() };
        for at in self.case.rows() {
            let row = operands.row(at, rounding);
            forward.o.extend(operands.output(at, &row, rounding));
            forward.lse.push(row.lse);
        }
        forward
    }

    /// The scores and weights of a query, rounded as [`Attention::naive_forward`] says, where `q`,
    /// `k` and `v` are operands already.
    pub(super) fn row(&self, at @ [b, h, i]: [usize; 3], rounding: Rounding) -> Row {
        let (case, options) = (&self.case, &self.case.options);
        let q = self.query(self.q, at);
        let head = (self.first_batch + b) * case.heads_q + h;
        let masked = |j| {
            let shaped = self.mask.zip(options.mask);
            shaped.is_some_and(|(mask, shape)| mask[case.pair_index(shape, at, j)])
        };
        let pair = |j| {
            let product = rounding.stored(case.scale() * dot(q, self.key(self.k, at, j)));
            let capped = match options.softcap {
                Some(cap) => rounding.stored(cap * (product / cap).tanh()),
                None => product,
            };
            let score = rounding.stored(capped + self.bias_at(at, j));
            let keep = options.dropout.map_or(1.0, |dropout| {
                if dropout.keeps(head, i, j) { dropout.pair_rescale() } else { 0.0 }
            });
            Pair { j, product, capped, score, p: 0.0, keep, weight: 0.0 }
        };
        let mut pairs: Vec<Pair> = case.keys(i).filter(|j| !masked(*j)).map(pair).collect();
        // A bias of minus infinity masks, too.
        pairs.retain(|pair| pair.score != f64::NEG_INFINITY);
        let max = pairs.iter().map(|pair| pair.score).fold(f64::NEG_INFINITY, f64::max);
        if pairs.is_empty() {
            return Row { pairs, lse: max };
        }
        let sum: f64 = pairs.iter().map(|pair| (pair.score - max).exp()).sum();
        for pair in &mut pairs {
            pair.p = rounding.stored((pair.score - max).exp() / sum);
            pair.weight = rounding.operand(rounding.stored(pair.p * pair.keep));
        }
        Row { pairs, lse: max + sum.ln() }
    }

    /// `o_i`
    pub(super) fn output(&self, at: [usize; 3], row: &Row, rounding: Rounding) -> Vec<f64> {
        let mut o = vec![0.0; self.case.head_dim];
        for pair in &row.pairs {
            add_scaled(&mut o, pair.weight, self.key(self.v, at, pair.j));
        }
        o.iter().map(|o| rounding.stored(*o)).collect()
    }
}
