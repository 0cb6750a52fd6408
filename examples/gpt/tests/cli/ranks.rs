//! Runs of several processes: what they compute, and how they end when one fails.

use crate::{
    checkpoints::{of_step, steps},
    sandbox::{Sandbox, fail, finish, losses, records, succeed},
};
use example_program::testing::{RANKS_END, end_rank, fail_on_ranks, free_port, start_rank};
use libtest_mimic::Trial;
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial!(two_processes_are_one_that_accumulates_on_any_number_of_them),
        trial!(numbers_of_processes_that_make_no_sense_are_refused),
        trial!(what_a_rank_does_not_share_with_the_others_is_named),
        trial!(a_rank_that_is_killed_ends_all_and_the_run_goes_on),
        #[cfg(unix)]
        trial!(a_rank_that_is_stopped_ends_all),
        by_mpirun(),
    ]
}

/// Open MPI is not on every machine.
fn by_mpirun() -> Trial {
    let is_there = Command::new("mpirun").arg("--version").output().is_ok();
    // Set where it was installed for this test: there it must not be left out.
    let is_required = std::env::var_os("BLACKBURN_REQUIRE_MPIRUN").is_some();
    let trial = trial!(two_processes_of_mpirun_train_together);
    match is_there || is_required {
        true => trial,
        false => trial.with_kind("no mpirun: install Open MPI").with_ignored_flag(true),
    }
}

fn two_processes_of_mpirun_train_together() {
    let place = Sandbox::new();
    let often = ["--eval-every", "2", "--accumulate"];
    succeed(place.train("one", &[&often[..], &["2"]].concat()));
    let of_each = place.train("two", &[&often[..], &["1"]].concat());
    let mut command = Command::new("mpirun");
    place.prepare(&mut command);
    // It refuses root and more processes than cores unless it is told; containers often have both.
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["--oversubscribe", "-np", "2"])
        .arg(of_each.get_program())
        .args(of_each.get_args());
    succeed(command);
    assert_eq!(losses(&place.path("two"), "train"), losses(&place.path("one"), "train"));
}

fn two_processes_are_one_that_accumulates_on_any_number_of_them() {
    let place = Sandbox::new();
    let of = |run: &str| numbers(&place.path(run));
    let often = ["--eval-every", "2", "--checkpoint-every", "2", "--keep", "9"];
    let with = |more: &[&'static str]| [&often[..], more].concat();
    succeed(place.train("one", &with(&["--accumulate", "2"])));
    let expected = of("one");
    assert_eq!(expected.len(), 6 + 3);
    let is_clipped = |record: &[Value; 4]| record[3].as_f64().is_some_and(|norm| norm > 1.0);
    assert!(expected.iter().any(is_clipped), "{expected:?}");

    succeed(place.train("two", &with(&["--gpus", "2"])));
    assert_eq!(of("two"), expected);
    // Two steps on each number of processes.
    for (done, ranks) in [(2, "1"), (4, "2")] {
        forget_after(&place.path("two"), done);
        succeed(place.resume("two", &["--gpus", ranks]));
        assert_eq!(of("two"), expected, "from step {done} on {ranks}");
    }
    let parts = records(&place.path("two"), "run");
    let parts = parts.iter().map(|part| [&part["starts_at_step"], &part["settings"]["ranks"]]);
    assert_eq!(json!(Vec::from_iter(parts)), json!([[0, 2], [2, 1], [4, 2]]));

    // Owners of shares each add up the squares of their own gradients, so that norms are rounded otherwise, and
    // with them what is clipped: nothing is here.
    let loose = ["--clip", "1e6"];
    succeed(place.train("loose", &with(&[&loose[..], &["--accumulate", "2"]].concat())));
    let shared = ["--gpus", "2", "--shard-optimizer"];
    succeed(place.train("shares", &with(&[&loose[..], &shared].concat())));
    let of = |run: &str| ["train", "validation"].map(|kind| losses(&place.path(run), kind));
    assert_eq!(of("shares"), of("loose"));
    for (done, options) in [(2, &[][..]), (4, &shared)] {
        forget_after(&place.path("shares"), done);
        succeed(place.resume("shares", options));
        assert_eq!(of("shares"), of("loose"), "from step {done} with {options:?}");
    }
}

/// What a run reports of its training and validations, to the last bit.
fn numbers(run: &Path) -> Vec<[Value; 4]> {
    let all = ["train", "validation"].map(|kind| records(run, kind)).concat();
    let fields = ["step", "loss", "learning_rate", "gradient_norm"];
    all.iter().map(|record| fields.map(|field| record[field].clone())).collect()
}

/// Leaves the run as if it had ended after `step`.
fn forget_after(run: &Path, step: u64) {
    for later in steps(run).into_iter().filter(|saved| *saved > step) {
        fs::remove_dir_all(of_step(run, later)).unwrap();
    }
}

fn numbers_of_processes_that_make_no_sense_are_refused() {
    let place = Sandbox::new();
    fail(place.train("run", &["--gpus", "0"]), &["launch", "`ranks`: expected at least 1, got 0"]);
    let mut command = place.train("run", &["--gpus", "3"]);
    command.env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
    fail(command, &["3, where a launcher has started 2"]);
    let mut command = place.train("run", &[]);
    command.env("RANK", "2").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
    fail(command, &["RANK: expected a rank below the number of ranks, got 2 of 2"]);
    succeed(place.train("run", &["--batch", "3"]));
    let resumed = finish(place.resume("run", &["--steps", "8", "--gpus", "2"]));
    let expected = "a step has 3 samples on 1 ranks, which 2 cannot share equally";
    assert!(resumed.stderr.contains(expected), "{}", resumed.stderr);
}

fn what_a_rank_does_not_share_with_the_others_is_named() {
    let place = Sandbox::new();
    for (option, of_rank_0, of_rank_1) in [
        ("--width", "16", "32"),
        ("--seed", "42", "7"),
        ("--batch", "2", "4"),
        ("--accumulate", "1", "2"),
        ("--steps", "6", "8"),
        ("--attention", "naive", "flash"),
        ("--checkpoint-every", "2", "3"),
        ("--validation-share", "0.3", "0.4"),
    ] {
        let ranks = [of_rank_0, of_rank_1].map(|value| place.train("run", &[option, value]));
        let expected = format!(
            "the ranks differ in {option}: rank 0 has {of_rank_0}, rank 1 has {of_rank_1}. Start all \
             ranks with the same options"
        );
        fail_on_ranks(ranks, &expected);
    }
    let ranks = [place.train("run", &[]), place.resume("run", &[])];
    fail_on_ranks(ranks, "the ranks differ in --resume: rank 0 has false, rank 1 has true");
    succeed(place.train("run", &["--gpus", "2"]));
    let ranks = ["8", "9"].map(|steps| place.resume("run", &["--steps", steps]));
    fail_on_ranks(ranks, "the ranks differ in --steps: rank 0 has 8, rank 1 has 9");
    let ranks = [place.resume("run", &[]), place.resume("run", &["--seed", "7"])];
    fail_on_ranks(ranks, "--seed 7 (the checkpoint has 42)");
}

fn a_rank_that_is_killed_ends_all_and_the_run_goes_on() {
    let place = Sandbox::new();
    let port = free_port();
    let long = ["--steps", "100000", "--warmup", "1", "--checkpoint-every", "1"];
    let mut rank_0 = start_rank(place.train("run", &long), 0, port);
    let mut rank_1 = start_rank(place.train("run", &long), 1, port);
    wait_for_steps(&place, &mut rank_0);
    rank_1.kill().unwrap();
    rank_1.wait().unwrap();
    let said = end_rank(rank_0, "rank 0");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(errors[0].contains("rank 1 of 2 (host "), "{said}");
    assert!(errors[0].contains("has died"), "{said}");
    assert!(errors[0].contains("the newest checkpoint is run/checkpoints/step-"), "{said}");

    let done = losses(&place.path("run"), "train").len() as u64;
    let more = (done + 5).to_string();
    succeed(place.resume("run", &["--gpus", "2", "--steps", &more]));
}

#[cfg(unix)]
fn a_rank_that_is_stopped_ends_all() {
    let place = Sandbox::new();
    let port = free_port();
    let long = ["--steps", "100000"];
    let mut rank_0 = start_rank(place.train("run", &long), 0, port);
    let mut rank_1 = start_rank(place.train("run", &long), 1, port);
    wait_for_steps(&place, &mut rank_0);
    let stopped = Command::new("kill").args(["-STOP", &rank_1.id().to_string()]).status();
    assert!(stopped.unwrap().success());
    let said = end_rank(rank_0, "rank 0");
    assert!(said.contains("rank 1 of 2 (host "), "{said}");
    assert!(said.contains("has given no sign of life for 5 s"), "{said}");
    rank_1.kill().unwrap();
    rank_1.wait().unwrap();
}

fn wait_for_steps(place: &Sandbox, rank_0: &mut Child) {
    let since = Instant::now();
    while losses(&place.path("run"), "train").len() < 5 {
        assert!(rank_0.try_wait().unwrap().is_none(), "the run ended by itself");
        assert!(since.elapsed() < RANKS_END, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
}
