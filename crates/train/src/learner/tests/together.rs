//! A training of several ranks.

use super::*;
use crate::ranks::on_ranks;
use blackburn_distributed::Group;

/// Two epochs on `rows`, in batches of three on each rank.
fn trained(rows: &[Row], ranks: usize) -> Vec<LearningResult<Toy>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    on_ranks(ranks, |group| {
        training(folder.path(), rows.to_vec())
            .num_epochs(2)
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_training_strategy(strategy().with_group(&group).into())
            .launch(learner())
    })
}

#[test]
fn a_step_is_of_the_batches_of_all_ranks() {
    let all = rows(10);
    let epoch = [[&all[..3], &all[5..8]].concat(), [&all[3..5], &all[8..]].concat()];
    let windows: Vec<&[Row]> = epoch.iter().chain(&epoch).map(Vec::as_slice).collect();
    let expected = descend(&windows, f64::INFINITY);
    for result in trained(&all, 2) {
        assert!(result.error.is_none(), "{:?}", result.error);
        assert_close(&result.model.weights(), expected, rounding(4));
    }
}

#[test]
fn ranks_with_less_data_wait_for_the_others() {
    // Three rows, and four: the second rank has a batch more.
    let all = rows(7);
    let epoch = [&all[..6], &all[6..]];
    let expected = descend(&[epoch[0], epoch[1], epoch[0], epoch[1]], f64::INFINITY);
    let results = trained(&all, 2);
    for result in &results {
        assert!(result.error.is_none(), "{:?}", result.error);
        assert_close(&result.model.weights(), expected, rounding(4));
    }
    assert_eq!(results[0].model.weights(), results[1].model.weights());
}

#[test]
fn a_rank_that_fails_stops_all() {
    // Its loss is not finite.
    let mut all = rows(12);
    all[11][2] = f32::INFINITY;
    let results = trained(&all, 2);
    let message = results[1].error.as_ref().expect("rank 1 has diverged").to_string();
    assert!(message.contains("training diverged"), "{message}");
    assert!(results.iter().all(|result| result.error.is_some()), "rank 0 went on");
}

#[test]
fn rank_0_saves_and_all_resume_from_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let all = rows(6);
    let run = |epochs: usize, resumed: Option<usize>| {
        on_ranks(2, |group: Group| {
            let own = rank_folder(&group, folder.path()).expect("folders are made");
            let training = training(&own, all.clone())
                .num_epochs(epochs)
                .with_metric_logger(InMemoryMetricLogger::new())
                .with_default_checkpointers()
                .with_training_strategy(strategy().with_group(&group).into());
            let training = match resumed {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            };
            let result = training.launch(learner());
            assert!(result.error.is_none(), "{:?}", result.error);
            result.model.weights()
        })
    };
    run(1, None);
    assert!(folder.path().join("checkpoint").is_dir());
    let resumed = run(3, Some(1));
    // Both ranks have all rows together in one step.
    let expected = descend(&[&all[..], &all[..], &all[..]], f64::INFINITY);
    for weights in resumed {
        assert_close(&weights, expected, rounding(3));
    }
}

#[test]
fn several_devices_on_a_rank_of_several_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let results = on_ranks(2, |group| {
        training(folder.path(), rows(6))
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_training_strategy(
                strategy().with_device(&Device::flex()).with_group(&group).into(),
            )
            .launch(learner())
    });
    for result in results {
        let message = result.error.expect("it is refused").to_string();
        assert!(
            message.contains("expected one device on each rank of a group, got 2"),
            "{message}"
        );
    }
}
