//! Input that cannot be worked with. Each case asks to replace a finished run, and must not: a
//! mistake may not cost the run before it.

use crate::{
    checkpoints,
    sandbox::{Sandbox, fail, succeed, text},
};
use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial!(text_that_is_missing_or_none_is_named),
        trial!(too_little_text_for_a_window_is_an_error_on_either_side),
        trial!(numbers_out_of_range_are_named),
        #[cfg(target_os = "linux")]
        trial!(a_batch_that_cannot_fit_is_refused_before_the_start),
        trial!(unknown_and_missing_devices_are_named),
        trial!(absurd_sizes_are_refused_before_they_overflow),
    ]
}

/// Every pair is a case: options, and what the error has to say.
fn refused(cases: &[(&[&str], &[&str])], prepare: impl FnOnce(&Sandbox)) {
    let place = Sandbox::new();
    let run = place.path("run");
    succeed(place.train("run", &[]));
    let before = checkpoints::contents(&run);
    prepare(&place);
    for (options, expected) in cases {
        let options = [*options, &["--overwrite"]].concat();
        fail(place.train("run", &options), expected);
        assert_eq!(checkpoints::contents(&run), before, "{options:?}");
    }
}

fn text_that_is_missing_or_none_is_named() {
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--data", "nowhere/file"], &["cannot read nowhere/file", "--data"]),
        (&["--data", "text", "nowhere"], &["cannot read nowhere", "--data"]),
        (&["--data", "empty"], &["txt", "empty", "found none and 0 of other", "--data"]),
        (&["--extensions", "rs,md"], &["\"rs\", \"md\"", "found none and 6 of other"]),
        (&["--data", "blank"], &["all 2 matching files are empty", "--data"]),
        (&["--data", "binary"], &["of 3 files 0 are UTF-8 text, 3 are not"]),
        (&["--data", "binary/nul.txt"], &["of 1 files 0 are UTF-8 text, 1 are not"]),
        (&["--validation-share", "0"], &["--validation-share", "between 0 and 1"]),
    ];
    refused(&cases, |place| {
        std::fs::create_dir(place.path("empty")).unwrap();
        place.write("blank/a.txt", "");
        place.write("blank/b.txt", "");
        place.write("binary/nul.txt", "text\0with a NUL");
        place.write("binary/latin-1.txt", b"caf\xe9");
        place.write("binary/bytes.txt", [0, 159, 146, 150]);
    });
}

fn too_little_text_for_a_window_is_an_error_on_either_side() {
    let cases: [(&[&str], &[&str]); 2] = [
        (&["--data", "short"], &["needs at least 17 tokens", "--context"]),
        (&["--data", "one-sided"], &["needs at least 17 tokens", "--context"]),
    ];
    refused(&cases, |place| {
        place.write("short/a.txt", "too little");
        place.write("short/b.txt", "too little");
        // The last tenth of a single file is held out: enough to learn from, too little for that.
        place.write("one-sided/a.txt", text(0, 40));
    });
}

fn numbers_out_of_range_are_named() {
    let zeros = [
        "--layers",
        "--width",
        "--heads",
        "--context",
        "--steps",
        "--batch",
        "--accumulate",
        "--log-every",
        "--eval-every",
        "--checkpoint-every",
        "--keep",
    ];
    let zeros = zeros.map(|option| ([option, "0"], [option, "expected at least 1, got 0"]));
    let mut cases: Vec<(&[&str], &[&str])> = vec![
        (&["--heads", "3"], &["--heads", "--width (16)", "got 3"]),
        (&["--dropout", "1"], &["--dropout", "below 1", "got 1"]),
        (&["--dropout", "NaN"], &["--dropout", "got NaN"]),
        (&["--learning-rate", "0"], &["--learning-rate", "positive", "got 0"]),
        (&["--learning-rate", "inf"], &["--learning-rate", "positive", "got inf"]),
        (&["--min-learning-rate", "1"], &["--min-learning-rate", "0.002", "got 1"]),
        (&["--clip", "0"], &["--clip", "positive", "got 0"]),
        (&["--weight-decay=-1"], &["--weight-decay", "at least 0", "got -1"]),
        (&["--steps", "many"], &["many", "--steps"]),
        (&["--tokenizer", "words"], &["words", "--tokenizer"]),
        (&["--preset", "huge"], &["huge", "--preset"]),
        (&["--kv-heads", "1"], &["--kv-heads", "--heads (2)", "got 1", "--family llama"]),
        (&["--family", "llama", "--kv-heads", "3"], &["--kv-heads", "--heads (2)", "got 3"]),
        (&["--family", "llama", "--heads", "16"], &["--heads", "even", "got 1"]),
        (&["--family", "llama", "--attention", "naive"], &["--attention", "flash", "got naive"]),
        (&["--windows", "3"], &["--windows"]),
    ];
    cases.extend(zeros.iter().map(|(options, expected)| (&options[..], &expected[..])));
    refused(&cases, |_| ());
}

/// Linux tells how much memory there is.
#[cfg(target_os = "linux")]
fn a_batch_that_cannot_fit_is_refused_before_the_start() {
    let cases: [(&[&str], &[&str]); 1] = [(
        &["--batch", "100000000"],
        &["out of memory before the start", "--batch (now 100000000)", "GiB"],
    )];
    refused(&cases, |_| ());
}

fn unknown_and_missing_devices_are_named() {
    let cases: [(&[&str], &[&str]); 2] = [
        (&["--device", "warp"], &["warp", "auto", "cuda", "vulkan", "webgpu", "flex"]),
        (&["--device", "cuda:first"], &["cuda:first", "cuda:N"]),
    ];
    refused(&cases, |_| ());

    let place = Sandbox::new();
    let mut command = place.train("run", &[]);
    command.env("BLACKBURN_DEVICE", "warp");
    fail(command, &["warp", "auto", "flex"]);

    // A build for CUDA finds a device or none, and then no checkpoint; any other names its feature.
    let finished = fail(place.gpt(&["generate", "--device", "cuda"]), &[]).stderr;
    let answers: [&[&str]; 4] = [
        &["feature `cuda`", "--features cuda", "Found:", "flex"],
        &["is not on this machine", "Found:"],
        &["did not start"],
        &["found no checkpoint"],
    ];
    let answered = |parts: &&[&str]| parts.iter().all(|part| finished.contains(part));
    assert!(answers.iter().any(answered), "{finished}");
}

fn absurd_sizes_are_refused_before_they_overflow() {
    let cases: [(&[&str], &[&str]); 4] = [
        (&["--batch", "18446744073709551615"], &["--batch", "at most"]),
        (&["--width", "9223372036854775808"], &["--width", "at most"]),
        (&["--layers", "1000000000", "--width", "1000000000", "--heads", "1"], &["out of memory"]),
        (&["--max-data", "18446744073709551615"], &["--max-data"]),
    ];
    refused(&cases, |_| {});
}
