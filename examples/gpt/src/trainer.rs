//! The training loop.

use crate::{
    checkpoint,
    cli::TrainArgs,
    evaluation::{Evaluation, evaluate, tensors},
    loader::{Prefetcher, Windows},
    metrics::{MetricRecord, MetricsLog},
    model::{Attention, Computation, Gpt},
    progress::Progress,
    run::{self, Run},
    settings::RunSettings,
    store::TrainTokens,
    text::{Author, Sampling},
};
use anyhow::{Context, Result, bail};
use blackburn::{
    Report,
    train::{
        accumulate::GradientSum,
        graph::GradientGraph,
        memory::MemoryMonitor,
        scaler::{ScalerState, scaled},
    },
};
use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{Device, Int, Tensor},
};
use std::time::Instant;

/// Batches of held-out text that a validation during training looks at.
const VALIDATION_BATCHES: usize = 20;
/// Steps that overflow one after another, by which the scale has come down from anywhere.
const HOPELESS: u32 = 40;
/// Tokens of a sample.
const SAMPLE_TOKENS: usize = 120;

/// Forward and backward passes over micro-batches of token ids and targets, and a loss scale.
pub(crate) type Passes =
    GradientGraph<Gpt, (Vec<(Tensor<2, Int>, Tensor<2, Int>)>, Tensor<1>), Tensor<1>>;

/// How often a run reports, and how much it keeps.
struct Cadence {
    log: usize,
    evaluate: usize,
    checkpoint: usize,
    keep: usize,
}

impl Cadence {
    fn resolve(args: &TrainArgs, steps: usize) -> Result<Self> {
        let tenth = steps.div_ceil(10);
        let cadence = Self {
            log: args.log_every.unwrap_or(10),
            evaluate: args.eval_every.unwrap_or(tenth),
            checkpoint: args.checkpoint_every.unwrap_or(tenth),
            keep: args.keep.unwrap_or(3),
        };
        let all = [
            ("--profile", args.profile.unwrap_or(1)),
            ("--log-every", cadence.log),
            ("--eval-every", cadence.evaluate),
            ("--checkpoint-every", cadence.checkpoint),
            ("--keep", cadence.keep),
        ];
        match all.iter().find(|(_, value)| *value == 0) {
            Some((option, _)) => bail!("{option}: expected at least 1, got 0"),
            None => Ok(cadence),
        }
    }
}

/// Trains, or continues to.
pub(crate) fn train(args: &TrainArgs, mut device: Device, report: &Report) -> Result<()> {
    let folder = args.out.clone().unwrap_or_else(|| run::default_folder(args));
    if args.resume {
        let mut run = Run::resume(args, folder, &mut device, report)?;
        let cadence = Cadence::resolve(args, run.settings.steps)?;
        return run.carry_out(args, &cadence, report);
    }
    let settings = RunSettings::resolve(args)?;
    // Before the start, which with --overwrite removes the run before it.
    let cadence = Cadence::resolve(args, settings.steps)?;
    Run::start(args, folder, settings, &mut device, report)?.carry_out(args, &cadence, report)
}

impl Run {
    /// Trains or profiles, as was asked for.
    fn carry_out(&mut self, args: &TrainArgs, cadence: &Cadence, report: &Report) -> Result<()> {
        match args.profile {
            Some(steps) => self.profile(steps, report),
            None => self.train(cadence, report),
        }
    }

    fn train(&mut self, cadence: &Cadence, report: &Report) -> Result<()> {
        let steps = self.settings.steps;
        if self.step >= steps {
            eprintln!(
                "the run is complete: {} of {steps} steps are done. Raise --steps to go on",
                self.step
            );
            return Ok(());
        }
        let resumed_at = (self.step > 0).then_some(self.step as u64);
        let mut log = MetricsLog::open(&self.folder, resumed_at)?;
        self.introduce(&mut log, report)?;

        let mut batches = self.batches()?;
        let how = self.computation();
        let mut graph = self.passes();
        let schedule = self.settings.schedule();
        let progress = Progress::new(self.step, steps);
        let started = Instant::now();
        let mut interval = Interval::new();

        while self.step < steps {
            let learning_rate = schedule.at(self.step);
            let (loss, norm) = self.take_step(&mut batches, &mut graph, &how, learning_rate)?;
            self.step += 1;
            interval.losses.push(loss);
            progress.advance(self.step);

            let due = |every: usize| self.step == steps || self.step.is_multiple_of(every);
            let (log_due, evaluate_due, checkpoint_due) =
                (due(cadence.log), due(cadence.evaluate), due(cadence.checkpoint));
            if !(log_due || evaluate_due || checkpoint_due) {
                continue;
            }
            let record = self.report(interval, learning_rate, norm, started)?;
            log.write(&record)?;
            self.check_finite(&record, &progress)?;
            if evaluate_due {
                self.validate(&mut log, &progress)?;
            }
            if checkpoint_due {
                // The loss above is from before the last update. A checkpoint of a model that this
                // update broke would be what every --resume starts from.
                if !evaluate_due {
                    let held_out = self.evaluate(&self.model.valid(), 1)?;
                    self.check_held_out(held_out.loss)?;
                }
                let path = self.save(cadence.keep)?;
                log.write(&MetricRecord::Checkpoint { step: self.step as u64, path })?;
            }
            interval = Interval::new();
        }
        progress.finish();
        self.conclude()
    }

    /// The batches of the steps to come.
    pub(crate) fn batches(&self) -> Result<Prefetcher> {
        let tokens = TrainTokens(self.store.clone());
        let windows = Windows::new(tokens, self.settings.model.context, self.settings.seed)?;
        let first = (self.step * self.settings.accumulate) as u64;
        Prefetcher::new(windows, self.settings.batch, first)
    }

    /// One optimizer step: forward and backward over the micro-batches, clip, update. Returns the
    /// mean loss and the gradients' norm, still on the device.
    pub(crate) fn take_step(
        &mut self,
        batches: &mut Prefetcher,
        graph: &mut Passes,
        how: &Computation,
        learning_rate: f64,
    ) -> Result<(Tensor<1>, Tensor<1>)> {
        // Dropout follows the step, so that a resumed run repeats it.
        let seed = self.settings.seed.wrapping_add(1 + self.step as u64);
        self.device.seed(seed);
        blackburn::nn::seed(seed);
        let micro_batches = (0..self.settings.accumulate)
            .map(|_| Ok(tensors(batches.next_batch()?, &self.device)))
            .collect::<Result<Vec<_>>>()?;
        let scale = self.scaler.current_scale();
        let weight = self.settings.batch as f64;
        let (total, gradients) =
            graph.run(&self.model, (micro_batches, scale), |model, (micro_batches, scale)| {
                let mut gradients = GradientSum::new();
                let mut losses = Vec::new();
                for (inputs, targets) in micro_batches {
                    let loss = model.loss(inputs, targets, how);
                    losses.push(loss.clone().inner());
                    let backward = scaled(loss, scale.clone()).backward();
                    gradients.add(model, GradientsParams::from_grads(backward, model), weight);
                }
                let mean = gradients.mean(model).unwrap_or_default();
                (Tensor::cat(losses, 0).mean(), mean)
            })?;
        let clip = self.settings.clip;
        let norm = self.scaler.unscale_and_clip_in_step(&gradients, &*self.model, clip)?;
        self.model.update(|model| self.optimizer.step(learning_rate, model, gradients));
        self.scaler.update()?;
        // Hand the step over to the device now, and go on preparing the next one.
        self.device.flush().context("the device failed")?;
        Ok((total, norm))
    }

    /// The interval in numbers. Reading the loss waits for the device, so the time is the steps' own.
    fn report(
        &self,
        interval: Interval,
        learning_rate: f64,
        norm: Tensor<1>,
        started: Instant,
    ) -> Result<MetricRecord> {
        let steps = interval.losses.len();
        let loss: f32 = Tensor::cat(interval.losses, 0).mean().into_scalar();
        let gradient_norm: f32 = norm.into_scalar();
        let scaler = self.scaler.is_enabled().then(|| self.scaler.state());
        let memory = MemoryMonitor::new(&self.device).read();
        let tokens = (steps * self.settings.tokens_per_step()) as f64;
        Ok(MetricRecord::Train {
            step: self.step as u64,
            loss,
            learning_rate,
            gradient_norm,
            scaler,
            reserved_bytes: memory.map(|pool| pool.reserved_bytes),
            in_use_bytes: memory.map(|pool| pool.in_use_bytes),
            tokens_per_second: tokens / interval.clock.elapsed().as_secs_f64(),
            tokens: (self.step * self.settings.tokens_per_step()) as u64,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    fn check_finite(&self, record: &MetricRecord, progress: &Progress) -> Result<()> {
        let MetricRecord::Train { step, loss, gradient_norm, tokens_per_second, scaler, .. } =
            record
        else {
            return Ok(());
        };
        let left = (self.settings.steps - self.step) * self.settings.tokens_per_step();
        progress.report(self.step, *loss, *tokens_per_second, left as f64 / tokens_per_second);
        // A scaler leaves steps out that overflow. It cannot help where all of them do.
        let is_left_out = |state: &ScalerState| state.skipped_in_a_row < HOPELESS;
        if loss.is_finite()
            && (gradient_norm.is_finite() || scaler.as_ref().is_some_and(is_left_out))
        {
            return Ok(());
        }
        self.diverged(&format!(
            "by step {step} the loss is {loss} and the gradients' norm {gradient_norm}"
        ))
    }

    fn check_held_out(&self, loss: f64) -> Result<()> {
        if loss.is_finite() {
            return Ok(());
        }
        self.diverged(&format!("after step {} the validation loss is {loss}", self.step))
    }

    fn diverged(&self, how: &str) -> Result<()> {
        bail!(
            "training diverged: {how}. Checkpoints up to step {} are intact. Try a lower \
             --learning-rate (now {}), more --warmup or a smaller --clip",
            checkpoint::steps(&checkpoint::folder(&self.folder)).last().copied().unwrap_or(0),
            self.settings.learning_rate
        )
    }

    /// What runs forward and backward passes.
    pub(crate) fn passes(&self) -> Passes {
        let policy = self.settings.policy();
        if self.graph { GradientGraph::new(policy) } else { GradientGraph::disabled(policy) }
    }

    /// How losses are computed.
    pub(crate) fn computation(&self) -> Computation {
        let context = self.settings.model.context;
        let attention = Attention::new(self.attention, context, &self.device);
        Computation { attention, chunked_loss: self.chunked_loss }
    }

    /// The loss of `model` on held-out text.
    fn evaluate(&self, model: &Gpt, most: usize) -> Result<Evaluation> {
        let device = self.device.clone().without_autodiff();
        let (batch, context) = (self.settings.batch, self.settings.model.context);
        let how = self.computation();
        evaluate(model, self.store.validation(), batch, context, most, &how, &device)
            .context("cannot validate")
    }

    fn validate(&self, log: &mut MetricsLog, progress: &Progress) -> Result<()> {
        let started = Instant::now();
        // In the type that is computed in: masters would be cast anew for each batch and each token.
        let model = self.model.valid().materialize();
        let result = self.evaluate(&model, VALIDATION_BATCHES)?;
        let step = self.step as u64;
        log.write(&MetricRecord::Validation {
            step,
            loss: result.loss,
            perplexity: result.perplexity(),
            tokens: result.tokens,
            seconds: started.elapsed().as_secs_f64(),
        })?;
        self.check_held_out(result.loss)?;
        let sampling = Sampling { temperature: 0.8, top_k: 50, seed: self.settings.seed };
        let author = Author {
            model: &model,
            tokenizer: &self.tokenizer,
            context: self.settings.model.context,
            attention: self.attention,
            device: &self.device.clone().without_autodiff(),
        };
        let sample = author.generate(&self.prompt, SAMPLE_TOKENS, sampling, &mut |_| true)?.text;
        progress.line(&format!(
            "step {step}: validation loss {:.4}, perplexity {:.2}\n{}\n",
            result.loss,
            result.perplexity(),
            indent(&sample)
        ));
        log.write(&MetricRecord::Sample { step, prompt: self.prompt.clone(), text: sample })
    }
}

/// What was measured since the last report.
struct Interval {
    losses: Vec<Tensor<1>>,
    clock: Instant,
}

impl Interval {
    fn new() -> Self {
        Self { losses: Vec::new(), clock: Instant::now() }
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
