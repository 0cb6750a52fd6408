use crate::{
    checkpoint::Checkpoints,
    ranks::on_ranks,
    trainer::{MicroBatch, Trainer, TrainerConfig, TrainerError},
};
use burn::{
    nn::{Linear, LinearConfig},
    tensor::{Device, Tensor, TensorData},
};
use std::path::Path;

fn device() -> Device {
    Device::flex().autodiff()
}

/// Numbers of batch `number`, in a few rows.
fn batch(number: usize, rows: usize) -> Tensor<2> {
    let numbers: Vec<f32> =
        (0..4 * rows).map(|i| ((i * 31 + number * 7919 + 1) as f32).sin()).collect();
    Tensor::from_data(TensorData::new(numbers, [rows, 4]), &device())
}

fn loss(model: &Linear, x: Tensor<2>) -> Tensor<1> {
    model.forward(x).powi_scalar(2).mean()
}

/// Always the same model.
fn model(seed: usize) -> Linear {
    let model = LinearConfig::new(4, 3).with_bias(false).init(&device());
    let weight = batch(seed, 3).reshape([4, 3]);
    let id = model.weight.id;
    Linear { weight: burn::module::Param::initialized(id, weight.require_grad()), ..model }
}

fn weights(model: &Linear) -> Vec<f32> {
    model.weight.val().into_data().iter::<f32>().collect()
}

fn config() -> TrainerConfig {
    TrainerConfig::new(0.05).with_max_norm(0.5).with_seed(7)
}

/// Losses, norms and weights of one process that accumulates.
fn alone(steps: usize, parts: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let mut trainer: Trainer<_, Tensor<2>> = config().init(model(1)).expect("sound options");
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let part = |part| MicroBatch::new(batch(step * parts + part, 2)).expect("it has rows");
        let step = trainer.step_of((0..parts).map(part).collect(), loss).expect("it trains");
        losses.push(step.loss());
        norms.push(step.gradient_norm.into_scalar());
    }
    (losses, norms, weights(trainer.model().expect("it is there")))
}

#[test]
fn two_ranks_are_one_with_two_micro_batches_bit_for_bit() {
    let (expected_losses, expected_norms, expected) = alone(5, 2);
    for is_sharded in [false, true] {
        let all = on_ranks(2, |group| {
            let config = config().with_group(&group);
            let config = if is_sharded { config.with_sharded_optimizer() } else { config };
            // They begin with rank 0's.
            let start = model(1 + group.rank());
            let mut trainer: Trainer<_, Tensor<2>> = config.init(start).expect("sound options");
            let (mut losses, mut norms) = (Vec::new(), Vec::new());
            for step in 0..5 {
                let own = batch(step * 2 + group.rank(), 2);
                let step = trainer.step(own, loss).expect("it trains");
                losses.push(step.loss());
                norms.push(step.gradient_norm.into_scalar::<f32>());
            }
            (losses, norms, weights(trainer.model().expect("it is there")))
        });
        for (losses, norms, weights) in all {
            assert_eq!(losses, expected_losses, "sharded: {is_sharded}");
            assert_eq!(norms, expected_norms, "sharded: {is_sharded}");
            assert_eq!(weights, expected, "sharded: {is_sharded}");
        }
    }
}

#[test]
fn ranks_count_by_rows_and_those_without_data_wait() {
    // Five rows of rank 0 and one of rank 1 are six rows; then rank 1 has no more.
    let rows = batch(0, 6);
    let mut whole: Trainer<_, Tensor<2>> = config().init(model(1)).expect("sound options");
    let first = whole.step(rows.clone(), loss).expect("it trains").loss();
    let second = whole.step(batch(9, 2), loss).expect("it trains").loss();
    let expected = weights(whole.model().expect("it is there"));
    let all = on_ranks(2, |group| {
        let mut trainer: Trainer<_, Tensor<2>> =
            config().with_group(&group).init(model(1)).expect("sound options");
        let own = if group.rank() == 0 { 0..5 } else { 5..6 };
        let first = trainer.step(rows.clone().slice([own, 0..4]), loss).expect("it trains");
        let left = if group.rank() == 0 { vec![batch(9, 2)] } else { Vec::new() };
        let left = left.into_iter().map(|rows| MicroBatch::new(rows).expect("it has rows"));
        let second = trainer.step_of(left.collect(), loss).expect("one rank has data");
        assert_eq!(second.outputs.len(), usize::from(group.rank() == 0));
        let none = trainer.step_of(Vec::new(), loss).map(drop).expect_err("nobody has data");
        assert!(none.to_string().contains("a rank with a weight above 0"), "{none}");
        (first.loss(), second.loss(), weights(trainer.model().expect("it is there")))
    });
    for (its_first, its_second, its_weights) in &all {
        // A mean of means, weighted: some roundings of numbers of this size.
        assert!((its_first - first).abs() < 8.0 * f32::EPSILON * first);
        assert!((its_second - second).abs() < 1e-4 * second);
        for (own, expected) in its_weights.iter().zip(&expected) {
            // AdamW's first steps are of the learning rate, whatever the gradient, which may differ by roundings.
            assert!((own - expected).abs() < 1e-4, "{own} against {expected}");
        }
        assert_eq!(*its_weights, all[0].2, "all ranks have the same bits");
    }
}

/// Three steps on `ranks`, from the newest checkpoint in `folder` if there is one, and a checkpoint.
fn continued(folder: &Path, ranks: usize) -> Vec<f32> {
    let all = on_ranks(ranks, |group| {
        let checkpoints = Checkpoints::new(folder, "tests");
        let config = config().with_group(&group).with_sharded_optimizer();
        let newest = group.rank_0_first("a checkpoint's folder", || {
            let steps = checkpoints.steps();
            Ok::<_, TrainerError>(steps.last().copied())
        });
        let start = model(1);
        let mut trainer: Trainer<_, Tensor<2>> = match newest.expect("the folder is read") {
            Some(_) => config.resume(start, &checkpoints.newest().expect("it is sound")),
            None => config.init(start),
        }
        .expect("sound options");
        let mut losses = Vec::new();
        for _ in 0..3 {
            let step = trainer.steps_taken();
            let own = (0..2 / ranks).map(|part| step * 2 + part * ranks + group.rank());
            let own = own.map(|number| MicroBatch::new(batch(number, 2)).expect("it has rows"));
            losses.push(trainer.step_of(own.collect(), loss).expect("it trains").loss());
        }
        let path = trainer.save(&checkpoints, &"extra").expect("it is written");
        assert!(path.exists());
        losses
    });
    assert!(all.iter().all(|losses| *losses == all[0]));
    all.into_iter().next().expect("there are ranks")
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let losses: Vec<f32> =
        [2, 1, 2].into_iter().flat_map(|ranks| continued(folder.path(), ranks)).collect();
    assert_eq!(losses, alone(9, 2).0);
}

#[test]
fn ranks_with_other_options_or_models_are_refused() {
    let refused = |change: fn(TrainerConfig, usize) -> TrainerConfig| {
        on_ranks(2, |group| {
            let config = change(config().with_group(&group), group.rank());
            let refused = config.init::<_, Tensor<2>, ()>(model(1));
            refused.map(drop).expect_err("the ranks differ").to_string()
        })
    };
    for message in refused(|config, rank| config.with_max_norm(1.0 + rank as f64)) {
        let expected = "the ranks differ in the trainer's maximum norm: rank 0 has 1, rank 1 has 2";
        assert!(message.contains(expected), "{message}");
    }
    let all = on_ranks(2, |group| {
        let model = LinearConfig::new(4, 3 + group.rank()).init(&device());
        let refused = config().with_group(&group).init::<_, Tensor<2>, ()>(model);
        refused.map(drop).expect_err("the models differ").to_string()
    });
    assert!(all.iter().all(|message| message.contains("rank 1 has weight [4, 4]")), "{all:?}");
}

#[test]
fn what_rank_0_cannot_write_all_ranks_are_told() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let file = folder.path().join("file");
    std::fs::write(&file, "in the way").expect("it is written");
    let all = on_ranks(2, |group| {
        let mut trainer: Trainer<_, Tensor<2>> =
            config().with_group(&group).init(model(1)).expect("sound options");
        trainer.step(batch(group.rank(), 2), loss).expect("it trains");
        let refused = trainer.save(&Checkpoints::new(&file, "tests"), &());
        // It goes on.
        trainer.step(batch(group.rank(), 2), loss).expect("it trains");
        refused.map(drop).expect_err("a file is in the way").to_string()
    });
    assert!(all[1].contains("a checkpoint: rank 0 says: ") && all[1].ends_with(&all[0]), "{all:?}");
}

#[test]
fn a_fault_of_one_rank_is_told_to_all() {
    let all = on_ranks(2, |group| {
        let mut trainer: Trainer<_, Tensor<2>> =
            config().with_group(&group).init(model(1)).expect("sound options");
        let step = trainer.step(batch(0, 2), |model, x| match group.rank() {
            0 => loss(model, x),
            _ => model.forward(x).flatten(0, 1),
        });
        let message = step.map(drop).expect_err("rank 1's loss is no number").to_string();
        if group.rank() == 1 {
            group.fail(&message);
        }
        message
    });
    assert!(all[0].contains("rank 1 of 2") && all[0].contains("expected one number"), "{all:?}");
    assert!(all[1].contains("expected one number in f32"), "{all:?}");
}
