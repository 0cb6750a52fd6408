//! Points on a spiral, told apart by a small network that is trained twice: through Burn's learner
//! with Blackburn's toolkit, and by hand. Both take the same steps.

mod by_hand;
mod data;
mod model;
mod with_learner;

use std::path::PathBuf;

use anyhow::Result;
use blackburn::train::schedule::WarmupCosine;
use burn::tensor::Device;
use clap::Parser;

/// Training samples: 1000 make windows of 128 and a last one of 104.
const TRAIN: usize = 1000;
const VALID: usize = 300;

/// Train a small classifier through Burn's learner and by hand.
#[derive(Debug, Parser)]
struct Settings {
    /// Passes over the training data
    #[arg(long, default_value_t = 60)]
    epochs: usize,
    /// Micro-batches to an optimizer step
    #[arg(long, default_value_t = 2)]
    accumulate: usize,
    /// Maximum global norm of the gradients
    #[arg(long, default_value_t = 1.0)]
    max_norm: f64,
    /// Seed of weights, data and their order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Show burn-train's dashboard in a terminal; build with `--features burn/tui`
    #[arg(long)]
    dashboard: bool,
    /// Folder for checkpoints, logs and event files
    #[arg(long, default_value = "runs/learner")]
    out: PathBuf,
}

impl Settings {
    fn schedule(&self) -> WarmupCosine {
        let steps = self.epochs * TRAIN.div_ceil(64).div_ceil(self.accumulate);
        WarmupCosine { peak: 1e-2, floor: 1e-4, warmup_steps: steps / 20, total_steps: steps }
    }
}

fn main() -> Result<()> {
    let settings = Settings::parse();
    anyhow::ensure!(settings.accumulate > 0, "--accumulate: expected at least 1, got 0");
    anyhow::ensure!(
        settings.max_norm > 0.0,
        "--max-norm: expected a positive number, got {}",
        settings.max_norm
    );
    println!("{}", blackburn::init()?);
    let [learner, by_hand] = train_both(&settings, &blackburn::device()?)?;
    println!("loss on held-out points: {learner:.6} with the learner, {by_hand:.6} by hand");
    println!("tensorboard --logdir {}", settings.out.join("events").display());
    Ok(())
}

/// The losses on held-out points.
fn train_both(settings: &Settings, device: &Device) -> Result<[f64; 2]> {
    let training_device = device.clone().autodiff();
    training_device.seed(settings.seed);
    let start = model::Classifier::new(&training_device);
    let train = || data::points(TRAIN, settings.seed, true, &training_device);
    let valid = data::points(VALID, settings.seed + 1, false, device);

    let folder = &settings.out;
    let learner = with_learner::train(
        start.clone(),
        train(),
        valid.clone(),
        settings,
        &training_device,
        folder,
    )?;
    let by_hand = by_hand::train(start, train().as_ref(), settings, &training_device)?;
    Ok([model::loss(&learner, valid.as_ref())?, model::loss(&by_hand, valid.as_ref())?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(out: &std::path::Path) -> Settings {
        Settings {
            epochs: 30,
            accumulate: 2,
            max_norm: 1.0,
            seed: 1,
            dashboard: false,
            out: out.to_owned(),
        }
    }

    #[test]
    fn both_ways_reach_the_stated_loss_and_agree() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let device = Device::flex();
        let [learner, by_hand] = train_both(&settings(folder.path()), &device)?;
        // Guessing among three arms has a loss of ln 3 = 1.1.
        assert!(learner < 0.1, "with the learner: {learner}");
        assert!(by_hand < 0.1, "by hand: {by_hand}");
        // The same data in the same order, and the same operations on it.
        assert_eq!(learner, by_hand);
        Ok(())
    }
}
