//! Loss scaling in the learner. Scales are powers of two, so they leave no rounding behind.

use super::*;
use crate::scaler::{GradScalerConfig, ScalerState};
use burn::optim::GradientsParams;

fn scaling(initial_scale: f32) -> LossScaling {
    let config = GradScalerConfig { initial_scale, ..GradScalerConfig::default() };
    LossScaling::new(config.init(&Device::flex()).expect("these settings make sense"))
}

/// Trains a model whose losses are scaled, in windows of two batches.
fn train_scaled(scaling: &LossScaling) -> LearningResult<Toy> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = Toy { scaling: Some(scaling.clone()), ..Toy::new() };
    training(folder.path(), rows(10))
        .grads_accumulation(2)
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy().with_hook(scaling.clone()).into())
        .launch(Learner::new(model, SgdConfig::new().init(), ConstantLr::new(RATE)))
}

#[test]
fn scaled_losses_train_what_others_do() {
    let scaling = scaling(1024.0).waiting();
    let result = train_scaled(&scaling);
    assert!(result.error.is_none(), "{:?}", result.error);
    assert_eq!(result.model.weights(), train(strategy(), 2).model.weights());
    assert_eq!(scaling.state(), ScalerState { clean_steps: 2, ..scaling_state(1024.0) });
}

fn scaling_state(scale: f32) -> ScalerState {
    ScalerState { scale, clean_steps: 0, skipped_steps: 0, skipped_in_a_row: 0 }
}

#[test]
fn steps_that_overflow_are_left_out() {
    // The sum of squares of gradients near 1 overflows f32 at this scale, and at half of it.
    let config = GradScalerConfig {
        initial_scale: 2f32.powi(100),
        max_scale: 2f32.powi(100),
        ..GradScalerConfig::default()
    };
    let scaler = config.init(&Device::flex()).expect("these settings make sense");
    let scaling = LossScaling::new(scaler).waiting();
    let result = train_scaled(&scaling);
    assert!(result.error.is_none(), "{:?}", result.error);
    assert_eq!(result.model.weights(), Toy::new().weights());
    let state = scaling.state();
    assert_eq!((state.scale, state.skipped_steps), (2f32.powi(98), 2));
}

/// A file that is written over is torn by a crash. One that is replaced stays whole for who has it open.
#[test]
fn the_scalers_file_is_replaced_and_never_written_over() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let save = |scale: f32, epoch: usize| {
        let mut scaling = scaling(scale).saved_in(folder.path());
        let hook: &mut dyn StepHook<Toy> = &mut scaling;
        hook.save(epoch)
    };
    let path = folder.path().join("scaler-1.json");
    let open = || std::fs::File::open(&path).expect("it was written");
    let state = |file| -> ScalerState { serde_json::from_reader(file).expect("it is whole") };
    save(1024.0, 1).expect("the folder can be written to");
    let old = open();
    save(4.0, 1).expect("the folder can be written to");
    assert_eq!((state(old), state(open())), (scaling_state(1024.0), scaling_state(4.0)));
    // A failure leaves nothing behind.
    std::fs::create_dir(folder.path().join("scaler-2.json")).expect("writable");
    assert!(save(4.0, 2).is_err(), "a folder was replaced by a file");
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 2);
}

#[test]
fn the_state_is_kept_beside_checkpoints_and_foreign_ones_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut first = scaling(1024.0).saved_in(folder.path());
    let hook: &mut dyn StepHook<Toy> = &mut first;
    assert_eq!(hook.before_step(&mut GradientsParams::new(), &Toy::new()), Verdict::Skip);
    hook.save(3).expect("the folder can be written to");
    let mut second = scaling(4.0).saved_in(folder.path());
    let hook: &mut dyn StepHook<Toy> = &mut second;
    hook.load(3).expect("it was saved");
    assert_eq!(second.state(), scaling_state(1024.0));

    let hook: &mut dyn StepHook<Toy> = &mut second;
    let missing = hook.load(4).expect_err("it was not saved").to_string();
    assert!(missing.contains("scaler-4.json"), "{missing}");
    std::fs::write(folder.path().join("scaler-5.json"), r#"{"scale": -1.0}"#).expect("writable");
    let foreign = hook.load(5).expect_err("no scaler is so");
    assert_eq!(foreign.kind(), std::io::ErrorKind::InvalidData);
    assert_eq!(second.state(), scaling_state(1024.0));
}
