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
    vec![Trial::ignorable_test("training::a_small_network_learns_on_the_device", || {
        on_burn_device(learns)
    })]
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
