use super::*;
use crate::{clip::clip_global_norm, optim::AdamWGroups};
use burn::{
    nn::{Initializer, Linear, LinearConfig},
    optim::{AdamWConfig, ModuleOptimizer},
};

fn device() -> Device {
    Device::flex().autodiff()
}

fn layer() -> Linear {
    LinearConfig::new(3, 2).with_initializer(Initializer::Ones).init(&device())
}

/// Gradients of one value each.
fn gradients(layer: &Linear, of_weight: f32, of_bias: f32) -> GradientsParams {
    let device = Device::flex();
    let mut gradients = GradientsParams::new();
    gradients.register(layer.weight.id, Tensor::<2>::full([3, 2], of_weight, &device));
    let bias = layer.bias.as_ref().expect("LinearConfig gives a bias").id;
    gradients.register(bias, Tensor::<1>::full([2], of_bias, &device));
    gradients
}

fn scaler() -> GradScaler {
    GradScalerConfig::default().init(&device()).expect("the defaults make sense")
}

fn weights(layer: &Linear) -> Vec<f32> {
    let bias = layer.bias.as_ref().expect("LinearConfig gives a bias").val();
    let all = Tensor::cat(vec![layer.weight.val().reshape([6]), bias], 0);
    all.into_data().try_to_vec().expect("f32")
}

/// One step with gradients that a loss scaled by the scaler would have had.
fn step(
    scaler: &mut GradScaler,
    optimizer: &mut ModuleOptimizer,
    layer: Linear,
    gradient: f32,
) -> Linear {
    let scale = scaler.state().scale;
    let mut gradients = gradients(&layer, scale * gradient, scale);
    scaler.unscale(&mut gradients, &layer).expect("it is the first time in this step");
    let layer = optimizer.step(0.1, layer, gradients);
    scaler.update().expect("gradients were unscaled");
    layer
}

#[test]
fn an_overflow_skips_exactly_one_step_and_halves_the_scale() {
    for overflow in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let run = |gradients: &[f32]| {
            let mut scaler = scaler();
            let mut layer = layer();
            let mut optimizer = AdamWGroups::default().init_gated(&layer, &device(), scaler.gate());
            for gradient in gradients {
                layer = step(&mut scaler, &mut optimizer, layer, *gradient);
            }
            (weights(&layer), scaler.state())
        };
        let (with, state) = run(&[0.3, -0.7, overflow, 0.25, 2.0]);
        let (without, clean) = run(&[0.3, -0.7, 0.25, 2.0]);
        assert_eq!(with, without, "{overflow} left a trace");
        assert_eq!((state.scale, state.clean_steps), (32768.0, 2));
        assert_eq!((state.skipped_steps, state.skipped_in_a_row), (1, 0));
        assert_eq!((clean.scale, clean.skipped_steps), (65536.0, 0));
        // The control: a step in place of the overflow does leave one.
        assert_ne!(run(&[0.3, -0.7, 0.1, 0.25, 2.0]).0, without);
    }
}

#[test]
fn an_overflow_in_the_first_step_is_no_step_at_all() {
    let mut scaler = scaler();
    let mut optimizer = AdamWGroups::default().init_gated(&layer(), &device(), scaler.gate());
    let layer = step(&mut scaler, &mut optimizer, layer(), f32::NAN);
    assert_eq!(weights(&layer), [1.0; 8]);
    let moved = step(&mut scaler, &mut optimizer, layer, 0.5);
    // The first step of Adam is lr sign(g), and the decay is 0.1 * 0.1.
    assert!((weights(&moved)[0] - (1.0 - 0.1 - 0.01)).abs() < 1e-5, "{:?}", weights(&moved));
}

#[test]
fn other_optimizers_can_ask() {
    let mut scaler = scaler();
    let mut layer = layer();
    let mut optimizer = AdamWConfig::new().init();
    for (gradient, overflows) in [(1.0, false), (f32::INFINITY, true), (1.0, false)] {
        let mut gradients = gradients(&layer, gradient, 1.0);
        scaler.unscale(&mut gradients, &layer).expect("it is the first time in this step");
        assert_eq!(scaler.overflowed(), overflows);
        if !scaler.overflowed() {
            layer = optimizer.step(0.1, layer, gradients);
        }
        scaler.update().expect("gradients were unscaled");
    }
    assert!(weights(&layer).iter().all(|x| x.is_finite()));
}

#[test]
fn the_scale_grows_after_the_interval_and_stays_within_its_bounds() {
    let config = GradScalerConfig {
        initial_scale: 4.0,
        growth_interval: 2,
        min_scale: 2.0,
        max_scale: 16.0,
        ..GradScalerConfig::default()
    };
    let mut scaler = config.init(&device()).expect("these make sense");
    let mut scales = |finite: &[bool]| -> Vec<f32> {
        let layer = layer();
        let next = |finite: &bool| {
            let value = if *finite { 1.0 } else { f32::NAN };
            scaler.unscale(&mut gradients(&layer, value, value), &layer).expect("once a step");
            scaler.update().expect("gradients were unscaled");
            scaler.state().scale
        };
        finite.iter().map(next).collect()
    };
    assert_eq!(scales(&[true, true, true, true, true, true]), [4.0, 8.0, 8.0, 16.0, 16.0, 16.0]);
    // An overflow starts the count afresh.
    assert_eq!(scales(&[true, false, true, true]), [16.0, 8.0, 8.0, 16.0]);
    assert_eq!(scales(&[false, false, false, false, false]), [8.0, 4.0, 2.0, 2.0, 2.0]);
    assert_eq!(scaler.state().skipped_in_a_row, 5);
}

#[test]
fn losses_and_gradients_go_by_the_scale_and_back() {
    let layer = layer();
    let mut scaler = scaler();
    let x = Tensor::<2>::ones([1, 3], &device());
    let loss = layer.forward(x.clone()).sum();
    let scaled = scaler.scale(loss.clone());
    let values: [f32; 2] = [loss, scaled.clone()].map(|loss| loss.into_scalar());
    assert_eq!(values[1], 65536.0 * values[0]);
    let mut gradients = GradientsParams::from_grads(scaled.backward(), &layer);
    let norm = scaler.unscale_and_clip(&mut gradients, &layer, 1.0).expect("once a step");
    // Eight gradients of 1.
    let norm: f32 = norm.into_scalar();
    assert!((norm - 8f32.sqrt()).abs() < 1e-5, "{norm}");
    let left: f32 = clip_global_norm(&mut gradients, &layer, f64::INFINITY).into_scalar();
    assert!((left - 1.0).abs() < 1e-5, "{left}");
}

#[test]
fn losses_whose_activations_are_recomputed_are_scaled_too() {
    let recomputing = device().gradient_checkpointing();
    let layer = LinearConfig::new(3, 2).init(&recomputing);
    let loss = layer.forward(Tensor::<2>::ones([1, 3], &recomputing)).sum();
    let gradients = GradientsParams::from_grads(scaler().scale(loss).backward(), &layer);
    let of_weight = gradients.get::<2>(layer.weight.id).expect("it was used");
    let least: f32 = of_weight.min().into_scalar();
    assert_eq!(least, 65536.0);
}

#[test]
fn gradients_and_norms_of_the_optimizers_step_are_those_of_unscaled_gradients() {
    let run = |in_step: bool| {
        let (mut scaler, mut layer) = (scaler(), layer());
        let mut optimizer = AdamWGroups::default().init_gated(&layer, &device(), scaler.gate());
        let mut norms = Vec::new();
        for gradient in [0.3, -0.7, f32::NAN, 0.25] {
            let scale = scaler.state().scale;
            let mut all = gradients(&layer, scale * gradient, scale);
            let norm = match in_step {
                true => scaler.unscale_and_clip_in_step(&all, &layer, 0.5),
                false => scaler.unscale_and_clip(&mut all, &layer, 0.5),
            };
            norms.push(norm.expect("once a step").into_scalar::<f32>());
            layer = optimizer.step(0.1, layer, all);
            scaler.update().expect("gradients were unscaled");
        }
        norms.remove(2);
        (weights(&layer), norms, scaler.state())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn gradients_in_f16_are_unscaled_in_f32() {
    let layer = layer();
    let mut scaler = scaler();
    let mut gradients = GradientsParams::new();
    let small = Tensor::<2>::full([3, 2], 1.0, &Device::flex()).cast(FloatDType::F16);
    gradients.register(layer.weight.id, small);
    scaler.unscale(&mut gradients, &layer).expect("once a step");
    let unscaled = gradients.get::<2>(layer.weight.id).expect("it was registered");
    let least: f32 = unscaled.min().into_scalar();
    // Less than half the least number of f16.
    assert_eq!(least, 1.0 / 65536.0);
}

#[test]
fn a_disabled_scaler_clips_and_lets_everything_pass() {
    let layer = layer();
    let mut scaler = GradScaler::disabled(&device());
    let mut all = gradients(&layer, 3.0, 3.0);
    let norm: f32 =
        scaler.unscale_and_clip(&mut all, &layer, 1.0).expect("there are gradients").into_scalar();
    assert!((norm - 72f32.sqrt()).abs() < 1e-4, "{norm}");
    scaler.update().expect("nothing to do");
    assert_eq!(scaler.state().scale, 1.0);
    assert!(!scaler.overflowed());
}

#[test]
fn the_order_of_calls_is_checked() {
    let layer = layer();
    let mut scaler = scaler();
    assert_eq!(scaler.update(), Err(ScalerError::NothingUnscaled));
    let mut all = gradients(&layer, 1.0, 1.0);
    assert_eq!(scaler.unscale(&mut GradientsParams::new(), &layer), Err(ScalerError::NoGradients));
    scaler.unscale(&mut all, &layer).expect("the first time");
    assert_eq!(scaler.unscale(&mut all, &layer), Err(ScalerError::AlreadyUnscaled));
}

#[test]
fn a_restored_scaler_goes_on_and_foreign_states_are_refused() {
    let layer = layer();
    let mut first = scaler();
    for value in [1.0, f32::NAN, 1.0, 1.0] {
        first.unscale(&mut gradients(&layer, value, 1.0), &layer).expect("once a step");
        first.update().expect("gradients were unscaled");
    }
    let state = first.state();
    let json = serde_json::to_string(&state).expect("numbers");
    let mut second = scaler();
    second.restore(serde_json::from_str(&json).expect("it was written")).expect("same settings");
    assert_eq!(second.state(), state);

    let foreign = [
        (ScalerState { scale: f32::NAN, ..state }, "scale"),
        (ScalerState { scale: 0.5, ..state }, "scale"),
        (ScalerState { clean_steps: 2000, ..state }, "clean_steps"),
        (ScalerState { skipped_in_a_row: 2, ..state }, "skipped_in_a_row"),
    ];
    for (foreign, field) in foreign {
        let text = second.restore(foreign).expect_err("no scaler is so").to_string();
        assert!(text.contains(field) && text.contains("left as it was"), "{text}");
        assert_eq!(second.state(), state);
    }
    assert!(GradScaler::disabled(&device()).restore(state).is_err());
    assert!(serde_json::from_str::<ScalerState>(r#"{"scale": 2.0}"#).is_err());
}

#[test]
fn absurd_settings_are_refused_by_name() {
    let default = GradScalerConfig::default();
    let absurd = [
        (GradScalerConfig { initial_scale: 0.0, ..default }, "initial_scale"),
        (GradScalerConfig { initial_scale: f32::NAN, ..default }, "initial_scale"),
        (GradScalerConfig { growth_factor: 1.0, ..default }, "growth_factor"),
        (GradScalerConfig { backoff_factor: 1.0, ..default }, "backoff_factor"),
        (GradScalerConfig { growth_interval: 0, ..default }, "growth_interval"),
        (GradScalerConfig { min_scale: 0.0, ..default }, "min_scale"),
        (GradScalerConfig { max_scale: 0.5, ..default }, "max_scale"),
    ];
    for (config, setting) in absurd {
        let text = config.init(&device()).expect_err("it makes no sense").to_string();
        assert!(text.contains(setting), "{text}");
    }
}
