//! All of `burn::nn::interpolate`, with gradients in every mode and on every device.
//!
//! On GPUs the provider `BlackburnInterpolate` has the gradient of every mode but Lanczos. Without it, Burn 0.22 has gradients
//! of the mode `Nearest` alone there, of `Linear` and `Cubic` on the CPU as well, and of the others nowhere. (Its CPU
//! device does not compute `NearestExact` at all.) Interpolation is linear in its input, and goes along one dimension
//! after the other. So where there is no gradient and one may be asked for, each dimension is a product with the
//! matrix of its weights, which Burn's own interpolation of unit vectors gives.

use crate::drop_in::{drop_in, same_config};
use blackburn_backend::{graph, interpolate as provider};
pub use burn::nn::interpolate::*;
use burn::{
    config::Config,
    nn::interpolate as burns,
    tensor::{
        Tensor,
        module::interpolate,
        ops::{InterpolateMode as Mode, InterpolateOptions},
    },
};

/// Configuration of [`Interpolate1d`], as of Burn's.
#[derive(Config, Debug)]
pub struct Interpolate1dConfig {
    /// Size of the result. Either this or `scale_factor`. Default: none
    #[config(default = "None")]
    pub output_size: Option<usize>,
    /// Size of the result for one of the input, rounded down. Default: none
    #[config(default = "None")]
    pub scale_factor: Option<f32>,
    /// How it is done. Default: the nearest number
    #[config(default = "InterpolateMode::Nearest")]
    pub mode: InterpolateMode,
    /// Whether the first and the last number stay where they are. Default: true
    #[config(default = true)]
    pub align_corners: bool,
}

same_config!(
    Interpolate1dConfig,
    burns::Interpolate1dConfig,
    output_size,
    scale_factor,
    mode,
    align_corners
);

impl Interpolate1dConfig {
    /// Creates the module.
    pub fn init(self) -> Interpolate1d {
        burns::Interpolate1dConfig::from(self).init().into()
    }
}

drop_in! {
    /// Burn's [`Interpolate1d`](burns::Interpolate1d) with gradients in every mode; [`Interpolate1dConfig`] makes it.
    Interpolate1d, burns::Interpolate1d
}

impl Interpolate1d {
    /// Resizes `input`, `[batch, channels, length]`, along its last dimension.
    ///
    /// # Panics
    ///
    /// Unless either `output_size` or `scale_factor` is set.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let options = InterpolateOptions {
            output_size: self.output_size.map(|size| [1, size]),
            scale_factor: self.scale_factor.map(|factor| [1.0, factor]),
            ..options(&self.mode, self.align_corners)
        };
        resized(input.unsqueeze_dim(2), options).squeeze_dim(2)
    }
}

/// Configuration of [`Interpolate2d`], as of Burn's.
#[derive(Config, Debug)]
pub struct Interpolate2dConfig {
    /// Height and width of the result. Either this or `scale_factor`. Default: none
    #[config(default = "None")]
    pub output_size: Option<[usize; 2]>,
    /// Height and width of the result for one of the input, rounded down. Default: none
    #[config(default = "None")]
    pub scale_factor: Option<[f32; 2]>,
    /// How it is done. Default: the nearest number
    #[config(default = "InterpolateMode::Nearest")]
    pub mode: InterpolateMode,
    /// Whether the corners stay where they are. Default: true
    #[config(default = true)]
    pub align_corners: bool,
}

same_config!(
    Interpolate2dConfig,
    burns::Interpolate2dConfig,
    output_size,
    scale_factor,
    mode,
    align_corners
);

impl Interpolate2dConfig {
    /// Creates the module.
    pub fn init(self) -> Interpolate2d {
        burns::Interpolate2dConfig::from(self).init().into()
    }
}

drop_in! {
    /// Burn's [`Interpolate2d`](burns::Interpolate2d) with gradients in every mode; [`Interpolate2dConfig`] makes it.
    Interpolate2d, burns::Interpolate2d
}

impl Interpolate2d {
    /// Resizes images `[batch, channels, height, width]`.
    ///
    /// # Panics
    ///
    /// Unless either `output_size` or `scale_factor` is set.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let options = InterpolateOptions {
            output_size: self.output_size,
            scale_factor: self.scale_factor,
            ..options(&self.mode, self.align_corners)
        };
        resized(input, options)
    }
}

fn options(mode: &InterpolateMode, align_corners: bool) -> InterpolateOptions {
    InterpolateOptions::new(mode.clone().into()).with_align_corners(align_corners)
}

fn resized(x: Tensor<4>, options: InterpolateOptions) -> Tensor<4> {
    let device = x.device();
    let burn_has_gradient = match options.mode {
        Mode::Nearest => true,
        // Devices that record are GPUs, all of which share CubeCL's interpolation.
        Mode::Bilinear | Mode::Bicubic => !graph::is_supported(&device),
        Mode::NearestExact | Mode::Lanczos3 => false,
    };
    let has_gradient =
        burn_has_gradient || provider::has_gradient(&device, x.dtype(), &options.mode);
    if has_gradient || !device.is_autodiff() {
        return interpolate(x, options);
    }
    let [height, width] = [0, 1].map(|dimension| weights(&x, dimension, &options));
    x.matmul(width).swap_dims(2, 3).matmul(height).swap_dims(2, 3)
}

/// What each number along height (0) or width (1) adds to the result's: `[1, 1, from, to]`.
fn weights(x: &Tensor<4>, dimension: usize, options: &InterpolateOptions) -> Tensor<4> {
    let size = x.dims()[2 + dimension];
    let units = Tensor::<2>::eye(size, &x.device()).reshape([1, size, 1, size]);
    let options = InterpolateOptions {
        output_size: options.output_size.map(|sizes| [1, sizes[dimension]]),
        scale_factor: options.scale_factor.map(|factors| [1.0, factors[dimension]]),
        ..options.clone()
    };
    interpolate(units, options).swap_dims(1, 2).cast(x.dtype())
}
