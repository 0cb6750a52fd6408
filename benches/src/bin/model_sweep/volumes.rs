// A model of volumes, included behind `models.rs`.

use nn::{
    PaddingConfig3d,
    conv::{Conv3d, Conv3dConfig, ConvTranspose3d, ConvTranspose3dConfig},
};

fn conv_3d(channels: [usize; 2], size: usize, stride: usize, device: &Device) -> Conv3d {
    let pad = size / 2;
    Conv3dConfig::new(channels, [size; 3])
        .with_stride([stride; 3])
        .with_padding(PaddingConfig3d::Explicit(pad, pad, pad))
        .init(device)
}

/// Two convolutions with a batch norm and a ReLU behind each.
#[derive(Module, Debug)]
struct Twice {
    convs: [Conv3d; 2],
    norms: [BatchNorm; 2],
}

impl Twice {
    fn new(from: usize, to: usize, device: &Device) -> Self {
        Self {
            convs: [from, to].map(|channels| conv_3d([channels, to], 3, 1, device)),
            norms: [to, to].map(|channels| BatchNormConfig::new(channels).init(device)),
        }
    }

    fn forward(&self, x: Tensor<5>) -> Tensor<5> {
        let layers = self.convs.iter().zip(&self.norms);
        layers.fold(x, |x, (conv, norm)| activation::relu(norm.forward(conv.forward(x))))
    }
}

/// A network that segments volumes (Çiçek et al., "3D U-Net", 2016), which are halved by strided convolutions.
#[derive(Module, Debug)]
pub(crate) struct VolumeNet {
    stem: Twice,
    narrow: Vec<Conv3d>,
    down: Vec<Twice>,
    wide: Vec<ConvTranspose3d>,
    up: Vec<Twice>,
    head: Conv3d,
}

impl VolumeNet {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, .. } = *shape;
        let levels: Vec<usize> = (0..layers).map(|level| width << level).collect();
        let (mut narrow, mut down, mut wide, mut up) = (vec![], vec![], vec![], vec![]);
        for &channels in &levels {
            narrow.push(conv_3d([channels, 2 * channels], 3, 2, device));
            down.push(Twice::new(2 * channels, 2 * channels, device));
            let doubled = ConvTranspose3dConfig::new([2 * channels, channels], [2; 3]);
            wide.push(doubled.with_stride([2; 3]).init(device));
            up.push(Twice::new(2 * channels, channels, device));
        }
        Self {
            stem: Twice::new(1, width, device),
            narrow,
            down,
            wide,
            up,
            head: conv_3d([width, classes], 1, 1, device),
        }
    }

    pub(crate) fn loss(&self, (volumes, targets): (Tensor<5>, Tensor<5>)) -> Tensor<1> {
        let mut x = self.stem.forward(volumes);
        let mut kept = vec![];
        for (narrow, block) in self.narrow.iter().zip(&self.down) {
            kept.push(x.clone());
            x = block.forward(narrow.forward(x));
        }
        for ((block, wide), kept) in self.up.iter().zip(&self.wide).zip(kept).rev() {
            x = block.forward(Tensor::cat(vec![wide.forward(x), kept], 1));
        }
        let y = self.head.forward(x);
        MseLoss::new().forward(full_precision(y), full_precision(targets), Reduction::Mean)
    }
}
