//! How well a network tells images apart.

use crate::{
    data::{
        CHANNELS, Source, denormalize,
        loader::{Batch, Loader, Plan, Shape},
        order::Order,
    },
    model::ResNet,
};
use anyhow::{Context, Result, ensure};
use blackburn::train::precision::{PrecisionPolicy, full_precision};
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::{collections::BTreeSet, sync::Arc};

/// Classes that are named for an image.
pub(crate) const TOP: usize = 5;
/// Images that are kept to be shown.
pub(crate) const SAMPLES: usize = 32;

/// What a network made of held-out images.
#[derive(Clone, Debug)]
pub(crate) struct Evaluation {
    /// Images of class `row` that were taken for class `column`, row by row.
    pub(crate) confusion: Vec<u32>,
    classes: usize,
    loss: f64,
    in_top: u64,
    /// Images from all over the set.
    pub(crate) samples: Vec<Sample>,
}

/// An image, and what it was taken for.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// 8-bit RGB, row by row.
    pub(crate) rgb: Vec<u8>,
    pub(crate) size: usize,
    pub(crate) class: usize,
    pub(crate) predicted: usize,
    /// What the network gives for its answer, from 0 to 1.
    pub(crate) probability: f32,
}

impl Evaluation {
    /// Of no images yet.
    pub(crate) fn of(classes: usize) -> Self {
        Self {
            confusion: vec![0; classes * classes],
            classes,
            loss: 0.0,
            in_top: 0,
            samples: Vec::new(),
        }
    }

    /// Images measured on.
    pub(crate) fn images(&self) -> u64 {
        self.confusion.iter().map(|count| u64::from(*count)).sum()
    }

    /// Mean cross-entropy in nats.
    pub(crate) fn loss(&self) -> f64 {
        self.loss / self.images() as f64
    }

    /// Share of images whose class was found likeliest.
    pub(crate) fn top1(&self) -> f64 {
        let right = self.confusion.iter().step_by(self.classes + 1).map(|count| u64::from(*count));
        right.sum::<u64>() as f64 / self.images() as f64
    }

    /// Share of images whose class was among the five likeliest.
    pub(crate) fn top5(&self) -> f64 {
        self.in_top as f64 / self.images() as f64
    }

    /// Takes one image's logits into account.
    fn add(&mut self, logits: &[f32], class: usize) -> (usize, f32) {
        let probabilities = softmax(logits);
        let best = likeliest(&probabilities);
        let predicted = best.first().map_or(0, |(class, _)| *class);
        self.confusion[class * self.classes + predicted] += 1;
        self.loss -= f64::from(probabilities[class]).ln();
        self.in_top += u64::from(best.iter().any(|(other, _)| *other == class));
        (predicted, probabilities[predicted])
    }
}

/// Probabilities of logits, in f64 within.
pub(crate) fn softmax(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|logit| f64::from(logit - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    // Not below what f32 has, or a loss would be infinite by rounding alone.
    weights.iter().map(|weight| ((weight / sum) as f32).max(f32::MIN_POSITIVE)).collect()
}

/// The five likeliest classes with their probabilities, the likeliest first.
pub(crate) fn likeliest(probabilities: &[f32]) -> Vec<(usize, f32)> {
    let mut all: Vec<(usize, f32)> = probabilities.iter().copied().enumerate().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(TOP);
    all
}

/// The tensors of a batch: images `[rows, 3, size, size]` as the network takes them, and classes `[rows]`.
pub(crate) fn tensors(
    batch: Batch,
    policy: &PrecisionPolicy,
    device: &Device,
) -> (Tensor<4>, Tensor<1, Int>) {
    let (rows, size) = (batch.rows(), batch.size);
    let images = TensorData::new(batch.images, [rows, CHANNELS, size, size]);
    let images = policy.input(Tensor::from_data(images, device));
    (images, Tensor::from_data(TensorData::new(batch.classes, [rows]), device))
}

/// The logits of a batch, row by row.
pub(crate) fn logits(
    model: &ResNet,
    batch: Batch,
    policy: &PrecisionPolicy,
    device: &Device,
) -> Result<Vec<f32>> {
    let (images, _) = tensors(batch, policy, device);
    let data = full_precision(model.forward(images)).into_data();
    data.try_to_vec().map_err(|error| anyhow::anyhow!("logits are not in f32: {error:?}"))
}

/// Measures `model`, one without automatic differentiation (`valid()`), on all images that are held out.
pub(crate) fn evaluate(
    model: &ResNet,
    source: &Arc<dyn Source>,
    shape: Shape,
    policy: &PrecisionPolicy,
    device: &Device,
) -> Result<Evaluation> {
    let classes = source.classes().len();
    let mut evaluation = Evaluation::of(classes);
    // Any few of the images that are there, the same each time.
    let count = source.validation_images();
    let order = Order::new(0, 0, count.max(1));
    let shown: BTreeSet<u64> =
        (0..count.min(SAMPLES as u64)).map(|place| order.at(place)).collect();
    let mut loader = Loader::start(source.clone(), Plan::Validation, shape)?;
    let mut image = 0;
    while let Some(batch) = loader.next_batch()? {
        if batch.rows() == 0 {
            continue;
        }
        let pixels = batch.images.clone();
        let (classes_of, size) = (batch.classes.clone(), batch.size);
        let all = logits(model, batch, policy, device).context("cannot validate")?;
        let length = pixels.len() / classes_of.len();
        for (row, (class, logits)) in classes_of.iter().zip(all.chunks(classes)).enumerate() {
            let class = *class as usize;
            let (predicted, probability) = evaluation.add(logits, class);
            if shown.contains(&image) {
                let rgb = denormalize(&pixels[row * length..][..length]);
                evaluation.samples.push(Sample { rgb, size, class, predicted, probability });
            }
            image += 1;
        }
    }
    ensure!(image > 0, "there is nothing to measure on: no held-out image can be used");
    Ok(evaluation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_losses_are_those_of_the_images_counted() {
        let mut evaluation = Evaluation::of(7);
        let of = |best: usize, class: usize| {
            let mut logits = vec![0.0; 7];
            (logits[best], logits[class]) = (3.0, if best == class { 3.0 } else { -1.0 });
            logits
        };
        // Right, wrong with the class likely, wrong with it the unlikeliest.
        let mut likely = of(2, 4);
        likely[4] = 2.0;
        for (logits, class) in [(of(1, 1), 1), (likely, 4), (of(0, 5), 5)] {
            evaluation.add(&logits, class);
        }
        assert_eq!(evaluation.images(), 3);
        assert!((evaluation.top1() - 1.0 / 3.0).abs() < 1e-12);
        assert!((evaluation.top5() - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(evaluation.confusion[4 * 7 + 2], 1);
        let e = |x: f64| x.exp();
        let expected = -[
            e(3.0) / (e(3.0) + 6.0),
            e(2.0) / (e(3.0) + e(2.0) + 5.0),
            e(-1.0) / (e(3.0) + e(-1.0) + 5.0),
        ]
        .map(f64::ln)
        .iter()
        .sum::<f64>()
            / 3.0;
        assert!((evaluation.loss() - expected).abs() < 1e-6, "{}", evaluation.loss());
    }

    #[test]
    fn a_logit_far_below_the_others_has_a_finite_loss() {
        let mut evaluation = Evaluation::of(2);
        evaluation.add(&[1000.0, -1000.0], 1);
        assert!(evaluation.loss().is_finite() && evaluation.loss() > 80.0);
        assert_eq!(likeliest(&softmax(&[0.0, 1.0, f32::NEG_INFINITY])).len(), 3);
    }
}
