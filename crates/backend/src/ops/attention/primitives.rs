//! What a backend has to be able to do: attention and its gradients, without a graph.

use super::{Dropout, Window};
use crate::tensors::Optional;
#[cfg(feature = "gpu")]
use crate::tensors::OptionalMetadata;
use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{BoolTensor, FloatTensor},
};
#[cfg(feature = "gpu")]
use burn::{
    backend::fusion::custom::TensorSpec,
    tensor::{DType, Shape},
};
use std::sync::Arc;

/// The tensors that attention reads.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Inputs<B: Backend> {
    /// `[batch, heads_q, seq_q, head_dim]`; packed sequences are one of all rows.
    pub q: FloatTensor<B>,
    /// `[batch, heads_kv, seq_kv, head_dim]`, in the type of q.
    pub k: FloatTensor<B>,
    /// As k.
    pub v: FloatTensor<B>,
    /// Which pairs are left out.
    #[extension_type]
    pub mask: Mask<B>,
    /// What is added to the scores: `[batch, heads_q, seq_q, seq_kv]`, each of the first three or 1; in the
    /// type of q.
    #[extension_type]
    pub bias: Optional<B>,
}

/// The pairs of queries and keys that are left out.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub enum Mask<B: Backend> {
    /// No pair is.
    Absent,
    /// True for pairs that are: `[batch, heads_q, seq_q, seq_kv]`, each of the first three or 1.
    Present(BoolTensor<B>),
}

/// What attention returns, and its backward pass reads again.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Output<B: Backend> {
    /// In the shape and the type of q.
    pub out: FloatTensor<B>,
    /// `[2, batch, heads_q, seq_q]`, the logarithms of the sums of `exp(score)` in two parts: the largest
    /// score of each query, and the logarithm of the sum of `exp(score - largest)`. In f32, and f64 for
    /// f64.
    pub lse: FloatTensor<B>,
}

/// The gradients of attention.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// The gradient of q.
    pub dq: FloatTensor<B>,
    /// The gradient of k.
    pub dk: FloatTensor<B>,
    /// The gradient of v.
    pub dv: FloatTensor<B>,
    /// The gradient of the bias, if it was asked for, in the type of `lse`: for every pair,
    /// `[batch, heads_q, seq_q, seq_kv]`, with 1 in the place of `batch` where the bias has 1.
    #[extension_type]
    pub dbias: Optional<B>,
}

/// The arguments of attention that are not tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The factor of the products of queries and keys.
    pub scale: f64,
    /// Which keys a query sees; causal attention has 0 on its right.
    pub window: Window,
    /// The bound of the scores.
    pub softcap: Option<f64>,
    /// Weights that are left out at random.
    pub dropout: Option<Dropout>,
    /// Where sequences begin, if they are packed.
    pub sequences: Option<Arc<Sequences>>,
}

/// Where packed sequences begin, and the end of the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequences {
    /// Rows of q.
    pub q: Vec<usize>,
    /// Rows of k and v.
    pub kv: Vec<usize>,
}

/// The operations under attention. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait AttentionPrimitives: Backend {
    /// Attention.
    #[fusion(meta = output_of)]
    fn attention_forward(
        #[extension_type] inputs: Inputs<Self>,
        settings: Settings,
    ) -> Output<Self>;

    /// Its gradients, given that of the output.
    #[fusion(meta = gradients_of)]
    fn attention_backward(
        #[extension_type] inputs: Inputs<Self>,
        #[extension_type] output: Output<Self>,
        dout: FloatTensor<Self>,
        settings: Settings,
        wants_bias: bool,
    ) -> Gradients<Self>;
}

#[cfg(feature = "gpu")]
fn output_of(inputs: &InputsMetadata, _settings: &Settings) -> OutputMetadata {
    let q = &inputs.q;
    let lse = Shape::new([2, q.shape[0], q.shape[1], q.shape[2]]);
    OutputMetadata { out: q.clone(), lse: TensorSpec::new(lse, DType::F32) }
}

#[cfg(feature = "gpu")]
fn gradients_of(
    inputs: &InputsMetadata,
    _output: &OutputMetadata,
    _dout: &TensorSpec,
    _settings: &Settings,
    wants_bias: &bool,
) -> GradientsMetadata {
    let InputsMetadata { q, k, v, bias, .. } = inputs;
    let pairs = |batches| Shape::new([batches, q.shape[1], q.shape[2], k.shape[2]]);
    let dbias = match bias {
        OptionalMetadata::Present(bias) if *wants_bias => {
            Some(TensorSpec::new(pairs(bias.shape[0]), DType::F32))
        }
        _ => None,
    };
    let dbias = dbias.into();
    GradientsMetadata { dq: q.clone(), dk: k.clone(), dv: v.clone(), dbias }
}
