//! A training step of unmodified Burn modules on the device that kernels are tested on.

use blackburn::train::{accumulate::GradientSum, clip::clip_global_norm, optim::AdamWGroups};
use blackburn_tests::on_burn_device;
use burn::{
    nn::{Gelu, Linear, LinearConfig},
    optim::GradientsParams,
    prelude::*,
};
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test("training::a_small_network_learns_on_the_device", || {
            on_burn_device(learns)
        }),
        Trial::ignorable_test("training::micro_batches_add_up_to_the_whole_batch", || {
            on_burn_device(accumulates)
        }),
    ]
}

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    activation: Gelu,
    second: Linear,
}

impl Network {
    fn loss(&self, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
        let hidden = self.activation.forward(self.first.forward(x));
        (self.second.forward(hidden) - y).powi_scalar(2).mean()
    }
}

/// Fits y = x1 - x2 on a grid of points; the loss must fall to a tenth.
fn learns(device: Device) -> Result<(), Failed> {
    let device = device.autodiff();
    device.seed(1);
    let mut network = Network {
        first: LinearConfig::new(2, 16).init(&device),
        activation: Gelu::new(),
        second: LinearConfig::new(16, 1).init(&device),
    };
    let points: Vec<[f32; 2]> =
        (0..64).map(|i| [(i % 8) as f32 / 4.0 - 1.0, (i / 8) as f32 / 4.0 - 1.0]).collect();
    let x = Tensor::<2>::from_data(TensorData::new(points.concat(), [64, 2]), &device);
    let targets: Vec<f32> = points.iter().map(|[a, b]| a - b).collect();
    let y = Tensor::<2>::from_data(TensorData::new(targets, [64, 1]), &device);

    let groups = AdamWGroups { weight_decay: 0.0, ..AdamWGroups::default() };
    let mut optimizer = groups.init(&network, &device);
    let mut losses: Vec<f32> = Vec::new();
    for _ in 0..30 {
        let mut sum = GradientSum::new();
        for (from, to) in [(0, 40), (40, 64)] {
            let (x, y) = (x.clone().slice([from..to, 0..2]), y.clone().slice([from..to, 0..1]));
            let gradients = GradientsParams::from_grads(network.loss(x, y).backward(), &network);
            sum.add(&network, gradients, (to - from) as f64);
        }
        let mut gradients = sum.mean(&network).ok_or("no micro-batch was added")?;
        clip_global_norm(&mut gradients, &network, 1.0);
        network = optimizer.step(0.03, network, gradients);
        losses.push(network.loss(x.clone(), y.clone()).into_scalar());
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    if last < 0.1 * first { Ok(()) } else { Err(format!("losses {losses:?}").into()) }
}

/// Rows of a batch, and the micro-batches that they come in.
const ROWS: usize = 7;
const PARTS: [(usize, usize); 3] = [(0, 4), (4, 6), (6, 7)];
const INPUTS: usize = 3;

fn accumulates(device: Device) -> Result<(), Failed> {
    let device = device.autodiff();
    let layer = LinearConfig::new(INPUTS, 1).with_bias(false).init(&device);
    let number = |i: usize| ((37 * i + 11) % 29) as f32 / 14.5 - 1.0;
    let inputs: Vec<f32> = (0..ROWS * INPUTS).map(number).collect();
    let data = TensorData::new(inputs.clone(), [ROWS, INPUTS]);
    let x = Tensor::<2>::from_data(data, &device);
    let gradients = |rows: std::ops::Range<usize>| {
        let loss = layer.forward(x.clone().slice([rows])).powi_scalar(2).mean();
        GradientsParams::from_grads(loss.backward(), &layer)
    };
    let values = |gradients: &GradientsParams| -> Result<Vec<f32>, Failed> {
        let gradient = gradients.get::<2>(layer.weight.id).ok_or("the weight has no gradient")?;
        Ok(gradient.into_data().try_to_vec()?)
    };
    let whole = values(&gradients(0..ROWS))?;
    let mut sum = GradientSum::new();
    for (from, to) in PARTS {
        sum.try_add(&layer, gradients(from..to), (to - from) as f64)?;
    }
    let mean = values(&sum.mean(&layer).ok_or("three parts were added")?)?;

    let weights: Vec<f32> = layer.weight.val().into_data().try_to_vec()?;
    for (column, (mean, whole)) in mean.iter().zip(&whole).enumerate() {
        // 2 / N sum x y: as many terms as rows, each of a product whose operands may be rounded to
        // TF32 at another scale, and whose sum is rounded in f32 in another order.
        let size: f32 = inputs
            .chunks(INPUTS)
            .map(|row| {
                let output: f32 = row.iter().zip(&weights).map(|(x, w)| (x * w).abs()).sum();
                2.0 / ROWS as f32 * row[column].abs() * output
            })
            .sum();
        let bound = size * (4.0 * 2f32.powi(-11) + (ROWS + 2) as f32 * f32::EPSILON);
        if (mean - whole).abs() > bound {
            return Err(format!("element {column}: {mean}, expected {whole} within {bound}").into());
        }
    }
    // The control: without weights, the parts do not add up.
    let mut equal = GradientSum::new();
    for (from, to) in PARTS {
        equal.try_add(&layer, gradients(from..to), 1.0)?;
    }
    let equal = values(&equal.mean(&layer).ok_or("three parts were added")?)?;
    if equal.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 0.01 * b.abs()) {
        return Err("equal weights for unequal parts gave the whole batch's gradient".into());
    }
    Ok(())
}
