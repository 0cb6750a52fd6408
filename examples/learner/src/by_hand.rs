//! The same training as a loop.

use blackburn::train::{accumulate::GradientSum, clip::clip_global_norm, optim::AdamWGroups};
use burn::{
    data::dataloader::DataLoader, module::Module, optim::ModuleOptimizer, tensor::Device,
    train::TrainStep,
};

use crate::{Settings, data::Points, model::Classifier};

/// Trains `model` and returns it, taken out of training.
pub(crate) fn train(
    mut model: Classifier,
    points: &dyn DataLoader<Points>,
    settings: &Settings,
    device: &Device,
) -> anyhow::Result<Classifier> {
    // The learner gives the data to its device, which draws the order of samples anew.
    let points = points.to_device(device);
    let mut optimizer = AdamWGroups::default().init(&model, device);
    let (mut step, mut sum) = (0, GradientSum::new());
    let schedule = settings.schedule();
    for _epoch in 0..settings.epochs {
        for batch in points.iter() {
            let output = model.step(batch?);
            sum.add(&model, output.grads, output.item.report.items as f64);
            if sum.parts() == settings.accumulate {
                model = update(model, &mut optimizer, &mut sum, schedule.at(step), settings);
                step += 1;
            }
        }
        if sum.parts() > 0 {
            model = update(model, &mut optimizer, &mut sum, schedule.at(step), settings);
            step += 1;
        }
    }
    Ok(model.valid())
}

/// The incomplete last window of an epoch is a step like the others.
fn update(
    model: Classifier,
    optimizer: &mut ModuleOptimizer,
    sum: &mut GradientSum,
    rate: f64,
    settings: &Settings,
) -> Classifier {
    let Some(mut gradients) = sum.mean(&model) else { return model };
    clip_global_norm(&mut gradients, &model, settings.max_norm);
    optimizer.step(rate, model, gradients)
}
