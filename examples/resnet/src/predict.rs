//! `resnet eval`, `resnet predict` and `resnet data`: what is done with images besides learning from them.

use crate::{
    cli::{EvalArgs, LoadArgs, NetworkArgs, PredictArgs},
    data::{
        CHANNELS, DataSettings, Source,
        loader::{Batch, Loader, Plan, Shape},
        normalize, photo,
    },
    evaluation::{evaluate, likeliest, logits, softmax},
    model::ResNet,
    run::{self, RunState, workers},
    settings::check_size,
    train::draw,
    training::Training,
    weights::Weights,
};
use anyhow::{Context, Result, bail, ensure};
use blackburn::{distributed::Group, train::precision::PrecisionPolicy};
use burn::{module::Module, tensor::Device};
use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// A trained network, and how images are put to it.
struct Network {
    model: ResNet,
    policy: PrecisionPolicy,
    size: usize,
    classes: usize,
    /// Of a run.
    state: Option<RunState>,
    name: String,
}

impl Network {
    fn load(args: &NetworkArgs, device: &Device) -> Result<Self> {
        if let Some(path) = &args.weights {
            ensure!(!args.raw, "--raw: files of --weights have no moving average");
            let weights = Weights::open(path)?;
            let config = weights.model();
            let model = weights.load(ResNet::new(&config, device), &config, false)?;
            let size = args.size.unwrap_or(224);
            check_size(size)?;
            let policy = PrecisionPolicy::default();
            let name = path.display().to_string();
            let classes = config.classes;
            return Ok(Self { model: model.valid(), policy, size, classes, state: None, name });
        }
        let (found, state) = run::find(&args.checkpoint)?;
        let settings = &state.settings;
        let size = args.size.unwrap_or(settings.size);
        check_size(size)?;
        let training = Training::load(settings, &found, state.cadence, device, &Group::alone())?;
        Ok(Self {
            model: training.to_read(args.raw)?,
            policy: training.trainer.policy().clone(),
            size,
            classes: settings.model.classes,
            name: format!("step {}", found.step()),
            state: Some(state),
        })
    }
}

/// Measures a network on held-out images.
pub(crate) fn eval(args: &EvalArgs, device: &Device) -> Result<()> {
    ensure!(args.batch > 0, "--batch: expected at least 1, got 0");
    let workers = workers(args.data.workers)?;
    let network = Network::load(&args.network, device)?;
    let asked = args.data.data.is_some() || args.data.dataset.is_some();
    let source = match (&network.state, asked) {
        (Some(state), false) => {
            args.data.check_without_folder()?;
            state.data.reopen(&state.fingerprint)?
        }
        (None, false) => bail!("--weights: expected images to measure on, by --data DIR"),
        (_, true) => DataSettings::resolve(&args.data)?.open()?,
    };
    check_classes(&network, source.as_ref())?;
    let shape = Shape { batch: args.batch, size: network.size, workers };
    let evaluation = evaluate(&network.model, &source, shape, &network.policy, device)?;
    println!(
        "{}: loss {:.4} nats, {:.2} % right, {:.2} % among the five likeliest, of {} images",
        network.name,
        evaluation.loss(),
        100.0 * evaluation.top1(),
        100.0 * evaluation.top5(),
        evaluation.images()
    );
    if source.skipped() > 0 {
        println!("{} images could not be used and were left out", source.skipped());
    }
    if let Some(folder) = &args.pictures {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        draw(&evaluation, source.classes(), folder)?;
    }
    Ok(())
}

/// Refuses images of other classes than the network knows.
fn check_classes(network: &Network, source: &dyn Source) -> Result<()> {
    let found = source.classes();
    ensure!(
        found.len() == network.classes,
        "--data: the network tells {} classes apart, and the images have {}",
        network.classes,
        found.len()
    );
    let known = network.state.as_ref().map_or(found, |state| &state.classes);
    match known.iter().zip(found).find(|(known, found)| known != found) {
        Some((known, found)) => {
            bail!("--data: the network has the class {known} where the images have {found}")
        }
        None => Ok(()),
    }
}

/// Tells what is on images.
pub(crate) fn predict(args: &PredictArgs, device: &Device) -> Result<()> {
    let network = Network::load(&args.network, device)?;
    let names = match (&network.state, &args.classes) {
        (Some(state), _) => state.classes.clone(),
        (None, Some(path)) => read_names(path, network.classes)?,
        (None, None) => (0..network.classes).map(|class| format!("class {class}")).collect(),
    };
    let mut failed = 0;
    for path in &args.images {
        let photo = match photo::read(path) {
            Ok(photo) => photo,
            Err(error) => {
                eprintln!("{error}");
                failed += 1;
                continue;
            }
        };
        let crop = photo::middle(photo.dimensions().into());
        let mut images = vec![0.0; CHANNELS * network.size * network.size];
        normalize(&photo::scale(&photo, crop, network.size), &mut images);
        let batch = Batch { images, classes: vec![0], size: network.size };
        let probabilities = softmax(&logits(&network.model, batch, &network.policy, device)?);
        println!("{}", path.display());
        for (class, probability) in likeliest(&probabilities) {
            println!("{:>8.2} %  {}", 100.0 * probability, names[class]);
        }
    }
    ensure!(failed == 0, "{failed} of {} images could not be used", args.images.len());
    Ok(())
}

fn read_names(path: &Path, classes: usize) -> Result<Vec<String>> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("--classes: cannot read {}", path.display()))?;
    let names: Vec<String> = text.lines().map(|line| line.trim().to_owned()).collect();
    ensure!(
        names.len() == classes,
        "--classes: expected {classes} lines in {}, one for each class, got {}",
        path.display(),
        names.len()
    );
    Ok(names)
}

/// Measures how fast batches to train on are made.
pub(crate) fn load(args: &LoadArgs) -> Result<()> {
    check_size(args.size)?;
    ensure!(args.batch > 0, "--batch: expected at least 1, got 0");
    ensure!(
        args.seconds.is_finite() && args.seconds > 0.0,
        "--seconds: expected a positive number, got {}",
        args.seconds
    );
    let workers = workers(args.data.workers)?;
    let source: Arc<dyn Source> = DataSettings::resolve(&args.data)?.open()?;
    println!("{}", source.summary());
    let shape = Shape { batch: args.batch, size: args.size, workers };
    let plan = Plan::Train { seed: 0, first: 0, stride: 1 };
    let mut loader = Loader::start(source.clone(), plan, shape)?;
    // The threads have begun by then, and files that are read again are in memory.
    loader.next_batch()?.context("the images have come to an end")?;
    let (started, limit) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    let mut images = 0;
    while started.elapsed() < limit {
        images += loader.next_batch()?.context("the images have come to an end")?.rows();
    }
    println!(
        "{:.0} images/s of {} pixels by {workers} threads ({} skipped)",
        images as f64 / started.elapsed().as_secs_f64(),
        args.size,
        source.skipped()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_classes_are_as_many_as_there_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("classes.txt");
        fs::write(&path, "cat \ndog\n").expect("written");
        assert_eq!(read_names(&path, 2).expect("names"), ["cat", "dog"]);
        let error = read_names(&path, 3).expect_err("one is missing").to_string();
        assert!(error.contains("expected 3 lines") && error.contains("got 2"), "{error}");
    }
}
