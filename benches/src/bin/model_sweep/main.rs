//! Steps of whole models, as users write them: of `burn::nn` unmodified, and of `blackburn::nn`.
//! `model_sweep --models bert-large,vit-b16 > models.tsv`
//!
//! Prints rows of `benches/results`. The peer is `peers/torch_models.py`. ResNet-50 is timed by `resnet speed`, GPT-2
//! by `gpt train`.

use blackburn::{
    fp8::Tally,
    train::{
        graph::{GraphStatus, PassTensors},
        memory::MemoryMonitor,
        precision::{Precision, PrecisionPolicy},
        profile::Profiler,
        trainer::{Trainer, TrainerConfig},
    },
};
use blackburn_benches::device;
use burn::{
    module::{Module, ModuleDisplay},
    optim::{AdamWConfig, GradientsParams},
    tensor::{Device, Tensor},
};
use clap::{Parser, ValueEnum};
use std::{
    error::Error,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

mod data;
mod drop_in;
mod names;
mod unmodified;

use names::{Counted, Name, Shape};

/// Time steps of whole models.
#[derive(Parser)]
struct Arguments {
    /// Which models, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Name::value_variants().to_vec())]
    models: Vec<Name>,
    /// Whose modules, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Spelling::value_variants().to_vec())]
    modules: Vec<Spelling>,
    /// What is computed in, separated by commas: f32, tf32, bf16, f16 or fp8. With fp8 a model's head stays in bf16.
    #[arg(long, value_delimiter = ',', default_value = "bf16")]
    precision: Vec<Precision>,
    /// Sequences or images of a step; each model has a number of its own without this.
    #[arg(long)]
    batch: Option<usize>,
    /// Layers of transformers; each model has a number of its own without this.
    #[arg(long)]
    layers: Option<usize>,
    /// Share of activations that Burn's transformers leave out; the other models have none.
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    /// Run passes one by one, instead of recording and replaying them.
    #[arg(long)]
    unrecorded: bool,
    /// Print where a step's time goes instead of its row. Passes then run one by one.
    #[arg(long)]
    profile: bool,
    /// Train by a loop of Burn's own, its `AdamW` and its `step`, in the place of `Trainer`.
    #[arg(long)]
    plain_loop: bool,
    /// Steps that are timed together.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// How often that is timed; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Commit of the rows.
    #[arg(long, default_value = "-")]
    commit: String,
    /// Date of the rows.
    #[arg(long, default_value = "-")]
    date: String,
    /// End of the rows' notes.
    #[arg(long, default_value = "")]
    note: String,
    /// Take Burn's CPU device: to try the program, not to time it.
    #[arg(long)]
    flex: bool,
}

/// Whose modules a model is made of.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Spelling {
    /// `burn::nn`, as it is.
    Burn,
    /// `blackburn::nn`, under the same names.
    Blackburn,
}

/// What is timed, and how it is called in the results.
struct Case<'a> {
    name: Name,
    spelling: Spelling,
    precision: Precision,
    shape: Shape,
    arguments: &'a Arguments,
    device: &'a Device,
}

impl Case<'_> {
    /// As recipes in the literature have it, the head is not in 8 bits.
    fn policy(&self) -> PrecisionPolicy {
        let policy = PrecisionPolicy::new(self.precision);
        let policy = match self.spelling {
            Spelling::Burn => policy,
            Spelling::Blackburn => policy.with_drop_ins(),
        };
        if self.name.has_head() { policy.without_fp8("head") } else { policy }
    }

    /// Times a model's steps and prints the row.
    fn time<M: Module + ModuleDisplay, I: PassTensors>(
        &self,
        model: M,
        batch: I,
        loss: impl Fn(&M, I) -> Tensor<1>,
    ) -> Result<(), Box<dyn Error>> {
        let policy = self.policy();
        let before = Tally::now();
        if self.arguments.plain_loop {
            let mut model = Some(policy.apply(model)?);
            let mut optimizer = AdamWConfig::new().init();
            let (first, times) = self.timed(|| {
                let current = model.take().ok_or("an earlier step failed")?;
                let gradients = loss(&current, batch.clone()).backward();
                let gradients = GradientsParams::from_grads(gradients, &current);
                model = Some(optimizer.step(1e-4, current, gradients));
                Ok(())
            })?;
            let passes = "not recorded: a loop of Burn's own, with its AdamW";
            self.print(&times, first, passes, Tally::now().since(before));
            return Ok(());
        }
        let config = TrainerConfig::new(1e-4).with_policy(policy).with_max_norm(f64::INFINITY);
        let config = match self.arguments.unrecorded || self.arguments.profile {
            true => config.without_recording(),
            false => config,
        };
        let mut trainer: Trainer<M, I> = config.init(model)?;
        if self.arguments.profile {
            let mut profiler = Profiler::new(self.device)?;
            while !profiler.is_done() {
                profiler.step(|| trainer.step(batch.clone(), &loss))??;
            }
            println!("{:?} of {:?}\n{}", self.name, self.spelling, profiler.finish()?);
            return Ok(());
        }
        let (first, times) = self.timed(|| {
            trainer.step(batch.clone(), &loss)?;
            Ok(())
        })?;
        let passes = match trainer.graph_status() {
            GraphStatus::Recorded => "recorded".into(),
            GraphStatus::WarmUp => "not recorded yet".into(),
            GraphStatus::Unrecorded { reason } => format!("not recorded: {reason}"),
        };
        self.print(&times, first, &passes, Tally::now().since(before));
        Ok(())
    }

    /// Seconds of the first ten steps and of all first steps, and milliseconds of a step in each round, in order.
    fn timed(
        &self,
        mut step: impl FnMut() -> Result<(), Box<dyn Error>>,
    ) -> Result<([f64; 2], Vec<f64>), Box<dyn Error>> {
        // Passes are recorded in the third, and compared with the recording in the fourth and the twelfth.
        const WARM_UP: [usize; 2] = [10, 6];
        let Arguments { steps, rounds, .. } = *self.arguments;
        let start = Instant::now();
        let mut first = [0.0; 2];
        for (count, seconds) in WARM_UP.into_iter().zip(&mut first) {
            for _ in 0..count {
                step()?;
            }
            self.device.sync()?;
            *seconds = start.elapsed().as_secs_f64();
        }
        let mut times = Vec::new();
        for _ in 0..rounds {
            let start = Instant::now();
            for _ in 0..steps {
                step()?;
            }
            self.device.sync()?;
            times.push(start.elapsed().as_secs_f64() * 1e3 / steps as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok((first, times))
    }

    fn print(&self, times: &[f64], first: [f64; 2], passes: &str, products: Tally) {
        let reserved = MemoryMonitor::new(self.device).read().map_or(0, |pool| pool.reserved_bytes);
        let Self { arguments, shape, .. } = self;
        let name = self.name.to_possible_value().map_or_else(String::new, |v| v.get_name().into());
        let Counted { suffix, items, unit } = shape.counted(self.name);
        let (modules, nn) = match self.spelling {
            Spelling::Burn => (" unmodified", "burn::nn"),
            Spelling::Blackburn => ("", "blackburn::nn"),
        };
        let how = if arguments.plain_loop { " plain loop" } else { "" };
        let (behind, dropout) = match shape.dropout {
            0.0 => ("", String::new()),
            rate => (" dropout", format!(", dropout {rate}")),
        };
        let [median, least, most] = [times.len() / 2, 0, times.len() - 1].map(|place| times[place]);
        let rate = items as f64 * 1e3 / median;
        let memory = reserved as f64 / (1u64 << 30) as f64;
        let in_fp8 = match self.precision.recipe() {
            Some(_) => format!("; {products}"),
            None => String::new(),
        };
        let Arguments { date, commit, note, .. } = arguments;
        let precision = self.precision;
        println!(
            "{date}\t{commit}\t{name}\tstep\t{precision}\tB{}{suffix}{modules}{how}{behind}\tblackburn\t{median:.3}\t{least:.3}\t\
             {most:.3}\t{rate:.0}\t{unit}\t{nn}, AdamW with f32 masters, random data, no clipping{dropout}; passes {passes}; \
             first ten steps {:.2} s, first 16 steps {:.1} s; {memory:.2} GiB reserved{in_fp8}{note}",
            shape.batch, first[0], first[1]
        );
    }

    fn run(&self) -> Result<(), Box<dyn Error>> {
        let Shape { batch, length, width, .. } = self.shape;
        let training = self.device.clone().autodiff();
        macro_rules! time {
            ($model:ident, $data:expr) => {
                match self.spelling {
                    Spelling::Burn => {
                        let model = unmodified::$model::new(&self.shape, &training);
                        self.time(model, $data, unmodified::$model::loss)
                    }
                    Spelling::Blackburn => {
                        let model = drop_in::$model::new(&self.shape, &training);
                        self.time(model, $data, drop_in::$model::loss)
                    }
                }
            };
        }
        let tokens = || (self.ids([batch, length]), self.ids([batch * length]));
        match self.name {
            Name::BertLarge => {
                let (ids, targets) = tokens();
                time!(Bert, (ids, self.places(length), targets))
            }
            Name::Gpt2 | Name::WideGpt => {
                let (ids, targets) = tokens();
                time!(Gpt, (ids, self.places(length), targets))
            }
            Name::Llama | Name::LlamaLayers => time!(Llama, tokens()),
            Name::Vit => {
                let places = self.places((length / 16).pow(2));
                time!(Vit, (self.images(), places, self.ids([batch])))
            }
            Name::MobileNet => time!(MobileNet, (self.images(), self.ids([batch]))),
            Name::Lstm => {
                let targets = self.ids([batch * length]);
                time!(Recurrent, (self.numbers([batch, length, width]), targets))
            }
            Name::Gru => {
                let targets = self.ids([batch * length]);
                time!(Gated, (self.numbers([batch, length, width]), targets))
            }
            Name::Seq2seq => {
                let (ids, targets) = tokens();
                time!(Seq2seq, (self.ids([batch, length]), ids, self.places(length), targets))
            }
            Name::UNet => time!(UNet, (self.images(), self.images())),
            Name::VolumeNet => {
                let volumes = |channels| self.numbers([batch, channels, length, length, length]);
                time!(VolumeNet, (volumes(1), volumes(self.shape.classes)))
            }
            Name::DenseNet => time!(DenseNet, (self.images(), self.ids([batch]))),
            Name::ConvNext => time!(ConvNext, (self.images(), self.ids([batch]))),
            Name::Mixer => time!(Mixer, (self.images(), self.ids([batch]))),
            Name::Wave => {
                let targets = self.ids([batch * length]);
                time!(Wave, (self.numbers([batch, 1, length]), targets))
            }
            Name::EfficientNet => time!(EfficientNet, (self.images(), self.ids([batch]))),
            Name::ResNext => time!(ResNext, (self.images(), self.ids([batch]))),
            Name::Swin => time!(Swin, (self.images(), self.ids([batch]))),
            Name::Conformer => {
                let targets = self.ids([batch * length]);
                time!(Conformer, (self.numbers([batch, length, width]), targets))
            }
            Name::Dit => {
                let patches = || self.numbers([batch, length, unmodified::Dit::PATCH]);
                let condition = self.numbers([batch, width]);
                time!(Dit, (patches(), self.places(length), condition, patches()))
            }
            Name::GraphNet => {
                let nodes = batch * length;
                let ends = || self.ids_below(nodes, [10 * nodes]);
                let features = self.numbers([nodes, width]);
                time!(GraphNet, (features, ends(), ends(), self.ids([nodes])))
            }
            Name::Dcgan => {
                let noise = self.numbers([batch, unmodified::NOISE, 1, 1]);
                time!(Dcgan, (noise, self.images()))
            }
            Name::DiffusionUNet => {
                let channels = unmodified::DiffusionUNet::CHANNELS;
                let latents = || self.numbers([batch, channels, length, length]);
                time!(DiffusionUNet, (latents(), self.ids_below(1000, [batch]), latents()))
            }
            Name::Detector => {
                let boxes = self.shape.boxes();
                let told = |numbers| self.ids_below(2, [batch, boxes, numbers]);
                let sides = self.numbers([batch, boxes, 4]);
                time!(Detector, (self.images(), sides, told(1), told(self.shape.classes)))
            }
            Name::T5 => {
                let target = self.shape.target();
                let (source, ids) = (self.ids([batch, length]), self.ids([batch, target]));
                let buckets = (self.buckets(length, false), self.buckets(target, true));
                time!(T5, (source, ids, buckets, self.ids([batch * target])))
            }
            Name::Mixture => {
                let (ids, targets) = tokens();
                time!(Mixture, (ids, self.places(length), targets))
            }
            Name::Dlrm => {
                let numbers = self.numbers([batch, unmodified::Dlrm::NUMBERS]);
                let clicked = self.ids_below(2, [batch]);
                time!(Dlrm, (numbers, self.ids([batch, length]), clicked))
            }
            Name::Edsr => {
                let side = unmodified::Edsr::FACTOR * length;
                time!(Edsr, (self.images(), self.numbers([batch, 3, side, side])))
            }
        }
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
    let mut failures = 0;
    for &name in &arguments.models {
        for &spelling in &arguments.modules {
            for &precision in &arguments.precision {
                let Arguments { batch, layers, dropout, .. } = arguments;
                let shape = Shape::of(name, batch, layers, dropout);
                let arguments = &arguments;
                let case = Case { name, spelling, precision, shape, arguments, device: &device };
                // One model that fails leaves the others to be timed. A panic has told itself.
                let why = match catch_unwind(AssertUnwindSafe(|| case.run())) {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(error.to_string()),
                    Err(_) => Some("it panicked".into()),
                };
                if let Some(why) = why {
                    // At once: a run may be cut off.
                    eprintln!("{name:?} of {spelling:?}, {precision}: {why}");
                    failures += 1;
                }
                device.memory_cleanup();
            }
        }
    }
    match failures {
        0 => Ok(()),
        failures => Err(format!("{failures} failed, as told above").into()),
    }
}
