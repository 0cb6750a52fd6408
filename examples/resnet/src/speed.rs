//! Steps on random images, timed.

use crate::model::{Depth, ModelConfig, ResNet};
use anyhow::{Result, ensure};
use blackburn::train::{
    graph::GraphStatus,
    memory::MemoryMonitor,
    optim::SgdGroups,
    precision::{Precision, PrecisionPolicy, full_precision},
    profile::Profiler,
    trainer::{Trainer, TrainerConfig},
};
use burn::{
    nn::loss::CrossEntropyLossConfig,
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
    /// Run Burn's modules as they are, instead of their layers by `blackburn::nn::vision`.
    #[arg(long)]
    unmodified: bool,
    /// Run passes one by one, instead of recording and replaying them.
    #[arg(long)]
    unrecorded: bool,
    /// Show where the time of a step goes instead, with passes that run one by one.
    #[arg(long)]
    profile: bool,
}

/// A network that learns the same random images again and again.
struct Training {
    trainer: Trainer<ResNet, (Tensor<4>, Tensor<1, Int>)>,
    images: Tensor<4>,
    classes: Tensor<1, Int>,
    forward: fn(&ResNet, Tensor<4>) -> Tensor<2>,
}

impl Training {
    fn new(args: &SpeedArgs, device: &Device) -> Result<Self> {
        let SpeedArgs { batch, size, .. } = *args;
        let config = ModelConfig { depth: args.depth, width: 64, classes: args.classes };
        let model = ResNet::new(&config, &device.clone().autodiff());
        let policy = PrecisionPolicy::new(args.precision);
        let (policy, forward): (_, fn(&_, _) -> _) = match args.unmodified {
            true => (policy, ResNet::forward_unmodified),
            false => (policy.with_f32_statistics(), ResNet::forward),
        };
        let config = TrainerConfig::new(1e-3)
            .with_policy(policy)
            .with_optimizer(SgdGroups::default())
            .with_max_norm(f64::INFINITY);
        let is_recorded = !(args.unrecorded || args.profile);
        let config = if is_recorded { config } else { config.without_recording() };
        let trainer = config.init(model)?;
        let images =
            Tensor::<4>::random([batch, 3, size, size], Distribution::Normal(0.0, 1.0), device);
        let images = Tensor::from_inner(trainer.input(images));
        let upper = args.classes as f64;
        let classes = Tensor::<1, Int>::random([batch], Distribution::Uniform(0.0, upper), device);
        Ok(Self { trainer, images, classes: Tensor::from_inner(classes), forward })
    }

    fn step(&mut self) -> Result<()> {
        let batch = (self.images.clone(), self.classes.clone());
        let forward = self.forward;
        self.trainer.step(batch, |model, (images, classes)| {
            let logits = full_precision(forward(model, images));
            CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, classes)
        })?;
        Ok(())
    }

    /// How its passes run.
    fn passes(&self) -> String {
        match self.trainer.graph_status() {
            GraphStatus::Recorded => "recorded".into(),
            GraphStatus::WarmUp => "not recorded yet".into(),
            GraphStatus::Unrecorded { reason } => format!("not recorded: {reason}"),
        }
    }
}

/// Times steps, or profiles them.
pub(crate) fn speed(args: &SpeedArgs, device: &Device) -> Result<()> {
    // Passes are recorded in the third, and compared with the recording in the fourth and the twelfth.
    const WARM_UP: usize = 16;
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
        }
        device.sync()?;
        times.push(start.elapsed().as_secs_f64() * 1e3 / args.steps as f64);
    }
    times.sort_by(f64::total_cmp);
    let [median, least, most] = [times[times.len() / 2], times[0], times[times.len() - 1]];
    println!(
        "ResNet-{} in {}{}, {} images of {} pixels: {median:.2} ms a step ({least:.2} to {most:.2}), {:.0} images/s",
        args.depth,
        args.precision,
        if args.unmodified { ", modules unmodified" } else { "" },
        args.batch,
        args.size,
        args.batch as f64 * 1e3 / median
    );
    println!("passes: {}", training.passes());
    if let Some(memory) = MemoryMonitor::new(device).read() {
        let reserved = memory.reserved_bytes as f64 / (1u64 << 30) as f64;
        println!("memory: {reserved:.2} GiB reserved");
    }
    Ok(())
}
