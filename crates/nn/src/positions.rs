//! Positional encodings of `burn::nn` on tokens of any type: functions in the place of `forward`.
//!
//! Burn holds tables of rotations and sinusoids in the device's default type, f32, and adds or multiplies them
//! to what comes in, which fails where that is in 16 bits. A table is no parameter, so a
//! `PrecisionPolicy` does not reach it. These functions compute in f32 and round once.
//!
//! ```
//! use blackburn_nn::positions;
//! use burn::{nn::RotaryEncodingConfig, prelude::*, tensor::{DType, FloatDType}};
//!
//! let device = Device::flex();
//! let module = RotaryEncodingConfig::new(16, 8).init(&device);
//! let heads = Tensor::<4>::ones([2, 4, 16, 8], &device).cast(FloatDType::BF16);
//!
//! // Instead of `module.forward(heads)`:
//! let turned = positions::rotary(&module, heads, 0);
//! assert_eq!(turned.dtype(), DType::BF16);
//! ```

use burn::{
    nn::{PositionalEncoding, RotaryEncoding},
    tensor::{FloatDType, Tensor},
};

/// What `module` makes of `x`, `[.., seq, d_model]`, whose first token stands at position `start`. In the type
/// of `x`; computed in that of the module's table.
///
/// # Panics
///
/// As [`RotaryEncoding::apply`]: where the last dimension is not `d_model`, or the table ends before the last
/// token.
pub fn rotary<const D: usize>(module: &RotaryEncoding, x: Tensor<D>, start: usize) -> Tensor<D> {
    let (given, table) = (x.dtype(), module.freq_complex.dtype());
    if given == table {
        return module.apply(x, start);
    }
    module.apply(x.cast(FloatDType::from(table)), start).cast(FloatDType::from(given))
}

/// What `module` makes of `x`, `[batch, seq, d_model]`. In the type of `x`; computed in that of the module's
/// table.
///
/// # Panics
///
/// As [`PositionalEncoding::forward`]: where the last dimension is not `d_model`, or the table ends before the
/// last token.
pub fn sinusoidal(module: &PositionalEncoding, x: Tensor<3>) -> Tensor<3> {
    let (given, table) = (x.dtype(), module.sinusoids.dtype());
    if given == table {
        return module.forward(x);
    }
    module.forward(x.cast(FloatDType::from(table))).cast(FloatDType::from(given))
}
