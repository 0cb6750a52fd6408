//! Steps on random images, timed.

use crate::model::{Depth, ModelConfig, ResNet};
use anyhow::{Context, Result, ensure};
use blackburn::train::{
    optim::SgdGroups,
    precision::{Precision, PrecisionPolicy, full_precision},
    profile::Profiler,
};
use burn::{
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, ModuleOptimizer},
    tensor::{Device, Distribution, Int, Tensor},
};
use clap::Args;
use std::time::Instant;

/// What is timed.
#[derive(Debug, Args)]
pub(crate) struct SpeedArgs {
    /// Layers of the network: 18, 34, 50 or 101.
    #[arg(long, default_value = "50")]
    depth: Depth,
    /// Images of a step.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Height and width of the images, in pixels.
    #[arg(long, default_value_t = 224)]
    size: usize,
    /// Classes that the network tells apart.
    #[arg(long, default_value_t = 1000)]
    classes: usize,
    /// What is computed in: f32, tf32, bf16 or f16.
    #[arg(long, default_value = "bf16")]
    precision: Precision,
    /// Steps that are timed together.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// How often that is timed; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Show where the time of a step goes instead.
    #[arg(long)]
    profile: bool,
}

/// A network that learns the same random images again and again.
struct Training {
    /// There but while the optimizer has it.
    model: Option<ResNet>,
    optimizer: ModuleOptimizer,
    images: Tensor<4>,
    classes: Tensor<1, Int>,
}

impl Training {
    fn new(args: &SpeedArgs, device: &Device) -> Result<Self> {
        let SpeedArgs { batch, size, .. } = *args;
        let training = device.clone().autodiff();
        let policy = PrecisionPolicy::new(args.precision);
        let config = ModelConfig { depth: args.depth, width: 64, classes: args.classes };
        let model = policy.apply(ResNet::new(&config, &training))?;
        let optimizer = SgdGroups::default().init(&model, &training);
        let images =
            Tensor::<4>::random([batch, 3, size, size], Distribution::Normal(0.0, 1.0), device);
        let upper = args.classes as f64;
        let classes = Tensor::<1, Int>::random([batch], Distribution::Uniform(0.0, upper), device);
        Ok(Self {
            model: Some(model),
            optimizer,
            images: Tensor::from_inner(policy.input(images)),
            classes: Tensor::from_inner(classes),
        })
    }

    fn step(&mut self) -> Result<()> {
        let model = self.model.take().context("an earlier step failed")?;
        let logits = full_precision(model.forward(self.images.clone()));
        let criterion = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = criterion.forward(logits, self.classes.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
        Ok(())
    }
}

/// Times steps, or profiles them.
pub(crate) fn speed(args: &SpeedArgs, device: &Device) -> Result<()> {
    const WARM_UP: usize = 3;
    ensure!(
        args.batch > 0 && args.steps > 0 && args.rounds > 0 && args.classes > 0,
        "--batch, --steps, --rounds and --classes have to be at least 1"
    );
    ensure!(args.size >= 32, "--size has to be at least 32, which the last stage sees as 1 pixel");
    let mut training = Training::new(args, device)?;
    if args.profile {
        let mut profiler = Profiler::new(device)?;
        while !profiler.is_done() {
            profiler.step(|| training.step())??;
        }
        println!("{}", profiler.finish()?);
        return Ok(());
    }
    let start = Instant::now();
    for _ in 0..WARM_UP {
        training.step()?;
    }
    device.sync()?;
    eprintln!("{WARM_UP} steps in {:.1} s, kernels compiled", start.elapsed().as_secs_f64());
    let mut times = Vec::new();
    for _ in 0..args.rounds {
        let start = Instant::now();
        for _ in 0..args.steps {
            training.step()?;
            device.flush()?;
        }
        device.sync()?;
        times.push(start.elapsed().as_secs_f64() * 1e3 / args.steps as f64);
    }
    times.sort_by(f64::total_cmp);
    let [median, least, most] = [times[times.len() / 2], times[0], times[times.len() - 1]];
    println!(
        "ResNet-{} in {}, {} images of {} pixels: {median:.2} ms a step ({least:.2} to {most:.2}), {:.0} images/s",
        args.depth,
        args.precision,
        args.batch,
        args.size,
        args.batch as f64 * 1e3 / median
    );
    Ok(())
}
