//! Checkpoints that are damaged, and ones that are not this program's.

use crate::{
    checkpoints::{self, TENSORS, of_step},
    sandbox::{Sandbox, fail, losses, succeed},
};
use libtest_mimic::Trial;
use std::{fs, path::Path};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial!(a_damaged_newest_checkpoint_is_passed_over),
        trial!(damaged_checkpoints_do_not_push_out_sound_ones),
        trial!(any_damaged_file_of_a_named_checkpoint_is_named),
        trial!(when_all_checkpoints_are_damaged_each_is_named),
        trial!(checkpoints_of_other_programs_and_versions_are_refused),
        trial!(a_folder_without_checkpoints_is_refused_with_advice),
    ]
}

const EVERY_TWO: [&str; 4] = ["--checkpoint-every", "2", "--eval-every", "2"];

/// A run of six steps with the checkpoints 2, 4 and 6.
fn trained() -> Sandbox {
    let place = Sandbox::new();
    succeed(place.train("run", &EVERY_TWO));
    assert_eq!(checkpoints::steps(&place.path("run")), [2, 4, 6]);
    place
}

fn flip(file: &Path, position: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[position] ^= 1;
    fs::write(file, bytes).unwrap();
}

fn flip_middle(file: &Path) {
    flip(file, fs::metadata(file).unwrap().len() as usize / 2);
}

fn a_damaged_newest_checkpoint_is_passed_over() {
    let place = trained();
    let run = place.path("run");
    let before = losses(&run, "train");
    flip_middle(&of_step(&run, 6).join("model.bpk"));

    let warning = ["WARN", "passing over", "step-00000006", "model.bpk is damaged"];
    let assert_warned = |stderr: &str| {
        let warned = |line: &str| warning.iter().all(|part| line.contains(part));
        assert!(stderr.lines().any(warned), "{stderr}");
    };
    assert_warned(&succeed(place.gpt(&["generate", "--checkpoint", "run"])).stderr);
    let measured = succeed(place.gpt(&["eval", "--checkpoint", "run"]));
    assert_warned(&measured.stderr);
    assert!(measured.stdout.starts_with("step 4: "), "{}", measured.stdout);

    // The run does the steps again, with the same numbers, and mends the checkpoint.
    let resumed = succeed(place.resume("run", &EVERY_TWO));
    assert_warned(&resumed.stderr);
    assert!(resumed.stderr.contains("continuing from run/checkpoints/step-00000004"));
    assert_eq!(losses(&run, "train"), before);
    assert_eq!(checkpoints::assert_sound(&run), [2, 4, 6]);
}

fn damaged_checkpoints_do_not_push_out_sound_ones() {
    let place = trained();
    let run = place.path("run");
    flip_middle(&of_step(&run, 6).join("model.bpk"));
    // Step 5 is older than the damaged one by number, and the newest that is sound.
    succeed(place.resume("run", &["--steps", "5", "--checkpoint-every", "1", "--keep", "1"]));
    assert_eq!(checkpoints::steps(&run), [5, 6]);
    let measured = succeed(place.gpt(&["eval", "--checkpoint", "run"]));
    assert!(measured.stdout.starts_with("step 5: "), "{}", measured.stdout);
}

fn any_damaged_file_of_a_named_checkpoint_is_named() {
    let place = trained();
    let run = place.path("run");
    let refused = |expected: &[&str]| {
        for command in ["generate", "eval"] {
            let arguments = [command, "--checkpoint", "run/checkpoints/step-00000004"];
            let expected = [&["run/checkpoints/step-00000004"], expected].concat();
            fail(place.gpt(&arguments), &expected);
        }
    };
    for file in TENSORS {
        let path = of_step(&run, 4).join(file);
        let sound = fs::read(&path).unwrap();
        for position in [0, sound.len() / 2, sound.len() - 1] {
            flip(&path, position);
            refused(&[file, "is damaged", "expected checksum"]);
            flip(&path, position);
        }
        for length in [0, 1, sound.len() - 1] {
            fs::write(&path, &sound[..length]).unwrap();
            let sizes = format!("expected {} bytes, got {length}", sound.len());
            refused(&[file, "is damaged", &sizes]);
        }
        fs::remove_file(&path).unwrap();
        refused(&[file, "cannot be read"]);
        fs::write(&path, sound).unwrap();
    }
    let path = of_step(&run, 4).join("state.json");
    let sound = fs::read(&path).unwrap();
    for damaged in [&b""[..], &sound[..sound.len() / 2], b"\xff\xfe", b"[]"] {
        fs::write(&path, damaged).unwrap();
        refused(&["state.json"]);
    }
    fs::remove_file(&path).unwrap();
    refused(&["state.json cannot be read"]);
    fs::write(&path, sound).unwrap();
    assert_eq!(checkpoints::assert_sound(&run), [2, 4, 6]);
    succeed(place.gpt(&["generate", "--checkpoint", "run/checkpoints/step-00000004"]));
}

fn when_all_checkpoints_are_damaged_each_is_named() {
    let place = trained();
    let run = place.path("run");
    flip_middle(&of_step(&run, 2).join("model.bpk"));
    flip_middle(&of_step(&run, 4).join("optimizer.bpk"));
    fs::write(of_step(&run, 6).join("state.json"), "{").unwrap();
    let before = checkpoints::contents(&run);
    let expected = [
        "none of the 3 checkpoints in run is sound",
        "step-00000002: model.bpk is damaged",
        "step-00000004: optimizer.bpk is damaged",
        "step-00000006: state.json is damaged",
    ];
    fail(place.gpt(&["generate", "--checkpoint", "run"]), &expected);
    fail(place.gpt(&["eval", "--checkpoint", "run"]), &expected);
    fail(place.resume("run", &[]), &expected);
    // Nothing is thrown away that somebody may still want to rescue.
    assert_eq!(checkpoints::contents(&run), before);
}

fn checkpoints_of_other_programs_and_versions_are_refused() {
    let place = trained();
    let folder = of_step(&place.path("run"), 6);
    let own = checkpoints::state(&folder);
    let refused = |change: &dyn Fn(&mut serde_json::Value), expected: &[&str]| {
        let mut state = own.clone();
        change(&mut state);
        fs::write(folder.join("state.json"), state.to_string()).unwrap();
        let path = folder.to_str().unwrap();
        fail(place.gpt(&["generate", "--checkpoint", path]), expected);
    };
    refused(
        &|state| state["format"] = "somebody-else".into(),
        &["not a checkpoint of this program", "somebody-else", "expected blackburn-gpt"],
    );
    refused(
        &|state| drop(state.as_object_mut().unwrap().remove("format")),
        &["not a checkpoint of this program", "the format nothing"],
    );
    refused(&|state| state["version"] = 1.into(), &["has version 1", "reads version 2"]);
    refused(&|state| state["version"] = "x".into(), &["has version none", "reads version 2"]);
    refused(&|state| state["files"] = 5.into(), &["state.json is damaged"]);
    refused(&|state| state["state"]["extra"]["settings"] = 5.into(), &["state.json"]);

    // The sizes say something else than the tensors: sound files, of another model.
    let other_sizes = |state: &mut serde_json::Value| {
        state["state"]["extra"]["settings"]["model"]["width"] = 32.into();
    };
    refused(&other_sizes, &["model.bpk does not fit this model"]);
}

fn a_folder_without_checkpoints_is_refused_with_advice() {
    let place = Sandbox::new();
    for folder in ["text", "nowhere"] {
        let expected = ["found no checkpoint in", folder, "`train` makes one"];
        fail(place.gpt(&["generate", "--checkpoint", folder]), &expected);
        fail(place.gpt(&["eval", "--checkpoint", folder]), &expected);
    }
    place.write("other/checkpoints/epoch-1.pt", "weights");
    fail(place.resume("other", &[]), &["found no checkpoint in other"]);
    assert_eq!(fs::read(place.path("other/checkpoints/epoch-1.pt")).unwrap(), b"weights");
    // Without --checkpoint it is the default run's folder, and there is none.
    fail(place.gpt(&["generate"]), &["found no checkpoint in runs/gpt-tiny"]);
}
