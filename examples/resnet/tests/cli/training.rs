//! Runs from their beginning to their end: what they write, and what they continue with.

use crate::sandbox::{Running, Sandbox, checkpoints, fail, losses, records, succeed, tensors};
use std::fs;

#[test]
fn training_writes_what_it_promises() {
    let place = Sandbox::new();
    let run = place.path("run");
    let options = "--steps 12 --eval-every 6 --checkpoint-every 4 --keep 2 --clip 5 --ema 0.8";
    let options: Vec<&str> = options.split_whitespace().collect();
    let finished = succeed(place.train("run", &options));
    assert!(finished.stderr.contains("of 512 held-out images told right"), "{}", finished.stderr);

    let steps: Vec<u64> = losses(&run, "train").iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, Vec::from_iter(1..=12));
    // An untrained network finds 16 classes about equally likely.
    let (_, first) = losses(&run, "train")[0];
    assert!((first - 16f64.ln()).abs() < 1.0, "{first}");
    // One before each checkpoint, too.
    let validations = records(&run, "validation");
    let steps: Vec<_> = validations.iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [4, 6, 8, 12]);
    assert_eq!(
        (&validations[0]["images"], &validations[0]["averaged"]),
        (&512.into(), &true.into())
    );
    assert_eq!(checkpoints(&run), [8, 12]);

    for name in ["curves", "confusion"] {
        let svg = fs::read_to_string(run.join(name).with_extension("svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{name}");
        image::open(run.join(name).with_extension("png")).unwrap();
    }
    assert_eq!(image::open(run.join("samples.png")).unwrap().width(), 1200);
    let events: Vec<_> = fs::read_dir(run.join("tensorboard")).unwrap().collect();
    assert_eq!(events.len(), 1);
    let events = fs::read(events[0].as_ref().unwrap().path()).unwrap();
    for tag in ["train/loss", "validation/top1", "validation/samples", "IHDR"] {
        assert!(events.windows(tag.len()).any(|part| part == tag.as_bytes()), "{tag}");
    }

    // `eval` finds what the run found at its end, and `--raw` something else.
    let eval = |options: &[&str]| {
        let mut command = place.resnet(&["eval", "--checkpoint", "run"]);
        command.args(options);
        succeed(command).stdout
    };
    let last = validations.last().unwrap();
    let expected = format!("step 12: loss {:.4} nats", last["loss"].as_f64().unwrap());
    let averaged = eval(&["--batch", "7", "--pictures", "pictures"]);
    assert!(averaged.starts_with(&expected), "{averaged}, expected {expected}");
    assert_ne!(eval(&["--raw"]), averaged);
    assert!(place.path("pictures/confusion.svg").exists());
    let options = ["eval", "--checkpoint", "run", "--jitter", "0.5"];
    fail(place.resnet(&options), &["--jitter", "--data DIR, which is missing"]);
}

/// Accumulation, the average of the weights and the norms' running statistics are part of it.
#[test]
fn a_killed_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit() {
    let place = Sandbox::new();
    let options =
        "--accumulate 2 --steps 24 --eval-every 6 --checkpoint-every 4 --keep 9 --ema 0.7";
    let options: Vec<&str> = options.split_whitespace().collect();
    let straight = place.path("straight");
    succeed(place.train("straight", &options));

    // The kill has to come before the end: a machine that is too busy gets another try.
    let interrupted = (0..5).map(|attempt| format!("interrupted-{attempt}")).find(|name| {
        let run = place.path(name);
        let mut running = Running::start(place.train(name, &options));
        let in_time = running.wait_until(|| losses(&run, "train").len() >= 10);
        running.kill();
        in_time && !checkpoints(&run).contains(&24)
    });
    let name = interrupted.expect("a run that was killed before its end");
    let run = place.path(&name);
    let saved = *checkpoints(&run).last().unwrap();
    assert!((8..24).contains(&saved), "{saved}");
    let options = ["--eval-every", "6", "--checkpoint-every", "4", "--keep", "9", "--workers", "1"];
    let resumed = succeed(place.resume(&name, &options));
    assert!(resumed.stderr.contains(&format!("step-{saved:08}")), "{}", resumed.stderr);

    // Every step once, in order, and the very same numbers.
    assert_eq!(losses(&straight, "train").len(), 24);
    assert_eq!(losses(&straight, "train"), losses(&run, "train"));
    assert_eq!(losses(&straight, "validation"), losses(&run, "validation"));
    for file in ["model.bpk", "optimizer.bpk", "ema.bpk"] {
        assert!(tensors(&straight, 24, file) == tensors(&run, 24, file), "{file} differs");
    }
}

#[test]
fn a_finished_run_goes_on_when_more_steps_are_asked_for_and_only_so() {
    let place = Sandbox::new();
    let run = place.path("run");
    succeed(place.train("run", &["--steps", "2"]));
    let complete = succeed(place.resume("run", &[]));
    assert!(complete.stderr.contains("complete"), "{}", complete.stderr);
    // It reports after each step, as it did, and not after every tenth.
    succeed(place.resume("run", &["--steps", "4"]));
    assert_eq!(losses(&run, "train").len(), 4);

    for (option, asked, saved) in [
        ("--depth", "34", "18"),
        ("--width", "8", "4"),
        ("--size", "64", "32"),
        ("--batch", "3", "4"),
        ("--accumulate", "2", "1"),
        ("--precision", "bf16", "f32"),
        ("--seed", "1", "42"),
    ] {
        let expected = format!("{option} {asked} (the checkpoint has {saved})");
        fail(place.resume("run", &[option, asked]), &[&expected]);
    }
    fail(place.resume("run", &["--epochs", "2"]), &["--epochs", "--steps"]);
    assert_eq!(checkpoints(&run).last(), Some(&4));
}

/// In f16 losses are scaled, and the first steps may be left out.
#[test]
fn sixteen_bits_train_and_resume() {
    let place = Sandbox::new();
    for precision in ["bf16", "f16"] {
        let options = ["--precision", precision, "--steps", "3", "--checkpoint-every", "2"];
        succeed(place.train(precision, &options));
        succeed(place.resume(precision, &["--steps", "4"]));
        let run = place.path(precision);
        assert_eq!(losses(&run, "train").len(), 4);
        let has_scaler = records(&run, "train").iter().all(|record| record.get("scaler").is_some());
        assert_eq!(has_scaler, precision == "f16");
    }
}

#[test]
fn a_run_that_diverges_says_so_and_keeps_its_checkpoints() {
    let place = Sandbox::new();
    succeed(place.train("run", &["--steps", "3", "--checkpoint-every", "1", "--keep", "9"]));
    let mut diverging = place.resume("run", &["--learning-rate", "1e30", "--steps", "30"]);
    diverging.args(["--checkpoint-every", "1", "--keep", "99"]);
    fail(diverging, &["diverged", "are intact", "--learning-rate"]);
    let saved = checkpoints(&place.path("run"));
    assert!(saved.contains(&3), "{saved:?}");
    // What was saved since is of a model whose losses were numbers.
    let validations = losses(&place.path("run"), "validation");
    assert!(validations.iter().all(|(_, loss)| loss.is_finite()), "{validations:?}");
}
