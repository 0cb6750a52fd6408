//! All of `burn::nn::conv`, with the right gradients of a deformable convolution on GPUs.
//!
//! Burn 0.22.1 reads the first tap of the kernel for all of them where it computes the gradients of offsets and mask on
//! GPUs. Where such a gradient may be asked for, the convolution is composed here of operations whose gradients are right:
//!
//! ```text
//! column[c, k, p] = mask[k, p] sum over four neighbors n of place(k, p) + offset[k, p]:  weight[n] image[c, n]
//! result          = kernel column + bias
//! ```
//!
//! with taps k and places p of the result; neighbors outside of the image count as zero. Source: Zhu et al.,
//! "Deformable `ConvNets` v2", arXiv:1811.11168.

use crate::{
    drop_in::{drop_in, same_config},
    refuse,
};
use blackburn_backend::graph;
pub use burn::nn::conv::*;
use burn::{
    config::Config,
    nn::{Initializer, PaddingConfig2d, conv as burns},
    tensor::{Device, FloatDType, Int, Tensor, TensorData, s},
};

const MODULE: &str = "deform_conv2d";

/// Configuration of [`DeformConv2d`], as of Burn's.
#[derive(Config, Debug)]
pub struct DeformConv2dConfig {
    /// Channels of the input and of the result.
    pub channels: [usize; 2],
    /// Height and width of the kernel.
    pub kernel_size: [usize; 2],
    /// Places of the input from one of the result to the next. Default: 1 each
    #[config(default = "[1, 1]")]
    pub stride: [usize; 2],
    /// Places of the input from one tap to the next. Default: 1 each
    #[config(default = "[1, 1]")]
    pub dilation: [usize; 2],
    /// Groups of channels that are convolved apart. Default: 1
    #[config(default = "1")]
    pub weight_groups: usize,
    /// Groups of channels that have offsets of their own. Default: 1
    #[config(default = "1")]
    pub offset_groups: usize,
    /// Zeros around the input; the same on opposite sides. Default: none
    #[config(default = "PaddingConfig2d::Valid")]
    pub padding: PaddingConfig2d,
    /// Whether there is a bias. Default: true
    #[config(default = true)]
    pub bias: bool,
    /// How weights begin.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
}

same_config!(
    DeformConv2dConfig,
    burns::DeformConv2dConfig,
    channels,
    kernel_size,
    stride,
    dilation,
    weight_groups,
    offset_groups,
    padding,
    bias,
    initializer
);

impl DeformConv2dConfig {
    /// Creates the module with fresh weights.
    ///
    /// # Panics
    ///
    /// If groups do not divide channels.
    pub fn init(&self, device: &Device) -> DeformConv2d {
        burns::DeformConv2dConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`DeformConv2d`](burns::DeformConv2d) with the right gradients on GPUs; [`DeformConv2dConfig`] makes it.
    DeformConv2d, burns::DeformConv2d
}

impl DeformConv2d {
    /// Convolves images `[batch, channels_in, height_in, width_in]` with a kernel whose taps are moved by `offset`,
    /// `[batch, 2 offset_groups taps, height, width]`, and weighted by `mask`, `[batch, offset_groups taps, height,
    /// width]`. Returns `[batch, channels_out, height, width]`.
    ///
    /// # Panics
    ///
    /// If shapes do not fit.
    pub fn forward(
        &self,
        input: Tensor<4>,
        offset: Tensor<4>,
        mask: Option<Tensor<4>>,
    ) -> Tensor<4> {
        let device = input.device();
        // Devices that record are GPUs, all of which share CubeCL's kernel.
        if device.is_autodiff() && graph::is_supported(&device) {
            composed(self, input, offset, mask)
        } else {
            self.0.forward(input, offset, mask)
        }
    }
}

/// The convolution as the module's documentation has it.
fn composed(
    module: &burns::DeformConv2d,
    input: Tensor<4>,
    offset: Tensor<4>,
    mask: Option<Tensor<4>>,
) -> Tensor<4> {
    let [batch, channels, _, _] = input.dims();
    let [_, moved, height, width] = offset.dims();
    let (weight, places) = (module.weight.val(), height * width);
    let [channels_out, channels_in, kernel_height, kernel_width] = weight.dims();
    let (groups, taps) = (module.offset_groups, kernel_height * kernel_width);
    if moved != 2 * groups * taps {
        let expected = format!("{} channels", 2 * groups * taps);
        refuse(MODULE, "offset", &expected, moved);
    }
    let columns = sampled(module, input, offset, [kernel_height, kernel_width]);
    let columns = match mask {
        Some(mask) => columns * mask.reshape([batch, groups, 1, taps * places]),
        None => columns,
    };
    let apart = module.weight_groups;
    let columns = columns.reshape([batch, apart, channels / apart * taps, places]);
    let weight = weight.reshape([1, apart, channels_out / apart, channels_in * taps]);
    let result = weight.matmul(columns).reshape([batch, channels_out, height, width]);
    match &module.bias {
        Some(bias) => result + bias.val().reshape([1, channels_out, 1, 1]),
        None => result,
    }
}

/// What each tap finds at each place of the result, `[batch, offset_groups, channels of a group, taps * places]`.
fn sampled(
    module: &burns::DeformConv2d,
    input: Tensor<4>,
    offset: Tensor<4>,
    kernel: [usize; 2],
) -> Tensor<4> {
    let (device, dtype) = (input.device(), input.dtype());
    let [batch, channels, height_in, width_in] = input.dims();
    let [_, _, height, width] = offset.dims();
    let (groups, taps, places) = (module.offset_groups, kernel[0] * kernel[1], height * width);
    let sizes = [height_in, width_in];
    // In f32: places beyond 256 have no fractions in bf16.
    let offset = offset.cast(FloatDType::F32).reshape([batch, groups, taps, 2, places]);
    let [y, x] = [0, 1].map(|axis| {
        let still = Still { module, sizes, kernel, result: [height, width] }.places(axis, &device);
        offset.clone().slice(s![.., .., .., axis as i64, ..]).squeeze_dim::<4>(3) + still
    });
    let [top, left] = [&y, &x].map(|at| at.clone().detach().floor());
    let (down, right) = (y - top.clone(), x - left.clone());
    let image = input.reshape([batch, groups, channels / groups, height_in * width_in]);
    let mut found: Option<Tensor<4>> = None;
    for (is_lower, is_right) in [(false, false), (false, true), (true, false), (true, true)] {
        let near = |share: &Tensor<4>, is_far: bool| {
            if is_far { share.clone() } else { share.clone().neg().add_scalar(1.0) }
        };
        let [row, column] = [(&top, is_lower), (&left, is_right)]
            .map(|(first, is_far)| first.clone().add_scalar(if is_far { 1.0 } else { 0.0 }));
        let [last_row, last_column] = sizes.map(|size| size as f32 - 1.0);
        let outside = row.clone().lower_scalar(0.0).bool_or(row.clone().greater_scalar(last_row));
        let outside = outside
            .bool_or(column.clone().lower_scalar(0.0))
            .bool_or(column.clone().greater_scalar(last_column));
        let share = (near(&down, is_lower) * near(&right, is_right)).mask_fill(outside, 0.0);
        let row = row.clamp(0.0, last_row).int();
        let index: Tensor<4, Int> = row * width_in as i64 + column.clamp(0.0, last_column).int();
        let shape = [batch, groups, channels / groups, taps * places];
        let index = index.reshape([batch, groups, 1, taps * places]).expand(shape);
        let share = share.cast(dtype).reshape([batch, groups, 1, taps * places]);
        let part = image.clone().gather(3, index) * share;
        found = Some(match found {
            Some(found) => found + part,
            None => part,
        });
    }
    found.unwrap_or(image)
}

/// Where taps are before they are moved.
struct Still<'a> {
    module: &'a burns::DeformConv2d,
    sizes: [usize; 2],
    kernel: [usize; 2],
    result: [usize; 2],
}

impl Still<'_> {
    /// Rows (0) or columns (1) of the input, `[1, 1, taps, places]`.
    fn places(&self, axis: usize, device: &Device) -> Tensor<4> {
        let padding = match (&self.module.padding, axis) {
            (PaddingConfig2d::Valid, _) => 0,
            (PaddingConfig2d::Explicit(top, ..), 0) => *top,
            (PaddingConfig2d::Explicit(_, left, ..), _) => *left,
            (PaddingConfig2d::Same, _) => {
                let (size, stride) = (self.sizes[axis], self.module.stride[axis]);
                let needed = size.div_ceil(stride).saturating_sub(1) * stride + self.kernel[axis];
                needed.saturating_sub(size) / 2
            }
        };
        let at = |tap: usize, place: usize| {
            let tap = [tap / self.kernel[1], tap % self.kernel[1]][axis];
            let place = [place / self.result[1], place % self.result[1]][axis];
            let at = place * self.module.stride[axis] + tap * self.module.dilation[axis];
            at as f32 - padding as f32
        };
        let [taps, places] = [self.kernel, self.result].map(|sizes| sizes[0] * sizes[1]);
        let all = (0..taps * places).map(|i| at(i / places, i % places)).collect::<Vec<f32>>();
        Tensor::from_data(TensorData::new(all, [1, 1, taps, places]), device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers<const D: usize>(shape: [usize; D], start: f32) -> Tensor<D> {
        let elements = shape.iter().product::<usize>();
        let numbers = (0..elements).map(|i| (start + 1.7 * i as f32).sin());
        let data = TensorData::new(numbers.collect::<Vec<f32>>(), shape);
        Tensor::from_data(data, &Device::flex().autodiff())
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_to_vec().expect("numbers are f32")
    }

    /// The CPU's own convolution is right.
    #[test]
    fn the_composed_convolution_is_burns_with_its_gradients() {
        let device = Device::flex().autodiff();
        let config = || DeformConv2dConfig::new([4, 6], [3, 2]);
        for (config, size) in [
            (config(), [4, 4]),
            (
                config().with_stride([2, 1]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)),
                [3, 6],
            ),
            (config().with_weight_groups(2).with_offset_groups(2).with_dilation([1, 2]), [4, 3]),
            (config().with_bias(false), [4, 4]),
        ] {
            let module = config.init(&device);
            let groups = config.offset_groups;
            for masked in [false, true] {
                let run = |is_composed: bool| {
                    let leaves = [
                        numbers([2, 4, 6, 5], 0.1),
                        // Some fall outside of the image.
                        numbers([2, 12 * groups, size[0], size[1]], 0.2) * 2.3,
                        numbers([2, 6 * groups, size[0], size[1]], 0.3),
                    ];
                    let leaves = leaves.map(|leaf| leaf.detach().require_grad());
                    let [input, offset, mask] = leaves.clone();
                    let mask = masked.then_some(mask);
                    let y = match is_composed {
                        true => composed(&module, input, offset, mask),
                        false => {
                            burns::DeformConv2d::from(module.clone()).forward(input, offset, mask)
                        }
                    };
                    let gradients = (y.clone() * numbers(y.dims(), 0.7)).sum().backward();
                    let used = if masked { 3 } else { 2 };
                    let mut all = vec![values(y.inner())];
                    all.extend(
                        leaves
                            .iter()
                            .take(used)
                            .map(|leaf| values(leaf.grad(&gradients).expect("it was read"))),
                    );
                    all.push(values(module.weight.val().grad(&gradients).expect("it was read")));
                    all
                };
                for (actual, expected) in run(true).iter().zip(run(false)) {
                    assert_eq!(actual.len(), expected.len());
                    let largest = expected.iter().fold(1f32, |largest, e| largest.max(e.abs()));
                    for (a, e) in actual.iter().zip(&expected) {
                        assert!((a - e).abs() < 2e-5 * largest, "{a} for {e}");
                    }
                }
            }
        }
    }
}
