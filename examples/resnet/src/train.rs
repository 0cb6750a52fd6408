//! `resnet train`: the loop, and what it reports.

use crate::{
    cli::TrainArgs,
    data::loader::{Loader, Plan},
    evaluation::{Evaluation, evaluate},
    metrics::{LOG, MetricRecord, MetricsLog},
    pictures::{self, Confusion, Curves, Samples},
    run::{self, Run},
    settings::RunSettings,
};
use anyhow::{Context, Result, bail};
use blackburn::{
    Report,
    distributed::Group,
    train::{
        memory::MemoryMonitor,
        record_log::read_records,
        trainer::{Metrics, Step, TrainerError},
    },
};
use example_program::{Cadence, Progress, agree};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Validations and checkpoints of a run, if it is not said otherwise.
const TIMES: usize = 5;

/// Trains, or continues to.
pub(crate) fn train(
    args: &TrainArgs,
    device: &burn::tensor::Device,
    report: &Report,
    group: &Group,
) -> Result<()> {
    // Before the start, which with --overwrite removes the run before it.
    args.cadence().check()?;
    agree(group, &[("--resume", args.resume.to_string())])?;
    let folder = args.out.clone().unwrap_or_else(|| PathBuf::from("runs/resnet"));
    let mut run = match args.resume {
        true => Run::resume(args, folder, device, group)?,
        false => Run::start(args, folder, device, report, group)?,
    };
    let cadence = run.cadence.cadence(run.settings.steps, TIMES);
    match group.is_main() {
        true => run.train(&cadence, report),
        false => run.follow(&cadence),
    }
}

impl Run {
    fn train(&mut self, cadence: &Cadence, report: &Report) -> Result<()> {
        let steps = self.settings.steps;
        if self.step() >= steps {
            eprintln!(
                "the run is complete: {} of {steps} steps are done. Raise --steps to go on",
                self.step()
            );
            return Ok(());
        }
        let resumed_at = (self.step() > 0).then_some(self.step() as u64);
        let mut log = MetricsLog::open(&self.folder, resumed_at)?;
        self.introduce(&mut log, report)?;
        let mut loader = self.batches()?;
        let progress = Progress::new(self.step(), steps, "images");
        let started = Instant::now();
        let mut last = None;

        while self.step() < steps {
            let step = self.take_step(&mut loader)?;
            progress.advance(step.number);
            if let Some(metrics) = &step.metrics {
                self.tell(metrics, &mut log, &progress, loader.take_waited(), started)?;
            }
            let [evaluate_due, checkpoint_due] = cadence.due(step.number, steps);
            if !(evaluate_due || checkpoint_due) {
                continue;
            }
            let metrics = self.training.trainer.metrics().or_else(|error| self.explain(error))?;
            if let Some(metrics) = &metrics {
                self.tell(metrics, &mut log, &progress, loader.take_waited(), started)?;
            }
            // The losses above are from before the last update. A checkpoint of a model that this update broke would
            // be what every --resume starts from.
            last = Some(self.validate(&mut log, &progress)?);
            if checkpoint_due {
                let path = self.save(cadence.keep)?;
                log.write(&MetricRecord::Checkpoint { step: self.step() as u64, path })?;
            }
        }
        progress.finish();
        match last {
            Some(evaluation) => self.conclude(&evaluation),
            None => Ok(()),
        }
    }

    /// Trains on a rank other than 0, which speaks and writes.
    fn follow(&mut self, cadence: &Cadence) -> Result<()> {
        let steps = self.settings.steps;
        let mut loader = self.batches()?;
        while self.step() < steps {
            let number = self.take_step(&mut loader)?.number;
            let [_, checkpoint_due] = cadence.due(number, steps);
            if checkpoint_due {
                self.save(cadence.keep)?;
            }
        }
        Ok(())
    }

    /// The batches of the steps to come. Those of a step are dealt to the ranks in turn.
    fn batches(&self) -> Result<Loader> {
        let RunSettings { seed, ranks, .. } = self.settings;
        let first = self.settings.step_shape().first_batch(self.step(), self.group.rank());
        let plan = Plan::Train { seed, first, stride: ranks };
        Loader::start(self.source.clone(), plan, self.shape())
    }

    /// One optimizer step over the batches that come next.
    fn take_step(&mut self, loader: &mut Loader) -> Result<Step> {
        let batches = (0..self.settings.accumulate)
            .map(|_| loader.next_batch()?.context("the images have come to an end"))
            .collect::<Result<Vec<_>>>()?;
        self.training.step(batches).or_else(|error| self.explain(error))
    }

    /// Says what is about to be trained, to the reader and to the log.
    fn introduce(&self, log: &mut MetricsLog, report: &Report) -> Result<()> {
        let settings = &self.settings;
        eprintln!("{}", self.source.summary());
        eprintln!(
            "training a ResNet-{} of width {} in {} on {}{} ({}): {} steps of {} images of {} pixels, \
             seed {}; run folder {}",
            settings.model.depth,
            settings.model.width,
            settings.precision,
            match settings.ranks {
                1 => String::new(),
                ranks => format!("{ranks} devices, this one "),
            },
            report.device,
            report.device_name,
            settings.steps,
            settings.images_per_step(),
            settings.size,
            settings.seed,
            self.folder.display()
        );
        let memory = self.training.trainer.memory()?;
        eprintln!("memory: {}", memory.line());
        let fields = serde_json::json!({
            "settings": settings,
            "data": self.data,
            "classes": self.source.classes(),
            "fingerprint": self.source.fingerprint(),
            "memory": memory,
            "device": report,
            "starts_at_step": self.step(),
        });
        match fields {
            serde_json::Value::Object(fields) => log.write(&MetricRecord::Run(fields)),
            _ => Ok(()),
        }
    }

    /// Writes and shows what the last steps have come to, with the time that they `waited` for images.
    fn tell(
        &self,
        metrics: &Metrics,
        log: &mut MetricsLog,
        progress: &Progress,
        waited: Duration,
        started: Instant,
    ) -> Result<()> {
        let Metrics { step, steps, loss, .. } = *metrics;
        let images_per_step = self.settings.images_per_step();
        let seconds = metrics.elapsed.as_secs_f64();
        let images_per_second = (steps * images_per_step) as f64 / seconds;
        let scaler = self.training.trainer.scaler();
        let memory = MemoryMonitor::new(&self.device).read();
        log.write(&MetricRecord::Train {
            step: step as u64,
            loss,
            learning_rate: metrics.learning_rate,
            gradient_norm: metrics.gradient_norm,
            scaler: scaler.is_enabled().then(|| scaler.state()),
            reserved_bytes: memory.map(|memory| memory.reserved_bytes),
            images_per_second,
            waited_share: waited.as_secs_f64() / seconds,
            skipped_images: self.source.skipped() as u64,
            images: (step * images_per_step) as u64,
            seconds: started.elapsed().as_secs_f64(),
        })?;
        let left = (self.settings.steps - step) * images_per_step;
        progress.report(step, loss, images_per_second, left as f64 / images_per_second);
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

    fn diverged<T>(&self, how: &str) -> Result<T> {
        bail!(
            "training diverged: {how}. Checkpoints up to step {} are intact. Try a lower \
             --learning-rate (now {}), more --warmup, or a --clip",
            run::checkpoints(&self.folder).steps().last().copied().unwrap_or(0),
            self.settings.learning_rate
        )
    }

    /// Measures on the images that are held out, and shows some of them in `TensorBoard`.
    fn validate(&self, log: &mut MetricsLog, progress: &Progress) -> Result<Evaluation> {
        let started = Instant::now();
        let model = self.training.to_read(false)?;
        let policy = self.training.trainer.policy();
        let evaluation = evaluate(&model, &self.source, self.shape(), policy, &self.device)?;
        let step = self.step() as u64;
        log.write(&MetricRecord::Validation {
            step,
            loss: evaluation.loss(),
            top1: evaluation.top1(),
            top5: evaluation.top5(),
            images: evaluation.images(),
            averaged: self.training.trainer.ema().is_some(),
            seconds: started.elapsed().as_secs_f64(),
        })?;
        if !evaluation.loss().is_finite() {
            return self.diverged(&format!("after step {step} the validation loss is no number"));
        }
        let picture =
            Samples { evaluation: &evaluation, classes: self.source.classes() }.render()?;
        let size = picture.dimensions().into();
        log.image("validation/samples", step, size, &pictures::png(&picture)?)?;
        progress.line(&format!(
            "step {step}: validation loss {:.4}, {:.1} % right, {:.1} % among the five likeliest",
            evaluation.loss(),
            100.0 * evaluation.top1(),
            100.0 * evaluation.top5()
        ));
        Ok(evaluation)
    }

    /// Draws what has become of the finished run.
    fn conclude(&self, evaluation: &Evaluation) -> Result<()> {
        let records: Vec<MetricRecord> = read_records(&self.folder.join(LOG))?;
        let title = format!(
            "{}: ResNet-{} of width {}",
            self.folder.display(),
            self.settings.model.depth,
            self.settings.model.width
        );
        pictures::write(&Curves::new(&records, title)?, &self.folder, "curves")?;
        draw(evaluation, self.source.classes(), &self.folder)?;
        let skipped = self.source.skipped();
        if skipped > 0 {
            eprintln!("{skipped} images could not be used and were left out");
        }
        eprintln!(
            "{:.1} % of {} held-out images told right. Pictures: curves, confusion (.svg, .png) and \
             samples.png in {}",
            100.0 * evaluation.top1(),
            evaluation.images(),
            self.folder.display()
        );
        Ok(())
    }
}

/// Draws samples and confusions of an evaluation.
pub(crate) fn draw(evaluation: &Evaluation, classes: &[String], folder: &Path) -> Result<()> {
    pictures::write(&Confusion::new(evaluation, classes), folder, "confusion")?;
    let png = pictures::png(&Samples { evaluation, classes }.render()?)?;
    pictures::save(&folder.join("samples.png"), |temporary| Ok(std::fs::write(temporary, &png)?))
}
