//! A training step of GPT-2 small of Burn's modules, as the GPT example has it with naive attention:
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

const WIDTH: usize = 768;
const HEADS: usize = 12;
const LAYERS: usize = 12;
const VOCABULARY: usize = 50_257;
const CONTEXT: usize = 1024;
const BATCH: usize = 8;

#[derive(Module, Debug)]
struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(CONTEXT, WIDTH).init(device),
            blocks: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, HEADS, LAYERS)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).with_bias(false).init(device),
        }
    }

    fn loss(
        &self,
        ids: Tensor<2, Int>,
        targets: Tensor<1, Int>,
        mask: Tensor<3, Bool>,
        criterion: &CrossEntropyLoss,
    ) -> Tensor<1> {
        let positions = Tensor::<1, Int>::arange(0..CONTEXT as i64, &ids.device()).unsqueeze();
        let x = self.tokens.forward(ids) + self.positions.forward(positions);
        let x = self.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(self.norm.forward(x).reshape([BATCH * CONTEXT, WIDTH]));
        criterion.forward(logits.cast(FloatDType::F32), targets)
    }
}

/// Prints the first step's time, the median of `steps` after `warm_up`, and what the pool holds.
pub(crate) fn gpt2(device: &Device, dtype: &str, steps: usize) -> Result<(), Box<dyn Error>> {
    const WARM_UP: usize = 5;
    let training = device.clone().autodiff();
    let mut model = Gpt::new(&training);
    let parameters = model.num_params();
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).with_epsilon(1e-5).init();
    let criterion = CrossEntropyLossConfig::new().init(&training);
    let mask = generate_autoregressive_mask(BATCH, CONTEXT, device);
    let draw = || Distribution::Uniform(0.0, VOCABULARY as f64);
    let ids = Tensor::<2, Int>::random([BATCH, CONTEXT], draw(), &training);
    let targets = Tensor::<1, Int>::random([BATCH * CONTEXT], draw(), &training);

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
        (BATCH * CONTEXT) as f64 / median
    );
    Ok(())
}
