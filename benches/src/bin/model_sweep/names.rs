//! What models are called, how large they and their batches are, and what their results count.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Name {
    BertLarge,
    Gpt2,
    /// As GPT-2, four layers of width 4096.
    #[value(name = "gpt-4096")]
    WideGpt,
    #[value(name = "llama-1.1b")]
    Llama,
    /// Four layers of Llama of 8 billion, at full width and vocabulary.
    #[value(name = "llama-8b-layers")]
    LlamaLayers,
    #[value(name = "vit-b16")]
    Vit,
    #[value(name = "mobilenet-v2")]
    MobileNet,
    Lstm,
    Gru,
    Seq2seq,
    #[value(name = "unet")]
    UNet,
    #[value(name = "unet-3d")]
    VolumeNet,
    #[value(name = "densenet-121")]
    DenseNet,
    #[value(name = "convnext-t")]
    ConvNext,
    #[value(name = "mixer-b16")]
    Mixer,
    #[value(name = "wavenet")]
    Wave,
    #[value(name = "efficientnet-b0")]
    EfficientNet,
    #[value(name = "resnext-50")]
    ResNext,
    #[value(name = "swin-t")]
    Swin,
    Conformer,
    #[value(name = "dit-b")]
    Dit,
    /// A graph of 100 000 nodes and ten times as many edges.
    #[value(name = "gcn")]
    GraphNet,
    Dcgan,
    #[value(name = "diffusion-unet")]
    DiffusionUNet,
    Detector,
    #[value(name = "t5-small")]
    T5,
    #[value(name = "moe")]
    Mixture,
    Dlrm,
    Edsr,
}

impl Name {
    /// Whether a last layer is called `head`, to be kept out of 8 bits, as recipes in the literature have it.
    pub(crate) fn has_head(self) -> bool {
        let is_without = matches!(
            self,
            Self::Gpt2
                | Self::WideGpt
                | Self::Lstm
                | Self::Gru
                | Self::UNet
                | Self::VolumeNet
                | Self::Dcgan
                | Self::DiffusionUNet
                | Self::Detector
                | Self::T5
                | Self::Mixture
                | Self::Edsr
        );
        !is_without
    }
}

/// Sizes of a model and its batch.
pub(crate) struct Shape {
    pub(crate) batch: usize,
    /// Tokens of a sequence, pixels of the side of an image or a volume, nodes of a graph, or ids of a sample.
    pub(crate) length: usize,
    pub(crate) width: usize,
    pub(crate) layers: usize,
    /// Words, classes of images or objects, or what an id is one of.
    pub(crate) classes: usize,
    /// Share of activations that transformers leave out.
    pub(crate) dropout: f64,
}

/// What a step's speed is counted in.
pub(crate) struct Counted {
    /// Behind the batch in a row's shape.
    pub(crate) suffix: String,
    /// Of a step.
    pub(crate) items: usize,
    pub(crate) unit: &'static str,
}

impl Shape {
    /// A model's own sizes, in the place of which others may be given.
    pub(crate) fn of(
        name: Name,
        batch: Option<usize>,
        layers: Option<usize>,
        dropout: f64,
    ) -> Self {
        let [usual_batch, length, width, usual_layers, classes] = match name {
            Name::BertLarge => [16, 512, 1024, 24, 30522],
            Name::Gpt2 => [8, 1024, 768, 12, 50304],
            Name::WideGpt => [8, 1024, 4096, 4, 50304],
            Name::Llama => [8, 2048, 2048, 22, 32000],
            Name::LlamaLayers => [1, 8192, 4096, 4, 128_256],
            Name::Vit | Name::Mixer => [128, 224, 768, 12, 1000],
            Name::MobileNet | Name::EfficientNet => [128, 224, 0, 0, 1000],
            Name::Lstm | Name::Gru => [64, 256, 1024, 1, 1024],
            Name::Seq2seq => [32, 128, 512, 6, 32000],
            Name::UNet => [32, 64, 128, 3, 0],
            Name::VolumeNet => [2, 96, 32, 3, 4],
            Name::DenseNet | Name::ConvNext | Name::ResNext => [64, 224, 0, 0, 1000],
            Name::Wave => [8, 8192, 128, 20, 256],
            Name::Swin => [64, 224, 96, 0, 1000],
            Name::Conformer => [16, 512, 512, 12, 1024],
            Name::Dit => [64, 256, 768, 12, 0],
            Name::GraphNet => [1, 100_000, 256, 3, 64],
            Name::Dcgan => [128, 64, 64, 0, 0],
            Name::DiffusionUNet => [64, 32, 128, 2, 0],
            Name::Detector => [32, 320, 32, 0, 80],
            Name::T5 => [32, 512, 512, 6, 32128],
            Name::Mixture => [8, 1024, 768, 6, 50304],
            Name::Dlrm => [8192, 26, 64, 0, 100_000],
            Name::Edsr => [16, 96, 64, 16, 0],
        };
        let has_dropout = matches!(
            name,
            Name::BertLarge | Name::Gpt2 | Name::WideGpt | Name::Vit | Name::Seq2seq
        );
        Self {
            batch: batch.unwrap_or(usual_batch),
            length,
            width,
            layers: layers.unwrap_or(usual_layers),
            classes,
            dropout: if has_dropout { dropout } else { 0.0 },
        }
    }

    /// Tokens of what T5 makes of a sequence.
    pub(crate) fn target(&self) -> usize {
        self.length / 4
    }

    /// Boxes that the detector proposes of an image: three a pixel at each of three scales.
    pub(crate) fn boxes(&self) -> usize {
        3 * [8, 16, 32].map(|pixels| (self.length / pixels).pow(2)).iter().sum::<usize>()
    }

    pub(crate) fn counted(&self, name: Name) -> Counted {
        let Self { batch, length, width, .. } = *self;
        let (suffix, items, unit) = match name {
            Name::Lstm | Name::Gru => (format!("T{length}W{width}"), batch * length, "tokens/s"),
            Name::Vit
            | Name::MobileNet
            | Name::UNet
            | Name::DenseNet
            | Name::ConvNext
            | Name::Mixer
            | Name::EfficientNet
            | Name::ResNext
            | Name::Swin
            | Name::Dcgan
            | Name::DiffusionUNet
            | Name::Detector
            | Name::Edsr => (String::new(), batch, "images/s"),
            Name::Dlrm => (String::new(), batch, "samples/s"),
            Name::T5 => {
                let tokens = length + self.target();
                (format!("T{tokens}"), batch * tokens, "tokens/s")
            }
            Name::VolumeNet => (format!("D{length}"), batch, "volumes/s"),
            Name::Wave => (format!("T{length}"), batch * length, "samples/s"),
            Name::Conformer => (format!("T{length}"), batch * length, "frames/s"),
            Name::GraphNet => (format!("N{length}"), batch * length, "nodes/s"),
            _ => (format!("T{length}"), batch * length, "tokens/s"),
        };
        Counted { suffix, items, unit }
    }
}
