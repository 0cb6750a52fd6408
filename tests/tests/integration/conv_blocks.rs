//! Convolutions between other layers: that Burn leaves them to the kernels there, too.

use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
};
use burn::{
    nn::{
        GroupNorm, GroupNormConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
    },
    prelude::*,
    tensor::activation::silu,
};
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let name = "conv::blocks::residual_blocks_with_norms_of_groups_run_on_the_kernels";
    vec![Trial::ignorable_test(name, || on_burn_device(|device| residuals(&device.autodiff())))]
}

/// Two convolutions, each behind a norm and an activation, beside one of a single pixel.
struct Residual {
    norms: [GroupNorm; 2],
    convs: [Conv2d; 2],
    shortcut: Option<Conv2d>,
}

fn conv(channels: [usize; 2], size: usize, device: &Device) -> Conv2d {
    let pad = size / 2;
    let padding = PaddingConfig2d::Explicit(pad, pad, pad, pad);
    Conv2dConfig::new(channels, [size, size]).with_padding(padding).init(device)
}

impl Residual {
    const GROUPS: usize = 2;

    fn new(from: usize, to: usize, device: &Device) -> Self {
        let norm = |channels| GroupNormConfig::new(Self::GROUPS, channels).init(device);
        Self {
            norms: [from, to].map(norm),
            convs: [from, to].map(|channels| conv([channels, to], 3, device)),
            shortcut: (from != to).then(|| conv([from, to], 1, device)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let layers = self.norms.iter().zip(&self.convs);
        let y = layers.fold(x.clone(), |x, (norm, conv)| conv.forward(silu(norm.forward(x))));
        match &self.shortcut {
            Some(shortcut) => shortcut.forward(x) + y,
            None => x + y,
        }
    }

    fn convolutions(&self) -> impl Iterator<Item = &Conv2d> {
        self.convs.iter().chain(&self.shortcut)
    }
}

/// As in the network of a diffusion model: each block but the first reads what two before it made.
fn residuals(device: &Device) -> Result<(), Failed> {
    const STEPS: usize = 3;
    const CHANNELS: usize = 8;
    const IMAGE: [usize; 4] = [2, 3, 8, 8];
    let stem = conv([3, CHANNELS], 3, device);
    let network = [(1, 1), (2, 1), (2, 1)]
        .map(|(from, to)| Residual::new(from * CHANNELS, to * CHANNELS, device));
    let convolutions =
        || [&stem].into_iter().chain(network.iter().flat_map(Residual::convolutions));
    let step = || {
        let images = normal(8, IMAGE.iter().product(), 1.0, Storage::F32);
        let first = stem.forward(tensor(&images, IMAGE, Storage::F32, device));
        let second = network[0].forward(first.clone());
        let third = network[1].forward(Tensor::cat(vec![second.clone(), first], 1));
        let last = network[2].forward(Tensor::cat(vec![third, second], 1));
        let gradients = last.powi_scalar(2).mean().backward();
        convolutions().try_for_each(|layer| {
            values(layer.weight.grad(&gradients).ok_or("a gradient")?).map(drop)
        })
    };
    for _ in 0..STEPS {
        step()?;
    }
    let ((), blocks) = blocks_of(device, step)?;
    // Forward, the weights' gradients, and the images' but of the first.
    all_on_kernels(&blocks, 3 * convolutions().count() - 1)
}

fn all_on_kernels(blocks: &[Block], expected: usize) -> Result<(), Failed> {
    let kernels = || blocks.iter().flat_map(|block| &block.kernels);
    // Those of single pixels are plain products.
    let is_ours = |name: &str| {
        name.starts_with("blackburn_kernels::conv::")
            || name.starts_with("blackburn_kernels::matmul::") && !name.contains("::split::")
    };
    let is_burns = |name: &str| name.starts_with("cubek_convolution::");
    let burns: Vec<_> = kernels().filter(|name| is_burns(name)).collect();
    let ours = kernels().filter(|name| is_ours(name)).count();
    match burns.is_empty() && ours >= expected {
        true => Ok(()),
        false => {
            Err(format!("{ours} of {expected} on the kernels, and on Burn's: {burns:?}").into())
        }
    }
}
