//! Functions that run Burn's `Dropout` by an operation that keeps nothing for its gradient. Call them instead
//! of `forward`.
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

use blackburn_backend::{attention::Dropout as Drawn, dropout as op};
use burn::{
    nn::Dropout,
    tensor::{Device, Tensor},
};

/// Runs `module` on `x`, like `module.forward(x)`. Returns `x` itself where no backward pass is possible or the
/// module is frozen.
pub fn dropout<const D: usize>(module: &Dropout, x: Tensor<D>) -> Tensor<D> {
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
    module: &Dropout,
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
pub(crate) fn drawn(module: &Dropout, device: &Device) -> Option<Drawn> {
    let rate = module.prob;
    let is_training = module.training.is_enabled() && device.is_autodiff();
    (is_training && rate > 0.0).then(|| Drawn::next(rate))
}
