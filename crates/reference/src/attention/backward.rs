//! Backward, row by row.

use super::{
    Attention, AttentionCase, AttentionGradients, add_scaled, dot, forward::Pair,
    rounding::Rounding,
};

impl AttentionGradients {
    /// Zeros in the shapes of the case.
    pub(super) fn zeros(case: &AttentionCase) -> Self {
        Self {
            dq: vec![0.0; case.q_len()],
            dk: vec![0.0; case.kv_len()],
            dv: vec![0.0; case.kv_len()],
            dbias: case.options.bias.map(|shape| vec![0.0; case.pair_len(shape)]),
        }
    }
}

impl Attention<'_> {
    pub(super) fn backward_rounded(&self, dout: &[f64], rounding: Rounding) -> AttentionGradients {
        self.check();
        let case = &self.case;
        assert_eq!(dout.len(), case.q_len(), "dout of {case} differs in length");
        let [q, k, v, factors] = [self.q, self.k, self.v, dout].map(|x| rounding.operands(x));
        let operands = Attention { q: &q, k: &k, v: &v, ..*self };
        let mut gradients = AttentionGradients::zeros(case);
        for at in case.rows() {
            let row = operands.row(at, rounding);
            let (dout, factor) = (self.query(dout, at), self.query(&factors, at));
            let delta = dot(dout, &operands.output(at, &row, rounding));
            for pair in &row.pairs {
                let dp = rounding.stored(pair.keep * dot(factor, operands.key(&v, at, pair.j)));
                let dx = rounding.stored(pair.p * (dp - delta));
                let ds = rounding.stored(dx * self.cap_slope(pair));
                gradients.add(&operands, at, pair, rounding.operand(ds), dx, factor);
            }
        }
        let AttentionGradients { dq, dk, dv, dbias } = &mut gradients;
        for tensor in [Some(dq), Some(dk), Some(dv), dbias.as_mut()].into_iter().flatten() {
            tensor.iter_mut().for_each(|value| *value = rounding.stored(*value));
        }
        gradients
    }

    /// The derivative of the cap.
    pub(super) fn cap_slope(&self, pair: &Pair) -> f64 {
        self.case.options.softcap.map_or(1.0, |cap| 1.0 - (pair.capped / cap).powi(2))
    }
}

impl AttentionGradients {
    /// Adds what one pair passes on.
    pub(super) fn add(
        &mut self,
        attention: &Attention<'_>,
        at: [usize; 3],
        pair: &Pair,
        ds: f64,
        dx: f64,
        dout: &[f64],
    ) {
        let Attention { case, q, k, .. } = attention;
        let (query, key) = (case.q_start(at), case.kv_start(at, pair.j));
        let (ds, d) = (case.scale() * ds, case.head_dim);
        add_scaled(&mut self.dq[query..query + d], ds, &k[key..key + d]);
        add_scaled(&mut self.dk[key..key + d], ds, &q[query..query + d]);
        add_scaled(&mut self.dv[key..key + d], pair.weight, dout);
        if let Some((dbias, shape)) = self.dbias.as_mut().zip(case.options.bias) {
            dbias[case.pair_index(shape, at, pair.j)] += dx;
        }
    }
}
