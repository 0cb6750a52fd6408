//! Models that give many numbers for an image, a clip or a ray.

use super::{Batch, Small, trial};
use blackburn::train::precision::full_precision;
use burn::{
    module::{Module, Param},
    nn::{
        BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig, PRelu, PReluConfig,
        PaddingConfig2d, PaddingConfig3d,
        conv::{Conv2d, Conv2dConfig, Conv3d, Conv3dConfig},
        interpolate::{Interpolate2dConfig, InterpolateMode},
        loss::{BinaryCrossEntropyLossConfig, HuberLossConfig},
    },
    tensor::{
        Device, Int, Tensor,
        activation::{leaky_relu, relu, sigmoid, softmax, softplus},
        s,
    },
};
use libtest_mimic::Trial;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial::<SuperResolution>(),
        trial::<Segmenter>(),
        trial::<Detector>(),
        trial::<Clips>(),
        trial::<Codebook>(),
        trial::<Radiance>(),
    ]
}

const IMAGES: usize = 3;

fn conv(from: usize, to: usize, stride: usize) -> Conv2dConfig {
    Conv2dConfig::new([from, to], [3, 3])
        .with_stride([stride; 2])
        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
}

/// Four channels for each pixel, which become four pixels.
#[derive(Module, Debug)]
struct SuperResolution {
    layers: Vec<Conv2d>,
    activation: PRelu,
}

impl Small for SuperResolution {
    const NAME: &'static str = "super_resolution";
    const NUMBERS: usize = IMAGES * 3 * (10 * 10 + 20 * 20);
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        let channels = [(3, 16), (16, 16), (16, 12)];
        Self {
            layers: channels.map(|(from, to)| conv(from, to, 1).init(device)).into(),
            activation: PReluConfig::new().init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let small = (IMAGES * 300) as isize;
        let x = numbers.clone().slice(s![..small]).reshape([IMAGES, 3, 10, 10]);
        let wanted = numbers.slice(s![small..]).reshape([IMAGES, 3, 20, 20]);
        let y = self.activation.forward(self.layers[0].forward(x));
        let y = y.clone() + self.activation.forward(self.layers[1].forward(y));
        let y = self.layers[2].forward(y).reshape([IMAGES, 3, 2, 2, 10, 10]);
        let y = y.permute([0, 1, 4, 2, 5, 3]).reshape([IMAGES, 3, 20, 20]);
        (full_precision(y) - full_precision(wanted)).abs().mean()
    }
}

/// Features of two sizes, of which the smaller is blown up; scored by how they overlap.
#[derive(Module, Debug)]
struct Segmenter {
    down: Vec<Conv2d>,
    norms: Vec<BatchNorm>,
    side: Conv2d,
    head: Conv2d,
}

impl Small for Segmenter {
    const NAME: &'static str = "segmenter";
    const NUMBERS: usize = IMAGES * 3 * 16 * 16;
    const WHOLE: usize = IMAGES * 16 * 16;
    const BELOW: i64 = 4;

    fn new(device: &Device) -> Self {
        Self {
            down: [(3, 8), (8, 16)].map(|(from, to)| conv(from, to, 2).init(device)).into(),
            norms: [8, 16].map(|channels| BatchNormConfig::new(channels).init(device)).into(),
            side: Conv2dConfig::new([8, 16], [1, 1]).init(device),
            head: conv(16, 4, 1).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let x = numbers.reshape([IMAGES, 3, 16, 16]);
        let large = relu(self.norms[0].forward(self.down[0].forward(x)));
        let small = relu(self.norms[1].forward(self.down[1].forward(large.clone())));
        let to = |side| {
            Interpolate2dConfig::new()
                .with_output_size(Some([side, side]))
                .with_mode(InterpolateMode::Linear)
                .init()
        };
        let both = to(8).forward(small) + self.side.forward(large);
        let scores = to(16).forward(self.head.forward(both));
        let shares = softmax(full_precision(scores), 1);
        let ids = Tensor::<1, Int>::arange(0..4, &shares.device()).reshape([1, 4, 1, 1]);
        let classes = classes.reshape([IMAGES, 1, 16, 16]).expand([IMAGES, 4, 16, 16]);
        let wanted = classes.equal(ids.expand([IMAGES, 4, 16, 16])).float();
        let wanted = full_precision(wanted);
        let sums = |x: Tensor<4>| -> Tensor<2> { x.sum_dim(3).sum_dim(2).flatten(1, 3) };
        let overlap = sums(shares.clone() * wanted.clone()) * 2.0 + 1.0;
        let dice = overlap / (sums(shares) + sums(wanted) + 1.0);
        dice.mean().neg() + 1.0
    }
}

/// Boxes and whether they are there, of two sizes; what is easy counts little.
#[derive(Module, Debug)]
struct Detector {
    trunk: Vec<Conv2d>,
    boxes: Conv2d,
    objects: Conv2d,
}

impl Small for Detector {
    const NAME: &'static str = "detector";
    const NUMBERS: usize = IMAGES * (3 * 16 * 16 + 80 * 4);
    const WHOLE: usize = IMAGES * 80;

    fn new(device: &Device) -> Self {
        Self {
            trunk: [(3, 16), (16, 16)].map(|(from, to)| conv(from, to, 2).init(device)).into(),
            boxes: conv(16, 4, 1).init(device),
            objects: conv(16, 1, 1).init(device),
        }
    }

    fn loss(&self, (numbers, there): Batch) -> Tensor<1> {
        let pixels = (IMAGES * 3 * 16 * 16) as isize;
        let x = numbers.clone().slice(s![..pixels]).reshape([IMAGES, 3, 16, 16]);
        let wanted = numbers.slice(s![pixels..]).reshape([IMAGES * 80, 4]);
        let large = leaky_relu(self.trunk[0].forward(x), 0.1);
        let small = leaky_relu(self.trunk[1].forward(large.clone()), 0.1);
        let of_each = |x: Tensor<4>, numbers: usize| -> Tensor<3> {
            x.flatten::<3>(2, 3).swap_dims(1, 2).reshape([IMAGES as i32, -1, numbers as i32])
        };
        let both = [large, small];
        let boxes = both.clone().map(|x| of_each(self.boxes.forward(x), 4));
        let objects = both.map(|x| of_each(self.objects.forward(x), 1));
        let boxes = full_precision(Tensor::cat(boxes.into(), 1)).reshape([IMAGES * 80, 4]);
        let objects: Tensor<1> = full_precision(Tensor::cat(objects.into(), 1)).flatten(0, 2);
        let is_there = there.clone().equal_elem(1);
        let device = boxes.device();
        let far =
            HuberLossConfig::new(0.5).init().forward_no_reduction(boxes, full_precision(wanted));
        let far = far.mask_fill(
            is_there.clone().bool_not().unsqueeze_dim::<2>(1).expand([IMAGES * 80, 4]),
            0.0,
        );
        let entropy = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&device);
        let chance = sigmoid(objects.clone());
        let missed = chance.clone().mask_where(is_there, chance.neg() + 1.0).powi_scalar(2).mean();
        far.mean() + entropy.forward(objects, there) + missed
    }
}

/// Short films, seen by kernels of three dimensions.
#[derive(Module, Debug)]
struct Clips {
    first: Conv3d,
    second: Conv3d,
    norm: BatchNorm,
    head: Linear,
}

impl Small for Clips {
    const NAME: &'static str = "clips";
    const NUMBERS: usize = IMAGES * 2 * 4 * 8 * 8;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        let conv = |from, to| {
            Conv3dConfig::new([from, to], [3, 3, 3])
                .with_padding(PaddingConfig3d::Explicit(1, 1, 1))
        };
        Self {
            first: conv(2, 8).init(device),
            second: conv(8, 8).with_stride([2, 2, 2]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            head: LinearConfig::new(8 * 2 * 4 * 4, 3).init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let x = numbers.reshape([IMAGES, 2, 4, 8, 8]);
        let y = relu(self.norm.forward(self.first.forward(x)));
        let y: Tensor<2> = relu(self.second.forward(y)).flatten(1, 4);
        let made = full_precision(self.head.forward(y));
        (made - 0.3).powi_scalar(2).mean()
    }
}

/// The nearest of a few learned vectors in place of each feature, with the gradient of the feature.
#[derive(Module, Debug)]
struct Codebook {
    encoder: Conv2d,
    codes: Param<Tensor<2>>,
    decoder: Conv2d,
}

impl Small for Codebook {
    const NAME: &'static str = "codebook";
    const NUMBERS: usize = IMAGES * 3 * 8 * 8;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            encoder: conv(3, 8, 2).init(device),
            codes: Initializer::Uniform { min: -1.0, max: 1.0 }.init([2, 8], device),
            decoder: conv(8, 12, 1).init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let x = numbers.reshape([IMAGES, 3, 8, 8]);
        let features =
            self.encoder.forward(x.clone()).permute([0, 2, 3, 1]).reshape([IMAGES * 16, 8]);
        let features = full_precision(features);
        // Far apart, so that roundings do not choose.
        let codes = full_precision(self.codes.val());
        let signs = Tensor::<1>::from_data([4.0, -4.0], &codes.device()).reshape([2, 1]);
        let codes = codes + signs;
        let squares = |x: Tensor<2>| x.powi_scalar(2).sum_dim(1);
        let apart = squares(features.clone()) + squares(codes.clone()).transpose()
            - features.clone().matmul(codes.clone().transpose()) * 2.0;
        let nearest: Tensor<1, Int> = apart.argmin(1).squeeze_dim(1);
        let chosen = codes.select(0, nearest);
        let kept = (chosen.clone() - features.clone().detach()).powi_scalar(2).mean();
        let passed = features.clone() + (chosen - features).detach();
        let back = passed.cast(x.dtype()).reshape([IMAGES, 4, 4, 8]).permute([0, 3, 1, 2]);
        let back = self.decoder.forward(back).reshape([IMAGES, 3, 2, 2, 4, 4]);
        let back = back.permute([0, 1, 4, 2, 5, 3]).reshape([IMAGES, 3, 8, 8]);
        (full_precision(back) - full_precision(x)).powi_scalar(2).mean() + kept
    }
}

/// Colors along rays: waves of places, a deep network with one leap, and what lies in front takes its share.
#[derive(Module, Debug)]
struct Radiance {
    layers: Vec<Linear>,
    head: Linear,
}

const RAYS: usize = 6;
const POINTS: usize = 8;

impl Small for Radiance {
    const NAME: &'static str = "radiance";
    const NUMBERS: usize = RAYS * (POINTS * 3 + 3);
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        let linear = |(from, to)| LinearConfig::new(from, to).init(device);
        Self {
            layers: [(27, 32), (32, 32), (59, 32), (32, 32)].map(linear).into(),
            head: linear((32, 4)),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let places = (RAYS * POINTS * 3) as isize;
        let x = full_precision(numbers.clone().slice(s![..places]).reshape([RAYS * POINTS, 3]));
        let wanted = numbers.slice(s![places..]).reshape([RAYS, 3]);
        let waves = (0..4).flat_map(|octave| {
            let turned = x.clone() * 2f64.powi(octave);
            [turned.clone().sin(), turned.cos()]
        });
        let seen = Tensor::cat([x.clone()].into_iter().chain(waves).collect(), 1);
        let seen = seen.cast(wanted.dtype());
        let mut y = relu(self.layers[0].forward(seen.clone()));
        y = relu(self.layers[1].forward(y));
        y = relu(self.layers[2].forward(Tensor::cat(vec![y, seen], 1)));
        y = relu(self.layers[3].forward(y));
        let y = full_precision(self.head.forward(y)).reshape([RAYS, POINTS, 4]);
        let dense = softplus(y.clone().slice(s![.., .., 3..]), 1.0);
        let color = sigmoid(y.slice(s![.., .., ..3]));
        let behind = dense.clone().cumsum(1) - dense.clone();
        let share = (behind.neg()).exp() * (dense.neg().exp().neg() + 1.0);
        let made: Tensor<2> = (color * share).sum_dim(1).squeeze_dim(1);
        (made - full_precision(wanted)).powi_scalar(2).mean()
    }
}
