//! Options that make no sense, and help.

use crate::sandbox::{Sandbox, fail, succeed};

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let place = Sandbox::new();
    let cases: [(&[&str], &[&str]); 14] = [
        (&["--depth", "19"], &["--depth", "expected 18, 34, 50 or 101"]),
        (&["--width", "0"], &["--width: expected at least 1"]),
        (&["--size", "16"], &["--size: expected from 32"]),
        (&["--batch", "1"], &["--batch", "at least 2"]),
        (&["--precision", "fp8"], &["--precision", "no convolutions in 8 bits"]),
        (&["--learning-rate", "0"], &["--learning-rate: expected a positive"]),
        (&["--momentum", "1"], &["--momentum: expected a number from 0 to below 1"]),
        (&["--label-smoothing", "1"], &["--label-smoothing"]),
        (&["--clip", "0"], &["--clip: expected a positive number"]),
        (&["--keep", "0"], &["--keep: expected at least 1"]),
        (&["--workers", "0"], &["--workers"]),
        (&["--jitter", "0.5"], &["--jitter", "--data DIR"]),
        (&["--new-head"], &["required arguments were not provided"]),
        (&["--weights", "model.pth"], &["--weights: expected a file, model.pth is none"]),
    ];
    for (options, expected) in cases {
        fail(place.train("run", options), expected);
    }
    assert!(!place.path("run").exists(), "nothing has begun");
    place.write("model.safetensors", "no tensors");
    let eval = ["eval", "--weights", "model.safetensors", "--dataset", "glyphs"];
    fail(place.resnet(&eval), &["model.safetensors cannot be read"]);
    fail(place.resnet(&["eval", "--checkpoint", "none"]), &["found no checkpoint", "none"]);
    fail(place.resnet(&["predict"]), &["required arguments were not provided"]);
    fail(place.resnet(&["data", "--seconds", "0"]), &["--seconds"]);
}

#[test]
fn help_names_every_command_and_what_options_default_to() {
    let place = Sandbox::new();
    let help = succeed(place.resnet(&["--help"])).stdout;
    for command in ["train", "eval", "predict", "data", "speed"] {
        assert!(help.contains(command), "{help}");
    }
    let help = succeed(place.resnet(&["train", "--help"])).stdout;
    for option in ["--data <DIR>", "--weights <FILE>", "--resume", "--ema", "Default: 0.9"] {
        assert!(help.contains(option), "{option}: {help}");
    }
}
