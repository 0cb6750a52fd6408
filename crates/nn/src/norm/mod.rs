//! The norms of `burn::nn`. [`LayerNorm`] and [`RmsNorm`] run by one kernel forward and two backward; [`GroupNorm`] and
//! [`InstanceNorm`] go over their input twice forward and twice backward.
//!
//! Functions run Burn's own modules by the same kernels. Call them instead of `forward`. They take the modules of
//! this crate too, and two of them add a residual in the same pass.
//!
//! Under automatic differentiation Burn decomposes a norm into some ten operations and keeps several tensors of
//! the size of its input. [`blackburn_backend::layer_norm`] keeps one, and reads it once. The modules stay Burn's,
//! and so do their records:
//!
//! ```
//! use blackburn_nn::norm;
//! use burn::{nn::LayerNormConfig, prelude::*};
//!
//! let device = Device::flex();
//! let module = LayerNormConfig::new(16).init(&device);
//! let x = Tensor::<3>::ones([2, 5, 16], &device);
//!
//! // Instead of `module.forward(x + residual)`, with the sum that goes on to the next layer:
//! let (sum, y) = norm::add_layer_norm(&module, x.clone(), x);
//! assert_eq!((sum.dims(), y.dims()), ([2, 5, 16], [2, 5, 16]));
//! ```
//!
//! The result has the input's dtype, whatever the parameters have: in mixed precision either may be in 16 bits.
//! Everything is computed in f32.

mod groups;
mod modules;
mod normalization;

pub use burn::nn::norm::*;
pub use groups::{GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig};
pub use modules::{LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig};
pub use normalization::{Normalization, NormalizationConfig};

use crate::dropout::drawn;
use blackburn_backend::{
    dropout::add_dropout,
    group_norm::{self, GroupNormCall},
    layer_norm as op,
};
use burn::{
    module::{Content, DisplaySettings, ModuleDisplay, Param},
    nn as burns,
    tensor::Tensor,
};

/// Normalizes `x`, `[.., d_model]`, by `module`.
///
/// # Panics
///
/// As [`blackburn_backend::layer_norm::layer_norm`] does, for example if the last dimension is not `d_model`.
pub fn layer_norm<const D: usize>(module: &burns::LayerNorm, x: Tensor<D>) -> Tensor<D> {
    match epsilon(module) {
        Some(epsilon) => op::layer_norm(x, module.gamma.val(), beta(module), epsilon),
        None => module.forward(x),
    }
}

/// Returns `x + residual` and its norm by `module`. `x` and `residual` have one shape, `[.., d_model]`, and one
/// dtype.
///
/// # Panics
///
/// As [`layer_norm`], and if `x` and `residual` differ in shape or dtype.
pub fn add_layer_norm<const D: usize>(
    module: &burns::LayerNorm,
    x: Tensor<D>,
    residual: Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    add_layer_norm_of(module, x, op::Addend { residual, bias: None, dropout: None })
}

/// Returns `x + dropout.forward(residual)` and its norm by `module`, as [`add_layer_norm`] does: dropout needs no pass of
/// its own.
///
/// # Panics
///
/// As [`add_layer_norm`].
pub fn add_dropout_layer_norm<const D: usize>(
    module: &burns::LayerNorm,
    dropout: &burns::Dropout,
    x: Tensor<D>,
    residual: Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    let dropout = drawn(dropout, &x.device());
    add_layer_norm_of(module, x, op::Addend { residual, bias: None, dropout })
}

fn add_layer_norm_of<const D: usize>(
    module: &burns::LayerNorm,
    x: Tensor<D>,
    addend: op::Addend<D>,
) -> (Tensor<D>, Tensor<D>) {
    match epsilon(module) {
        Some(epsilon) => {
            op::layer_norm_of_sum(x, addend, module.gamma.val(), beta(module), epsilon)
        }
        None => {
            let sum = added(x, addend);
            (sum.clone(), module.forward(sum))
        }
    }
}

fn added<const D: usize>(x: Tensor<D>, addend: op::Addend<D>) -> Tensor<D> {
    let op::Addend { residual, bias, dropout } = addend;
    let residual = match bias {
        Some(bias) => residual + bias.unsqueeze(),
        None => residual,
    };
    match dropout {
        Some(dropout) => add_dropout(x, residual, dropout),
        None => x + residual,
    }
}

/// Normalizes `x`, `[.., d_model]`, by `module`.
///
/// # Panics
///
/// As [`layer_norm`].
pub fn rms_norm<const D: usize>(module: &burns::RmsNorm, x: Tensor<D>) -> Tensor<D> {
    op::rms_norm(x, module.gamma.val(), module.epsilon)
}

/// Returns `x + residual` and its norm by `module`, like [`add_layer_norm`].
///
/// # Panics
///
/// As [`add_layer_norm`].
pub fn add_rms_norm<const D: usize>(
    module: &burns::RmsNorm,
    x: Tensor<D>,
    residual: Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    op::add_rms_norm(x, residual, module.gamma.val(), module.epsilon)
}

/// Normalizes groups of the channels of `x`, `[batch, channels, ..]`, by `module`.
///
/// # Panics
///
/// As [`blackburn_backend::group_norm::group_norm`] does, for example if `x` has other channels than `module`.
pub fn group_norm<const D: usize>(module: &burns::GroupNorm, x: Tensor<D>) -> Tensor<D> {
    let affine = affine(module.affine, module.gamma.as_ref(), module.beta.as_ref());
    normalize_groups(x, affine, module.num_channels, module.num_groups, module.epsilon)
}

/// Normalizes each channel of each sample of `x`, `[batch, channels, ..]`, by `module`.
///
/// # Panics
///
/// As [`group_norm()`].
pub fn instance_norm<const D: usize>(module: &burns::InstanceNorm, x: Tensor<D>) -> Tensor<D> {
    let affine = affine(module.affine, module.gamma.as_ref(), module.beta.as_ref());
    normalize_groups(x, affine, module.num_channels, module.num_channels, module.epsilon)
}

/// gamma and beta where they count, as in Burn's modules.
fn affine(
    counts: bool,
    gamma: Option<&Param<Tensor<1>>>,
    beta: Option<&Param<Tensor<1>>>,
) -> Option<[Tensor<1>; 2]> {
    match (counts, gamma, beta) {
        (false, ..) => None,
        (true, Some(gamma), Some(beta)) => Some([gamma.val(), beta.val()]),
        (true, ..) => panic!("a norm of groups says that it has gamma and beta, but lacks one"),
    }
}

fn normalize_groups<const D: usize>(
    x: Tensor<D>,
    affine: Option<[Tensor<1>; 2]>,
    channels: usize,
    groups: usize,
    epsilon: f64,
) -> Tensor<D> {
    if x.dims().get(1) != Some(&channels) {
        let expected = format!("[batch, {channels}, ..]");
        crate::refuse("a norm of groups", "input", &expected, format!("{:?}", x.dims()));
    }
    group_norm::group_norm(GroupNormCall { x, affine, groups, epsilon })
}

fn beta(module: &burns::LayerNorm) -> Option<Tensor<1>> {
    module.beta.as_ref().map(Param::val)
}

/// What `module` adds to the variance: a private field, which its description tells in full. A module
/// that does not tell it runs by Burn's operations.
fn epsilon(module: &burns::LayerNorm) -> Option<f64> {
    let described = module.custom_content(Content::new(DisplaySettings::new()))?;
    let told = described.attributes.iter().find(|attribute| attribute.name == "epsilon")?;
    told.value.trim().parse().ok()
}

/// A residual stream: tokens, and a summand that the next norm adds to them in its own pass, without what dropout leaves
/// out of it.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    x: Tensor<3>,
    addend: Option<op::Addend<3>>,
}

/// What a layer adds to its tokens. Its last linear layer leaves its bias out, so that the norm of the sum adds it, and
/// makes its gradient.
pub(crate) struct Addend {
    pub(crate) rows: Tensor<3>,
    pub(crate) bias: Option<Tensor<1>>,
}

impl Addend {
    fn dropped(self, dropout: &burns::Dropout) -> op::Addend<3> {
        let Self { rows, bias } = self;
        let dropout = drawn(dropout, &rows.device());
        op::Addend { residual: rows, bias, dropout }
    }
}

/// The norm of tokens and what `dropout` leaves of `addend`.
pub(crate) fn normalized_sum(
    norm: &burns::LayerNorm,
    dropout: &burns::Dropout,
    x: Tensor<3>,
    addend: Addend,
) -> Tensor<3> {
    add_layer_norm_of(norm, x, addend.dropped(dropout)).1
}

impl Stream {
    pub(crate) fn new(x: Tensor<3>) -> Self {
        Self { x, addend: None }
    }

    /// Has the next norm add what `dropout` leaves of `addend`.
    pub(crate) fn with(x: Tensor<3>, addend: Addend, dropout: &burns::Dropout) -> Self {
        Self { x, addend: Some(addend.dropped(dropout)) }
    }

    /// Returns the tokens and their norm.
    pub(crate) fn normalized(self, norm: &burns::LayerNorm) -> (Tensor<3>, Tensor<3>) {
        match self.addend {
            Some(addend) => add_layer_norm_of(norm, self.x, addend),
            None => (self.x.clone(), layer_norm(norm, self.x)),
        }
    }

    /// The tokens.
    pub(crate) fn into_tokens(self) -> Tensor<3> {
        match self.addend {
            Some(addend) => added(self.x, addend),
            None => self.x,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{nn::LayerNormConfig, tensor::Device};

    #[test]
    fn a_module_tells_its_epsilon_to_the_last_digit() {
        for value in [1e-5, 1e-12, 0.1 + 0.2, 0.0, 1.0 / 3.0] {
            let module = LayerNormConfig::new(3).with_epsilon(value).init(&Device::flex());
            assert_eq!(epsilon(&module), Some(value));
        }
    }
}
