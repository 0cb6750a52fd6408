//! A training step of GPT-2 small, or a smaller one, of Burn's modules, as the GPT example has it with naive attention:
//! parameters, moments and activations in the device's type, the loss in f32, tokens drawn once.

use burn::{
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        attention::generate_autoregressive_mask,
        loss::{CrossEntropyLoss, CrossEntropyLossConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamWConfig, GradientsParams},
    tensor::{Bool, Device, Distribution, FloatDType, Int, Tensor},
};
use std::{error::Error, time::Instant};

/// The sizes of a model and of its batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    width: usize,
    heads: usize,
    layers: usize,
    vocabulary: usize,
    context: usize,
    batch: usize,
}

pub(crate) const GPT2: Sizes =
    Sizes { width: 768, heads: 12, layers: 12, vocabulary: 50_257, context: 1024, batch: 8 };

/// The GPT example's preset `tiny`, with its tokens of single bytes.
pub(crate) const TINY: Sizes =
    Sizes { width: 128, heads: 4, layers: 4, vocabulary: 256, context: 128, batch: 8 };

/// The preset `small`.
pub(crate) const SMALL: Sizes =
    Sizes { width: 384, heads: 6, layers: 6, vocabulary: 256, context: 256, batch: 32 };

#[derive(Module, Debug)]
struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(sizes: Sizes, device: &Device) -> Self {
        let Sizes { width, heads, layers, vocabulary, context, .. } = sizes;
        Self {
            tokens: EmbeddingConfig::new(vocabulary, width).init(device),
            positions: EmbeddingConfig::new(context, width).init(device),
            blocks: TransformerEncoderConfig::new(width, 4 * width, heads, layers)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, vocabulary).with_bias(false).init(device),
        }
    }

    fn loss(
        &self,
        ids: Tensor<2, Int>,
        targets: Tensor<1, Int>,
        mask: Tensor<3, Bool>,
        criterion: &CrossEntropyLoss,
    ) -> Tensor<1> {
        let [batch, context] = ids.dims();
        let positions = Tensor::<1, Int>::arange(0..context as i64, &ids.device()).unsqueeze();
        let x = self.tokens.forward(ids) + self.positions.forward(positions);
        let x = self.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let rows = self.norm.forward(x).reshape([(batch * context) as i32, -1]);
        let logits = self.head.forward(rows);
        criterion.forward(logits.cast(FloatDType::F32), targets)
    }
}

/// Prints the first step's time, the median of `steps` after `warm_up`, and what the pool holds.
pub(crate) fn gpt2(
    device: &Device,
    sizes: Sizes,
    dtype: &str,
    steps: usize,
) -> Result<(), Box<dyn Error>> {
    const WARM_UP: usize = 5;
    let Sizes { vocabulary, context, batch, .. } = sizes;
    let training = device.clone().autodiff();
    let mut model = Gpt::new(sizes, &training);
    let parameters = model.num_params();
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).with_epsilon(1e-5).init();
    let criterion = CrossEntropyLossConfig::new().init(&training);
    let mask = generate_autoregressive_mask(batch, context, device);
    let draw = || Distribution::Uniform(0.0, vocabulary as f64);
    let ids = Tensor::<2, Int>::random([batch, context], draw(), &training);
    let targets = Tensor::<1, Int>::random([batch * context], draw(), &training);

    let mut times = Vec::new();
    for step in 0..WARM_UP + steps {
        device.sync()?;
        let start = Instant::now();
        let loss = model.loss(ids.clone(), targets.clone(), mask.clone(), &criterion);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-4, model, gradients);
        device.flush()?;
        device.sync()?;
        times.push(start.elapsed().as_secs_f64());
        if step < WARM_UP {
            eprintln!("step {step}: {:.2} s", times[step]);
        }
    }
    let first = times[0];
    let mut rest = times.split_off(WARM_UP);
    rest.sort_by(f64::total_cmp);
    let median = rest[rest.len() / 2];
    let reserved = device.memory_pool_usage().map_or(0, |pool| pool.bytes_reserved >> 20);
    println!("dtype\tparameters\tfirst_step_s\tmedian_ms\ttokens_per_s\treserved_MiB");
    println!(
        "{dtype}\t{parameters}\t{first:.1}\t{:.2}\t{:.0}\t{reserved}",
        median * 1e3,
        (batch * context) as f64 / median
    );
    Ok(())
}
