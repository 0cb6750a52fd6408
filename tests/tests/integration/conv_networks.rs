//! Networks of convolutions, forward and backward: all of them stay on the kernels.
//!
//! Burn's fusion runs a whole stretch of a stream unfused where what it has found in it depends on each other crosswise.
//! Convolutions then run on Burn's direct kernels, which take a hundred times as long.

use blackburn::train::{
    precision::{Precision, PrecisionPolicy, full_precision},
    trainer::TrainerConfig,
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::tensor,
};
use burn::{
    module::{Module, ModuleDisplay},
    nn::{
        BatchNorm, BatchNormConfig, PaddingConfig1d, PaddingConfig3d,
        conv::{Conv1d, Conv1dConfig, Conv2dConfig, Conv3d, Conv3dConfig, ConvTranspose2dConfig},
        loss::{MseLoss, Reduction},
    },
    prelude::*,
    tensor::activation,
};
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for precision in [Precision::F32, Precision::F16] {
        type Test = fn(&Device, Precision) -> Result<(), Failed>;
        let spellings: [(&str, Test); 2] = [
            ("burn_nn", |device, precision| {
                let model = unmodified::UNet::new(&device.clone().autodiff());
                train(model, [2, 3, SIZE, SIZE], precision, device, unmodified::UNet::forward)
                    .map(drop)
            }),
            ("blackburn_nn", |device, precision| {
                let model = drop_in::UNet::new(&device.clone().autodiff());
                train(model, [2, 3, SIZE, SIZE], precision, device, drop_in::UNet::forward)
                    .map(drop)
            }),
        ];
        for (spelling, test) in spellings {
            let name = format!("conv::networks::a_u_net_of_{spelling}_in_{precision:?}");
            trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
                on_burn_device(|device| test(&device, precision))
            }));
        }
        let name = format!("conv::networks::gates_of_sequences_in_{precision:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_burn_device(|device| {
                let model = Gates::new(&device.clone().autodiff());
                train(model, [2, 1, 64], precision, &device, Gates::forward).map(drop)
            })
        }));
        let name = format!("conv::networks::a_relu_in_front_of_the_loss_in_{precision:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_burn_device(|device| {
                let model = Volumes::new(&device.clone().autodiff());
                let shape = [2, 4, 8, 8, 8];
                let blocks = train(model, shape, precision, &device, Volumes::forward)?;
                // The ReLU's comparison runs with the loss, and the gradient of the norm begins with the ReLU's mask.
                let is_gradient = |name: &&'static str| name.contains("BatchNormInputGradient");
                let norms = blocks.iter().filter(|block| block.kernels.iter().any(is_gradient));
                match norms.count() {
                    STEPS => Ok(()),
                    found => Err(format!("{found} gradients of the norm in {STEPS} steps").into()),
                }
            })
        }));
    }
    trials
}

const WIDTH: usize = 32;
const SIZE: usize = 16;
const LEVELS: usize = 3;
const STEPS: usize = 3;

macro_rules! u_net {
    () => {
        #[derive(Module, Debug)]
        pub(super) struct Residual {
            norms: [GroupNorm; 2],
            convs: [Conv2d; 2],
            shortcut: Option<Conv2d>,
        }

        impl Residual {
            fn new(from: usize, to: usize, device: &Device) -> Self {
                Self {
                    norms: [from, to]
                        .map(|channels| GroupNormConfig::new(8, channels).init(device)),
                    convs: [from, to].map(|channels| conv([channels, to], 3, 1, device)),
                    shortcut: (from != to).then(|| conv([from, to], 1, 1, device)),
                }
            }

            fn forward(&self, x: Tensor<4>) -> Tensor<4> {
                let parts = self.norms.iter().zip(&self.convs);
                let y = parts.fold(x.clone(), |x, (norm, conv)| {
                    conv.forward(activation::silu(norm.forward(x)))
                });
                match &self.shortcut {
                    Some(shortcut) => shortcut.forward(x) + y,
                    None => x + y,
                }
            }
        }

        #[derive(Module, Debug)]
        pub(super) struct UNet {
            stem: Conv2d,
            down: Vec<Residual>,
            narrow: Vec<Conv2d>,
            middle: Residual,
            wide: Vec<ConvTranspose2d>,
            up: Vec<Residual>,
            norm: GroupNorm,
            head: Conv2d,
        }

        impl UNet {
            pub(super) fn new(device: &Device) -> Self {
                let widths: Vec<usize> = (0..LEVELS).map(|level| WIDTH << level).collect();
                let each = |make: fn(usize, &Device) -> Residual| {
                    widths.iter().map(|width| make(*width, device)).collect()
                };
                let deepest = WIDTH << LEVELS;
                Self {
                    stem: conv([3, WIDTH], 3, 1, device),
                    down: each(|width, device| Residual::new(width, width, device)),
                    narrow: widths.iter().map(|w| conv([*w, 2 * w], 3, 2, device)).collect(),
                    middle: Residual::new(deepest, deepest, device),
                    wide: widths
                        .iter()
                        .map(|w| {
                            let doubled = ConvTranspose2dConfig::new([2 * w, *w], [2, 2]);
                            doubled.with_stride([2, 2]).init(device)
                        })
                        .collect(),
                    up: each(|width, device| Residual::new(2 * width, width, device)),
                    norm: GroupNormConfig::new(8, WIDTH).init(device),
                    head: conv([WIDTH, 3], 3, 1, device),
                }
            }

            pub(super) fn forward(&self, images: Tensor<4>) -> Tensor<4> {
                let mut x = self.stem.forward(images);
                let mut kept = vec![];
                for (block, narrow) in self.down.iter().zip(&self.narrow) {
                    x = block.forward(x);
                    kept.push(x.clone());
                    x = narrow.forward(x);
                }
                x = self.middle.forward(x);
                for ((block, wide), kept) in self.up.iter().zip(&self.wide).zip(kept).rev() {
                    x = block.forward(Tensor::cat(vec![wide.forward(x), kept], 1));
                }
                self.head.forward(activation::silu(self.norm.forward(x)))
            }
        }
    };
}

mod unmodified {
    use super::*;
    use burn::nn::{
        GroupNorm, GroupNormConfig,
        conv::{Conv2d, ConvTranspose2d},
    };
    u_net!();
}

mod drop_in {
    use super::*;
    use blackburn::nn::{
        GroupNorm, GroupNormConfig,
        conv::{Conv2d, ConvTranspose2d},
    };
    u_net!();
}

fn conv(
    channels: [usize; 2],
    size: usize,
    stride: usize,
    device: &Device,
) -> burn::nn::conv::Conv2d {
    let pad = size / 2;
    Conv2dConfig::new(channels, [size, size])
        .with_stride([stride, stride])
        .with_padding(burn::nn::PaddingConfig2d::Explicit(pad, pad, pad, pad))
        .init(device)
}

/// What lies behind in time, at a growing distance, by a gate: part of it goes on, and part of it into a sum.
#[derive(Module, Debug)]
struct Gates {
    stem: Conv1d,
    /// Value, gate, what goes on, and what is added up.
    layers: Vec<[Conv1d; 4]>,
    head: Conv1d,
}

impl Gates {
    fn new(device: &Device) -> Self {
        let conv = |channels: [usize; 2], size: usize, distance: usize| {
            let before = PaddingConfig1d::Explicit((size - 1) * distance, 0);
            let conv = Conv1dConfig::new(channels[0], channels[1], size).with_dilation(distance);
            conv.with_padding(before).init(device)
        };
        let wide = [WIDTH, WIDTH];
        let layer = |place: usize| {
            let behind = || conv(wide, 2, 1 << place);
            [behind(), behind(), conv(wide, 1, 1), conv([WIDTH, 2 * WIDTH], 1, 1)]
        };
        Self {
            stem: conv([1, WIDTH], 2, 1),
            layers: (0..4).map(layer).collect(),
            head: conv([2 * WIDTH, 1], 1, 1),
        }
    }

    fn forward(&self, sound: Tensor<3>) -> Tensor<3> {
        let mut x = self.stem.forward(sound);
        let mut sum: Option<Tensor<3>> = None;
        for [value, gate, on, out] in &self.layers {
            let value = activation::tanh(value.forward(x.clone()));
            let gated = value * activation::sigmoid(gate.forward(x.clone()));
            let out = out.forward(gated.clone());
            sum = Some(match sum {
                Some(sum) => sum + out,
                None => out,
            });
            x = x + on.forward(gated);
        }
        self.head.forward(activation::relu(sum.unwrap_or(x)))
    }
}

/// A block of a network of volumes, and a head that takes each place by itself.
#[derive(Module, Debug)]
struct Volumes {
    stem: Conv3d,
    norm: BatchNorm,
    head: Conv3d,
}

impl Volumes {
    fn new(device: &Device) -> Self {
        let stem = Conv3dConfig::new([4, WIDTH], [3; 3])
            .with_padding(PaddingConfig3d::Explicit(1, 1, 1))
            .with_bias(false);
        Self {
            stem: stem.init(device),
            norm: BatchNormConfig::new(WIDTH).init(device),
            head: Conv3dConfig::new([WIDTH, 4], [1; 3]).init(device),
        }
    }

    fn forward(&self, x: Tensor<5>) -> Tensor<5> {
        self.head.forward(activation::relu(self.norm.forward(self.stem.forward(x))))
    }
}

/// What ran in [`STEPS`] steps on two inputs of that shape, as a trainer has them.
fn train<M: Module + ModuleDisplay, const D: usize>(
    model: M,
    shape: [usize; D],
    precision: Precision,
    device: &Device,
    forward: impl Fn(&M, Tensor<D>) -> Tensor<D>,
) -> Result<Vec<Block>, Failed> {
    let policy = PrecisionPolicy::new(precision).with_drop_ins();
    let config = TrainerConfig::new(1e-4).with_policy(policy).with_max_norm(f64::INFINITY);
    let config = config.without_recording();
    let mut trainer = config.init(model).map_err(|error| error.to_string())?;
    let draw = |seed| {
        let numbers = normal(seed, shape.iter().product(), 1.0, Storage::F32);
        Tensor::from_inner(tensor::<D>(&numbers, shape, Storage::F32, device))
    };
    let batch = (trainer.input(draw(1)), draw(2));
    let (_, blocks) = blocks_of(device, || {
        for _ in 0..STEPS {
            let step = trainer.step(batch.clone(), |model, (x, noise)| {
                let y = full_precision(forward(model, x));
                MseLoss::new().forward(y, noise, Reduction::Mean)
            });
            step.map_err(|error| error.to_string())?;
        }
        Ok(())
    })?;
    let is_burns = |kernel: &&'static str| {
        kernel.contains("DirectConv2d") || kernel.contains("conv_transpose")
    };
    let lost: Vec<&Block> =
        blocks.iter().filter(|block| block.kernels.iter().any(is_burns)).collect();
    match lost.is_empty() {
        true => Ok(blocks),
        false => {
            Err(format!("{} convolutions ran on Burn's kernels: {lost:#?}", lost.len()).into())
        }
    }
}
