//! A GPT as `examples/gpt` builds it: embeddings, pre-norm blocks under a causal mask, a head, the
//! loss, and steps of an optimizer. Which kernels run, and whether loss and gradients are right.

use super::expect_products;
use blackburn::train::precision::{Precision, PrecisionPolicy, full_precision};
use blackburn_reference::storage::Storage;
use blackburn_tests::{
    blocks::{Block, blocks_of},
    modules::{Unread, parameter_gradients, parameters, read, seeded, with_parameters},
    plain::{self, Judge, Tensors},
    tensors::values,
    textbook::{AttentionRules, Fault, Function, Textbook},
};
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
    tensor::DType,
};
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let precisions = [
        (Storage::F32, Precision::F32),
        (Storage::F16, Precision::F16),
        (Storage::Bf16, Precision::Bf16),
    ];
    let trial = |(storage, precision)| {
        let name = format!("linear::a_gpt_is_served_and_within_bounds_in_{storage:?}");
        plain::trial(name.to_lowercase(), storage, move |device, judge| {
            steps(precision, device, judge)
        })
    };
    precisions.into_iter().map(trial).collect()
}

const LAYERS: usize = 3;
const HEADS: usize = 4;
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

/// What a step learns from.
struct Batch {
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    mask: Tensor<3, Bool>,
}

impl Batch {
    fn new(step: usize, device: &Device) -> Self {
        let [batch, length] = TOKENS;
        let ids = |step: usize| {
            let ids = (0..batch * length).map(|i| ((7 * i + step) % VOCABULARY) as i32);
            let data = TensorData::new(ids.collect::<Vec<_>>(), [batch, length]);
            Tensor::<2, Int>::from_data(data, device)
        };
        let mask = generate_autoregressive_mask(batch, length, &device.clone().without_autodiff());
        Self { inputs: ids(step), targets: ids(step + 1), mask }
    }
}

/// The loss by its formula.
fn loss_by_formula(model: &Gpt, formulas: Textbook, batch: Batch) -> Tensor<1> {
    let [sequences, length] = TOKENS;
    let device = batch.inputs.device();
    let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>();
    let x = formulas.embedding(&model.tokens, batch.inputs)
        + formulas.embedding(&model.positions, positions);
    let rules =
        AttentionRules { heads: HEADS, heads_kv: HEADS, causal: true, ..AttentionRules::default() };
    let layers = model.blocks.layers.iter();
    let x = layers.fold(x, |x, l| formulas.encoder_layer(l, Function::Gelu, &rules, x));
    let logits = formulas.linear(&model.head, formulas.norm(&model.norm, x));
    let rows = sequences * length;
    let logits = logits.reshape([rows, VOCABULARY]);
    let logits = match logits.dtype() {
        DType::F64 => logits,
        _ => full_precision(logits),
    };
    formulas.cross_entropy(logits, batch.targets.reshape([rows]))
}

/// Loss and gradients in f64, for the parameters that `model` computes with.
fn exact(parameters: &Tensors, formulas: Textbook, step: usize) -> Result<Tensors, Failed> {
    let device = &Device::flex().autodiff();
    let model = with_parameters(Gpt::new(device), parameters);
    let loss = loss_by_formula(&model, formulas, Batch::new(step, device));
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    numbers(loss, parameter_gradients(&model, &gradients)?)
}

fn numbers(loss: Tensor<1>, gradients: Unread) -> Result<Tensors, Failed> {
    let mut numbers = vec![("loss".to_string(), values(loss.inner())?)];
    numbers.extend(read(gradients)?);
    Ok(numbers)
}

fn steps(precision: Precision, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let fresh = seeded(Gpt::new(&Device::flex().autodiff()), Storage::F32, |_, _, _| ());
    let mut model = PrecisionPolicy::new(precision).apply(fresh.fork(device))?;
    let mut optimizer = AdamWConfig::new().init();
    for step in 0..4 {
        let parameters = parameters(&model)?;
        let truth = exact(&parameters, Textbook::default(), step)?;
        let batch = Batch::new(step, device);
        let is_plain = judge.is_plain();
        let ((loss, gradients, next), blocks) = blocks_of(device, || {
            let loss = match is_plain {
                true => loss_by_formula(&model, Textbook::default().with_norms_of_burn(), batch),
                false => model.loss(batch.inputs, batch.targets, batch.mask),
            };
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            let kept = parameter_gradients(&model, &gradients)?;
            Ok((loss, kept, optimizer.step(1e-3, model.clone(), gradients)))
        })?;
        // What the first step runs while plans are still being made may be cut short.
        if step > 0 && !is_plain {
            expect_kernels(&blocks)?;
        }
        let actual = || numbers(loss, gradients);
        let name = format!("step {step}");
        match is_plain {
            true => judge.check(&name, &truth, actual, || Ok(Tensors::new()))?,
            false => judge.check(&name, &truth, || Ok(Tensors::new()), actual)?,
        }
        if step == 0 {
            for fault in [Fault::Bias, Fault::LateKey, Fault::Scale, Fault::Mean] {
                let faulty = || exact(&parameters, Textbook::with(fault), step);
                judge.expect_caught(&name, &format!("{fault:?}"), &truth, faulty)?;
            }
        }
        model = next;
    }
    Ok(())
}

fn expect_kernels(blocks: &[Block]) -> Result<(), Failed> {
    // Of a layer: q, k, v, scores, context, projection, and two of the feed-forward part.
    expect_products(blocks, 3 * (8 * LAYERS + 1))?;
    expect_gelu(blocks)?;
    expect_loss(blocks)
}

/// Both passes, of seven and of twelve operations, and the casts around them.
fn expect_loss(blocks: &[Block]) -> Result<(), Failed> {
    let launches = |block: &Block, kernel: &str| block.kernels.iter().any(|k| k.ends_with(kernel));
    let is_forward = |block: &&Block| launches(block, "SoftmaxSumsKernel");
    let is_backward =
        |block: &&Block| launches(block, "CrossEntropyBackwardKernel") && !is_forward(block);
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
        if found != LAYERS {
            return Err(format!("{found} of {LAYERS} layers ran {kernel}").into());
        }
    }
    Ok(())
}
