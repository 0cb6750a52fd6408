//! What can be done with a trained model, and with its text.

use crate::sandbox::{Sandbox, fail, losses, succeed};
use libtest_mimic::Trial;
use std::{io::Read, time::Instant};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial!(generated_text_follows_from_the_seed_and_is_all_that_standard_output_holds),
        trial!(naive_attention_writes_and_measures_the_same),
        trial!(an_empty_prompt_is_no_obstacle),
        trial!(a_reader_that_has_seen_enough_is_no_failure),
        trial!(evaluation_measures_what_training_did),
        trial!(a_checkpoint_works_without_the_tokens_while_its_text_is_unchanged),
        trial!(sampling_out_of_range_is_refused),
        trial!(files_that_are_not_text_are_skipped_and_counted),
        trial!(every_command_explains_its_options),
    ]
}

fn trained() -> Sandbox {
    let place = Sandbox::new();
    succeed(place.train("run", &["--steps", "20"]));
    place
}

fn generated_text_follows_from_the_seed_and_is_all_that_standard_output_holds() {
    let place = trained();
    let written = |options: &[&str]| {
        let arguments = ["generate", "--checkpoint", "run", "--prompt", "the kernel "];
        succeed(place.gpt(&[&arguments[..], options].concat())).stdout
    };
    let first = written(&["--seed", "1"]);
    assert_eq!(first, written(&["--seed", "1"]));
    assert_ne!(first, written(&["--seed", "2"]));
    // The likeliest token needs no seed.
    let greedy = ["--temperature", "0", "--seed"];
    let greedy = |seed| written(&[&greedy[..], &[seed]].concat());
    assert_eq!(greedy("1"), greedy("2"));
    // One token more changes nothing of those before it, and none is the prompt alone.
    let longer = written(&["--seed", "1", "--tokens", "301"]);
    assert!(longer.starts_with(first.trim_end()), "{first:?} {longer:?}");
    assert!(first.starts_with("the kernel ") && first.len() > 200, "{first:?}");
    assert_eq!(written(&["--tokens", "0"]), "the kernel \n");
    // The model's context is 16 tokens: this prompt is longer.
    let long = "where ".repeat(20);
    let arguments = ["generate", "--checkpoint", "run", "--prompt", &long, "--tokens", "3"];
    assert!(succeed(place.gpt(&arguments)).stdout.starts_with(&long));
}

/// Greedy, so that rounding cannot change a draw; through the context of 16 tokens and beyond.
fn naive_attention_writes_and_measures_the_same() {
    let place = trained();
    let output = |arguments: &[&str]| {
        ["naive", "flash"].map(|kind| {
            let arguments = [arguments, &["--checkpoint", "run", "--attention", kind]].concat();
            succeed(place.gpt(&arguments)).stdout
        })
    };
    let [naive, flash] = output(&["generate", "--temperature", "0", "--tokens", "40"]);
    assert_eq!(naive, flash);
    let [naive, flash] = output(&["eval"]);
    assert_eq!(naive, flash);
}

fn an_empty_prompt_is_no_obstacle() {
    let place = trained();
    let arguments = ["generate", "--checkpoint", "run", "--prompt", "", "--tokens", "20"];
    assert!(!succeed(place.gpt(&arguments)).stdout.trim_end().is_empty());
    succeed(place.train("other", &["--prompt", "", "--steps", "2"]));
}

fn a_reader_that_has_seen_enough_is_no_failure() {
    let place = trained();
    // As `| head -c 20` does it.
    let arguments = ["generate", "--checkpoint", "run", "--tokens", "1000000000"];
    let mut child = place.gpt(&arguments).spawn().unwrap();
    let started = Instant::now();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 20]).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("error"), "{stderr}");
    // Writing all of it would take days.
    assert!(started.elapsed().as_secs() < 60);
}

fn evaluation_measures_what_training_did() {
    let place = trained();
    let (step, last) = *losses(&place.path("run"), "validation").last().unwrap();
    let measure = |options: &[&str]| -> f64 {
        let arguments = [&["eval", "--checkpoint", "run"], options].concat();
        let stdout = succeed(place.gpt(&arguments)).stdout;
        let rest = stdout.strip_prefix(&format!("step {step}: loss "));
        let number = rest.and_then(|rest| rest.split(' ').next());
        number.unwrap_or_else(|| panic!("{stdout}")).parse().unwrap()
    };
    // Training looks at 20 batches; four digits are printed.
    let same = measure(&["--batches", "20"]);
    assert!((same - last).abs() < 1e-4, "{same} and {last}");
    // More held-out text, all text and the like of it give about the same.
    for options in [&["--batches", "0"][..], &["--all"], &["--data", "text", "--extensions", "txt"]]
    {
        let close = measure(options);
        assert!((close - last).abs() < 0.2, "{close} and {last} for {options:?}");
    }
    fail(place.gpt(&["eval", "--checkpoint", "run", "--data", "nowhere"]), &["nowhere"]);
}

fn a_checkpoint_works_without_the_tokens_while_its_text_is_unchanged() {
    let place = trained();
    std::fs::remove_dir_all(place.path("run/data")).unwrap();
    succeed(place.resume("run", &["--steps", "21"]));
    std::fs::remove_dir_all(place.path("run/data")).unwrap();
    place.write("text/part-0.txt", "something else, of another length");
    let expected = ["the text changed since the checkpoint", "--out"];
    fail(place.resume("run", &["--steps", "22"]), &expected);
    fail(place.gpt(&["eval", "--checkpoint", "run"]), &expected);
    // Writing needs none of it.
    succeed(place.gpt(&["generate", "--checkpoint", "run"]));
}

fn sampling_out_of_range_is_refused() {
    let place = trained();
    for temperature in ["-1", "NaN", "inf"] {
        let option = format!("--temperature={temperature}");
        let command = place.gpt(&["generate", "--checkpoint", "run", &option]);
        assert_eq!(fail(command, &["--temperature", "at least 0"]).stdout, "");
    }
}

fn files_that_are_not_text_are_skipped_and_counted() {
    let place = Sandbox::new();
    place.write("text/binary.txt", b"text\0with a NUL");
    place.write("text/latin-1.txt", b"caf\xe9");
    place.write("text/picture.png", [0; 10]);
    let finished = succeed(place.train("run", &["--steps", "2"]));
    let line = finished.stderr.lines().find(|line| line.contains("tokens:")).unwrap();
    assert!(line.contains("6 files used, 2 skipped as not text, 0 unreadable"), "{line}");
}

fn every_command_explains_its_options() {
    let place = Sandbox::new();
    let help = |arguments: &[&str], expected: &str| {
        let stdout = succeed(place.gpt(arguments)).stdout;
        for option in expected.split_whitespace() {
            assert!(stdout.contains(option), "no {option} in {stdout}");
        }
    };
    help(&["--help"], "train generate eval --device --version");
    help(
        &["train", "--help"],
        "--data --extensions --max-data --validation-share --out --resume --overwrite --preset \
         --tokenizer --precision --layers --width --heads --context --dropout --steps --batch \
         --accumulate --learning-rate --min-learning-rate --warmup --weight-decay --clip --seed \
         --log-every --eval-every --checkpoint-every --keep --prompt --attention --device",
    );
    help(
        &["generate", "--help"],
        "--checkpoint --prompt --tokens --temperature --top-k --seed --attention --device",
    );
    help(
        &["eval", "--help"],
        "--checkpoint --data --extensions --all --batches --attention --device",
    );
    fail(place.gpt(&["paint"]), &["paint"]);
}
