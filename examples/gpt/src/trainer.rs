//! The training loop.

use crate::{
    checkpoint,
    cli::TrainArgs,
    evaluation::{Evaluation, evaluate, tensors},
    loader::{Prefetcher, Windows},
    metrics::{MetricRecord, MetricsLog},
    model::{Attention, Computation, Gpt},
    run::{self, Run},
    settings::RunSettings,
    store::TrainTokens,
    text::{Author, Sampling},
};
use anyhow::{Context, Result, bail, ensure};
use blackburn::{
    Report,
    distributed::Group,
    train::{
        memory::MemoryMonitor,
        trainer::{Metrics, MicroBatch, Step, TrainerError},
    },
};
use burn::{module::Module, tensor::Device};
use example_program::{Cadence, Progress, agree, or_none};
use std::time::Instant;

/// Batches of held-out text that a validation during training looks at.
const VALIDATION_BATCHES: usize = 20;
/// Tokens of a sample.
const SAMPLE_TOKENS: usize = 120;

/// Validations and checkpoints of a run, if it is not said otherwise.
const TIMES: usize = 10;

/// Trains, or continues to.
pub(crate) fn train(
    args: &TrainArgs,
    mut device: Device,
    report: &Report,
    group: &Group,
) -> Result<()> {
    // Before the start, which with --overwrite removes the run before it.
    args.cadence().check()?;
    ensure!(args.profile != Some(0), "--profile: expected at least 1, got 0");
    agree(group, &[("--resume", args.resume.to_string()), ("--profile", or_none(args.profile))])?;
    let folder = args.out.clone().unwrap_or_else(|| run::default_folder(args));
    let mut run = match args.resume {
        true => Run::resume(args, folder, &mut device, report, group)?,
        false => {
            let settings = RunSettings::resolve(args, group.size(), &device)?;
            Run::start(args, folder, settings, &mut device, report, group)?
        }
    };
    let cadence = run.cadence.cadence(run.settings.steps, TIMES);
    run.carry_out(args, &cadence, report)
}

impl Run {
    /// Trains or profiles, as was asked for.
    fn carry_out(&mut self, args: &TrainArgs, cadence: &Cadence, report: &Report) -> Result<()> {
        match args.profile {
            Some(steps) => self.profile(steps, report),
            None if self.group.is_main() => self.train(cadence, report),
            None => self.follow(cadence),
        }
    }

    fn train(&mut self, cadence: &Cadence, report: &Report) -> Result<()> {
        let steps = self.settings.steps;
        let done = self.step();
        if done >= steps {
            eprintln!(
                "the run is complete: {done} of {steps} steps are done. Raise --steps to go on"
            );
            return Ok(());
        }
        let resumed_at = (done > 0).then_some(done as u64);
        let mut log = MetricsLog::open(&self.folder, resumed_at)?;
        self.introduce(&mut log, report)?;

        let mut batches = self.batches()?;
        let how = self.computation();
        let progress = Progress::new(done, steps, "tokens");
        let started = Instant::now();

        while self.step() < steps {
            let step = self.take_step(&mut batches, &how)?;
            progress.advance(step.number);
            if let Some(metrics) = &step.metrics {
                self.tell(metrics, &mut log, &progress, started)?;
            }
            let [evaluate_due, checkpoint_due] = cadence.due(step.number, steps);
            if !(evaluate_due || checkpoint_due) {
                continue;
            }
            let metrics = self.trainer.metrics().or_else(|error| self.explain(error))?;
            if let Some(metrics) = &metrics {
                self.tell(metrics, &mut log, &progress, started)?;
            }
            if evaluate_due {
                self.validate(&mut log, &progress)?;
            }
            if checkpoint_due {
                // The loss above is from before the last update. A checkpoint of a model that this
                // update broke would be what every --resume starts from.
                if !evaluate_due {
                    let held_out = self.evaluate(&self.model()?.valid(), 1)?;
                    self.check_held_out(held_out.loss)?;
                }
                let path = self.save(cadence.keep)?;
                log.write(&MetricRecord::Checkpoint { step: self.step() as u64, path })?;
            }
        }
        progress.finish();
        self.conclude()
    }

    /// Trains on a rank other than 0, which speaks and writes.
    fn follow(&mut self, cadence: &Cadence) -> Result<()> {
        let steps = self.settings.steps;
        let mut batches = self.batches()?;
        let how = self.computation();
        while self.step() < steps {
            let number = self.take_step(&mut batches, &how)?.number;
            let [_, checkpoint_due] = cadence.due(number, steps);
            if checkpoint_due {
                self.save(cadence.keep)?;
            }
        }
        Ok(())
    }

    /// The batches of the steps to come. Those of a step are dealt to the ranks in turn.
    pub(crate) fn batches(&self) -> Result<Prefetcher> {
        let tokens = TrainTokens(self.store.clone());
        let windows = Windows::new(tokens, self.settings.model.context, self.settings.seed)?;
        let first = self.settings.step_shape().first_batch(self.step(), self.group.rank());
        Prefetcher::new(windows, self.settings.batch, first, self.group.size())
    }

    /// One optimizer step over the micro-batches that come next.
    pub(crate) fn take_step(
        &mut self,
        batches: &mut Prefetcher,
        how: &Computation,
    ) -> Result<Step> {
        let weight = self.settings.batch as f64;
        let micro_batches = (0..self.settings.accumulate)
            .map(|_| {
                let tensors = tensors(batches.next_batch()?, &self.device);
                Ok(MicroBatch { tensors, weight })
            })
            .collect::<Result<Vec<_>>>()?;
        self.trainer
            .step_of(micro_batches, |model, (inputs, targets)| model.loss(inputs, targets, how))
            .or_else(|error| self.explain(error))
    }

    /// Writes and shows what the last steps have come to.
    fn tell(
        &self,
        metrics: &Metrics,
        log: &mut MetricsLog,
        progress: &Progress,
        started: Instant,
    ) -> Result<()> {
        let Metrics { step, steps, loss, elapsed, .. } = *metrics;
        let tokens_per_step = self.settings.tokens_per_step();
        let tokens_per_second = (steps * tokens_per_step) as f64 / elapsed.as_secs_f64();
        let scaler = self.trainer.scaler();
        let memory = MemoryMonitor::new(&self.device).read();
        let moving_ms = 1e3 * metrics.moving.as_secs_f64() / steps as f64;
        log.write(&MetricRecord::Train {
            step: step as u64,
            loss,
            learning_rate: metrics.learning_rate,
            gradient_norm: metrics.gradient_norm,
            scaler: scaler.is_enabled().then(|| scaler.state()),
            reserved_bytes: memory.map(|pool| pool.reserved_bytes),
            in_use_bytes: memory.map(|pool| pool.in_use_bytes),
            moving_ms: (self.group.size() > 1).then_some(moving_ms),
            tokens_per_second,
            tokens: (step * tokens_per_step) as u64,
            seconds: started.elapsed().as_secs_f64(),
        })?;
        let left = (self.settings.steps - step) * tokens_per_step;
        progress.report(step, loss, tokens_per_second, left as f64 / tokens_per_second);
        Ok(())
    }

    /// An error of the trainer's, with what to do where the run has diverged.
    fn explain<T>(&self, error: TrainerError) -> Result<T> {
        match error {
            TrainerError::Diverged { .. } | TrainerError::Hopeless { .. } => {
                self.diverged(&error.to_string())
            }
            _ => Err(error.into()),
        }
    }

    fn check_held_out(&self, loss: f64) -> Result<()> {
        if loss.is_finite() {
            return Ok(());
        }
        self.diverged(&format!("after step {} the validation loss is {loss}", self.step()))
    }

    fn diverged<T>(&self, how: &str) -> Result<T> {
        bail!(
            "training diverged: {how}. Checkpoints up to step {} are intact. Try a lower \
             --learning-rate (now {}), more --warmup or a smaller --clip",
            checkpoint::of_run(&self.folder).steps().last().copied().unwrap_or(0),
            self.settings.learning_rate
        )
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
        let model = self.model()?.valid().materialize();
        let result = self.evaluate(&model, VALIDATION_BATCHES)?;
        let step = self.step() as u64;
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
            // So few tokens are not worth a recording.
            graph: false,
            device: &self.device.clone().without_autodiff(),
        };
        let sample = author.generate(self.prompt(), SAMPLE_TOKENS, sampling, &mut |_| true)?.text;
        progress.line(&format!(
            "step {step}: validation loss {:.4}, perplexity {:.2}\n{}\n",
            result.loss,
            result.perplexity(),
            indent(&sample)
        ));
        log.write(&MetricRecord::Sample { step, prompt: self.prompt().into(), text: sample })
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
