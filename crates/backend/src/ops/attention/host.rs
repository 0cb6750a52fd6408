//! The primitives by a backend's own operations, with a tensor of all pairs: for the CPU.
//!
//! The steps are those of the kernels, and so is the precision: types of 16 bits are computed in
//! f32 and rounded once.

use super::{Gradients, Inputs, Mask, Output, Settings};
use crate::tensors::{Optional, cast, wide};
use burn::{
    backend::{
        Backend, TensorMetadata,
        tensor::{BoolTensor, FloatTensor},
    },
    tensor::{DType, Shape, Slice, TensorData},
};
use std::ops::Range;

impl super::AttentionPrimitives for burn::backend::Flex {
    fn attention_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        forward(inputs, &settings)
    }

    fn attention_backward(
        inputs: Inputs<Self>,
        output: Output<Self>,
        dout: FloatTensor<Self>,
        settings: Settings,
        wants_bias: bool,
    ) -> Gradients<Self> {
        backward(inputs, output, dout, &settings, wants_bias)
    }
}

/// The least finite number for minus infinity, which less this is itself, and not NaN.
fn finite<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let least = if tensor.dtype() == DType::F64 { f64::MIN } else { f32::MIN.into() };
    B::float_clamp_min(tensor, least.into())
}

fn forward<B: Backend>(inputs: Inputs<B>, settings: &Settings) -> Output<B> {
    let dtype = inputs.q.dtype();
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for part in parts(&inputs, settings) {
        let Some((out, lse)) = part.forward() else { continue };
        outs.push(cast::<B>(out, dtype));
        lses.push(lse);
    }
    Output { out: joined::<B>(outs, 2), lse: joined::<B>(lses, 3) }
}

fn backward<B: Backend>(
    inputs: Inputs<B>,
    output: Output<B>,
    dout: FloatTensor<B>,
    settings: &Settings,
    wants_bias: bool,
) -> Gradients<B> {
    let dtype = inputs.q.dtype();
    let (mut dqs, mut dks, mut dvs) = (Vec::new(), Vec::new(), Vec::new());
    let mut dbias = Optional::Absent;
    for part in parts(&inputs, settings) {
        let rows = |tensor: &FloatTensor<B>, dim| slice::<B>(tensor.clone(), dim, &part.rows_q);
        let [out, dout] = [&output.out, &dout].map(|t| wide::<B>(rows(t, 2)));
        let gradients = part.backward(out, rows(&output.lse, 3), dout);
        dqs.extend(gradients.dq.map(|dq| cast::<B>(dq, dtype)));
        dks.extend(gradients.dk.map(|dk| cast::<B>(dk, dtype)));
        dvs.extend(gradients.dv.map(|dv| cast::<B>(dv, dtype)));
        // Packed sequences, of which there are more, have no bias.
        if wants_bias {
            let shares = inputs.bias.as_option().is_some_and(|bias| bias.shape()[0] == 1);
            let sum = |pairs| if shares { B::float_sum_dim(pairs, 0) } else { pairs };
            dbias = gradients.dscores.map(sum).into();
        }
    }
    let [dq, dk, dv] = [dqs, dks, dvs].map(|parts| joined::<B>(parts, 2));
    Gradients { dq, dk, dv, dbias }
}

/// The sequences of a batch, or one that was packed with others; in f32 or f64.
struct Part<'a, B: Backend> {
    settings: &'a Settings,
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    mask: Option<BoolTensor<B>>,
    bias: Option<FloatTensor<B>>,
    rows_q: Range<usize>,
    /// How many heads of queries are before this part's.
    first_head: usize,
}

/// Gradients of a part; `None` for those without elements.
struct PartGradients<B: Backend> {
    dq: Option<FloatTensor<B>>,
    dk: Option<FloatTensor<B>>,
    dv: Option<FloatTensor<B>>,
    dscores: Option<FloatTensor<B>>,
}

fn parts<'a, B: Backend>(inputs: &Inputs<B>, settings: &'a Settings) -> Vec<Part<'a, B>> {
    let (heads, rows_q) = (inputs.q.shape()[1], inputs.q.shape()[2]);
    let rows_kv = inputs.k.shape()[2];
    let ranges = |starts: &[usize]| -> Vec<Range<usize>> {
        starts.windows(2).map(|ends| ends[0]..ends[1]).collect()
    };
    let (ranges_q, ranges_kv) = match settings.sequences.as_deref() {
        Some(sequences) => (ranges(&sequences.q), ranges(&sequences.kv)),
        None => (ranges(&[0, rows_q]), ranges(&[0, rows_kv])),
    };
    let parts = ranges_q.into_iter().zip(ranges_kv).enumerate();
    parts
        .map(|(number, (rows_q, rows_kv))| Part {
            settings,
            q: wide::<B>(slice::<B>(inputs.q.clone(), 2, &rows_q)),
            k: wide::<B>(slice::<B>(inputs.k.clone(), 2, &rows_kv)),
            v: wide::<B>(slice::<B>(inputs.v.clone(), 2, &rows_kv)),
            mask: match &inputs.mask {
                Mask::Present(mask) => Some(mask.clone()),
                Mask::Absent => None,
            },
            bias: inputs.bias.as_option().map(|bias| wide::<B>(bias.clone())),
            rows_q,
            first_head: number * heads,
        })
        .collect()
}

impl<B: Backend> Part<'_, B> {
    /// Sequences, heads of queries, queries, keys.
    fn pairs(&self) -> [usize; 4] {
        let (q, k) = (self.q.shape(), self.k.shape());
        [q[0], q[1], q[2], k[2]]
    }

    /// Output and `lse`; `None` without queries.
    fn forward(&self) -> Option<(FloatTensor<B>, FloatTensor<B>)> {
        let [batch, heads, rows, keys] = self.pairs();
        if rows == 0 {
            return None;
        }
        let lse_shape = Shape::new([2, batch, heads, rows]);
        if keys == 0 {
            let (device, dtype) = (self.q.device(), self.q.dtype().into());
            let lse = B::float_full(lse_shape, f32::NEG_INFINITY.into(), &device, dtype);
            return Some((zeros::<B>(&self.q), lse));
        }
        let (scores, _) = self.scores();
        let largest = finite::<B>(B::float_max_dim(scores.clone(), 3));
        let weights = B::float_exp(B::float_sub(scores, largest.clone()));
        let sum = B::float_sum_dim(weights.clone(), 3);
        let log = B::float_log(sum.clone());
        // The largest score adds 1: below that there is none.
        let weights = B::float_div(weights, B::float_clamp_min(sum, 1f32.into()));
        let weights = self.dropped(weights, self.left_out());
        let out = B::float_matmul(self.by_key_head(weights), self.v.clone());
        let out = B::float_reshape(out, self.q.shape());
        Some((out, B::float_reshape(B::float_cat(vec![largest, log], 0), lse_shape)))
    }

    fn backward(
        &self,
        out: FloatTensor<B>,
        lse: FloatTensor<B>,
        dout: FloatTensor<B>,
    ) -> PartGradients<B> {
        let [batch, heads, rows, keys] = self.pairs();
        if rows == 0 || keys == 0 {
            let of = |tensor: &FloatTensor<B>, elements| (elements > 0).then(|| zeros::<B>(tensor));
            let (dq, dk, dv) = (of(&self.q, rows), of(&self.k, keys), of(&self.v, keys));
            return PartGradients { dq, dk, dv, dscores: None };
        }
        let (scores, slopes) = self.scores();
        let part = |index: usize| {
            let part = slice::<B>(lse.clone(), 0, &(index..index + 1));
            B::float_reshape(part, Shape::new([batch, heads, rows, 1]))
        };
        // Below zero the logarithm is that of no key, which is minus infinity: scores are, too.
        let (largest, log) = (part(0), B::float_clamp_min(part(1), 0f32.into()));
        let weights = B::float_exp(B::float_sub(B::float_sub(scores, largest), log));
        let left_out = self.left_out();

        let folded = self.by_key_head(dout.clone());
        let kept = self.by_key_head(self.dropped(weights.clone(), left_out.clone()));
        let dv = B::float_matmul(B::float_swap_dims(kept, 2, 3), folded.clone());
        let dweights = B::float_matmul(folded, B::float_swap_dims(self.v.clone(), 2, 3));
        let dweights = self.dropped(self.by_query_head(dweights), left_out);
        let delta = B::float_sum_dim(B::float_mul(dout, out), 3);
        let dscores = B::float_mul(weights, B::float_sub(dweights, delta));
        let dproducts = match slopes {
            Some(slopes) => B::float_mul(dscores.clone(), slopes),
            None => dscores.clone(),
        };
        let dproducts = B::float_mul_scalar(dproducts, self.settings.scale.into());
        let dproducts = self.by_key_head(dproducts);
        let dq = B::float_matmul(dproducts.clone(), self.k.clone());
        let q = self.by_key_head(self.q.clone());
        PartGradients {
            dq: Some(B::float_reshape(dq, self.q.shape())),
            dk: Some(B::float_matmul(B::float_swap_dims(dproducts, 2, 3), q)),
            dv: Some(dv),
            dscores: Some(dscores),
        }
    }

    /// The scores, minus infinity where a pair is left out, and with a cap what they grow by with
    /// their products.
    fn scores(&self) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        let q = self.by_key_head(self.q.clone());
        let products = B::float_matmul(q, B::float_swap_dims(self.k.clone(), 2, 3));
        let products = B::float_mul_scalar(products, self.settings.scale.into());
        let mut scores = self.by_query_head(products);
        let mut slopes = None;
        if let Some(cap) = self.settings.softcap {
            let bounded = B::float_tanh(B::float_div_scalar(scores, cap.into()));
            let squares = B::float_mul(bounded.clone(), bounded.clone());
            slopes = Some(B::float_add_scalar(B::float_neg(squares), 1f32.into()));
            scores = B::float_mul_scalar(bounded, cap.into());
        }
        if let Some(bias) = &self.bias {
            scores = B::float_add(scores, bias.clone());
        }
        let pairs = Shape::new(self.pairs());
        for hidden in [self.mask.clone(), self.beyond_window()].into_iter().flatten() {
            let hidden = B::bool_expand(hidden, pairs.clone());
            scores = B::float_mask_fill(scores, hidden, f32::NEG_INFINITY.into());
        }
        (scores, slopes)
    }

    /// Whether each pair is too far apart, `[1, 1, seq_q, seq_kv]`.
    fn beyond_window(&self) -> Option<BoolTensor<B>> {
        let window = self.settings.window;
        if window.left.is_none() && window.right.is_none() {
            return None;
        }
        let [_, _, rows, keys] = self.pairs();
        // Both sides count from the query's own place, so that nothing is negative.
        let is_hidden = |row: usize, key: usize| {
            let (place, key) = (row + keys, key + rows);
            window.left.is_some_and(|left| place.saturating_sub(key) > left)
                || window.right.is_some_and(|right| key.saturating_sub(place) > right)
        };
        let hidden: Vec<bool> =
            (0..rows * keys).map(|pair| is_hidden(pair / keys, pair % keys)).collect();
        Some(B::bool_from_data(TensorData::new(hidden, [1, 1, rows, keys]), &self.q.device()))
    }

    /// What dropout leaves out, for all pairs.
    fn left_out(&self) -> Option<BoolTensor<B>> {
        let dropout = self.settings.dropout?;
        let [batch, heads, rows, keys] = self.pairs();
        let left_out = dropout.left_out(self.first_head, [batch * heads, rows, keys]);
        Some(B::bool_from_data(TensorData::new(left_out, self.pairs()), &self.q.device()))
    }

    fn dropped(&self, weights: FloatTensor<B>, left_out: Option<BoolTensor<B>>) -> FloatTensor<B> {
        match (self.settings.dropout, left_out) {
            (Some(dropout), Some(left_out)) => {
                let weights = B::float_mul_scalar(weights, dropout.pair_kept().into());
                B::float_mask_fill(weights, left_out, 0f32.into())
            }
            _ => weights,
        }
    }

    /// `[batch, heads_q, rows, n]` with the heads that share keys as one: their rows follow each
    /// other, so that a product sums over all of them.
    fn by_key_head(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        let (shape, heads_kv) = (tensor.shape(), self.k.shape()[1]);
        let rows = shape[1] / heads_kv * shape[2];
        B::float_reshape(tensor, Shape::new([shape[0], heads_kv, rows, shape[3]]))
    }

    /// The inverse, of all pairs.
    fn by_query_head(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        B::float_reshape(tensor, Shape::new(self.pairs()))
    }
}

/// Those of a tensor along a dimension.
fn slice<B: Backend>(tensor: FloatTensor<B>, dim: usize, range: &Range<usize>) -> FloatTensor<B> {
    if *range == (0..tensor.shape()[dim]) {
        return tensor;
    }
    let mut slices = vec![Slice::full(); tensor.rank()];
    slices[dim] = range.clone().into();
    B::float_slice(tensor, &slices)
}

/// What [`slice`] took apart.
fn joined<B: Backend>(mut parts: Vec<FloatTensor<B>>, dim: usize) -> FloatTensor<B> {
    if parts.len() == 1 { parts.remove(0) } else { B::float_cat(parts, dim) }
}

fn zeros<B: Backend>(like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_zeros(like.shape(), &like.device(), like.dtype().into())
}
