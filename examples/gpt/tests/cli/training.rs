//! Runs from their beginning to their end: what they write, how they diverge, and what they
//! continue with.

use crate::{
    checkpoints::{self, TENSORS, of_step},
    sandbox::{Running, Sandbox, fail, losses, records, succeed},
};
use libtest_mimic::Trial;
use safetensors::{Dtype, SafeTensors};
use std::fs;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial!(training_lowers_the_loss_and_writes_what_it_promises),
        trial!(naive_attention_learns_the_same),
        trial!(a_llama_trains_goes_on_and_writes),
        trial!(an_exported_run_goes_on_as_one_that_was_not),
        trial!(a_killed_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit),
        trial!(a_finished_run_goes_on_when_more_steps_are_asked_for),
        trial!(a_resumed_run_reports_as_it_began_unless_it_is_told_otherwise),
        trial!(resuming_with_other_sizes_is_refused_and_harms_nothing),
        trial!(a_run_that_diverges_says_so_and_keeps_only_sound_checkpoints),
        trial!(a_profile_is_printed_and_written_and_nothing_else),
    ]
}

fn training_lowers_the_loss_and_writes_what_it_promises() {
    let place = Sandbox::new();
    let run = place.path("run");
    succeed(place.train("run", &["--steps", "60", "--keep", "2"]));

    let losses_by_step = losses(&run, "train");
    let steps: Vec<u64> = losses_by_step.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, Vec::from_iter(1..=60));
    let mean =
        |part: &[(u64, f64)]| part.iter().map(|(_, loss)| loss).sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&losses_by_step[..3]), mean(&losses_by_step[57..]));
    // Of 256 bytes an untrained model finds all equally likely.
    assert!((first - 256f64.ln()).abs() < 0.1, "{first}");
    assert!(last < first - 0.5, "from {first} to {last}");
    // Without --eval-every and --checkpoint-every, ten of each.
    assert_eq!(losses(&run, "validation").len(), 10);
    assert_eq!(checkpoints::assert_sound(&run), [54, 60]);
    assert!(checkpoints::leftovers(&run).is_empty());

    let png = fs::read(run.join("loss.png")).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.ends_with(b"IEND\xaeB`\x82"));
    let svg = fs::read_to_string(run.join("loss.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    let events: Vec<_> = fs::read_dir(run.join("tensorboard")).unwrap().collect();
    assert_eq!(events.len(), 1);
    let events = fs::read(events[0].as_ref().unwrap().path()).unwrap();
    for tag in ["train/loss", "validation/loss", "samples/the"] {
        assert!(events.windows(tag.len()).any(|part| part == tag.as_bytes()), "{tag}");
    }
}

fn naive_attention_learns_the_same() {
    let place = Sandbox::new();
    let of = |kind| {
        succeed(place.train(kind, &["--steps", "12", "--attention", kind]));
        losses(&place.path(kind), "train")
    };
    let (naive, flash) = (of("naive"), of("flash"));
    assert_eq!((naive.len(), flash.len()), (12, 12));
    for ((step, naive), (_, flash)) in naive.iter().zip(&flash) {
        assert!((naive - flash).abs() < 1e-3, "{naive} and {flash} at step {step}");
    }
    // A checkpoint does not know how it was made.
    let resumed = ["--steps", "13", "--attention", "naive"];
    succeed(place.resume("flash", &resumed));
}

fn a_llama_trains_goes_on_and_writes() {
    const LLAMA: [&str; 4] = ["--family", "llama", "--kv-heads", "1"];
    let place = Sandbox::new();
    succeed(place.train("run", &LLAMA));
    succeed(place.resume("run", &["--steps", "30"]));
    let losses = losses(&place.path("run"), "train");
    assert!(losses.len() == 30 && losses[29].1 < losses[0].1 - 0.2, "{losses:?}");

    let written = ["generate", "--checkpoint", "run", "--prompt", "the ", "--tokens", "20"];
    assert!(succeed(place.gpt(&written)).stdout.starts_with("the "));
    fail(
        place.resume("run", &["--family", "gpt2", "--kv-heads", "2"]),
        &["--family gpt2 (the checkpoint has llama)", "--kv-heads 2 (the checkpoint has 1)"],
    );

    // Another program finds its parameters by the names of modules.
    succeed(place.export("exported", "start", &[&LLAMA[..], &["--batches", "1"]].concat()));
    let bytes = fs::read(place.path("start/model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let key = tensors.tensor("layers.0.attention.key.weight").unwrap();
    assert_eq!(key.shape(), [8, 16]);
    assert!(tensors.names().iter().all(|name| !name.contains("trunk")));
}

fn an_exported_run_goes_on_as_one_that_was_not() {
    let place = Sandbox::new();
    succeed(place.train("plain", &[]));
    succeed(place.export("exported", "start", &["--batches", "6"]));
    succeed(place.resume("exported", &[]));
    let of = |run| losses(&place.path(run), "train");
    assert_eq!(of("plain"), of("exported"));

    let read = |name: &str| fs::read(place.path("start").join(name)).unwrap();
    let bytes = read("model.safetensors");
    let model = SafeTensors::deserialize(&bytes).unwrap();
    let inner = model.tensor("blocks.layers.0.pwff.linear_inner.weight").unwrap();
    // As PyTorch has it: outputs by inputs.
    assert_eq!((inner.dtype(), inner.shape()), (Dtype::F32, &[64, 16][..]));
    assert!(model.tensor("norm.weight").is_ok(), "{:?}", model.names());
    let bytes = read("batches.safetensors");
    let batches = SafeTensors::deserialize(&bytes).unwrap();
    let [inputs, targets] = ["inputs", "targets"].map(|name| batches.tensor(name).unwrap());
    assert_eq!((inputs.dtype(), inputs.shape()), (Dtype::I32, &[6, 2, 16][..]));
    // A token's target is the next token.
    assert_eq!(inputs.data()[4..64], targets.data()[..60]);

    fail(place.export("another", "start", &["--batches", "7"]), &["--batches", "6 steps", "7"]);
}

/// Dropout and accumulation are part of it: both depend on where in the run a step is.
fn a_killed_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit() {
    let place = Sandbox::new();
    let options = "--width 32 --context 64 --batch 4 --accumulate 2 --dropout 0.1 --steps 30 \
                   --eval-every 3 --checkpoint-every 5 --keep 9";
    let options: Vec<&str> = options.split_whitespace().collect();
    let straight = place.path("straight");
    succeed(place.train("straight", &options));

    // The kill has to come before the end: a machine that is too busy gets another try.
    let interrupted = (0..5).map(|attempt| format!("interrupted-{attempt}")).find(|name| {
        let run = place.path(name);
        let mut running = Running::start(place.train(name, &options));
        let in_time = running.wait_until(|| losses(&run, "train").len() >= 12);
        running.kill();
        in_time && !checkpoints::steps(&run).contains(&30)
    });
    let name = interrupted.expect("a run that was killed before its end");
    let run = place.path(&name);
    let killed_after = losses(&run, "train").len();
    let saved = checkpoints::assert_sound(&run);
    assert!((12..30).contains(&killed_after) && saved.contains(&10), "{killed_after}, {saved:?}");

    let resumed = succeed(place.resume(&name, &["--eval-every", "3", "--checkpoint-every", "5"]));
    let from = of_step(&run, *saved.last().unwrap());
    let from = from.file_name().unwrap().to_str().unwrap();
    assert!(
        resumed.stderr.lines().any(|line| line.contains("continuing") && line.contains(from)),
        "{}",
        resumed.stderr
    );

    // Every step once, in order, and the very same numbers.
    assert_eq!(losses(&straight, "train").len(), 30);
    assert_eq!(losses(&straight, "train"), losses(&run, "train"));
    assert_eq!(losses(&straight, "validation").len(), 10);
    assert_eq!(losses(&straight, "validation"), losses(&run, "validation"));
    for file in TENSORS {
        let blocks = |run| checkpoints::blocks(&of_step(run, 30).join(file));
        assert!(blocks(&straight) == blocks(&run), "{file} differs");
    }
}

fn a_finished_run_goes_on_when_more_steps_are_asked_for() {
    let place = Sandbox::new();
    let run = place.path("run");
    succeed(place.train("run", &["--steps", "4"]));
    let complete = succeed(place.resume("run", &[]));
    assert!(complete.stderr.contains("complete"), "{}", complete.stderr);
    succeed(place.resume("run", &["--steps", "6"]));
    let steps: Vec<u64> = losses(&run, "train").iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
}

fn a_resumed_run_reports_as_it_began_unless_it_is_told_otherwise() {
    let place = Sandbox::new();
    let run = place.path("run");
    let steps = |kind| losses(&run, kind).into_iter().map(|(step, _)| step).collect::<Vec<_>>();
    let options =
        "--steps 4 --log-every 3 --eval-every 2 --checkpoint-every 2 --keep 4 --prompt of";
    succeed(place.train("run", &Vec::from_iter(options.split_whitespace())));
    assert_eq!(steps("train"), [2, 3, 4]);
    succeed(place.resume("run", &["--steps", "7"]));
    assert_eq!(steps("train"), [2, 3, 4, 6, 7]);
    assert_eq!(steps("validation"), [2, 4, 6, 7]);
    assert_eq!(checkpoints::steps(&run), [2, 4, 6, 7]);
    // What is told anew counts from there on.
    let options = "--steps 8 --log-every 1 --keep 1 --prompt a";
    succeed(place.resume("run", &Vec::from_iter(options.split_whitespace())));
    succeed(place.resume("run", &["--steps", "10"]));
    assert_eq!(steps("train"), [2, 3, 4, 6, 7, 8, 9, 10]);
    assert_eq!(checkpoints::steps(&run), [10]);
    let samples = records(&run, "sample");
    let prompts: Vec<_> = samples.iter().map(|sample| sample["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["of", "of", "of", "of", "a", "a"]);
}

fn resuming_with_other_sizes_is_refused_and_harms_nothing() {
    let place = Sandbox::new();
    succeed(place.train("run", &[]));
    let before = checkpoints::contents(&place.path("run"));
    let cases: [(&str, &str, &str); 9] = [
        ("--layers", "2", "1"),
        ("--width", "32", "16"),
        ("--heads", "4", "2"),
        ("--context", "8", "16"),
        ("--batch", "3", "2"),
        ("--accumulate", "2", "1"),
        ("--dropout", "0.5", "0"),
        ("--tokenizer", "gpt2", "bytes"),
        ("--preset", "gpt2", "tiny"),
    ];
    for (option, asked, saved) in cases {
        let expected = format!("{option} {asked} (the checkpoint has {saved})");
        fail(place.resume("run", &[option, asked]), &[&expected]);
    }
    let all = ["--layers", "2", "--tokenizer", "gpt2"];
    fail(place.resume("run", &all), &["--layers 2 (", "--tokenizer gpt2 ("]);
    assert_eq!(checkpoints::contents(&place.path("run")), before);
    // The saved values are no differences.
    succeed(place.resume("run", &["--layers", "1", "--tokenizer", "bytes", "--steps", "7"]));
}

fn a_run_that_diverges_says_so_and_keeps_only_sound_checkpoints() {
    let place = Sandbox::new();
    let run = place.path("run");
    succeed(place.train("run", &["--checkpoint-every", "2", "--eval-every", "100"]));
    let before = checkpoints::contents(&run);
    for reports in ["1", "100"] {
        // A checkpoint after each step, so that one of the broken model would be written if any.
        let mut diverging = place.resume("run", &["--learning-rate", "1e30", "--steps", "20"]);
        diverging.args(["--checkpoint-every", "1", "--keep", "9", "--eval-every", reports]);
        fail(diverging, &["diverged", "NaN", "up to step 6 are intact", "--learning-rate"]);
        assert_eq!(checkpoints::contents(&run), before);
        checkpoints::assert_finite(&run);
    }
    succeed(place.resume("run", &["--steps", "8"]));
    assert!(losses(&run, "train").iter().all(|(_, loss)| *loss < 6.0));
}

/// On the CPU there are no kernels to time; the files are there all the same.
fn a_profile_is_printed_and_written_and_nothing_else() {
    let place = Sandbox::new();
    let run = place.path("run");
    let finished = succeed(place.train("run", &["--profile", "2"]));
    assert!(finished.stdout.contains("need a GPU"), "{}", finished.stdout);
    let profile: serde_json::Value =
        serde_json::from_slice(&fs::read(run.join("profile.json")).unwrap()).unwrap();
    assert!(profile["wall_us"].as_f64().unwrap() > 0.0);
    assert_eq!((&profile["verdict"], &profile["device_us"]), (&"unknown".into(), &().into()));
    assert!(fs::read(run.join("profile.png")).unwrap().starts_with(b"\x89PNG\r\n\x1a\n"));
    assert!(fs::read_to_string(run.join("profile.svg")).unwrap().starts_with("<svg"));
    assert!(!run.join("checkpoints").exists() && !run.join("metrics.jsonl").exists());

    // The folder is as good as new, and of a run that goes on a profile changes nothing.
    succeed(place.train("run", &[]));
    assert!(!run.join("profile.json").exists());
    let before = checkpoints::contents(&run);
    succeed(place.resume("run", &["--profile", "1"]));
    assert!(run.join("profile.json").exists());
    assert_eq!(checkpoints::contents(&run), before);

    fail(place.resume("run", &["--profile", "0"]), &["--profile: expected at least 1, got 0"]);
}
