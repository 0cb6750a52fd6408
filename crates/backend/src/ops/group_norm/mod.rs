//! Normalization of groups of channels of each sample, with a hand-written gradient. With a group for each channel it
//! is instance norm.
//!
//! ```text
//! y = gamma (x - mean) / sqrt(variance + epsilon) + beta      over the channels of a group, and their pixels
//! ```
//!
//! By Burn's operations what is less its mean and what is normalized are kept for the backward pass, each as large as
//! the image and in another order than the images of a convolution. Here x is kept.
//!
//! | device | x | computed in |
//! |---|---|---|
//! | GPUs | f32, f16, bf16 | f32, rounded once |
//! | the CPU (Flex) | those and f64 | f32, and f64 for f64 |
//!
//! The kernels, and what they do not serve, are described in `blackburn_kernels::group_norm`.
//!
//! Source: Wu and He, "Group Normalization", arXiv:1803.08494.

#[cfg(feature = "gpu")]
mod cube;
mod host;
mod layer;
mod primitives;

pub use layer::GroupNormOps;
pub use primitives::{Gradients, GroupNormPrimitives, Inputs, Output, Saved, Settings};
#[cfg(feature = "gpu")]
pub use primitives::{GradientsMetadata, InputsMetadata, OutputMetadata, SavedMetadata};

use burn::{
    backend::Dispatch,
    tensor::{DType, Tensor},
};

/// What is normalized, and how.
#[derive(Clone, Debug)]
pub struct GroupNormCall<const D: usize> {
    /// `[batch, channels, ..]`, in f32, f16 or bf16; on the CPU f64, too.
    pub x: Tensor<D>,
    /// gamma and beta, `[channels]`, of any float type, if there are any.
    pub affine: Option<[Tensor<1>; 2]>,
    /// Groups, which divide the channels.
    pub groups: usize,
    /// A number from 0, added to the variance.
    pub epsilon: f64,
}

/// Normalizes groups of channels. The result is in the shape and the type of x, and differentiable in all tensors.
///
/// # Panics
///
/// With a message that names the argument, before anything runs: when shapes, dtypes or devices do not go together, x
/// holds nothing, or groups or epsilon are out of their range. While it runs, when a kernel cannot be launched.
pub fn group_norm<const D: usize>(call: GroupNormCall<D>) -> Tensor<D> {
    check(&call);
    let GroupNormCall { x, affine, groups, epsilon } = call;
    let [gamma, beta] = match affine {
        Some(both) => both.map(|parameter| Some(parameter.into_dispatch())),
        None => [None, None],
    };
    let inputs = Inputs { x: x.into_dispatch(), gamma: gamma.into(), beta: beta.into() };
    let settings = Settings { groups, epsilon };
    Tensor::from_dispatch(<Dispatch as GroupNormOps>::group_norm(inputs, settings))
}

fn check<const D: usize>(call: &GroupNormCall<D>) {
    let GroupNormCall { x, affine, groups, epsilon } = call;
    let refuse = |argument: &str, expected: String, actual: String| -> ! {
        panic!("group_norm: argument `{argument}`: expected {expected}, got {actual}")
    };
    if D < 2 {
        refuse("x", "a batch of channels: at least 2 dimensions".into(), format!("{D}"));
    }
    if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::F64) {
        refuse("x", "f32, f16, bf16 or f64".into(), format!("{:?}", x.dtype()));
    }
    if x.dims().contains(&0) {
        refuse("x", "numbers to take the statistics of".into(), format!("{:?}", x.dims()));
    }
    let channels = x.dims()[1];
    if *groups == 0 || !channels.is_multiple_of(*groups) {
        let expected = format!("a number that divides the {channels} channels of x");
        refuse("groups", expected, groups.to_string());
    }
    for (argument, parameter) in ["gamma", "beta"].into_iter().zip(affine.iter().flatten()) {
        if parameter.dims() != [channels] {
            let expected = format!("[{channels}], the channels of x, as its shape");
            refuse(argument, expected, format!("{:?}", parameter.dims()));
        }
        if !parameter.dtype().is_float() {
            refuse(argument, "floats".into(), format!("{:?}", parameter.dtype()));
        }
        if parameter.device() != x.device() {
            let expected = format!("{:?}, as x is on", x.device());
            refuse(argument, expected, format!("{:?}", parameter.device()));
        }
    }
    if !(*epsilon >= 0.0 && epsilon.is_finite()) {
        refuse("epsilon", "a number from 0".into(), epsilon.to_string());
    }
}
