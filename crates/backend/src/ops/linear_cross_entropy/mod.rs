//! A linear layer and the cross-entropy of its outputs, of which never more than a few rows exist.
//!
//! ```text
//! logits = x W + b        loss = sum_r share[r] loss_r(logits[r, :], t[r])
//! dx = dlogits W^T        dW = x^T dlogits        db = sum_r dlogits[r, :]
//! ```
//!
//! The layer in front of a loss over a large vocabulary makes the largest tensor of a model. Here it is made
//! in chunks of rows: of each, logits, losses and the gradient of the logits, which becomes its part of the
//! gradients of x, W and b at once, so that the next chunk may have its memory. The backward pass
//! multiplies what the forward pass has left by the gradient that comes in.
//!
//! | | unchunked | in chunks |
//! |---|---|---|
//! | logits and their gradient | rows by classes, from the forward pass to the backward pass | a chunk's |
//! | gradients | from the backward pass on | from the forward pass on, that of W in f32 |
//! | products | 3 | 3, each in parts; W is read again for each chunk |
//!
//! Products are those of the type of x and W, and rounded to it, chunk by chunk; logits are in that type,
//! and losses in f32 (f64 for f64), as [`cross_entropy`](crate::cross_entropy) has them. The gradients of W
//! and b are added up over the chunks in f32 and rounded once, in the backward pass. Until then gradients
//! are those of a loss multiplied by a power of two, as many as there are rows, up to 1024: in f16 a part
//! of a mean over many rows would be too small a number.
//!
//! Without autodiff, and for what is not to be differentiated, no gradient is computed.
//!
//! Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989, its
//! `FusedLinearCrossEntropy`.

mod layer;

pub use layer::{Inputs, LinearCrossEntropyOps, Settings};

use crate::ops::cross_entropy::{CrossEntropyOptions, checked_options, narrowed};
use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor},
};

const OP: &str = "linear_cross_entropy";

/// Options of [`linear_cross_entropy`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinearCrossEntropyOptions {
    /// Options of the cross-entropy.
    pub cross_entropy: CrossEntropyOptions,
    /// Rows of a chunk, at least 1; without a number [`chunk_rows`].
    pub chunk_rows: Option<usize>,
}

/// So many rows have about as many logits as x has elements, but at least 1024: with fewer, products read
/// the weight more often than they compute with it.
pub fn chunk_rows(rows: usize, width: usize, classes: usize) -> usize {
    const LEAST: usize = 1024;
    let as_x = (rows * width).div_ceil(classes.max(1)).next_power_of_two();
    as_x.max(LEAST).min(rows.max(1))
}

/// The sum over rows of `share` times the cross-entropy of `softmax(x weight + bias)` with the row's target.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x | `[rows, width]` | f32, f16, bf16, f64 |
/// | weight | `[width, classes]` | that of x |
/// | bias | `[classes]` | that of x |
/// | targets | `[rows]` | any integer |
/// | share | `[rows]` | any float: 1 / rows each for a mean; it has no gradient |
/// | result | `[1]` | f32; f64 for f64 |
///
/// The result is differentiable in x, weight and bias. Of rows that are ignored, and of targets that are no
/// class, [`cross_entropy`](crate::ops::cross_entropy::cross_entropy) tells.
///
/// # Panics
///
/// With a message that names the argument: where a dimension is zero, tensors do not go together, or an
/// option is out of its range.
pub fn linear_cross_entropy(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    targets: Tensor<1, Int>,
    share: Tensor<1>,
    options: LinearCrossEntropyOptions,
) -> Tensor<1> {
    let settings = checked(&x, &weight, bias.as_ref(), &targets, &share, options);
    let targets = narrowed(targets).into_dispatch();
    let inputs = Inputs::<Dispatch> {
        x: x.into_dispatch(),
        weight: weight.into_dispatch(),
        bias: bias.map(Tensor::into_dispatch).into(),
        share: share.into_dispatch(),
    };
    let loss = <Dispatch as LinearCrossEntropyOps>::linear_cross_entropy(inputs, targets, settings);
    Tensor::from_dispatch(loss)
}

fn checked(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    targets: &Tensor<1, Int>,
    share: &Tensor<1>,
    options: LinearCrossEntropyOptions,
) -> Settings {
    let [rows, width] = x.dims();
    let [inputs, classes] = weight.dims();
    let dtype = x.dtype();
    if rows == 0 || width == 0 {
        refuse("x", "at least 1 in every dimension", format!("shape {:?}", x.dims()));
    }
    if !matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
        refuse("x", "f32, f16, bf16 or f64", format!("{dtype:?}"));
    }
    if inputs != width || classes == 0 {
        let expected = format!("shape [{width}, classes], as x is wide");
        refuse("weight", &expected, format!("shape {:?}", weight.dims()));
    }
    let of_type = [("weight", Some(weight.dtype())), ("bias", bias.map(Tensor::dtype))];
    for (name, actual) in of_type {
        if let Some(actual) = actual.filter(|actual| *actual != dtype) {
            refuse(name, &format!("{dtype:?}, as x is"), format!("{actual:?}"));
        }
    }
    let lengths = [
        ("bias", bias.map(Tensor::dims), classes, "class"),
        ("targets", Some(targets.dims()), rows, "row of x"),
        ("share", Some(share.dims()), rows, "row of x"),
    ];
    for (name, actual, length, each) in lengths {
        if let Some(actual) = actual.filter(|actual| *actual != [length]) {
            let expected = format!("shape [{length}], one for each {each}");
            refuse(name, &expected, format!("shape {actual:?}"));
        }
    }
    let device = x.device().without_autodiff();
    let devices = [
        ("weight", Some(weight.device())),
        ("bias", bias.map(Tensor::device)),
        ("targets", Some(targets.device())),
        ("share", Some(share.device())),
    ];
    for (name, actual) in devices {
        if let Some(actual) = actual.filter(|actual| actual.clone().without_autodiff() != device) {
            refuse(name, &format!("{device:?}, as x is on"), format!("{actual:?}"));
        }
    }
    let chunk_rows = options.chunk_rows.unwrap_or_else(|| chunk_rows(rows, width, classes));
    if chunk_rows == 0 {
        refuse("chunk_rows", "at least 1", "0".into());
    }
    Settings { cross_entropy: checked_options(options.cross_entropy), chunk_rows }
}

fn refuse(argument: &str, expected: &str, actual: String) -> ! {
    panic!("{OP}: argument `{argument}`: expected {expected}, got {actual}")
}

#[cfg(test)]
mod tests {
    use super::chunk_rows;

    #[test]
    fn a_chunk_has_as_many_logits_as_x_has_elements_or_1024_rows() {
        assert_eq!(chunk_rows(8192, 768, 50_257), 1024);
        assert_eq!(chunk_rows(65_536, 8192, 128_256), 8192);
        assert_eq!(chunk_rows(300, 768, 50_257), 300);
        assert_eq!(chunk_rows(1 << 20, 64, 8), 1 << 20);
    }
}
