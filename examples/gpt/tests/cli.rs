//! The program `gpt` as its users meet it: runs that are killed, disks that are full, files that
//! are damaged, and options that make no sense. All on the CPU, with models of a few thousand
//! parameters.

/// A test that fails by panicking, by its path.
macro_rules! trial {
    ($test:ident) => {
        libtest_mimic::Trial::test(concat!(module_path!(), "::", stringify!($test)), || {
            $test();
            Ok(())
        })
    };
}

#[path = "cli/checkpoints.rs"]
mod checkpoints;
#[path = "cli/damage.rs"]
mod damage;
#[path = "cli/folders.rs"]
mod folders;
#[path = "cli/input.rs"]
mod input;
#[path = "cli/interruption.rs"]
mod interruption;
#[path = "cli/ranks.rs"]
mod ranks;
#[path = "cli/reading.rs"]
mod reading;
#[path = "cli/sandbox.rs"]
mod sandbox;
#[path = "cli/training.rs"]
mod training;

use libtest_mimic::Arguments;
use std::process::ExitCode;

/// With a harness of its own because only at run time is it known whether a disk may be mounted.
fn main() -> ExitCode {
    let trials = [
        damage::trials(),
        folders::trials(),
        input::trials(),
        interruption::trials(),
        ranks::trials(),
        reading::trials(),
        training::trials(),
    ];
    let trials = trials.into_iter().flatten().collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
