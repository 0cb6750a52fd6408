//! Runs that are stopped where it hurts: while they write a checkpoint, by a signal or by a disk
//! that is full.

use crate::{
    checkpoints::{self, of_step},
    sandbox::{Running, Sandbox, succeed},
};
use libtest_mimic::{Completion, Failed, Trial};
use std::{thread, time::Duration};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial!(a_kill_during_a_checkpoint_loses_nothing),
        #[cfg(unix)]
        trial!(a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones),
        #[cfg(target_os = "linux")]
        Trial::ignorable_test(
            concat!(module_path!(), "::a_full_disk_leaves_the_earlier_checkpoint"),
            a_full_disk_leaves_the_earlier_checkpoint,
        ),
    ]
}

fn a_kill_during_a_checkpoint_loses_nothing() {
    let place = Sandbox::new();
    let run = place.path("run");
    let often = ["--steps", "100000", "--checkpoint-every", "1", "--keep", "2"];
    let often = [&often[..], &["--eval-every", "100000"]].concat();
    let mut newest = 0;
    for wait in [90, 50, 210, 130, 250, 170] {
        let command = match newest {
            0 => place.train("run", &[&often[..], &["--width", "64"]].concat()),
            _ => place.resume("run", &often),
        };
        let planted = format!("checkpoints/.writing-{wait}");
        if newest > 0 {
            // What a writer leaves that was killed in the middle of the first file.
            place.write(&format!("run/{planted}/model.bpk"), [7; 1000]);
        }
        let mut running = Running::start(command);
        let written =
            running.wait_until(|| checkpoints::steps(&run).last().is_some_and(|s| *s > newest));
        assert!(written, "the run ended by itself");
        thread::sleep(Duration::from_millis(wait));
        newest = *checkpoints::steps(&run).last().unwrap();
        running.kill();

        let steps = checkpoints::assert_sound(&run);
        // One more than asked for when the kill came before the oldest went.
        assert!((1..=3).contains(&steps.len()), "{steps:?}");
        assert!(*steps.last().unwrap() >= newest, "{steps:?} after {newest}");
        newest = *steps.last().unwrap();
        assert!(!run.join(&planted).exists(), "the run before left its file");
        for step in steps {
            let folder = of_step(&run, step);
            let folder = folder.to_str().unwrap();
            let measured = succeed(place.gpt(&["eval", "--checkpoint", folder, "--batches", "1"]));
            assert!(measured.stdout.starts_with(&format!("step {step}: ")), "{}", measured.stdout);
        }
    }
    let end = (newest + 3).to_string();
    succeed(place.resume("run", &["--steps", &end, "--checkpoint-every", "1", "--keep", "2"]));
    assert_eq!(checkpoints::assert_sound(&run), [newest + 2, newest + 3]);
    assert!(checkpoints::leftovers(&run).is_empty(), "{:?}", checkpoints::leftovers(&run));
}

/// The limit makes writes fail as a full disk does, behind what fits.
#[cfg(unix)]
fn a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones() {
    use crate::sandbox::fail;
    use std::process::Command;

    let place = Sandbox::new();
    let run = place.path("run");
    succeed(place.train("run", &["--steps", "4", "--checkpoint-every", "2"]));
    let before = checkpoints::contents(&run);
    let bytes = |file| before[&of_step(&run, 4).join(file)].len() as u64;
    // First the smaller file does not fit, then only the larger one.
    assert!(bytes("model.bpk") > 44 << 10 && bytes("optimizer.bpk") > 90 << 10);
    for kib in ["40", "80"] {
        let mut command = Command::new("bash");
        // In units of 1024 bytes; the signal that comes with the error is ignored.
        command.args(["-c", "trap '' XFSZ; ulimit -f \"$0\" && exec \"$@\"", kib]);
        command.arg(env!("CARGO_BIN_EXE_gpt"));
        command.args(place.resume("run", &["--steps", "8", "--checkpoint-every", "2"]).get_args());
        place.prepare(&mut command);
        fail(command, &["cannot write the checkpoint", "step-00000006", "step 4 is intact"]);
        assert_eq!(checkpoints::contents(&run), before);
        assert!(checkpoints::leftovers(&run).is_empty(), "{:?}", checkpoints::leftovers(&run));
    }
    succeed(place.resume("run", &["--steps", "8", "--checkpoint-every", "2"]));
    assert_eq!(checkpoints::assert_sound(&run), [4, 6, 8]);
}

/// On a disk that really is full, where this process may mount one.
#[cfg(target_os = "linux")]
fn a_full_disk_leaves_the_earlier_checkpoint() -> Result<Completion, Failed> {
    use crate::sandbox::finish;
    use std::process::Command;

    let mounts = "mkdir disk && mount -t tmpfs none disk";
    let folder = Sandbox::new();
    let mut command = Command::new("unshare");
    command.args(["-rm", "bash", "-c", mounts]);
    folder.prepare(&mut command);
    if !command.output().is_ok_and(|output| output.status.success()) {
        return Ok(Completion::ignored_with("this process may not mount a disk of its own"));
    }
    let place = Sandbox::new();
    succeed(place.train("run", &["--steps", "4", "--keep", "1"]));
    // The mount is in a namespace of its own, which ends with the script. A checkpoint takes 160
    // KiB: a second one does not fit.
    let script = "mkdir disk && mount -t tmpfs -o size=\"$1\"k none disk || exit 9\n\
                  cp -r run disk && cd disk || exit 9\n\
                  \"$0\" train --resume --out run --steps 6 --checkpoint-every 1; echo \"ended $?\"\n\
                  ls -A run/checkpoints\n\
                  \"$0\" eval --checkpoint run --batches 1";
    let size = used_kib(&place.path("run")) + 100;
    let mut command = Command::new("unshare");
    command.args(["-rm", "bash", "-c", script, env!("CARGO_BIN_EXE_gpt"), &size.to_string()]);
    place.prepare(&mut command);
    let finished = finish(command);
    let (stdout, stderr) = (&finished.stdout, &finished.stderr);
    assert!(stderr.contains("error: cannot write the checkpoint"), "{stderr}");
    assert!(stderr.contains("the checkpoint of step 4 is intact: No space left"), "{stderr}");
    assert!(stdout.starts_with("ended 1\nstep-00000004\nstep 4: loss"), "{stdout}");
    assert!(!stderr.contains("panicked at"), "{stderr}");
    Ok(Completion::Completed)
}

/// What the files below a folder take on a disk of 4 KiB pages.
#[cfg(target_os = "linux")]
fn used_kib(folder: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let used = |entry: std::fs::DirEntry| match entry.metadata().unwrap() {
        metadata if metadata.is_dir() => used_kib(&entry.path()),
        metadata => metadata.len().div_ceil(4096) * 4,
    };
    entries.map(used).sum()
}
