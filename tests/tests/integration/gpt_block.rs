//! A GPT as `examples/gpt` builds it: embeddings, pre-norm blocks under a causal mask, a head, the
//! loss, and steps of an optimizer.

use super::{expect_products, trial};
use blackburn::train::precision::{Precision, PrecisionPolicy, full_precision};
use blackburn_tests::blocks::{Block, blocks_of};
use burn::{
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        attention::generate_autoregressive_mask,
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamWConfig, GradientsParams},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial("products_gelu_and_loss_of_a_gpt_are_served_from_the_second_step_on", |device| {
            steps(device, Precision::F32)
        }),
        trial("so_they_are_in_mixed_precision", |device| steps(device, Precision::F16)),
    ]
}

const LAYERS: usize = 3;
const WIDTH: usize = 64;
const VOCABULARY: usize = 51;
const TOKENS: [usize; 2] = [2, 16];

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
            positions: EmbeddingConfig::new(TOKENS[1], WIDTH).init(device),
            blocks: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, LAYERS)
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
        targets: Tensor<2, Int>,
        mask: Tensor<3, Bool>,
    ) -> Tensor<1> {
        let [batch, length] = ids.dims();
        let device = ids.device();
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(ids) + self.positions.forward(positions);
        let x = self.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(self.norm.forward(x));
        CrossEntropyLossConfig::new().init(&device).forward(
            full_precision(logits.reshape([batch * length, VOCABULARY])),
            targets.reshape([batch * length]),
        )
    }
}

fn steps(device: &Device, precision: Precision) -> Result<(), Failed> {
    let plain = device;
    let device = &device.clone().autodiff();
    let mut model = PrecisionPolicy::new(precision).apply(Gpt::new(device))?;
    let mut optimizer = AdamWConfig::new().init();
    let [batch, length] = TOKENS;
    let mask = generate_autoregressive_mask(batch, length, plain);
    let ids = |step: usize| {
        let ids = (0..batch * length).map(|i| ((7 * i + step) % VOCABULARY) as i32);
        let data = TensorData::new(ids.collect::<Vec<_>>(), [batch, length]);
        Tensor::<2, Int>::from_data(data, device)
    };
    for step in 0..4 {
        let (inputs, targets) = (ids(step), ids(step + 1));
        let (next, blocks) = blocks_of(device, || {
            let loss = model.loss(inputs, targets, mask.clone());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            Ok(optimizer.step(1e-3, model.clone(), gradients))
        })?;
        model = next;
        // What the first step runs while plans are still being made may be cut short.
        if step > 0 {
            // Of a layer: q, k, v, scores, context, projection, and two of the feed-forward part.
            expect_products(&blocks, 3 * (8 * LAYERS + 1))?;
            expect_gelu(&blocks)?;
            expect_loss(&blocks)?;
        }
    }
    Ok(())
}

/// Both passes, of seven and of twelve operations, and the casts around them.
fn expect_loss(blocks: &[Block]) -> Result<(), Failed> {
    let launches = |block: &Block, kernel: &str| block.kernels.iter().any(|k| k.ends_with(kernel));
    let is_forward = |block: &&Block| launches(block, "SoftmaxSumsKernel");
    let is_backward =
        |block: &&Block| launches(block, "CrossEntropyBackwardKernel") && !is_forward(block);
    // Other tests' blocks may be among them.
    let has = |least: usize, is: &dyn Fn(&&Block) -> bool| {
        blocks.iter().any(|block| is(&block) && block.operations >= least)
    };
    if has(7, &is_forward) && has(12, &is_backward) {
        return Ok(());
    }
    Err(format!("the loss is not on the softmax kernels: {blocks:#?}").into())
}

fn expect_gelu(blocks: &[Block]) -> Result<(), Failed> {
    for kernel in ["GeluForwardKernel", "GeluBackwardSumKernel"] {
        let runs = |block: &&Block| block.kernels.iter().any(|name| name.ends_with(kernel));
        let found = blocks.iter().filter(runs).count();
        if found < LAYERS {
            return Err(format!("{found} of {LAYERS} layers ran {kernel}").into());
        }
    }
    Ok(())
}
