//! Embeddings whose gradient adds up rows in parallel, for any number of indices.
//!
//! Burn's own gradient walks over all indices, one after the other, for each column. A fusion provider finds it in the
//! stream, of unmodified modules, too, and replaces it. The forward pass is Burn's.

#[cfg(feature = "gpu")]
use crate::tensors::{Location, contiguous, contiguous_buffer, zeros};
#[cfg(feature = "gpu")]
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    embedding::{EmbeddingProblem, embedding_backward, embedding_backward_onto},
};
#[cfg(feature = "gpu")]
use burn::tensor::Shape;
use burn::tensor::{Device, Int, Tensor, module};
#[cfg(feature = "gpu")]
use burn_backend::cubecl::dtype_to_elem_type;
#[cfg(feature = "gpu")]
use burn_cubecl::tensor::CubeTensor;

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
    module::embedding(weights, index)
}
