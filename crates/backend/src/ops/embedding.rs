//! Embeddings whose gradient adds up rows in parallel, for any number of indices.
//!
//! Burn's own gradient walks over all indices, one after the other, for each column. The forward pass is
//! Burn's.
//!
//! Unmodified modules have the same gradient: a fusion provider finds Burn's in the stream and replaces it.

#[cfg(feature = "gpu")]
use crate::{
    declined::served,
    tensors::{Location, contiguous, contiguous_buffer, zeros},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    embedding::{EmbeddingProblem, embedding_backward, embedding_backward_onto},
};
use burn::{
    backend::{
        Autodiff, Backend, Dispatch, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Device, IndexingUpdateOp, Int, Shape, Tensor},
};
#[cfg(feature = "gpu")]
use burn_backend::cubecl::dtype_to_elem_type;
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// The gradient by itself. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait EmbeddingPrimitives: Backend {
    /// `[rows, columns]`, the sums of the rows of `dy` `[batch, seq, columns]` that belong to the same
    /// index `[batch, seq]`.
    #[fusion(dtype = dy, shape = Shape::new([*rows, dy[2]]))]
    fn embedding_rows_gradient(
        dy: FloatTensor<Self>,
        index: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl EmbeddingPrimitives for burn::backend::Flex {
    fn embedding_rows_gradient(
        dy: FloatTensor<Self>,
        index: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        by_selection::<Self>(dy, index, rows)
    }
}

#[cfg(feature = "gpu")]
impl EmbeddingPrimitives for CubeBackend {
    fn embedding_rows_gradient(
        dy: FloatTensor<Self>,
        index: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let shape = Shape::new([rows, dy.shape()[2]]);
        let dw = row_sums(dy.clone(), index.clone(), shape);
        served("BlackburnEmbedding", dw).unwrap_or_else(|| by_selection::<Self>(dy, index, rows))
    }
}

/// `shape` is `[rows, columns]`; the sums of the rows of `dy` that belong to the same index, of which there
/// are as many.
///
/// # Errors
///
/// As the kernel has them.
#[cfg(feature = "gpu")]
pub(crate) fn row_sums(
    dy: CubeTensor,
    index: CubeTensor,
    shape: Shape,
) -> Result<CubeTensor, KernelError> {
    let (client, columns) = (dy.client.clone(), shape[1]);
    let dw = zeros(&Location::of(&dy), shape, dy.dtype);
    let buffers = [index, dy, dw.clone()].map(contiguous_buffer);
    let [of_index, of_dy, of_dw] = &buffers;
    embedding_backward(&client, of_index, of_dy, of_dw, columns)?;
    Ok(dw)
}

/// As [`row_sums`], added to the rows of `gradient`, of the type of `dy`. It is written to where nobody else holds its
/// memory and its rows follow each other; else it is copied first.
///
/// # Errors
///
/// As the kernel has them, which [`check`] tells beforehand.
#[cfg(feature = "gpu")]
pub(crate) fn add_row_sums(
    dy: CubeTensor,
    index: CubeTensor,
    gradient: CubeTensor,
) -> Result<CubeTensor, KernelError> {
    let (client, columns) = (dy.client.clone(), gradient.meta.shape()[1]);
    let gradient = contiguous(gradient);
    let dw = if gradient.can_mut() { gradient } else { gradient.copy() };
    let buffers = [index, dy, dw.clone()].map(contiguous_buffer);
    let [of_index, of_dy, of_dw] = &buffers;
    embedding_backward_onto(&client, of_index, of_dy, of_dw, columns)?;
    Ok(dw)
}

/// Whether the kernel serves a gradient of that shape.
///
/// # Errors
///
/// As the kernel has them.
#[cfg(feature = "gpu")]
pub(crate) fn check(dy: &CubeTensor, index: &CubeTensor, shape: &Shape) -> Result<(), KernelError> {
    // Memory is not looked at: that of the result, which there is none of yet, is `dy`'s.
    let buffer = |tensor: &CubeTensor, shape: &Shape| Buffer {
        handle: tensor.handle.clone(),
        elements: shape.num_elements(),
        dtype: dtype_to_elem_type(tensor.dtype),
    };
    let [of_index, of_dy] = [index, dy].map(|it| buffer(it, it.meta.shape()));
    EmbeddingProblem::new(&of_index, &of_dy, &buffer(dy, shape), shape[1]).map(drop)
}

/// By a backend's own operations.
fn by_selection<B: Backend>(
    dy: FloatTensor<B>,
    index: IntTensor<B>,
    rows: usize,
) -> FloatTensor<B> {
    let (shape, dtype, device) = (dy.shape(), dy.dtype(), dy.device());
    let [places, columns] = [shape[0] * shape[1], shape[2]];
    let dy = B::float_reshape(dy, Shape::new([places, columns]));
    let index = B::int_reshape(index, Shape::new([places]));
    let zeros = B::float_zeros(Shape::new([rows, columns]), &device, dtype.into());
    B::float_select_assign(zeros, 0, index, dy, IndexingUpdateOp::Add)
}

/// An embedding, differentiable in the weights.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait EmbeddingOps: Backend {
    /// Rows of weights `[rows, columns]` by index `[batch, seq]`.
    fn embedding_rows(weights: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        Self::embedding(weights, index)
    }
}

#[cfg(feature = "flex")]
impl EmbeddingOps for burn::backend::Flex {}

#[cfg(feature = "gpu")]
impl EmbeddingOps for CubeBackend {}

#[cfg(feature = "gpu")]
impl<B: burn_fusion::FusionBackend + EmbeddingPrimitives> EmbeddingOps for burn_fusion::Fusion<B> {}

impl<B: EmbeddingPrimitives, C: CheckpointStrategy> EmbeddingOps for Autodiff<B, C> {
    fn embedding_rows(weights: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        let (weights, node) = weights.into_parts();
        let rows = weights.shape()[0];
        match Embedding.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                prep.finish((index.clone(), rows), B::embedding(weights, index))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::embedding(weights, index)),
        }
    }
}

#[derive(Debug)]
struct Embedding;

impl<B: EmbeddingPrimitives> Backward<B, 1> for Embedding {
    /// The index, and how many rows the weights have.
    type State = (IntTensor<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        let Some(node) = parent else { return };
        let (index, rows) = ops.state;
        grads.register::<B>(node.id, B::embedding_rows_gradient(dy, index, rows));
    }
}

/// Rows of `weights` by index: `[batch, seq, columns]` in the type of the weights, differentiable in them.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | weights | `[rows, columns]` | any float; the gradient's kernel takes f32, f16 and bf16 |
/// | index | `[batch, seq]`, from 0 to `rows - 1` | any integer; the gradient's kernel takes i32 |
///
/// On GPUs the gradient is summed in f32 and rounded once. The order of the sum depends on the indices alone, so
/// results repeat to the bit. Indices that name no row add nothing to it; the forward pass does not check
/// them, as Burn's does not. Tensors of 2^31 elements or more are left to Burn.
///
/// # Panics
///
/// When the two are on different devices.
pub fn embedding(weights: Tensor<2>, index: Tensor<2, Int>) -> Tensor<3> {
    let on = |device: Device| device.without_autodiff();
    assert!(
        on(weights.device()) == on(index.device()),
        "embedding: argument `index`: expected a tensor on {:?}, as weights are, got one on {:?}",
        on(weights.device()),
        on(index.device())
    );
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::embedding_rows(
        weights.into_dispatch(),
        index.into_dispatch(),
    ))
}
