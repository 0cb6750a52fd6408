//! Convolutional networks of Burn's modules with less kept and moved: normalization with what follows it, as one
//! operation each way.
//!
//! A block of a residual network is a convolution, a [`BatchNorm`], a sum and a `ReLU`. By modules, automatic
//! differentiation keeps what comes of each. [`batch_norm`] keeps what was normalized and the end result, which the next
//! convolution keeps anyway. Parameters stay in Burn's modules, and so do records:
//!
//! ```
//! use blackburn_nn::vision::conv_norm;
//! use burn::{
//!     nn::{BatchNormConfig, PaddingConfig2d, conv::Conv2dConfig},
//!     prelude::*,
//! };
//!
//! let device = Device::flex().autodiff();
//! let conv = Conv2dConfig::new([4, 4], [3, 3]).with_padding(PaddingConfig2d::Same).init(&device);
//! let norm = BatchNormConfig::new(4).init(&device);
//! let x = Tensor::<4>::ones([2, 4, 8, 8], &device);
//!
//! // Instead of `relu(norm.forward(conv.forward(x.clone())) + x)`:
//! let y = conv_norm(&conv, &norm, x.clone(), Some(x), true);
//! assert_eq!(y.dims(), [2, 4, 8, 8]);
//! ```
//!
//! Statistics of a batch are in f32 whatever the type of the images. Running statistics have the type that they are
//! stored in: a `PrecisionPolicy` stores them in 16 bits, as Burn's own module needs them, unless
//! `with_f32_statistics` says that all batch norms are called through here.

use blackburn_backend::batch_norm::{self as op, BatchNormCall, Normalized};
use burn::{
    nn::{BatchNorm, conv::Conv2d},
    tensor::{Tensor, activation::relu as relu_of},
};

/// `relu(norm(x) + residual)`; the residual and the `ReLU` may be left out. In training the batch's own statistics count,
/// and the running ones of `norm` are updated, as by [`BatchNorm::forward`].
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x, residual, result | `[batch, channels, ..]` | f32, f16, bf16; on the CPU f64, too |
///
/// # Panics
///
/// As [`batch_norm`](op::batch_norm) of the backend does, for example when x does not have the channels of `norm`.
pub fn batch_norm<const D: usize>(
    norm: &BatchNorm,
    x: Tensor<D>,
    residual: Option<Tensor<D>>,
    relu: bool,
) -> Tensor<D> {
    if !(x.device().is_autodiff() && norm.training.is_enabled()) {
        return with_running(norm, x, residual, relu);
    }
    let device = x.device().without_autodiff();
    let call = BatchNormCall {
        x,
        gamma: norm.gamma.val(),
        beta: norm.beta.val(),
        residual,
        epsilon: norm.epsilon,
        relu,
    };
    let Normalized { y, mean, variance } = op::batch_norm(call);
    let before = [&norm.running_mean, &norm.running_var]
        .map(|state| state.value_sync().without_autodiff().to_device(&device));
    let [mean, variance] = op::running_statistics([mean, variance], before, norm.momentum);
    norm.running_mean.update(Tensor::from_inner(mean));
    norm.running_var.update(Tensor::from_inner(variance));
    y
}

/// By the statistics of all batches so far. In the type of x, whatever they are stored in.
fn with_running<const D: usize>(
    norm: &BatchNorm,
    x: Tensor<D>,
    residual: Option<Tensor<D>>,
    relu: bool,
) -> Tensor<D> {
    let (device, dtype) = (x.device(), x.dtype());
    let of = |tensor: Tensor<1>| tensor.to_device(&device).cast(dtype);
    let y = burn::tensor::module::batch_norm(
        x,
        of(norm.gamma.val()),
        of(norm.beta.val()),
        of(norm.running_mean.value()),
        of(norm.running_var.value()),
        norm.epsilon,
    );
    let y = match residual {
        Some(residual) => y + residual,
        None => y,
    };
    if relu { relu_of(y) } else { y }
}

/// [`batch_norm`] of a convolution's result: a layer of a convolutional network.
///
/// # Panics
///
/// As [`Conv2d::forward`] and [`batch_norm`].
pub fn conv_norm(
    conv: &Conv2d,
    norm: &BatchNorm,
    x: Tensor<4>,
    residual: Option<Tensor<4>>,
    relu: bool,
) -> Tensor<4> {
    batch_norm(norm, conv.forward(x), residual, relu)
}
