//! Random shapes: a few cases of each operation, always the same ones, and the fault that has to be found.
//! `cargo xtask fuzz` draws thousands.

use blackburn_tests::{
    fuzz::{
        Op, ops,
        run::{Ending, Part, Run, case},
        target::Target,
    },
    on_burn_cuda_and_client, on_burn_device_and_client,
};
use burn::tensor::Device;
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const SEED: u64 = 17;
/// Each plan compiles its kernels.
const PLANS: u64 = 2;
const CASES: u64 = 12;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |op: Op| {
        Trial::ignorable_test(format!("fuzz::drawn_cases_of_{}_are_right", op.name), move || {
            let test = |device: &Device, client: &Client| {
                right(&op, &Target::new(device.clone(), client.clone()))
            };
            if op.needs_cuda {
                on_burn_cuda_and_client(test)
            } else {
                on_burn_device_and_client(test)
            }
        })
    };
    ops().into_iter().map(trial).collect()
}

/// Cases are right, and wrong with a fault in them.
fn right(op: &Op, on: &Target) -> Result<(), Failed> {
    let run = Run {
        seed: SEED,
        plans: PLANS,
        cases: 0..CASES,
        threads: 1,
        limit: None,
        plant: false,
        part: Part::ALL,
    };
    let mut compared = 0;
    for index in run.cases.clone() {
        let ran = case(op, on, &run, index, &[]);
        compared += ran.check.compared();
        if let Ending::Wrong(message) = ran.ending {
            return Err(format!("case {index}: {message}\n{}", ran.told).into());
        }
    }
    if compared == 0 {
        return Err("nothing was compared".into());
    }
    let run = Run { plant: true, ..run };
    let planted = run.cases.clone().map(|index| case(op, on, &run, index, &[]));
    match planted.into_iter().find(|ran| ran.check.planted()).map(|ran| ran.ending) {
        Some(Ending::Wrong(_)) => Ok(()),
        other => Err(format!("the planted fault went unseen: {other:?}").into()),
    }
}
