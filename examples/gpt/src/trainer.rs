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
    distributed::{Group, Moved},
    train::{
        memory::MemoryMonitor,
        readback::Readback,
        scaler::ScalerState,
        trainer::{MicroBatch, Step, TrainerError},
    },
};
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};
use example_program::{Cadence, Progress, agree, or_none};
use std::time::Instant;

/// Batches of held-out text that a validation during training looks at.
const VALIDATION_BATCHES: usize = 20;
/// Steps that overflow one after another, by which the scale has come down from anywhere.
const HOPELESS: u32 = 40;
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
            let settings = RunSettings::resolve(args, group.size())?;
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
        let mut interval = Interval::new(&self.group);
        let mut asked: Option<Asked> = None;

        while self.step() < steps {
            let step = self.take_step(&mut batches, &how);
            if let Some(asked) = asked.take() {
                let told = self.report(asked, &mut interval, started).and_then(|record| {
                    log.write(&record)?;
                    self.check_finite(&record, &progress)
                });
                // Why this step has failed says more: where a rank is lost, numbers may be unfinished.
                if step.is_ok() {
                    told?;
                }
            }
            let step = step?;
            interval.losses.push(step.mean_loss.clone());
            progress.advance(step.number);

            let [log_due, evaluate_due, checkpoint_due] = cadence.due(step.number, steps);
            if !(log_due || evaluate_due || checkpoint_due) {
                continue;
            }
            let report = Asked::of(&mut interval, step);
            if !(evaluate_due || checkpoint_due) {
                // Read when the device has the next step to do.
                asked = Some(report);
                continue;
            }
            let record = self.report(report, &mut interval, started)?;
            log.write(&record)?;
            self.check_finite(&record, &progress)?;
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
            interval.begin(&self.group);
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
            let [.., checkpoint_due] = cadence.due(number, steps);
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
        let step = self
            .trainer
            .step_of(micro_batches, |model, (inputs, targets)| model.loss(inputs, targets, how));
        match step {
            Ok(step) => Ok(step),
            Err(error @ (TrainerError::Diverged { .. } | TrainerError::Hopeless { .. })) => {
                self.diverged(&error.to_string())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// An interval in numbers. They come when the device has done its steps, so the time is the steps' own, and the next
    /// interval begins.
    fn report(&self, asked: Asked, next: &mut Interval, started: Instant) -> Result<MetricRecord> {
        let Asked { step, learning_rate, steps, clock, moved, numbers } = asked;
        let numbers = numbers.wait().context("cannot read the loss")?;
        let [loss, gradient_norm] = numbers[..] else {
            bail!("expected a loss and a gradient norm, got {numbers:?}");
        };
        let elapsed = clock.elapsed();
        next.begin(&self.group);
        let scaler = self.trainer.scaler();
        let scaler = scaler.is_enabled().then(|| scaler.state());
        let memory = MemoryMonitor::new(&self.device).read();
        let tokens = (steps * self.settings.tokens_per_step()) as f64;
        let moving = next.moved.all - moved.all;
        let moving_ms = 1e3 * moving.as_secs_f64() / steps as f64;
        Ok(MetricRecord::Train {
            step: step as u64,
            loss,
            learning_rate,
            gradient_norm,
            scaler,
            reserved_bytes: memory.map(|pool| pool.reserved_bytes),
            in_use_bytes: memory.map(|pool| pool.in_use_bytes),
            moving_ms: (self.group.size() > 1).then_some(moving_ms),
            tokens_per_second: tokens / elapsed.as_secs_f64(),
            tokens: (step * self.settings.tokens_per_step()) as u64,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    fn check_finite(&self, record: &MetricRecord, progress: &Progress) -> Result<()> {
        let MetricRecord::Train { step, loss, gradient_norm, tokens_per_second, scaler, .. } =
            record
        else {
            return Ok(());
        };
        let done = *step as usize;
        let left = (self.settings.steps - done) * self.settings.tokens_per_step();
        progress.report(done, *loss, *tokens_per_second, left as f64 / tokens_per_second);
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

/// What was measured since the last report.
struct Interval {
    losses: Vec<Tensor<1>>,
    clock: Instant,
    moved: Moved,
}

impl Interval {
    fn new(group: &Group) -> Self {
        Self { losses: Vec::new(), clock: Instant::now(), moved: group.time_moving() }
    }

    /// Counts from now on.
    fn begin(&mut self, group: &Group) {
        (self.clock, self.moved) = (Instant::now(), group.time_moving());
    }
}

/// The numbers of an interval, which the device was asked for.
struct Asked {
    /// The interval's last.
    step: usize,
    learning_rate: f64,
    steps: usize,
    clock: Instant,
    moved: Moved,
    /// The mean loss and the last gradient norm.
    numbers: Readback,
}

impl Asked {
    /// Leaves the interval without losses.
    fn of(interval: &mut Interval, step: Step) -> Self {
        let losses = std::mem::take(&mut interval.losses);
        let steps = losses.len();
        let numbers = Tensor::cat(vec![Tensor::cat(losses, 0).mean(), step.gradient_norm], 0);
        Self {
            step: step.number,
            learning_rate: step.learning_rate,
            steps,
            clock: interval.clock,
            moved: interval.moved,
            numbers: Readback::of(numbers),
        }
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
