//! Positional encodings of `burn::nn` on tokens of any type: modules, and functions that run Burn's own.
//!
//! Rotary positions are one pass over the tokens each way, read where they lie: heads that a view put in front of
//! their positions are not copied, nor is the result, which lies as they do. Burn's own makes a tensor of twice the
//! size, and keeps it.
//!
//! Burn holds tables of rotations and sinusoids in the device's default type, f32, and adds or multiplies them
//! to what comes in, which fails where that is in 16 bits. A table is no parameter, so a
//! `PrecisionPolicy` does not reach it. Modules and functions of this file compute in f32 and round once: the angle of
//! a far position needs more digits than bf16 has.
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

use crate::{
    drop_in::{drop_in, same_config},
    refuse,
};
use burn::{
    config::Config,
    nn as burns,
    tensor::{Device, FloatDType, Int, Tensor},
};

/// What `module` makes of `x`, `[.., seq, d_model]`, whose first token stands at position `start`. In the type
/// of `x`, and in memory as `x` lies; computed in f32. Nothing of `x` is kept for its gradient.
///
/// # Panics
///
/// Where the last dimension is not `d_model`, or the table ends before the last token.
pub fn rotary<const D: usize>(
    module: &burns::RotaryEncoding,
    x: Tensor<D>,
    start: usize,
) -> Tensor<D> {
    blackburn_backend::rotary::rotary(x, module.freq_complex.clone(), start)
}

/// The rows of a module's table for `seq` tokens, the first of which stands at a position that is one number on the
/// device.
pub(crate) fn rotations_at(
    module: &burns::RotaryEncoding,
    position: &Tensor<1, Int>,
    seq: usize,
) -> Tensor<3> {
    let [positions] = position.dims();
    if positions != 1 {
        refuse("rotary", "position", "one number for all sequences", positions);
    }
    let places = Tensor::arange(0..seq as i64, &position.device()) + position.clone();
    module.freq_complex.clone().select(0, places)
}

/// What `module` makes of `x`, `[batch, seq, d_model]`. In the type of `x`; computed in that of the module's
/// table.
///
/// # Panics
///
/// As [`forward`](burns::PositionalEncoding::forward) of Burn's: where the last dimension is not `d_model`, or the table ends before the
/// last token.
pub fn sinusoidal(module: &burns::PositionalEncoding, x: Tensor<3>) -> Tensor<3> {
    let (given, table) = (x.dtype(), module.sinusoids.dtype());
    if given == table {
        return module.forward(x);
    }
    module.forward(x.cast(FloatDType::from(table))).cast(FloatDType::from(given))
}

/// Configuration of [`RotaryEncoding`], as of Burn's.
#[derive(Config, Debug)]
pub struct RotaryEncodingConfig {
    /// How many positions there are.
    pub max_sequence_length: usize,
    /// Size of what is rotated, an even number: that of a head, as a rule.
    pub d_model: usize,
    /// Base of the wavelengths. Default: 10000
    #[config(default = "10000.0")]
    pub theta: f32,
}

same_config!(
    RotaryEncodingConfig,
    burns::RotaryEncodingConfig,
    max_sequence_length,
    d_model,
    theta
);

impl RotaryEncodingConfig {
    /// Creates the module.
    ///
    /// # Panics
    ///
    /// If `d_model` is odd, or `theta` not above zero.
    pub fn init(&self, device: &Device) -> RotaryEncoding {
        burns::RotaryEncodingConfig::from(self.clone()).init(device).into()
    }

    /// Creates the module with frequencies `[d_model / 2]` that `scaling` is given and changes.
    ///
    /// # Panics
    ///
    /// As [`init`](Self::init).
    pub fn init_with_frequency_scaling(
        &self,
        scaling: impl Fn(Tensor<1>) -> Tensor<1>,
        device: &Device,
    ) -> RotaryEncoding {
        burns::RotaryEncodingConfig::from(self.clone())
            .init_with_frequency_scaling(scaling, device)
            .into()
    }
}

drop_in! {
    /// Burn's [`RotaryEncoding`](burns::RotaryEncoding) on tokens of any type; [`RotaryEncodingConfig`] makes it.
    RotaryEncoding, burns::RotaryEncoding
}

impl RotaryEncoding {
    /// Rotates `x`, `[.., seq, d_model]`, whose first token stands at position 0.
    ///
    /// # Panics
    ///
    /// As [`rotary`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.apply(x, 0)
    }

    /// Rotates `x`, `[.., seq, d_model]`, whose first token stands at position `start`.
    ///
    /// # Panics
    ///
    /// As [`rotary`].
    pub fn apply<const D: usize>(&self, x: Tensor<D>, start: usize) -> Tensor<D> {
        rotary(self, x, start)
    }
}

/// Configuration of [`PositionalEncoding`], as of Burn's.
#[derive(Config, Debug)]
pub struct PositionalEncodingConfig {
    /// How many positions there are. Default: 5000
    #[config(default = "5_000")]
    pub max_sequence_size: usize,
    /// Size of a token.
    pub d_model: usize,
    /// Base of the wavelengths. Default: 10000
    #[config(default = "10_000")]
    pub max_timescale: usize,
}

same_config!(
    PositionalEncodingConfig,
    burns::PositionalEncodingConfig,
    max_sequence_size,
    d_model,
    max_timescale
);

impl PositionalEncodingConfig {
    /// Creates the module.
    ///
    /// # Panics
    ///
    /// As [`init`](burns::PositionalEncodingConfig::init) of Burn's, for an odd `d_model`.
    pub fn init(&self, device: &Device) -> PositionalEncoding {
        burns::PositionalEncodingConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`PositionalEncoding`](burns::PositionalEncoding) on tokens of any type;
    /// [`PositionalEncodingConfig`] makes it.
    PositionalEncoding, burns::PositionalEncoding
}

impl PositionalEncoding {
    /// Adds sinusoids to `input`, `[batch, seq, d_model]`.
    ///
    /// # Panics
    ///
    /// As [`sinusoidal`].
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        sinusoidal(self, input)
    }
}
