//! Runs of several processes: what they compute, and how they end when one fails.

use crate::sandbox::{Sandbox, fail, finish, losses, succeed};
use libtest_mimic::Trial;
use std::{
    net::TcpListener,
    process::{Child, Command, Output},
    thread,
    time::{Duration, Instant},
};

/// In which all processes have to end once one has failed: ten times the timeout that they are given.
const LIMIT: Duration = Duration::from_secs(50);

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
    // Nothing is clipped: ranks that have a part of the gradients each add up the norm's parts in another order.
    let often = ["--eval-every", "2", "--checkpoint-every", "2", "--clip", "1e6"];
    let with = |more: &[&'static str]| [&often[..], more].concat();
    succeed(place.train("one", &with(&["--accumulate", "2"])));
    let expected = losses(&place.path("one"), "train");
    assert_eq!(expected.len(), 6);
    for (run, more) in [("two", &[][..]), ("shares", &["--shard-optimizer"])] {
        succeed(place.train(run, &with(&[&["--gpus", "2"], more].concat())));
        assert_eq!(losses(&place.path(run), "train"), expected, "{run}");
        assert_eq!(
            losses(&place.path(run), "validation"),
            losses(&place.path("one"), "validation"),
            "{run}"
        );
    }
    // Two steps on each number.
    let two = ["--steps", "2", "--warmup", "1", "--learning-rate", "1e-3"];
    let two = [&two[..], &["--min-learning-rate", "1e-3"]].concat();
    succeed(place.train("changes", &[&two[..], &["--gpus", "2"]].concat()));
    succeed(place.resume("changes", &["--steps", "4"]));
    succeed(place.resume("changes", &["--steps", "6", "--gpus", "2", "--shard-optimizer"]));
    let straight = [&two[2..], &["--steps", "6", "--accumulate", "2"]].concat();
    succeed(place.train("straight", &straight));
    assert_eq!(losses(&place.path("changes"), "train"), losses(&place.path("straight"), "train"));
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
    let port = free_port();
    let rank_0 = start(&place, 0, port, &["--width", "16"]);
    let rank_1 = start(&place, 1, port, &["--width", "32"]);
    for said in [end(rank_0, "rank 0"), end(rank_1, "rank 1")] {
        assert!(said.contains("the ranks differ in the module"), "{said}");
    }
}

fn a_rank_that_is_killed_ends_all_and_the_run_goes_on() {
    let place = Sandbox::new();
    let port = free_port();
    let long = ["--steps", "100000", "--warmup", "1", "--checkpoint-every", "1"];
    let mut rank_0 = start(&place, 0, port, &long);
    let mut rank_1 = start(&place, 1, port, &long);
    wait_for_steps(&place, &mut rank_0);
    rank_1.kill().unwrap();
    rank_1.wait().unwrap();
    let said = end(rank_0, "rank 0");
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
    let mut rank_0 = start(&place, 0, port, &long);
    let mut rank_1 = start(&place, 1, port, &long);
    wait_for_steps(&place, &mut rank_0);
    let stopped = Command::new("kill").args(["-STOP", &rank_1.id().to_string()]).status();
    assert!(stopped.unwrap().success());
    let said = end(rank_0, "rank 0");
    assert!(said.contains("rank 1 of 2 (host "), "{said}");
    assert!(said.contains("has given no sign of life for 5 s"), "{said}");
    rank_1.kill().unwrap();
    rank_1.wait().unwrap();
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One of two ranks of the run in the folder `run`, as a launcher starts it.
fn start(place: &Sandbox, rank: usize, port: u16, options: &[&str]) -> Child {
    let mut command = place.train("run", options);
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", "2")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("BLACKBURN_DISTRIBUTED_TIMEOUT", "5");
    command.spawn().unwrap()
}

fn wait_for_steps(place: &Sandbox, rank_0: &mut Child) {
    let since = Instant::now();
    while losses(&place.path("run"), "train").len() < 5 {
        assert!(rank_0.try_wait().unwrap().is_none(), "the run ended by itself");
        assert!(since.elapsed() < LIMIT, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
}

/// What a process says that has to end by itself, with an error.
fn end(mut rank: Child, name: &str) -> String {
    let since = Instant::now();
    while rank.try_wait().unwrap().is_none() {
        if since.elapsed() > LIMIT {
            rank.kill().unwrap();
            panic!("{name} hangs");
        }
        thread::sleep(Duration::from_millis(20));
    }
    let Output { status, stderr, .. } = rank.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success(), "{name} ended as if nothing were wrong: {said}");
    assert!(!said.contains("panicked at"), "{name}: {said}");
    said
}
