//! Whose folder it is: runs that are in use, and runs that another would replace.

use crate::{
    checkpoints,
    sandbox::{Running, Sandbox, fail, losses, succeed},
};
use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial!(a_folder_in_use_is_refused_to_a_second_process),
        trial!(a_run_is_replaced_only_with_overwrite),
        trial!(results_of_another_program_are_not_taken_for_a_run),
        trial!(a_resumed_run_keeps_its_text),
    ]
}

fn a_folder_in_use_is_refused_to_a_second_process() {
    let place = Sandbox::new();
    let run = place.path("run");
    let long = ["--steps", "1000000", "--checkpoint-every", "5", "--eval-every", "1000000"];
    let mut running = Running::start(place.train("run", &long));
    assert!(running.wait_until(|| !checkpoints::steps(&run).is_empty()));
    let expected = ["another process is training in run", "--out"];
    fail(place.resume("run", &[]), &expected);
    fail(place.train("run", &[]), &expected);
    fail(place.train("run", &["--overwrite"]), &expected);
    // Reading is allowed meanwhile, and the writer did not notice.
    succeed(place.gpt(&["generate", "--checkpoint", "run", "--tokens", "5"]));
    let done = losses(&run, "train").len();
    assert!(running.wait_until(|| losses(&run, "train").len() > done + 10));
    running.kill();
    let newest = *checkpoints::assert_sound(&run).last().unwrap();
    // The folder is free again, although the first process could not clean up.
    succeed(place.resume("run", &["--steps", &(newest + 1).to_string()]));
}

fn a_run_is_replaced_only_with_overwrite() {
    let place = Sandbox::new();
    let run = place.path("run");
    succeed(place.train("run", &["--steps", "8"]));
    let before = checkpoints::contents(&run);
    let advice = ["already holds a run", "--resume", "--out", "--overwrite"];
    fail(place.train("run", &["--steps", "4"]), &advice);
    assert_eq!(checkpoints::contents(&run), before);
    assert_eq!(losses(&run, "train").len(), 8);

    fail(place.resume("run", &["--overwrite"]), &["--overwrite", "--resume"]);
    assert_eq!(checkpoints::contents(&run), before);

    succeed(place.train("run", &["--steps", "4", "--seed", "7", "--overwrite"]));
    assert_eq!(checkpoints::assert_sound(&run), [2, 3, 4]);
    assert_eq!(losses(&run, "train").len(), 4);
    let state = checkpoints::state(&checkpoints::of_step(&run, 4));
    assert_eq!(state["state"]["extra"]["settings"]["seed"], 7);
}

fn results_of_another_program_are_not_taken_for_a_run() {
    let place = Sandbox::new();
    place.write("run/checkpoints/epoch.pt", "weights");
    let advice = ["checkpoints", "not from a run of this program", "--out", "--overwrite"];
    fail(place.train("run", &[]), &advice);
    assert!(place.path("run/checkpoints/epoch.pt").exists());
    place.write("other/loss.png", "a picture");
    fail(place.train("other", &[]), &["loss.png", "--overwrite"]);
    assert!(place.path("other/loss.png").exists());
}

fn a_resumed_run_keeps_its_text() {
    let place = Sandbox::new();
    succeed(place.train("run", &[]));
    for option in [["--data", "text"], ["--max-data", "1"], ["--extensions", "txt"]] {
        fail(place.resume("run", &option), &[option[0], "text it began with"]);
    }
}
