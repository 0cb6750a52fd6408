//! What the training toolkit adds to a step: a GPT-2 sized encoder of `burn::nn` layers, trained for a few
//! steps without it and with more and more of it, with and without a graph, in turns.
//! `toolkit_sweep > toolkit.tsv`

use blackburn::{
    nn::{embedding::embedding, flash, loss, transformer::TransformerEncoderInput},
    train::{
        accumulate::GradientSum,
        clip::clip_global_norm,
        graph::GradientGraph,
        optim::AdamWGroups,
        precision::{Precision, PrecisionPolicy},
        scaler::{GradScaler, GradScalerConfig, scaled},
    },
};
use blackburn_benches::device;
use burn::{
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig,
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig},
    },
    optim::{AdamWConfig, GradientsParams, ModuleOptimizer},
    tensor::{Device, Distribution, Int, Tensor},
};
use clap::Parser;
use std::{error::Error, time::Instant};

/// Time steps with and without the toolkit.
#[derive(Parser)]
struct Arguments {
    /// Layers of the encoder.
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Width of the residual stream; heads have 64.
    #[arg(long, default_value_t = 768)]
    width: usize,
    /// Sequences of a batch.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 1024)]
    context: usize,
    /// Tokens that there are.
    #[arg(long, default_value_t = 50257)]
    vocabulary: usize,
    /// Steps that are timed together.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// How often each is timed; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Take Burn's CPU device: to try the program, not to time it.
    #[arg(long)]
    flex: bool,
}

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    blocks: TransformerEncoder,
    head: Linear,
}

impl Model {
    fn loss(&self, ids: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = ids.dims();
        let input = TransformerEncoderInput::new(embedding(&self.embedding, ids.clone())).causal();
        let x = flash::transformer_encoder(&self.blocks, input);
        let width = x.dims()[2];
        let logits = self.head.forward(x.reshape([batch * length, width]));
        let criterion = CrossEntropyLossConfig::new().init(&logits.device());
        loss::cross_entropy(&criterion, logits, ids.reshape([batch * length]))
    }
}

/// What a step has beside forward, backward and update.
#[derive(Clone, Copy, PartialEq)]
enum Toolkit {
    /// Burn's optimizer, and nothing else.
    Burn,
    /// The toolkit's optimizer.
    Nothing,
    /// Accumulated, and clipped before the optimizer's step.
    Apart,
    /// Accumulated, and clipped and unscaled in the optimizer's step.
    InStep,
}

struct Subject {
    name: &'static str,
    toolkit: Toolkit,
    /// There but while the optimizer has it: a copy would hold parameters that are updated in place.
    model: Option<Model>,
    /// Forward and backward passes, over ids and a loss scale.
    passes: Option<GradientGraph<Model, (Tensor<2, Int>, Tensor<1>), Tensor<1>>>,
    optimizer: ModuleOptimizer,
    scaler: GradScaler,
    times: Vec<f64>,
}

/// Loss and gradients, accumulated if they are to be.
fn pass(
    model: &Model,
    (ids, scale): (Tensor<2, Int>, Tensor<1>),
    toolkit: Toolkit,
) -> (Tensor<1>, GradientsParams) {
    let loss = model.loss(ids);
    let value = loss.clone().inner();
    if matches!(toolkit, Toolkit::Burn | Toolkit::Nothing) {
        return (value, GradientsParams::from_grads(loss.backward(), model));
    }
    let mut sum = GradientSum::new();
    let backward = scaled(loss, scale).backward();
    sum.add(model, GradientsParams::from_grads(backward, model), 1.0);
    (value, sum.mean(model).unwrap_or_default())
}

impl Subject {
    fn step(&mut self, ids: &Tensor<2, Int>) -> Result<(), Box<dyn Error>> {
        let (toolkit, inputs) = (self.toolkit, (ids.clone(), self.scaler.current_scale()));
        let model = self.model.take().ok_or("an earlier step failed")?;
        let (_, mut gradients) = match &mut self.passes {
            Some(passes) => {
                passes.run(&model, inputs, |model, inputs| pass(model, inputs, toolkit))?
            }
            None => pass(&model, inputs, toolkit),
        };
        match self.toolkit {
            Toolkit::Burn | Toolkit::Nothing => {}
            Toolkit::Apart => drop(clip_global_norm(&mut gradients, &model, 1.0)),
            Toolkit::InStep => {
                drop(self.scaler.unscale_and_clip_in_step(&gradients, &model, 1.0)?);
            }
        }
        self.model = Some(self.optimizer.step(1e-4, model, gradients));
        if self.toolkit == Toolkit::InStep {
            self.scaler.update()?;
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let device = if arguments.flex {
        Device::flex()
    } else {
        let Some(device) = device() else { return Ok(()) };
        Device::new(device)
    };
    blackburn::init()?;
    let training = device.clone().autodiff();
    let ids = Tensor::<2, Int>::random(
        [arguments.batch, arguments.context],
        Distribution::Uniform(0.0, arguments.vocabulary as f64),
        &device,
    );
    let ids = Tensor::from_inner(ids);
    let subject = |name, precision, toolkit, graph| -> Result<Subject, Box<dyn Error>> {
        let Arguments { layers, width, vocabulary, .. } = arguments;
        let blocks = TransformerEncoderConfig::new(width, 4 * width, width.div_ceil(64), layers)
            .with_dropout(0.0)
            .with_norm_first(true);
        let model = Model {
            embedding: EmbeddingConfig::new(vocabulary, width).init(&training),
            blocks: blocks.init(&training),
            head: LinearConfig::new(width, vocabulary).with_bias(false).init(&training),
        };
        let policy = PrecisionPolicy::new(precision);
        let model = policy.apply(model)?;
        let scaler = match precision {
            Precision::F16 => GradScalerConfig::default().init(&training)?,
            _ => GradScaler::disabled(&training),
        };
        let optimizer = match toolkit {
            Toolkit::Burn => AdamWConfig::new().init(),
            _ => AdamWGroups::default().init_gated(&model, &training, scaler.gate()),
        };
        let passes = match toolkit {
            // Burn's optimizer takes gradients in the type of the masters.
            Toolkit::Burn => None,
            _ if graph => Some(GradientGraph::new(policy)),
            _ => Some(GradientGraph::disabled(policy)),
        };
        let model = Some(model);
        Ok(Subject { name, toolkit, model, passes, optimizer, scaler, times: Vec::new() })
    };
    let mut subjects = [
        subject("bf16, Burn's AdamW", Precision::Bf16, Toolkit::Burn, false)?,
        subject("bf16", Precision::Bf16, Toolkit::Nothing, false)?,
        subject("bf16, clipped in the step", Precision::Bf16, Toolkit::InStep, false)?,
        subject("bf16, graph", Precision::Bf16, Toolkit::Nothing, true)?,
        subject("bf16, graph, clipped", Precision::Bf16, Toolkit::Apart, true)?,
        subject("bf16, graph, clipped in the step", Precision::Bf16, Toolkit::InStep, true)?,
        subject("f16, graph, scaled, clipped in the step", Precision::F16, Toolkit::InStep, true)?,
    ];
    for subject in &mut subjects {
        eprintln!("warming up: {}", subject.name);
        // Passes are recorded in the third step.
        for _ in 0..6 {
            subject.step(&ids)?;
        }
        device.sync()?;
    }
    for _ in 0..arguments.rounds {
        for subject in &mut subjects {
            let start = Instant::now();
            for _ in 0..arguments.steps {
                subject.step(&ids)?;
                device.flush()?;
            }
            device.sync()?;
            let each = start.elapsed().as_secs_f64() * 1e3 / arguments.steps as f64;
            subject.times.push(each);
        }
    }
    println!("subject\tmedian_ms\tmin_ms\tmax_ms");
    for subject in &mut subjects {
        subject.times.sort_by(f64::total_cmp);
        let times = &subject.times;
        let median = times.get(times.len() / 2).copied().unwrap_or(f64::NAN);
        let min = times.first().copied().unwrap_or(f64::NAN);
        let max = times.last().copied().unwrap_or(f64::NAN);
        println!("{}\t{median:.2}\t{min:.2}\t{max:.2}", subject.name);
    }
    Ok(())
}
