//! Where the time of a training step goes: `train --profile`.

use crate::{bars::Bars, metrics::replace_file, picture, run::Run};
use anyhow::Result;
use blackburn::{
    Report,
    train::{
        graph::GraphStatus,
        profile::{Phase, ProfileOptions, Profiler},
    },
};
use std::{
    fs,
    time::{Duration, Instant},
};

impl Run {
    /// Takes steps from where the run is, and tells where their time goes. No checkpoint is written: the run
    /// is afterwards where it was.
    pub(crate) fn profile(&mut self, steps: usize, report: &Report) -> Result<()> {
        let options = ProfileOptions {
            steps_per_round: steps,
            observed: steps,
            recorded: self.graph,
            ..ProfileOptions::default()
        };
        let mut profiler = Profiler::with_options(&self.device, options)?;
        let mut batches = self.batches()?;
        let how = self.computation();
        let steps = profiler.steps_left();
        if self.group.is_main() {
            eprintln!("profiling {steps} steps; nothing of them is kept");
        }
        let (started, moved) = (Instant::now(), self.group.time_moving());

        let mut recorded = self.graph;
        while !profiler.is_done() {
            let phase = profiler.phase();
            let is_recorded = self.trainer.graph_status() == GraphStatus::Recorded;
            if recorded && phase != Phase::WarmUp && !is_recorded {
                // Devices without graphs, and passes that cannot be recorded.
                profiler.without_recording();
                recorded = false;
            }
            if recorded && phase.is_eager() {
                self.trainer.stop_recording();
                recorded = false;
            }
            profiler.step(|| self.take_step(&mut batches, &how).map(drop))??;
        }
        let (passed, moving) = (started.elapsed(), self.group.time_moving());
        let per_step =
            |from: Duration, to: Duration| 1e3 * (to - from).as_secs_f64() / steps as f64;
        let mut profile = profiler.finish()?;
        if !self.group.is_main() {
            return Ok(());
        }
        profile.device = format!("{} ({})", report.device, report.device_name);

        println!("{profile}");
        if self.group.size() > 1 {
            println!(
                "numbers between {} ranks: {:.2} ms a step with the wait for late ranks, {:.2} ms of it beside the \
                 optimizer's update; {:.1} % of the time of all profiled steps",
                self.group.size(),
                per_step(moved.all, moving.all),
                per_step(moved.beside, moving.beside),
                100.0 * (moving.all - moved.all).as_secs_f64() / passed.as_secs_f64()
            );
        }
        let path = |extension: &str| self.folder.join(format!("profile.{extension}"));
        let (json, svg, png) = (path("json"), path("svg"), path("png"));
        replace_file(&json, |temporary| {
            Ok(fs::write(temporary, serde_json::to_string_pretty(&profile)?)?)
        })?;
        picture::write(&Bars::new(&profile), &svg, &png)?;
        eprintln!("profile: {}, {} and {}", json.display(), png.display(), svg.display());
        Ok(())
    }
}
