// Linear layers, convolutions, norms, pools and what rearranges, of `nn`.

use blackburn_tests::programs::{Program, program};
use nn::{
    BatchNormConfig, CosineSimilarityConfig, DropoutConfig, EmbeddingConfig, Fold4dConfig,
    GaussianNoiseConfig, GroupNormConfig, Identity, InstanceNormConfig, LayerNormConfig,
    LinearConfig, LinearLayout, LocalResponseNormConfig, PaddingConfig1d, PaddingConfig2d,
    PairwiseDistanceConfig, PixelShuffleConfig, PixelUnshuffleConfig, RmsNormConfig,
    Unfold4dConfig,
    conv::{
        Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
        ConvTranspose3dConfig, DeformConv2dConfig,
    },
    interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode},
    norm::NormalizationConfig,
    pool::{
        AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig, AvgPool1dConfig,
        AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
    },
};

/// A share of numbers to be left out that is none.
const HARDLY_ANY: f64 = 1e-9;

pub(super) fn programs() -> Vec<Box<dyn Program>> {
    [linear(), convolutions(), norms(), pools(), interpolations(), rearranging(), random()]
        .into_iter()
        .flatten()
        .collect()
}

fn linear() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "Linear",
            2,
            |device| LinearConfig::new(16, 32).init(device),
            |module, data| module.forward(data.normal([2, 3, 16])),
        ),
        program(
            "Linear in columns, without bias",
            1,
            |device| {
                let config = LinearConfig::new(16, 32).with_bias(false);
                config.with_layout(LinearLayout::Col).init(device)
            },
            |module, data| module.forward(data.normal([5, 16])),
        ),
        program(
            "Embedding",
            1,
            |device| EmbeddingConfig::new(7, 8).init(device),
            |module, data| module.forward(data.ids([2, 5], 0, 7)),
        ),
        program(
            "Identity",
            1,
            |_| Identity::new(),
            |module, data| module.forward(data.normal([2, 3])),
        ),
        program(
            "PairwiseDistance",
            4,
            |_| PairwiseDistanceConfig::new().init(),
            |module, data| module.forward(data.normal([3, 8]), data.normal([3, 8])),
        ),
        program(
            "CosineSimilarity",
            6,
            |_| CosineSimilarityConfig::new().init(),
            |module, data| module.forward(data.normal([3, 8]), data.normal([3, 8])),
        ),
    ]
}

fn convolutions() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "Conv1d",
            2,
            |device| {
                let config = Conv1dConfig::new(4, 6, 3).with_groups(2);
                config.with_padding(PaddingConfig1d::Same).init(device)
            },
            |module, data| module.forward(data.normal([2, 4, 9])),
        ),
        program(
            "Conv2d",
            2,
            |device| {
                let config = Conv2dConfig::new([3, 5], [3, 3]).with_stride([2, 1]);
                config.with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(device)
            },
            |module, data| module.forward(data.normal([2, 3, 7, 6])),
        ),
        program(
            "Conv3d",
            2,
            |device| Conv3dConfig::new([2, 3], [2, 2, 2]).init(device),
            |module, data| module.forward(data.normal([2, 2, 3, 4, 3])),
        ),
        program(
            "ConvTranspose1d",
            2,
            |device| ConvTranspose1dConfig::new([4, 3], 3).with_stride(2).init(device),
            |module, data| module.forward(data.normal([2, 4, 5])),
        ),
        program(
            "ConvTranspose2d",
            2,
            |device| ConvTranspose2dConfig::new([3, 4], [2, 3]).with_stride([2, 2]).init(device),
            |module, data| module.forward(data.normal([2, 3, 4, 3])),
        ),
        program(
            "ConvTranspose3d",
            2,
            |device| ConvTranspose3dConfig::new([2, 3], [2, 2, 2]).init(device),
            |module, data| module.forward(data.normal([1, 2, 3, 2, 3])),
        ),
        program(
            "DeformConv2d",
            8,
            |device| DeformConv2dConfig::new([2, 3], [3, 3]).init(device),
            |module, data| {
                // Offsets between two pixels, so that a rounding takes none to another pixel.
                let offsets = data.share([2, 18, 4, 3]);
                module.forward(data.normal([2, 2, 6, 5]), offsets, Some(data.share([2, 9, 4, 3])))
            },
        ),
    ]
}

fn norms() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "BatchNorm",
            8,
            |device| BatchNormConfig::new(3).init(device),
            |module, data| module.forward(data.normal([4, 3, 5, 2])),
        ),
        program(
            "GroupNorm",
            8,
            |device| GroupNormConfig::new(2, 6).init(device),
            |module, data| module.forward(data.normal([2, 6, 5])),
        ),
        program(
            "InstanceNorm",
            8,
            |device| InstanceNormConfig::new(4).init(device),
            |module, data| module.forward(data.normal([2, 4, 6])),
        ),
        program(
            "LayerNorm",
            8,
            |device| LayerNormConfig::new(12).init(device),
            |module, data| module.forward(data.normal([2, 3, 12])),
        ),
        program(
            "LayerNorm without bias",
            8,
            |device| LayerNormConfig::new(12).with_bias(false).with_epsilon(1e-3).init(device),
            |module, data| module.forward(data.normal([5, 12])),
        ),
        program(
            "RmsNorm",
            6,
            |device| RmsNormConfig::new(12).with_epsilon(1e-6).init(device),
            |module, data| module.forward(data.normal([2, 3, 12])),
        ),
        program(
            "LocalResponseNorm",
            6,
            |_| LocalResponseNormConfig::new(3).init(),
            |module, data| module.forward(data.normal([2, 5, 3, 2])),
        ),
        program(
            "Normalization",
            8,
            |device| {
                let config = NormalizationConfig::from(LayerNormConfig::new(0));
                config.with_num_features(12).init(device)
            },
            |module, data| {
                assert_eq!(module.num_features(), 12);
                module.forward(data.normal([2, 3, 12]))
            },
        ),
    ]
}

fn pools() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "AvgPool1d",
            2,
            |_| AvgPool1dConfig::new(3).with_stride(2).init(),
            |module, data| module.forward(data.normal([2, 3, 9])),
        ),
        program(
            "AvgPool2d",
            2,
            |_| AvgPool2dConfig::new([2, 3]).init(),
            |module, data| module.forward(data.normal([2, 3, 6, 6])),
        ),
        program(
            "MaxPool1d",
            1,
            |_| MaxPool1dConfig::new(3).with_stride(2).init(),
            |module, data| module.forward(data.normal([2, 3, 9])),
        ),
        program(
            "MaxPool2d",
            1,
            |_| MaxPool2dConfig::new([3, 2]).init(),
            |module, data| module.forward(data.normal([2, 3, 6, 6])),
        ),
        program(
            "AdaptiveAvgPool1d",
            2,
            |_| AdaptiveAvgPool1dConfig::new(3).init(),
            |module, data| module.forward(data.normal([2, 3, 7])),
        ),
        program(
            "AdaptiveAvgPool2d",
            2,
            |_| AdaptiveAvgPool2dConfig::new([2, 3]).init(),
            |module, data| module.forward(data.normal([2, 3, 5, 6])),
        ),
        program(
            "AdaptiveAvgPool3d",
            6,
            |_| AdaptiveAvgPool3dConfig::new([2, 3, 2]).init(),
            |module, data| module.forward(data.normal([1, 2, 4, 5, 3])),
        ),
    ]
}

fn interpolations() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "Interpolate1d",
            4,
            |_| {
                let config = Interpolate1dConfig::new().with_output_size(Some(8));
                config.with_mode(InterpolateMode::Linear).init()
            },
            |module, data| module.forward(data.normal([2, 2, 5])),
        ),
        program(
            "Interpolate2d",
            1,
            |_| Interpolate2dConfig::new().with_scale_factor(Some([2.0, 2.0])).init(),
            |module, data| module.forward(data.normal([2, 2, 3, 4])),
        ),
        program(
            "Interpolate2d, linear",
            4,
            |_| {
                let config = Interpolate2dConfig::new().with_output_size(Some([5, 7]));
                config.with_mode(InterpolateMode::Linear).init()
            },
            |module, data| module.forward(data.normal([2, 2, 3, 4])),
        ),
        program(
            "Interpolate2d, cubic",
            6,
            |_| {
                let config = Interpolate2dConfig::new().with_output_size(Some([5, 7]));
                config.with_mode(InterpolateMode::Cubic).init()
            },
            |module, data| module.forward(data.normal([2, 2, 3, 4])),
        ),
    ]
}

fn rearranging() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "Unfold4d",
            1,
            |_| Unfold4dConfig::new([2, 3]).with_padding([1, 0]).init(),
            |module, data| module.forward(data.normal([2, 2, 4, 5])),
        ),
        program(
            "Fold4d",
            2,
            |_| Fold4dConfig::new([4, 5], [2, 2]).init(),
            |module, data| module.forward(data.normal([2, 8, 12])),
        ),
        program(
            "PixelShuffle",
            1,
            |_| PixelShuffleConfig::new(2).init(),
            |module, data| module.forward(data.normal([2, 8, 3, 2])),
        ),
        program(
            "PixelUnshuffle",
            1,
            |_| PixelUnshuffleConfig::new(2).init(),
            |module, data| module.forward(data.normal([2, 2, 4, 6])),
        ),
    ]
}

/// What draws numbers, so that hardly any of them matters.
fn random() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "Dropout",
            2,
            |_| DropoutConfig::new(HARDLY_ANY).init(),
            |module, data| module.forward(data.normal([3, 8])),
        ),
        program(
            "GaussianNoise",
            2,
            |_| GaussianNoiseConfig::new(HARDLY_ANY).init(),
            |module, data| module.forward(data.normal([3, 8])),
        ),
    ]
}
