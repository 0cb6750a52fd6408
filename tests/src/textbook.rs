//! Modules by their formulas, an operation a line: exact in f64 on the CPU, and the plain computation in
//! other types ([`crate::plain`]).
//!
//! Burn's modules would not do for either: their gradient of GELU is that of its tanh form, and a fault
//! in what they share with the kernels would not show.

use burn::{
    nn::{Embedding, LayerNorm, Linear, attention::MultiHeadAttention, transformer as theirs},
    prelude::*,
    tensor::FloatDType,
};
use std::f64::consts::SQRT_2;

/// Burn's default of what a norm adds to variances.
const EPSILON: f64 = 1e-5;
/// The base of rotary positions.
const THETA: f64 = 10_000.0;

/// What negative controls plant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The bias in front of an activation is left out.
    Bias,
    /// What an activation lets through is decided by the first row, for all of them.
    ColumnMask,
    /// A query sees one key more than a causal mask lets it.
    LateKey,
    /// Scores are not divided by the root of a head's size.
    Scale,
    /// A norm does not subtract the mean.
    Mean,
    /// The positions of keys are one off.
    Position,
    /// A window is one key narrower to the left.
    Window,
}

/// The formulas, with a fault or without.
#[derive(Clone, Copy, Debug, Default)]
pub struct Textbook {
    /// What is wrong with them.
    pub fault: Option<Fault>,
    /// Whether norms of bf16 compute in bf16, as Burn's modules do, and not in f32, as Blackburn's kernels do.
    pub narrow_norms: bool,
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// x where that is above zero.
    Relu,
    /// x times the normal distribution's integral up to x.
    Gelu,
}

/// The layers of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Projections<'a> {
    /// Of queries.
    pub query: &'a Linear,
    /// Of keys.
    pub key: &'a Linear,
    /// Of values.
    pub value: &'a Linear,
    /// Of what was found.
    pub output: &'a Linear,
}

impl<'a> From<&'a MultiHeadAttention> for Projections<'a> {
    fn from(module: &'a MultiHeadAttention) -> Self {
        let MultiHeadAttention { query, key, value, output, .. } = module;
        Self { query, key, value, output }
    }
}

/// What an attention is told beside its layers.
#[derive(Clone, Debug, Default)]
pub struct AttentionRules {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys.
    pub heads_kv: usize,
    /// Whether a query sees nothing behind its place, which is the last key's for the last query.
    pub causal: bool,
    /// How many keys to either side of its place a query sees.
    pub window: Option<usize>,
    /// Bounds scores smoothly.
    pub softcap: Option<f64>,
    /// Whether queries and keys are rotated by their places.
    pub rope: bool,
    /// True for keys that nobody sees: `[batch, keys]`.
    pub padding: Option<Tensor<2, Bool>>,
}

impl Textbook {
    /// Formulas with a fault.
    pub fn with(fault: Fault) -> Self {
        Self { fault: Some(fault), ..Self::default() }
    }

    /// The same formulas, with norms in the type that Burn's modules compute in.
    #[must_use]
    pub fn with_norms_of_burn(self) -> Self {
        Self { narrow_norms: true, ..self }
    }

    fn has(self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// `x W + b`
    pub fn linear<const D: usize>(self, layer: &Linear, x: Tensor<D>) -> Tensor<D> {
        let y = x.matmul(layer.weight.val().unsqueeze());
        match &layer.bias {
            Some(bias) => y + bias.val().unsqueeze::<D>(),
            None => y,
        }
    }

    /// The activation function of every element.
    pub fn activate<const D: usize>(self, function: Function, x: Tensor<D>) -> Tensor<D> {
        match function {
            Function::Gelu => x.clone() * ((x / SQRT_2).erf() + 1.0) * 0.5,
            Function::Relu => {
                let mut is_off = x.clone().lower_equal_elem(0.0);
                if self.has(Fault::ColumnMask) {
                    let dims = is_off.dims();
                    let first: [_; D] =
                        std::array::from_fn(|d| 0..if d + 1 < D { 1 } else { dims[d] });
                    is_off = is_off.slice(first).expand(dims);
                }
                x.mask_fill(is_off, 0.0)
            }
        }
    }

    /// Two layers with an activation between them.
    pub fn perceptron<const D: usize>(
        self,
        [inner, outer]: [&Linear; 2],
        function: Function,
        x: Tensor<D>,
    ) -> Tensor<D> {
        let z = match (&inner.bias, self.has(Fault::Bias)) {
            // Left out, with a gradient still.
            (Some(bias), true) => {
                x.matmul(inner.weight.val().unsqueeze()) + (bias.val() * 0.0).unsqueeze::<D>()
            }
            _ => self.linear(inner, x),
        };
        self.linear(outer, self.activate(function, z))
    }

    /// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, of f16 in f32.
    pub fn norm<const D: usize>(self, norm: &LayerNorm, x: Tensor<D>) -> Tensor<D> {
        let narrow = FloatDType::from(x.dtype());
        let wide = match narrow {
            FloatDType::F64 => narrow,
            FloatDType::BF16 if self.narrow_norms => narrow,
            _ => FloatDType::F32,
        };
        let x = x.cast(wide);
        let mean = x.clone().mean_dim(D - 1);
        let centered = if self.has(Fault::Mean) { x } else { x - mean };
        let variance = (centered.clone() * centered.clone()).mean_dim(D - 1);
        let normalized = centered / (variance + EPSILON).sqrt();
        let scaled = normalized * norm.gamma.val().cast(wide).unsqueeze::<D>();
        let shifted = match &norm.beta {
            Some(beta) => scaled + beta.val().cast(wide).unsqueeze::<D>(),
            None => scaled,
        };
        shifted.cast(narrow)
    }

    /// What the queries of `x` find among the keys of `memory`.
    pub fn attention(
        self,
        layers: Projections<'_>,
        rules: &AttentionRules,
        x: Tensor<3>,
        memory: Tensor<3>,
    ) -> Tensor<3> {
        let [batch, seq_q, _] = x.dims();
        let [_, seq_kv, _] = memory.dims();
        let q = split(self.linear(layers.query, x), rules.heads);
        let k = split(self.linear(layers.key, memory.clone()), rules.heads_kv);
        let v = split(self.linear(layers.value, memory), rules.heads_kv);
        let (q, k) = match rules.rope {
            true => {
                let early = usize::from(self.has(Fault::Position));
                (rotate(q, seq_kv - seq_q), rotate(k, early))
            }
            false => (q, k),
        };
        let head_dim = q.dims()[3];
        let [k, v] = [k, v].map(|x| repeat_heads(x, rules.heads / rules.heads_kv));
        let scale = if self.has(Fault::Scale) { 1.0 } else { 1.0 / (head_dim as f64).sqrt() };
        let scores = q.matmul(k.swap_dims(2, 3)) * scale;
        let scores = match rules.softcap {
            Some(cap) => (scores / cap).tanh() * cap,
            None => scores,
        };
        let unseen = self.unseen(rules, batch, [seq_q, seq_kv], &scores.device());
        // No exponential of it is above zero, in any type.
        let scores = scores.mask_fill(unseen.expand([batch, rules.heads, seq_q, seq_kv]), -1e4);
        let found = softmax(scores).matmul(v);
        let joined = found.swap_dims(1, 2).reshape([batch, seq_q, rules.heads * head_dim]);
        self.linear(layers.output, joined)
    }

    /// True for pairs that are left out: `[batch, 1, queries, keys]`.
    fn unseen(
        self,
        rules: &AttentionRules,
        batch: usize,
        [seq_q, seq_kv]: [usize; 2],
        device: &Device,
    ) -> Tensor<4, Bool> {
        let late = usize::from(self.has(Fault::LateKey));
        let narrow = usize::from(self.has(Fault::Window));
        let is_unseen = |pair: usize| {
            let (place, key) = (pair / seq_kv + seq_kv - seq_q, pair % seq_kv);
            let is_outside =
                rules.window.is_some_and(|keys| key + keys < place + narrow || key > place + keys);
            is_outside || rules.causal && key > place + late
        };
        let pairs = (0..seq_q * seq_kv).map(is_unseen).collect();
        let pairs: Tensor<2, Bool> =
            Tensor::from_data(TensorData::new(pairs, [seq_q, seq_kv]), device);
        let pairs = pairs.unsqueeze::<4>().expand([batch, 1, seq_q, seq_kv]);
        match &rules.padding {
            Some(padding) => {
                let padding = padding.clone().reshape([batch, 1, 1, seq_kv]);
                pairs.bool_or(padding.expand([batch, 1, seq_q, seq_kv]))
            }
            None => pairs,
        }
    }

    /// A layer of Burn's encoder.
    pub fn encoder_layer(
        self,
        layer: &theirs::TransformerEncoderLayer,
        function: Function,
        rules: &AttentionRules,
        x: Tensor<3>,
    ) -> Tensor<3> {
        let attend = |x: Tensor<3>| self.attention((&layer.mha).into(), rules, x.clone(), x);
        let pwff = [&layer.pwff.linear_inner, &layer.pwff.linear_outer];
        let feed = |x: Tensor<3>| self.perceptron(pwff, function, x);
        // Burn counts the norms in another order than they come in.
        if layer.norm_first {
            let x = x.clone() + attend(self.norm(&layer.norm_2, x));
            x.clone() + feed(self.norm(&layer.norm_1, x))
        } else {
            let x = self.norm(&layer.norm_1, x.clone() + attend(x));
            self.norm(&layer.norm_2, x.clone() + feed(x))
        }
    }

    /// Rows of a table.
    pub fn embedding(self, table: &Embedding, ids: Tensor<2, Int>) -> Tensor<3> {
        let [batch, seq] = ids.dims();
        let rows = table.weight.val().select(0, ids.reshape([batch * seq]));
        let width = rows.dims()[1];
        rows.reshape([batch, seq, width])
    }

    /// The mean of minus the logarithms of the targets' probabilities.
    pub fn cross_entropy(self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let rows = logits.dims()[0];
        let shifted = logits.clone() - logits.detach().max_dim(1);
        let sums = shifted.clone().exp().sum_dim(1).log();
        let picked = shifted.gather(1, targets.reshape([rows, 1]));
        (sums - picked).mean()
    }
}

/// Exponentials over their sum, along the last dimension.
fn softmax(scores: Tensor<4>) -> Tensor<4> {
    let shifted = scores.clone() - scores.detach().max_dim(3);
    let exponentials = shifted.exp();
    exponentials.clone() / exponentials.sum_dim(3)
}

/// `[batch, seq, heads * head_dim]` as `[batch, heads, seq, head_dim]`.
fn split(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch, seq, heads, width / heads]).swap_dims(1, 2)
}

/// Each head so many times, side by side.
fn repeat_heads(x: Tensor<4>, times: usize) -> Tensor<4> {
    let heads = x.dims()[1];
    let head = |index: usize| x.clone().narrow(1, index / times, 1);
    Tensor::cat((0..heads * times).map(head).collect(), 1)
}

/// Neighbors of a head as coordinates of points, each turned by its own angle a place; the first is at
/// place `start`.
fn rotate(x: Tensor<4>, start: usize) -> Tensor<4> {
    let [batch, heads, seq, head_dim] = x.dims();
    let options = (&x.device(), x.dtype());
    let numbers = |numbers: Vec<f64>, shape: [usize; 2]| -> Tensor<2> {
        Tensor::from_data(TensorData::new(numbers, shape), options)
    };
    let half = head_dim / 2;
    let exponents =
        numbers((0..half).map(|i| 2.0 * i as f64 / head_dim as f64).collect(), [1, half]);
    let places = numbers((start..start + seq).map(|place| place as f64).collect(), [seq, 1]);
    let angles = places * (exponents * -THETA.ln()).exp();
    let points = x.reshape([batch, heads, seq, half, 2]);
    let [a, b] = [0, 1].map(|i| points.clone().narrow(4, i, 1).reshape([batch, heads, seq, half]));
    let [sin, cos]: [Tensor<4>; 2] = [angles.clone().sin(), angles.cos()].map(Tensor::unsqueeze);
    let turned: Tensor<5> = Tensor::stack(
        vec![a.clone() * cos.clone() - b.clone() * sin.clone(), a * sin + b * cos],
        4,
    );
    turned.reshape([batch, heads, seq, head_dim])
}
