// A network that finds objects, included behind `systems.rs`.

use nn::loss::SmoothL1LossConfig;

fn silu_of(part: &ConvNorm, x: Tensor<4>) -> Tensor<4> {
    activation::silu(part.forward(x))
}

/// Half of the channels go through blocks, and all that these made is joined (Wang et al., "`CSPNet`", 2020).
#[derive(Module, Debug)]
struct CrossStage {
    first: ConvNorm,
    blocks: Vec<[ConvNorm; 2]>,
    last: ConvNorm,
    is_sum: bool,
}

impl CrossStage {
    fn new(channels: [usize; 2], blocks: usize, is_sum: bool, device: &Device) -> Self {
        let [from, to] = channels;
        let half = to / 2;
        let conv = |from, to, size| ConvNorm::new([from, to], size, 1, 1, device);
        Self {
            first: conv(from, to, 1),
            blocks: (0..blocks).map(|_| [conv(half, half, 3), conv(half, half, 3)]).collect(),
            last: conv((2 + blocks) * half, to, 1),
            is_sum,
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let mut parts = silu_of(&self.first, x).chunk(2, 1);
        for [first, second] in &self.blocks {
            let x = parts[parts.len() - 1].clone();
            let y = silu_of(second, silu_of(first, x.clone()));
            parts.push(if self.is_sum { x + y } else { y });
        }
        silu_of(&self.last, Tensor::cat(parts, 1))
    }
}

/// The largest numbers around each pixel, in windows that grow (He et al., "Spatial Pyramid Pooling", 2014).
#[derive(Module, Debug)]
struct Pyramid {
    narrow: ConvNorm,
    pool: MaxPool2d,
    wide: ConvNorm,
}

impl Pyramid {
    /// Windows besides the single pixel.
    const WINDOWS: usize = 3;

    fn new(channels: usize, device: &Device) -> Self {
        let half = channels / 2;
        let pad = PaddingConfig2d::Explicit(2, 2, 2, 2);
        Self {
            narrow: ConvNorm::new([channels, half], 1, 1, 1, device),
            pool: MaxPool2dConfig::new([5, 5]).with_strides([1, 1]).with_padding(pad).init(),
            wide: ConvNorm::new([(1 + Self::WINDOWS) * half, channels], 1, 1, 1, device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let mut parts = vec![silu_of(&self.narrow, x)];
        for place in 0..Self::WINDOWS {
            parts.push(self.pool.forward(parts[place].clone()));
        }
        silu_of(&self.wide, Tensor::cat(parts, 1))
    }
}

/// A detector of the kind of YOLO (Redmon et al., "You Only Look Once", 2016) in a later form: stages that cross, a
/// pyramid of pools, and paths up and down between three scales (Liu et al., "Path Aggregation Network", 2018).
#[derive(Module, Debug)]
pub(crate) struct Detector {
    stem: ConvNorm,
    narrow: Vec<ConvNorm>,
    stages: Vec<CrossStage>,
    pyramid: Pyramid,
    doubled: Interpolate2d,
    up: [CrossStage; 2],
    halved: [ConvNorm; 2],
    down: [CrossStage; 2],
    heads: Vec<Conv2d>,
}

impl Detector {
    /// Boxes that a pixel of a scale proposes.
    const BOXES: usize = 3;

    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        /// Blocks of each stage.
        const BLOCKS: [usize; 4] = [1, 2, 2, 1];
        let Shape { width, classes, .. } = *shape;
        let halving = |from, to| ConvNorm::new([from, to], 3, 2, 1, device);
        let stage = |from, to, blocks, is_sum| CrossStage::new([from, to], blocks, is_sum, device);
        let (mut narrow, mut stages) = (vec![], vec![]);
        for (place, blocks) in BLOCKS.into_iter().enumerate() {
            let from = width << place;
            narrow.push(halving(from, 2 * from));
            stages.push(stage(2 * from, 2 * from, blocks, true));
        }
        let scales = [4, 8, 16].map(|factor| factor * width);
        let [fine, middle, coarse] = scales;
        // Of each box: its sides, whether it holds an object, and of which class.
        let numbers = Self::BOXES * (4 + 1 + classes);
        Self {
            stem: halving(3, width),
            narrow,
            stages,
            pyramid: Pyramid::new(coarse, device),
            doubled: doubled(),
            up: [stage(coarse + middle, middle, 1, false), stage(middle + fine, fine, 1, false)],
            halved: [halving(fine, fine), halving(middle, middle)],
            down: [
                stage(fine + middle, middle, 1, false),
                stage(middle + coarse, coarse, 1, false),
            ],
            heads: scales.map(|channels| conv([channels, numbers], 1, 1, device)).into(),
        }
    }

    /// What is seen at three scales, the finest first.
    fn scales(&self, images: Tensor<4>) -> [Tensor<4>; 3] {
        let mut x = silu_of(&self.stem, images);
        let mut seen = vec![];
        for (narrow, stage) in self.narrow.iter().zip(&self.stages) {
            x = stage.forward(silu_of(narrow, x));
            seen.push(x.clone());
        }
        let joined = |stage: &CrossStage, x, beside: &Tensor<4>| {
            stage.forward(Tensor::cat(vec![x, beside.clone()], 1))
        };
        let coarse = self.pyramid.forward(x);
        let middle = joined(&self.up[0], self.doubled.forward(coarse.clone()), &seen[2]);
        let fine = joined(&self.up[1], self.doubled.forward(middle.clone()), &seen[1]);
        let middle = joined(&self.down[0], silu_of(&self.halved[0], fine.clone()), &middle);
        let coarse = joined(&self.down[1], silu_of(&self.halved[1], middle.clone()), &coarse);
        [fine, middle, coarse]
    }

    /// Of images, the sides of all boxes, which of them hold an object, and its classes.
    pub(crate) fn loss(
        &self,
        (images, sides, objects, classes): (Tensor<4>, Tensor<3>, Tensor<3, Int>, Tensor<3, Int>),
    ) -> Tensor<1> {
        let boxes = self.heads.iter().zip(self.scales(images)).map(|(head, x)| {
            let y = head.forward(x);
            let [batch, channels, height, width] = y.dims();
            let numbers = channels / Self::BOXES;
            let y = y.reshape([batch, Self::BOXES, numbers, height * width]).swap_dims(2, 3);
            y.reshape([batch, Self::BOXES * height * width, numbers])
        });
        let y = full_precision(Tensor::cat(boxes.collect(), 1));
        let entropy = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&y.device());
        let of_objects = entropy.forward(y.clone().slice(s![.., .., 4..5]), objects);
        let of_classes = entropy.forward(y.clone().slice(s![.., .., 5..]), classes);
        let of_sides = SmoothL1LossConfig::new().init().forward_with_reduction(
            activation::sigmoid(y.slice(s![.., .., ..4])),
            full_precision(sides),
            Reduction::Mean,
        );
        of_objects + of_classes + of_sides
    }
}
