//! Gradients of replays that somebody keeps.

use super::{Network, Passes, ROWS, STEPS, Test, agree, at, batch, gradient_numbers, pass};
use blackburn::train::{
    accumulate::GradientSum,
    precision::{Precision, PrecisionPolicy},
};
use burn::{optim::GradientsParams, prelude::*};
use libtest_mimic::Failed;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) const TESTS: [(&str, Test); 4] = [
    ("a_sum_of_replayed_gradients_is_the_sum_of_them_all", sums),
    ("a_sum_of_replayed_gradients_is_the_sum_of_them_all_in_mixed_precision", sums_in_f16),
    ("a_sum_within_a_recorded_pass_is_that_of_a_pass_that_runs", sums_within),
    ("gradients_that_are_kept_stay_what_they_are", kept),
];

const PARTS: u64 = 4;
/// Steps by which a recording is replayed.
const WARM: u64 = 6;

/// A graph whose passes for `network` are replayed.
fn recorded(network: &Network, policy: PrecisionPolicy, device: &Device) -> Result<Passes, Failed> {
    let mut graph = Passes::new(policy);
    for step in 0..WARM {
        graph.run(network, batch(step, ROWS, device), pass)?;
    }
    if graph.is_recorded() { Ok(graph) } else { Err("nothing was recorded".into()) }
}

fn accumulated(policy: PrecisionPolicy, least: f64, device: &Device) -> Result<(), Failed> {
    let network = policy.apply(Network::new(0.0, device))?;
    let mut graph = recorded(&network, policy, device)?;
    let calls = AtomicUsize::new(0);
    let counted = |network: &Network, inputs| {
        calls.fetch_add(1, Ordering::Relaxed);
        pass(network, inputs)
    };
    // Two windows: nothing of the first is in the second.
    for window in 0..2 {
        let (mut sum, mut expected) = (GradientSum::new(), GradientSum::new());
        for part in 0..PARTS {
            let (step, weight) = (window * PARTS + part, 1.0 + part as f64);
            let (_, gradients) = graph.run(&network, batch(step, ROWS, device), counted)?;
            sum.try_add(&network, gradients, weight)?;
            let (_, gradients) = pass(&network, batch(step, ROWS, device));
            expected.try_add(&network, gradients, weight)?;
        }
        let [sum, expected] = [&mut sum, &mut expected].map(|sum| sum.mean(&network));
        let (sum, expected) = sum.zip(expected).ok_or("nothing was added")?;
        agree(&gradient_numbers(&network, &sum)?, &gradient_numbers(&network, &expected)?, least)
            .map_err(at(format!("window {window}")))?;
    }
    // The tenth replay is checked by a pass that runs, and then the pass is recorded anew, by four.
    match calls.load(Ordering::Relaxed) {
        0..=5 => Ok(()),
        calls => Err(format!("{calls} passes of {} ran", 2 * PARTS).into()),
    }
}

fn sums(device: &Device) -> Result<(), Failed> {
    accumulated(PrecisionPolicy::default(), 1e-5, device)
}

fn sums_in_f16(device: &Device) -> Result<(), Failed> {
    accumulated(PrecisionPolicy::new(Precision::F16), 1e-2, device)
}

fn sums_within(device: &Device) -> Result<(), Failed> {
    type Inputs = Vec<(Tensor<2, Int>, Tensor<1>)>;
    let network = Network::new(0.0, device);
    let summed = |network: &Network, parts: Inputs| {
        let mut sum = GradientSum::new();
        let mut losses = Vec::new();
        for part in parts {
            let (loss, gradients) = pass(network, part);
            losses.push(loss);
            sum.add(network, gradients, 1.0);
        }
        (Tensor::cat(losses, 0).mean(), sum.mean(network).unwrap_or_default())
    };
    let mut graph = blackburn::train::graph::GradientGraph::<Network, Inputs, Tensor<1>>::new(
        PrecisionPolicy::default(),
    );
    for step in 0..STEPS {
        let parts: Inputs = (0..PARTS).map(|part| batch(step + part, ROWS, device)).collect();
        let (_, expected) = summed(&network, parts.clone());
        let (_, gradients) = graph.run(&network, parts, summed)?;
        let expected = gradient_numbers(&network, &expected)?;
        agree(&gradient_numbers(&network, &gradients)?, &expected, 1e-5)?;
    }
    if graph.is_recorded() { Ok(()) } else { Err("nothing was recorded".into()) }
}

fn kept(device: &Device) -> Result<(), Failed> {
    let network = Network::new(0.0, device);
    let mut graph = recorded(&network, PrecisionPolicy::default(), device)?;
    let mut all: Vec<GradientsParams> = Vec::new();
    for step in 0..PARTS {
        all.push(graph.run(&network, batch(step, ROWS, device), pass)?.1);
    }
    for (step, gradients) in all.into_iter().enumerate() {
        let (_, expected) = pass(&network, batch(step as u64, ROWS, device));
        let expected = gradient_numbers(&network, &expected)?;
        agree(&gradient_numbers(&network, &gradients)?, &expected, 1e-5)
            .map_err(at(format!("step {step}")))?;
    }
    Ok(())
}
