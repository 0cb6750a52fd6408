//! One binary for all integration tests, a module an op.
//!
//! It has a harness of its own because a kernel test knows only at run time whether its device is
//! there, and has to say so.

#[path = "integration/column_sum.rs"]
mod column_sum;
#[path = "integration/facade.rs"]
mod facade;
#[path = "integration/gelu.rs"]
mod gelu;
#[path = "integration/training.rs"]
mod training;

use libtest_mimic::Arguments;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    // Providers have to be registered before any test touches a tensor.
    if let Err(error) = blackburn::init() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    let trials = [column_sum::trials(), facade::trials(), gelu::trials(), training::trials()];
    let trials = trials.into_iter().flatten().collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
