//! Runs' folders, and folders of images.

use crate::sandbox::{Running, Sandbox, checkpoints, fail, records, succeed};

/// Three images of each of two colors to learn from, and one to validate with.
fn with_images() -> Sandbox {
    let place = Sandbox::new();
    for (class, color) in [("blue", [10, 20, 220]), ("red", [230, 30, 10])] {
        for line in 0..3 {
            place.image(&format!("images/train/{class}/{line}.png"), color, line);
        }
        place.image(&format!("images/val/{class}/7.jpg"), color, 7);
    }
    place
}

#[test]
fn a_folder_of_images_is_learned_from_and_told_apart() {
    let place = with_images();
    place.write("images/train/red/broken.jpg", "no image");
    let truncated = std::fs::read(place.path("images/val/red/7.jpg")).unwrap();
    place.write("images/val/red/truncated.jpg", &truncated[..truncated.len() / 2]);
    let options = ["--data", "images", "--steps", "30", "--label-smoothing", "0", "--ema", "0"];
    let finished = succeed(place.train("run", &options));
    assert!(finished.stderr.contains("2 classes, 7 images to learn from, 3 held out"));
    assert!(finished.stderr.contains("2 images could not be used"), "{}", finished.stderr);
    let run = place.path("run");
    let last = records(&run, "train").pop().unwrap();
    assert_eq!(last["skipped_images"], 2);
    let last = records(&run, "validation").pop().unwrap();
    assert_eq!((&last["images"], last["top1"].as_f64()), (&2.into(), Some(1.0)));

    place.image("other.png", [200, 50, 30], 20);
    let mut predict = place.resnet(&["predict", "--checkpoint", "run"]);
    predict.args(["other.png", "images/val/blue/7.jpg"]);
    let answers = succeed(predict).stdout;
    let lines: Vec<&str> = answers.lines().collect();
    assert_eq!((lines.len(), lines[0], lines[3]), (6, "other.png", "images/val/blue/7.jpg"));
    assert!(lines[1].ends_with("red") && lines[4].ends_with("blue"), "{answers}");
    // What cannot be read is named, and the rest is answered all the same.
    let mut predict = place.resnet(&["predict", "--checkpoint", "run"]);
    predict.args(["other.png", "images/train/red/broken.jpg"]);
    fail(predict, &["1 of 2 images could not be used"]);

    let load = ["data", "--data", "images", "--seconds", "0.2", "--size", "32"];
    let measured = succeed(place.resnet(&load)).stdout;
    assert!(measured.contains("images/s of 32 pixels"), "{measured}");

    // The images are part of the run.
    std::fs::remove_file(place.path("images/train/red/0.png")).unwrap();
    fail(place.resume("run", &["--steps", "31"]), &["not the images that the run began with"]);
    place.image("others/a/1.png", [0; 3], 1);
    place.image("others/a/2.png", [0; 3], 1);
    place.image("others/red/1.png", [0; 3], 1);
    place.image("others/red/2.png", [0; 3], 1);
    let eval = ["eval", "--checkpoint", "run", "--data", "others"];
    fail(place.resnet(&eval), &["the class blue where the images have a"]);
}

#[test]
fn folders_that_are_no_classes_are_refused() {
    let place = with_images();
    let refused = |data: &str, expected: &[&str]| {
        fail(place.train("run", &["--data", data]), expected);
        assert!(!place.path("run").exists(), "nothing has begun");
    };
    refused("nowhere", &["--data: expected a folder", "nowhere"]);
    place.write("text/a/notes.txt", "no image");
    place.write("text/b/notes.txt", "no image");
    refused("text", &["the class a has no images"]);
    place.image("single/only/1.png", [0; 3], 1);
    refused("single", &["the single class only"]);
    place.write("flat/notes.txt", "no image");
    refused("flat", &["found no images", "a folder for each class"]);
    place.write("broken/a/1.png", "no image");
    place.write("broken/a/2.png", "no image");
    place.write("broken/b/1.png", "no image");
    place.write("broken/b/2.png", "no image");
    fail(place.train("run", &["--data", "broken"]), &["none of 2 images in a row can be used"]);
}

#[test]
fn a_run_is_replaced_only_when_asked_for() {
    let place = Sandbox::new();
    succeed(place.train("run", &["--steps", "2"]));
    fail(
        place.train("run", &["--steps", "1"]),
        &["already holds a run", "--resume", "--overwrite"],
    );
    // Options that make no sense cost nothing.
    fail(place.train("run", &["--overwrite", "--batch", "0"]), &["--batch"]);
    fail(place.train("run", &["--overwrite", "--weights", "none.safetensors"]), &["--weights"]);
    assert_eq!(checkpoints(&place.path("run")), [1, 2]);
    succeed(place.train("run", &["--steps", "1", "--overwrite"]));
    assert_eq!(checkpoints(&place.path("run")), [1]);

    place.write("foreign/checkpoints/notes.txt", "mine");
    fail(place.train("foreign", &[]), &["is not from a run of this program"]);
    assert!(place.path("foreign/checkpoints/notes.txt").exists());
    fail(place.resume("nowhere", &[]), &["found no run in nowhere"]);
}

#[test]
fn two_processes_do_not_train_in_one_folder() {
    let place = Sandbox::new();
    let mut running = Running::start(place.train("run", &["--steps", "100000"]));
    assert!(running.wait_until(|| !records(&place.path("run"), "train").is_empty()));
    fail(place.train("run", &["--overwrite"]), &["another process is training in run"]);
    running.kill();
}

#[test]
fn damaged_checkpoints_are_passed_over_and_those_of_others_refused() {
    let place = Sandbox::new();
    succeed(place.train("run", &["--steps", "2", "--checkpoint-every", "1"]));
    place.write("run/checkpoints/step-00000002/model.bpk", "damaged");
    let resumed = succeed(place.resume("run", &["--steps", "3"]));
    assert!(resumed.stderr.contains("passing over"), "{}", resumed.stderr);
    let state = place.path("run/checkpoints/step-00000003/state.json");
    let text = std::fs::read_to_string(&state).unwrap();
    // Another depth: what is stored does not fit.
    std::fs::write(&state, text.replace("\"depth\": \"18\"", "\"depth\": \"34\"")).unwrap();
    let eval = ["eval", "--checkpoint", "run/checkpoints/step-00000003"];
    fail(place.resnet(&eval), &["step-00000003", "model.bpk does not fit this model"]);
    std::fs::write(&state, text.replace("blackburn-resnet", "blackburn-gpt")).unwrap();
    fail(place.resnet(&eval), &["not a checkpoint of this program", "blackburn-gpt"]);
}
