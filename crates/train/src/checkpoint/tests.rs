use super::*;
use tempfile::TempDir;

const FILES: [(&str, &[u8]); 2] = [("model.bpk", b"weights"), ("optimizer.bpk", b"moments")];

fn saved(steps: &[usize]) -> (TempDir, Checkpoints) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let checkpoints = Checkpoints::new(folder.path().join("checkpoints"), "test").keep(2);
    for step in steps {
        checkpoints.save(*step, &FILES, &format!("state of {step}")).expect("it is written");
    }
    (folder, checkpoints)
}

fn message<T>(result: Result<T, CheckpointError>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_was_saved_is_found_again_and_older_ones_go() {
    let (_folder, checkpoints) = saved(&[7, 20, 100_000_000]);
    assert_eq!(checkpoints.steps(), [20, 100_000_000]);
    let newest = checkpoints.newest().expect("it is sound");
    assert_eq!((newest.step(), newest.file("model.bpk").unwrap()), (100_000_000, &b"weights"[..]));
    assert_eq!(newest.state::<String>().unwrap(), "state of 100000000");
    assert!(is_checkpoint(newest.path()) && !is_checkpoint(checkpoints.folder()));
}

#[test]
fn a_file_or_a_state_that_is_not_there_is_named() {
    let (_folder, checkpoints) = saved(&[7]);
    let newest = checkpoints.newest().expect("it is sound");
    assert!(!newest.has("ema.bpk"));
    assert!(message(newest.file("ema.bpk")).ends_with("there is no ema.bpk in it"));
    assert!(message(newest.state::<usize>()).contains("state.json: invalid type"));
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_replaced_when_its_step_is_saved_again() {
    let (_folder, checkpoints) = saved(&[7, 8]);
    let damaged = checkpoints.path_of(8);
    fs::write(damaged.join("model.bpk"), b"weightz").unwrap();
    assert_eq!(checkpoints.newest().expect("step 7 is sound").step(), 7);
    let reason = message(checkpoints.open(&damaged));
    assert!(reason.contains("model.bpk is damaged: expected checksum"), "{reason}");
    fs::write(damaged.join("model.bpk"), b"weight").unwrap();
    let reason = message(checkpoints.open(&damaged));
    assert!(reason.contains("expected 7 bytes, got 6"), "{reason}");

    checkpoints.save(8, &FILES, &"again").expect("it is written");
    let newest = checkpoints.newest().expect("step 8 is sound");
    assert_eq!((newest.step(), newest.state::<String>().unwrap()), (8, "again".into()));
}

#[test]
fn a_sound_checkpoint_is_not_written_again() {
    let (_folder, checkpoints) = saved(&[7]);
    checkpoints.save(7, &FILES, &"again").expect("it is there");
    assert_eq!(checkpoints.newest().unwrap().state::<String>().unwrap(), "state of 7");
}

#[test]
fn where_none_is_sound_each_says_why() {
    let (_folder, checkpoints) = saved(&[]);
    assert!(message(checkpoints.newest()).starts_with("found no checkpoint in "));
    let (_folder, checkpoints) = saved(&[7, 8]);
    fs::remove_file(checkpoints.path_of(7).join("optimizer.bpk")).unwrap();
    fs::write(checkpoints.path_of(8).join(STATE), b"{").unwrap();
    let reason = message(checkpoints.newest());
    assert!(reason.starts_with("none of the 2 checkpoints in "), "{reason}");
    assert!(reason.contains("optimizer.bpk cannot be read"), "{reason}");
    assert!(reason.contains("state.json is damaged"), "{reason}");
}

#[test]
fn checkpoints_of_other_programs_versions_and_names_are_refused() {
    let (_folder, checkpoints) = saved(&[7]);
    let other = Checkpoints::new(checkpoints.folder(), "other");
    let reason = message(other.newest());
    assert!(reason.contains("names the format test, expected other"), "{reason}");

    let path = checkpoints.path_of(7);
    let elsewhere = checkpoints.path_of(9);
    fs::rename(&path, &elsewhere).unwrap();
    let reason = message(checkpoints.open(&elsewhere));
    assert!(reason.contains("it speaks of step 7, its folder of step 9"), "{reason}");

    let text = fs::read_to_string(elsewhere.join(STATE)).unwrap();
    fs::write(elsewhere.join(STATE), text.replace("\"version\": 2", "\"version\": 3")).unwrap();
    let reason = message(checkpoints.open(&elsewhere));
    assert!(reason.contains("has version 3, and this program reads version 2"), "{reason}");
}

#[test]
fn what_an_interrupted_writer_left_is_no_checkpoint_and_is_cleaned_away() {
    let (_folder, checkpoints) = saved(&[7]);
    let unfinished = checkpoints.folder().join(format!("{UNFINISHED}x"));
    fs::create_dir(&unfinished).unwrap();
    assert_eq!(checkpoints.steps(), [7]);
    checkpoints.clean().expect("it can be removed");
    assert!(!unfinished.exists());
    assert_eq!(checkpoints.steps(), [7]);
}

#[test]
fn a_failed_write_says_what_is_left() {
    let (_folder, checkpoints) = saved(&[7]);
    let bad: [(&str, &[u8]); 1] = [("no/such/folder", b"")];
    let reason = message(checkpoints.save(8, &bad, &()));
    assert!(reason.contains("the checkpoint of step 7 is intact"), "{reason}");
    assert_eq!(checkpoints.steps(), [7]);
}
