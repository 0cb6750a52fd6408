use super::*;
use std::cell::RefCell;

/// As CubeCL 0.11 words it, wrapped as Burn hands it out.
const OUT_OF_MEMORY: &str = "An error happened during execution\nCaused by:\n  out of device memory \
                             allocating 42 bytes\nNo backtrace available";

fn find<E: fmt::Debug + fmt::Display>(
    options: AutoBatch,
    step: impl FnMut(usize) -> Result<(), E>,
) -> Result<BatchPlan, AutoBatchError<E>> {
    auto_batch(&Device::flex(), options, step)
}

/// A device with room for `room` samples, and the sizes that were tried.
fn simulate(options: AutoBatch, room: usize) -> (BatchPlan, Vec<usize>) {
    let mut tried = vec![];
    let plan = find(options, |size| {
        tried.push(size);
        if size <= room { Ok(()) } else { Err(OUT_OF_MEMORY.to_string()) }
    });
    (plan.expect("something fits"), tried)
}

fn exact(target: usize) -> AutoBatch {
    AutoBatch { margin: 0.0, ..AutoBatch::new(target) }
}

#[test]
fn the_plan_is_that_of_the_largest_size_that_fits() {
    for target in [1, 2, 7, 16, 60, 97, 120, 128] {
        for room in 1..140 {
            let options = exact(target);
            let (plan, tried) = simulate(options, room);
            let best = options.plan(room.min(target));
            assert_eq!(
                (plan.micro_batch, plan.accumulation),
                (best.micro_batch, best.accumulation),
                "target {target}, room {room}, tried {tried:?}"
            );
            assert!(plan.micro_batch <= room);
            assert!(tried.len() <= 15, "{tried:?}");
            assert!(tried.iter().all(|size| *size <= target), "{tried:?}");
        }
    }
}

#[test]
fn sizes_double_and_are_then_bisected() {
    let (plan, tried) = simulate(exact(1000), 37);
    assert_eq!(tried, [1, 2, 4, 8, 16, 32, 64, 48, 40, 36, 38]);
    // 36 and 37 both need 28 passes, of 36 at most; no divisor is near.
    assert_eq!((plan.micro_batch, plan.accumulation, plan.largest_run), (36, 28, 36));
}

#[test]
fn the_search_ends_where_the_plan_cannot_change() {
    // With room for 60 or 99 of 100 samples it is two passes of 50.
    let (plan, tried) = simulate(exact(100), 70);
    assert_eq!((plan.micro_batch, plan.accumulation), (50, 2));
    assert_eq!(tried, [1, 2, 4, 8, 16, 32, 64, 100]);
}

#[test]
fn micro_batches_that_divide_the_target_are_preferred_when_near() {
    // Eleven passes of 11, the last one smaller, would do too.
    let plan = exact(120).plan(11);
    assert_eq!((plan.micro_batch, plan.accumulation), (10, 12));
    // 11 of 96: the nearest divisor is 8, so nine passes, the last smaller.
    let plan = exact(96).plan(11);
    assert_eq!((plan.micro_batch, plan.accumulation), (11, 9));
    assert_eq!(plan.micro_batches().sum::<usize>(), 96);
    assert_eq!(plan.micro_batches().last(), Some(8));
}

#[test]
fn every_plan_covers_its_target() {
    for target in 1..200 {
        for ran in 1..target + 3 {
            let plan = exact(target).plan(ran);
            let sizes: Vec<usize> = plan.micro_batches().collect();
            assert_eq!(sizes.len(), plan.accumulation);
            assert_eq!(sizes.iter().sum::<usize>(), target, "{plan:?}");
            assert!(sizes.iter().all(|size| (1..=ran).contains(size)), "{plan:?}");
        }
    }
}

#[test]
fn the_margin_is_kept_below_what_ran() {
    for margin in [0.1, 0.25, 0.5] {
        for room in 2..100 {
            let options = AutoBatch { margin, ..AutoBatch::new(64) };
            let (plan, _) = simulate(options, room);
            let most = plan.largest_run as f64 * (1.0 - margin);
            assert!(plan.micro_batch as f64 <= most + 1e-9, "{margin} {room} {plan:?}");
            assert!(plan.largest_run <= room);
        }
    }
    // A target that fits with room to spare is one pass.
    let (plan, tried) = simulate(AutoBatch::new(9), 1000);
    assert_eq!((plan.micro_batch, plan.accumulation, plan.largest_run), (9, 1, 10));
    assert_eq!(tried.last(), Some(&10));
}

#[test]
fn no_trial_exceeds_the_limit() {
    let options = AutoBatch { limit: Some(20), ..exact(64) };
    let (plan, tried) = simulate(options, 1000);
    assert!(tried.iter().all(|size| *size <= 20), "{tried:?}");
    assert_eq!((plan.micro_batch, plan.accumulation), (16, 4));
}

#[test]
fn panics_for_lack_of_memory_are_survived_too() {
    let tried = RefCell::new(vec![]);
    let plan = find(exact(64), |size| {
        tried.borrow_mut().push(size);
        match size > 5 {
            true => panic!("Error while reading data: {OUT_OF_MEMORY}"),
            false => Ok::<(), String>(()),
        }
    });
    let plan = plan.expect("five samples fit");
    assert_eq!((plan.micro_batch, plan.accumulation), (5, 13));
    assert_eq!(*tried.borrow(), [1, 2, 4, 8, 6, 5]);
}

#[test]
fn a_device_without_room_for_one_sample_says_so() {
    let error = find(exact(4), |_| Err::<(), _>(OUT_OF_MEMORY.to_string()));
    let message = error.expect_err("nothing fits").to_string();
    assert!(message.contains("a step of 1 samples"), "{message}");
    assert!(message.contains("out of device memory allocating 42 bytes"), "{message}");
}

#[test]
fn other_failures_are_returned_as_they_are() {
    let mut trials = 0;
    let error = find(exact(64), |size| {
        trials += 1;
        if size < 4 { Ok(()) } else { Err("the loss is NaN") }
    });
    assert!(matches!(error, Err(AutoBatchError::Step("the loss is NaN"))), "{error:?}");
    assert_eq!(trials, 3);

    let panicking = || find(exact(64), |_| -> Result<(), String> { panic!("index 3 of 2") });
    let payload = panic::catch_unwind(panicking).expect_err("the panic goes on");
    assert_eq!(panic_message(&*payload), Some("index 3 of 2"));
}

#[test]
fn absurd_options_are_refused_before_any_trial() {
    for (options, expected) in [
        (exact(0), "option `target`: expected at least 1, got 0"),
        (AutoBatch { limit: Some(0), ..exact(8) }, "option `limit`: expected at least 1, a"),
        (AutoBatch { limit: Some(1), ..AutoBatch::new(8) }, "expected at least 2, a sample with"),
        (AutoBatch { margin: 1.0, ..exact(8) }, "option `margin`"),
        (AutoBatch { margin: -0.1, ..exact(8) }, "option `margin`"),
        (AutoBatch { margin: f64::NAN, ..exact(8) }, "option `margin`"),
    ] {
        let error = find(options, |_| -> Result<(), String> { unreachable!("a trial ran") });
        let message = error.expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn lack_of_memory_is_told_from_other_failures() {
    for message in [
        OUT_OF_MEMORY,
        "An out-of-memory error happened during launch",
        "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
        "can't allocate buffer of size: 17179869184",
        "Not enough memory left: Out of Memory",
    ] {
        assert!(names_lack_of_memory(message), "{message}");
    }
    for message in [
        "Too much shared memory requested.\nRequested 300 bytes, maximum 200 bytes available.",
        "couldn't find resource for that handle",
        "The device is poisoned: an illegal memory access was encountered",
    ] {
        assert!(!names_lack_of_memory(message), "{message}");
    }
}
