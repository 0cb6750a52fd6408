//! Burn's `Dropout` by an operation that keeps nothing for its gradient: a module, and functions that run Burn's own.
//!
//! ```
//! use blackburn_nn::dropout;
//! use burn::{nn::DropoutConfig, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let module = DropoutConfig::new(0.1).init();
//! let x = Tensor::<2>::ones([3, 8], &device);
//!
//! // Instead of `x.clone() + module.forward(x)`:
//! let y = dropout::add_dropout(&module, x.clone(), x);
//! assert_eq!(y.dims(), [3, 8]);
//! ```
//!
//! [`seed`](crate::seed()) decides what is left out, and not the device's random numbers.

use crate::drop_in::{drop_in, same_config};
use blackburn_backend::{attention::Dropout as Drawn, dropout as op};
use burn::{
    config::Config,
    nn as burns,
    tensor::{Device, Tensor},
};

/// Runs `module` on `x`, like `module.forward(x)`. Returns `x` itself where no backward pass is possible or the
/// module is frozen.
pub fn dropout<const D: usize>(module: &burns::Dropout, x: Tensor<D>) -> Tensor<D> {
    match drawn(module, &x.device()) {
        Some(drawn) => op::dropout(x, drawn),
        None => x,
    }
}

/// Computes `residual + module.forward(x)` in one pass.
///
/// # Panics
///
/// If `residual` and `x` differ in shape, dtype or device.
pub fn add_dropout<const D: usize>(
    module: &burns::Dropout,
    residual: Tensor<D>,
    x: Tensor<D>,
) -> Tensor<D> {
    match drawn(module, &x.device()) {
        Some(drawn) => op::add_dropout(residual, x, drawn),
        None => residual + x,
    }
}

/// Dropout as Burn's module decides about it: where a backward pass is possible, and unless the module is
/// frozen.
pub(crate) fn drawn(module: &burns::Dropout, device: &Device) -> Option<Drawn> {
    let rate = module.prob;
    let is_training = module.training.is_enabled() && device.is_autodiff();
    (is_training && rate > 0.0).then(|| Drawn::next(rate))
}

/// Configuration of [`Dropout`], as of Burn's.
#[derive(Config, Debug)]
pub struct DropoutConfig {
    /// Share of the numbers that is left out: at least 0 and below 1.
    pub prob: f64,
}

same_config!(DropoutConfig, burns::DropoutConfig, prob);

impl DropoutConfig {
    /// Creates the module.
    ///
    /// # Panics
    ///
    /// If `prob` is not at least 0 and below 1.
    pub fn init(&self) -> Dropout {
        burns::DropoutConfig::from(self.clone()).init().into()
    }
}

drop_in! {
    /// Burn's [`Dropout`](burns::Dropout), which keeps nothing for its gradient; [`DropoutConfig`] makes it.
    Dropout, burns::Dropout
}

impl Dropout {
    /// Leaves out a share of `input`, and makes up for it by a larger rest. Returns `input` itself where no backward
    /// pass is possible or the module is frozen. [`seed`](crate::seed()) decides what is left out.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        dropout(self, input)
    }
}
