use super::*;
use crate::{
    optim::{AdamWGroups, SgdGroups, tests::ones},
    scaler::{GradScaler, GradScalerConfig},
};
use burn::{
    nn::Linear,
    optim::{GradientsParams, ModuleOptimizer},
};

const RATE: f64 = 0.1;

/// With gradients that do not change, every step of it moves a parameter by the learning rate, whatever came
/// before: what bias correction is for.
const ADAMW: AdamWGroups = AdamWGroups {
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.0,
    stochastic_rounding: false,
};

fn device() -> Device {
    Device::flex().autodiff()
}

fn scaler() -> GradScaler {
    GradScalerConfig::default().init(&device()).expect("the defaults make sense")
}

/// Gradients of a step: the weight's, and the bias's where it takes part.
#[derive(Clone, Copy)]
struct Step {
    weight: f32,
    bias: Option<f32>,
}

/// A step that overflows, without the bias.
const OVERFLOW: Step = Step { weight: f32::INFINITY, bias: None };

/// A step that is taken, without the bias.
const ALONE: Step = Step { weight: 0.5, bias: None };

/// A step that is taken, of both.
const BOTH: Step = Step { weight: 0.5, bias: Some(0.5) };

/// A step of both that overflows.
const BOTH_OVERFLOW: Step = Step { weight: f32::INFINITY, bias: Some(0.5) };

/// The step by a scaler's gate; returns the model and how far the bias has moved, in learning rates.
fn step(
    scaler: &mut GradScaler,
    optimizer: &mut ModuleOptimizer,
    model: Linear,
    Step { weight, bias }: Step,
) -> (Linear, f32) {
    let scale = scaler.state().scale;
    let mut gradients = GradientsParams::new();
    let weights = Tensor::<2>::full([3, 2], weight * scale, &Device::flex());
    gradients.register(model.weight.id, weights);
    if let Some(bias) = bias {
        let biases = Tensor::<1>::full([2], bias * scale, &Device::flex());
        gradients.register(bias_of(&model).0, biases);
    }
    scaler.unscale(&mut gradients, &model).expect("once a step");
    let before = bias_of(&model).1;
    let model = optimizer.step(RATE, model, gradients);
    scaler.update().expect("gradients were unscaled");
    let moved = (before - bias_of(&model).1) / RATE as f32;
    (model, moved)
}

fn bias_of(model: &Linear) -> (burn::module::ParamId, f32) {
    let bias = model.bias.as_ref().expect("LinearConfig gives a bias");
    (bias.id, bias.val().mean().into_scalar())
}

/// How far the bias moves in each step.
fn moves(scaler: &mut GradScaler, optimizer: &mut ModuleOptimizer, steps: &[Step]) -> Vec<f32> {
    let mut model = ones(&device());
    let mut moves = Vec::new();
    for given in steps {
        let moved;
        (model, moved) = step(scaler, optimizer, model, *given);
        moves.push(moved);
    }
    moves
}

/// The corrections are computed in f32: `1 - exp(ln 0.999)` has lost ten bits, of which the root keeps half
/// as a relative error, and the bias near 1 has an error of a unit for each of the parameter and its step.
const BOUND: f32 = 1024.0 * f32::EPSILON + 2.0 * f32::EPSILON / RATE as f32;

/// Whether each step in which the bias took part, and which did not overflow, moved it by the rate.
fn check(moves: &[f32], steps: &[Step]) {
    for (at, (moved, step)) in moves.iter().zip(steps).enumerate() {
        let is_taken = step.bias.is_some() && step.weight.is_finite();
        let expected = if is_taken { 1.0 } else { 0.0 };
        assert!((moved - expected).abs() < BOUND, "step {at} moved {moved} rates of {moves:?}");
    }
}

#[test]
fn a_parameter_that_joins_late_steps_as_a_new_one() {
    let steps = [&[OVERFLOW; 7][..], &[ALONE; 2], &[BOTH; 10]].concat();
    let mut scaler = scaler();
    let mut optimizer = ADAMW.init_gated(&ones(&device()), &device(), scaler.gate());
    check(&moves(&mut scaler, &mut optimizer, &steps), &steps);
    assert_eq!(scaler.state().skipped_steps, 7);
}

#[test]
fn steps_without_a_gradient_do_not_count_whether_they_overflow_or_not() {
    let steps = [BOTH, BOTH, OVERFLOW, OVERFLOW, ALONE, BOTH, OVERFLOW, BOTH, BOTH_OVERFLOW, BOTH];
    let mut scaler = scaler();
    let mut optimizer = ADAMW.init_gated(&ones(&device()), &device(), scaler.gate());
    check(&moves(&mut scaler, &mut optimizer, &steps), &steps);
}

#[test]
fn a_restored_scaler_beside_a_new_optimizer_changes_nothing() {
    let mut old = scaler();
    let mut optimizer = ADAMW.init_gated(&ones(&device()), &device(), old.gate());
    moves(&mut old, &mut optimizer, &[OVERFLOW; 8]);
    let mut scaler = scaler();
    scaler.restore(old.state()).expect("same settings");
    let mut optimizer = ADAMW.init_gated(&ones(&device()), &device(), scaler.gate());
    let steps = [BOTH, BOTH_OVERFLOW, BOTH, BOTH, BOTH];
    check(&moves(&mut scaler, &mut optimizer, &steps), &steps);
    assert_eq!(scaler.state().skipped_steps, 9);
}

#[test]
fn a_scaler_that_is_restored_under_a_living_optimizer_changes_nothing() {
    let mut scaler = scaler();
    let start = scaler.state();
    let mut optimizer = ADAMW.init_gated(&ones(&device()), &device(), scaler.gate());
    let steps = [BOTH, BOTH_OVERFLOW, BOTH_OVERFLOW, BOTH];
    check(&moves(&mut scaler, &mut optimizer, &steps), &steps);
    scaler.restore(start).expect("same settings");
    check(&moves(&mut scaler, &mut optimizer, &steps), &steps);
}

/// Saves an optimizer and its scaler after steps of which some were taken back, and compares what another
/// pair makes of the next steps.
#[test]
fn saved_counts_go_on_where_they_were() {
    let start = [OVERFLOW, ALONE, BOTH, BOTH_OVERFLOW, BOTH];
    for with_sgd in [false, true] {
        let init = |scaler: &GradScaler| match with_sgd {
            true => SgdGroups { dampening: 0.5, ..SgdGroups::default() }.init_gated(
                &ones(&device()),
                &device(),
                scaler.gate(),
            ),
            false => ADAMW.init_gated(&ones(&device()), &device(), scaler.gate()),
        };
        let mut scaler = scaler();
        let mut optimizer = init(&scaler);
        let mut model = ones(&device());
        for given in start {
            (model, _) = step(&mut scaler, &mut optimizer, model, given);
        }
        let bytes = optimizer.into_bytes().expect("the state serializes");
        let mut restored = self::scaler();
        restored.restore(scaler.state()).expect("same settings");
        let mut resumed = init(&restored).from_bytes(bytes).expect("the state loads");
        for given in [BOTH, BOTH_OVERFLOW, BOTH] {
            let (straight, _) = step(&mut scaler, &mut optimizer, model.clone(), given);
            let (other, _) = step(&mut restored, &mut resumed, model, given);
            assert_eq!(bias_of(&straight).1, bias_of(&other).1, "with SGD: {with_sgd}");
            let weights = [&straight, &other].map(|model| model.weight.val().into_data());
            assert_eq!(weights[0], weights[1], "with SGD: {with_sgd}");
            model = straight;
        }
    }
}

/// Steps that were taken back before a parameter's first gradient leave its first step the first one, which
/// is not dampened.
#[test]
fn a_dampened_velocity_begins_with_the_parameters_own_first_step() {
    let groups = SgdGroups { momentum: 0.5, dampening: 0.25, ..SgdGroups::default() };
    let groups = SgdGroups { weight_decay: 0.0, ..groups };
    let mut scaler = scaler();
    let mut optimizer = groups.init_gated(&ones(&device()), &device(), scaler.gate());
    let steps = [OVERFLOW, OVERFLOW, OVERFLOW, BOTH, BOTH_OVERFLOW, BOTH, BOTH];
    let found = moves(&mut scaler, &mut optimizer, &steps);
    // v = 0.5, then v = 0.5 v + 0.75 * 0.5.
    let expected = [0.0, 0.0, 0.0, 0.5, 0.0, 0.625, 0.6875];
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < BOUND, "{found}, expected {expected}");
    }
}

/// A model that begins with its scaler reads the scaler's own count, and nothing is computed for it.
#[test]
fn parameters_with_the_same_past_share_a_count_and_the_scalers_past_is_free() {
    let gate = StepGate::new();
    let counts = SkippedCounts::default();
    let set = |is_first: bool| {
        let one = || Tensor::<1>::ones([1], &Device::flex());
        let [taken, skipped, factor] = [one(), one() - 1.0, one()];
        gate.set(Some(Reading { taken, skipped, factor, is_first, number: 0 }));
    };
    let next = |skipped: &Skipped| counts.next(0, skipped.clone(), Some(&gate)).2;
    let last = |skipped: &Skipped| skipped.0.clone().expect("a step was taken");
    set(true);
    let [one, other] = [next(&Skipped::default()), next(&Skipped::default())];
    assert!(Arc::ptr_eq(&last(&one), &last(&other)));
    set(false);
    let [second, late] = [next(&one), next(&Skipped::default())];
    assert!(last(&second).as_scaler.is_some() && last(&late).as_scaler.is_none());
    set(false);
    assert!(last(&next(&second)).as_scaler.is_some());
    // This one was not there in the step before.
    assert!(last(&next(&other)).as_scaler.is_none());
}
