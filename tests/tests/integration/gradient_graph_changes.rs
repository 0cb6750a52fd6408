//! What changes between calls: in the model, and around it.

use super::{Network, ROWS, STEPS, Test, WIDTH, agree, at, batch, gradient_numbers, pass};
use blackburn::train::{
    graph::{GradientGraph, GraphError},
    precision::PrecisionPolicy,
};
use blackburn_tests::tensors::values;
use burn::{
    module::Param,
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    prelude::*,
};
use libtest_mimic::Failed;
use std::cell::Cell;

pub(super) const TESTS: [(&str, Test); 7] = [
    ("a_layer_that_is_frozen_later_gets_no_gradients", freezing),
    ("a_mask_that_is_replaced_is_used", masks),
    ("a_plain_field_that_is_changed_is_used", fields),
    ("a_model_that_differs_in_each_call_is_not_recorded", restless),
    ("a_captured_number_that_changes_each_step_is_never_used_stale", captured_each_step),
    ("a_captured_number_that_changes_later_is_found_by_the_next_check", captured_later),
    ("a_captured_number_that_outputs_alone_depend_on_is_found", captured_output),
];

/// Steps by which a recording is replayed.
const WARM: u64 = 6;

/// A layer behind a mask, times a number.
#[derive(Module, Debug)]
struct Masked {
    linear: Linear,
    mask: Param<Tensor<1, Bool>>,
    places: Param<Tensor<1, Int>>,
    factor: f64,
}

type MaskedPasses = GradientGraph<Masked, Tensor<2>, Tensor<1>>;

impl Masked {
    fn new(device: &Device) -> Self {
        // Random ones are, once in a while, such that another mask makes no difference.
        let weight = Tensor::<1, Int>::arange(0..(WIDTH * WIDTH) as i64, device).float().cos();
        let weight = Param::from_tensor(weight.reshape([WIDTH, WIDTH]));
        Self {
            linear: Linear { weight, ..LinearConfig::new(WIDTH, WIDTH).init(device) },
            mask: mask(2, device),
            places: places(3, device),
            factor: 1.0,
        }
    }

    fn pass(&self, x: Tensor<2>) -> (Tensor<1>, GradientsParams) {
        let y = self.linear.forward(x);
        let kept = y.mask_fill(self.mask.val().unsqueeze(), 0.0);
        let chosen = kept.select(1, self.places.val());
        let loss = chosen.powi_scalar(2).mean() * self.factor;
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), self))
    }
}

/// Every `every`-th number is left out.
fn mask(every: usize, device: &Device) -> Param<Tensor<1, Bool>> {
    let left_out: Vec<bool> = (0..WIDTH).map(|place| place.is_multiple_of(every)).collect();
    Param::initialized(burn::module::ParamId::new(), Tensor::from_data(&left_out[..], device))
}

/// Every `every`-th number is looked at.
fn places(every: usize, device: &Device) -> Param<Tensor<1, Int>> {
    let chosen: Vec<i32> = (0..WIDTH as i32).step_by(every).collect();
    Param::initialized(burn::module::ParamId::new(), Tensor::from_data(&chosen[..], device))
}

fn input(device: &Device) -> Tensor<2> {
    let device = device.clone().without_autodiff();
    Tensor::<1, Int>::arange(0..(4 * WIDTH) as i64, &device).float().sin().reshape([4, WIDTH])
}

/// Has passes replayed for `model`, changes it with `change`, and sees that what follows is of the new one.
fn changed(change: impl Fn(Masked) -> Masked, device: &Device) -> Result<(), Failed> {
    let mut model = Masked::new(device);
    let mut graph = MaskedPasses::new(PrecisionPolicy::default());
    for _ in 0..WARM {
        graph.run(&model, input(device), Masked::pass)?;
    }
    if !graph.is_recorded() {
        return Err("nothing was recorded".into());
    }
    let before = values(model.pass(input(device)).0)?;
    model = change(model);
    let (expected, _) = model.pass(input(device));
    let expected = values(expected)?;
    if agree(&before, &expected, 1e-3).is_ok() {
        return Err("the change changes nothing".into());
    }
    for step in 0..WARM {
        let (loss, _) = graph.run(&model, input(device), Masked::pass)?;
        agree(&values(loss)?, &expected, 1e-5)
            .map_err(at(format!("step {step} after the change")))?;
    }
    // By then the changed model's pass is recorded.
    if graph.is_recorded() { Ok(()) } else { Err("it was not recorded again".into()) }
}

fn masks(device: &Device) -> Result<(), Failed> {
    let replaced = |model: Masked| {
        let id = model.mask.id;
        let mask = mask(3, device).into_value();
        Masked { mask: Param::initialized(id, mask), ..model }
    };
    changed(replaced, device)?;
    let replaced = |model: Masked| {
        let id = model.places.id;
        let places = places(3, device).into_value() + 1;
        Masked { places: Param::initialized(id, places), ..model }
    };
    changed(replaced, device)
}

fn fields(device: &Device) -> Result<(), Failed> {
    changed(|model| Masked { factor: 3.0, ..model }, device)
}

fn restless(device: &Device) -> Result<(), Failed> {
    let mut model = Masked::new(device);
    let mut graph = MaskedPasses::new(PrecisionPolicy::default());
    for step in 0..30 {
        model.factor = 1.0 + f64::from(step);
        let (expected, _) = model.pass(input(device));
        let (loss, _) = graph.run(&model, input(device), Masked::pass)?;
        agree(&values(loss)?, &values(expected)?, 1e-5)?;
        if graph.is_recorded() {
            return Err(format!("recorded in step {step}").into());
        }
    }
    Ok(())
}

fn freezing(device: &Device) -> Result<(), Failed> {
    let mut network = Network::new(0.0, device);
    let mut graph = super::Passes::new(PrecisionPolicy::default());
    let has_gradient = |network: &Network, gradients: &GradientsParams| {
        gradients.get::<2>(network.first.weight.id).is_some()
    };
    for step in 0..WARM {
        let (_, gradients) = graph.run(&network, batch(step, ROWS, device), pass)?;
        if !has_gradient(&network, &gradients) {
            return Err("no gradient before".into());
        }
    }
    if !graph.is_recorded() {
        return Err("nothing was recorded".into());
    }
    network.first = network.first.no_grad();
    for step in 0..WARM {
        let (_, gradients) = graph.run(&network, batch(step, ROWS, device), pass)?;
        if has_gradient(&network, &gradients) {
            return Err(format!("a gradient in step {step} after freezing").into());
        }
    }
    if !graph.is_recorded() {
        return Err("nothing was recorded after freezing".into());
    }
    network.first = network.first.set_require_grad(true);
    for step in 0..WARM {
        let (_, gradients) = graph.run(&network, batch(step, ROWS, device), pass)?;
        if !has_gradient(&network, &gradients) {
            return Err(format!("no gradient in step {step} after unfreezing").into());
        }
    }
    Ok(())
}

/// Losses and gradients by a graph, of a pass that is multiplied by what `factor` says of the step; and those
/// of passes that ran. Ends with the first error of the graph.
fn with_factor(
    steps: u64,
    factor: impl Fn(u64) -> f64,
    device: &Device,
) -> Result<(u64, Option<GraphError>, bool), Failed> {
    let network = Network::new(0.0, device);
    let mut graph = super::Passes::new(PrecisionPolicy::default());
    let now = Cell::new(1.0);
    let scaled = |network: &Network, (words, scale): (Tensor<2, Int>, Tensor<1>)| {
        let loss = network.loss(words, scale) * now.get();
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), network))
    };
    let mut wrong = 0;
    for step in 0..steps {
        now.set(factor(step));
        let (_, expected) = scaled(&network, batch(step, ROWS, device));
        let (_, gradients) = match graph.run(&network, batch(step, ROWS, device), scaled) {
            Ok(done) => done,
            Err(error) => return Ok((wrong, Some(error), graph.is_recorded())),
        };
        let expected = gradient_numbers(&network, &expected)?;
        wrong +=
            u64::from(agree(&gradient_numbers(&network, &gradients)?, &expected, 1e-4).is_err());
    }
    Ok((wrong, None, graph.is_recorded()))
}

fn captured_each_step(device: &Device) -> Result<(), Failed> {
    match with_factor(STEPS, |step| 1.0 + step as f64, device)? {
        (0, None, false) => Ok(()),
        found => Err(format!("wrong steps, error, recorded: {found:?}").into()),
    }
}

fn captured_later(device: &Device) -> Result<(), Failed> {
    // Recorded in the third step; the tenth replay is that of step 12.
    let (wrong, error, recorded) =
        with_factor(20, |step| if step < 8 { 1.0 } else { 0.5 }, device)?;
    let error = error.ok_or("no error")?.to_string();
    if recorded || wrong > 6 {
        return Err(format!("recorded: {recorded}, wrong steps: {wrong}").into());
    }
    for part in ["GradientGraph", "gradients", "`inputs`"] {
        if !error.contains(part) {
            return Err(format!("`{part}` is not in: {error}").into());
        }
    }
    Ok(())
}

/// Gradients do not tell of it.
fn captured_output(device: &Device) -> Result<(), Failed> {
    let network = Network::new(0.0, device);
    let mut graph = super::Passes::new(PrecisionPolicy::default());
    for step in 0..STEPS {
        let reported = |network: &Network, inputs| {
            let (loss, gradients) = pass(network, inputs);
            (loss * (1.0 + step as f64), gradients)
        };
        let (expected, _) = reported(&network, batch(1, ROWS, device));
        let (loss, _) = graph.run(&network, batch(1, ROWS, device), reported)?;
        agree(&values(loss)?, &values(expected)?, 1e-5)?;
    }
    if graph.is_recorded() { Err("it was accepted".into()) } else { Ok(()) }
}
