//! Stock Burn's side of `ops_sweep`: the same cases, on the first CUDA device.
//!
//! ```text
//! stock-ops --sizes large --budget-s 300 --commit abc1234 --note "driver ..." > burn_ops.tsv
//! ```
//!
//! Burn tunes an operation when it first meets its shape. That counts in the budget, and not in the times.

#[path = "../../../src/bin/ops_sweep/cases.rs"]
mod cases;
#[path = "../../../src/bin/ops_sweep/elementwise.rs"]
mod elementwise;
#[path = "../../../src/bin/ops_sweep/gradients.rs"]
mod gradients;
#[path = "../../../src/bin/ops_sweep/images.rs"]
mod images;
#[path = "../../../src/bin/ops_sweep/indexing.rs"]
mod indexing;
#[path = "../../../src/bin/ops_sweep/layout.rs"]
mod layout;
#[path = "../../../src/bin/ops_sweep/measure.rs"]
mod measure;
#[path = "../../../src/bin/ops_sweep/reductions.rs"]
mod reductions;
#[path = "../../../src/bin/ops_sweep/report.rs"]
mod report;
#[path = "../../../src/bin/ops_sweep/sweep.rs"]
mod sweep;

use burn::tensor::Device;
use std::error::Error;
use sweep::{Subject, sweep};

fn main() -> Result<(), Box<dyn Error>> {
    sweep(&Subject {
        name: "burn",
        tunes: cfg!(feature = "autotune"),
        device: |name| match name {
            None => Ok(Some(Device::cuda(0))),
            Some(name) => {
                Err(format!("--device {name}: stock Burn runs on the first CUDA device").into())
            }
        },
    })
}
