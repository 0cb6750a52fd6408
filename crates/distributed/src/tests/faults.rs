//! Ranks that die, stop, stall, panic, differ or end early: all others end, in time, with a reason.

use super::{config, free_port, world};
use crate::{Group, World};
use std::{
    env,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// What the process does that is told to by it.
const ROLE: &str = "BLACKBURN_TEST_ROLE";
const PLACE: &str = "BLACKBURN_TEST_PLACE";
/// Without a sign of life.
const TIMEOUT: Duration = Duration::from_secs(5);
/// In which all have to end: the timeout, and time to start and end on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// How often each fault is tried, if nobody says.
const REPEATS: usize = 3;
/// How often it is.
const REPEATS_VARIABLE: &str = "BLACKBURN_TEST_REPEATS";

/// The body of each rank's process: does nothing in an ordinary run of the tests.
#[test]
fn a_rank() {
    let (Ok(role), Ok(place)) = (env::var(ROLE), env::var(PLACE)) else { return };
    let mut place = place.split(' ').map(|number| number.parse::<usize>().expect("a number"));
    let mut next = || place.next().expect("rank, size and port");
    let (rank, size, port) = (next(), next(), next());
    let result = act(&role, world(rank, size, port as u16));
    if let Err(message) = result {
        eprintln!("ENDS: {message}");
        std::process::exit(3);
    }
    std::process::exit(0);
}

fn act(role: &str, world: World) -> Result<(), String> {
    let text = |error: crate::DistributedError| error.to_string();
    let is_faulty = world.rank == 1;
    if role == "dies in start-up" && is_faulty {
        // Known to rank 0, and gone while another is waited for.
        let config = config(world.clone());
        std::thread::spawn(move || Group::join(&config));
        std::thread::sleep(Duration::from_millis(300));
        std::process::abort();
    }
    let late = role == "dies in start-up" && world.rank == 2;
    if late {
        std::thread::sleep(Duration::from_secs(1));
    }
    let config = config(world.clone())
        .with_timeout(TIMEOUT)
        .with_start_timeout(Duration::from_secs(8))
        .with_patience(Duration::from_secs(3));
    let config = match role {
        // It does not react, so it has to be ended.
        "does not react" => config.ending_the_process(),
        _ => config,
    };
    let group = Group::join(&config).map_err(text)?;
    for step in 1..200 {
        group.at_step(step).map_err(text)?;
        if step == 3 {
            group.saved(std::path::Path::new("runs/x/step-2"));
        }
        if step == 5 && is_faulty {
            match role {
                "dies" | "does not react" => std::process::abort(),
                "panics" => {
                    drop_in_panic(group);
                    return Ok(());
                }
                // Stops as by SIGSTOP: no thread of it runs.
                "stops" => stop(),
                "stalls" => std::thread::sleep(Duration::from_secs(60)),
                "ends early" => return Ok(()),
                "fails" => {
                    group.fail("its disk is full");
                    return Err("its own error".into());
                }
                "goes elsewhere" => return group.barrier().map_err(text),
                _ => {}
            }
        }
        if role == "does not react" && step == 5 {
            std::thread::sleep(Duration::from_secs(60));
        }
        group.sum(1.0).map_err(text)?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Lets the last hold on the group go while a panic unwinds.
fn drop_in_panic(group: Group) {
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _group = group;
        panic!("a fault in the program");
    }));
}

#[cfg(unix)]
fn stop() {
    // SAFETY: a signal to this process itself.
    unsafe { libc::raise(libc::SIGSTOP) };
}

#[cfg(not(unix))]
fn stop() {}

fn start(role: &str, size: usize) -> Vec<Child> {
    let program = env::current_exe().expect("tests are a program");
    let port = free_port();
    (0..size)
        .map(|rank| {
            Command::new(&program)
                .args(["--exact", "tests::faults::a_rank", "--nocapture"])
                .env(ROLE, role)
                .env(PLACE, format!("{rank} {size} {port}"))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("the program starts again")
        })
        .collect()
}

/// What the ranks other than 1 say at their end, which has to come in time.
fn survivors(role: &str, size: usize) -> Vec<String> {
    let since = Instant::now();
    let mut ranks = start(role, size);
    let mut said = Vec::new();
    let mut faulty = ranks.remove(1);
    for (index, mut rank) in ranks.into_iter().enumerate() {
        while rank.try_wait().expect("it is this one's child").is_none() {
            if since.elapsed() > LIMIT {
                let _ = (rank.kill(), faulty.kill());
                panic!("{role}: rank {} hangs", if index == 0 { 0 } else { index + 1 });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let Output { status, stderr, .. } = rank.wait_with_output().expect("it has ended");
        let stderr = String::from_utf8_lossy(&stderr).into_owned();
        assert!(!status.success(), "{role}: a rank ended as if nothing were wrong: {stderr}");
        said.push(stderr);
    }
    let _ = (faulty.kill(), faulty.wait());
    said
}

fn repeats() -> usize {
    env::var(REPEATS_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(REPEATS)
}

fn check(role: &str, size: usize, expected: &str) {
    for _ in 0..repeats() {
        for said in survivors(role, size) {
            let told = said.lines().filter(|line| line.contains(expected)).count();
            assert_eq!(told, 1, "{role}: expected one line with `{expected}`, got {said}");
        }
    }
}

/// In a step, with the newest checkpoint.
fn check_in_step(role: &str, expected: &str) {
    check(role, 3, expected);
    for said in survivors(role, 2) {
        // The step that it had told of.
        assert!(said.contains("step 4) ") || said.contains("step 5) "), "{said}");
        assert!(said.contains("the newest checkpoint is runs/x/step-2"), "{said}");
    }
}

#[test]
fn a_rank_that_dies_ends_all() {
    check_in_step("dies", "rank 1 of ");
    assert!(survivors("dies", 2)[0].contains("has died"));
}

#[test]
fn a_rank_that_dies_in_start_up_ends_all() {
    for _ in 0..repeats() {
        let said = survivors("dies in start-up", 3);
        assert!(said[0].contains("has died while ranks [2] were waited for"), "{said:?}");
        // It comes when rank 0 has ended.
        assert!(said[1].contains("has not found rank 0"), "{said:?}");
    }
}

#[test]
#[cfg(unix)]
fn a_rank_that_is_stopped_ends_all() {
    check_in_step("stops", "has given no sign of life for 5 s");
}

#[test]
fn a_rank_that_is_alive_and_never_comes_ends_all() {
    check_in_step("stalls", "is alive and has not come to a sum within 3 s");
}

#[test]
fn a_rank_that_ends_early_ends_all() {
    check_in_step("ends early", "has ended, and others have come to a sum");
}

#[test]
fn a_rank_that_panics_ends_all() {
    check_in_step("panics", "panicked; its own output says where");
}

#[test]
fn a_rank_that_cannot_go_on_says_why() {
    check_in_step("fails", "cannot go on: its disk is full");
}

#[test]
fn a_rank_at_another_point_ends_all() {
    check_in_step("goes elsewhere", "has come to ");
}

#[test]
fn a_process_that_does_not_react_is_ended() {
    check("does not react", 2, "rank 1 of 2 ");
}
