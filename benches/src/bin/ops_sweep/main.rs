//! Times the operations of Burn that training uses, each beside a copy of the bytes that it has to move:
//! `ops_sweep --date 2026-11-25 --commit abc1234 > ops.tsv`
//!
//! Prints rows of `benches/results`, and on the standard error a table, the slowest first. Burn's autotuner is off
//! under Blackburn: an operation that no kernel of ours serves is what Burn's untuned choice makes of it. Results are
//! not verified here, the tests do that. `--list` prints the cases, which `benches/peers/torch_ops.py` reads.

mod cases;
mod elementwise;
mod gradients;
mod images;
mod indexing;
mod layout;
mod measure;
mod reductions;
mod report;
mod sweep;

use std::error::Error;
use sweep::{Subject, sweep};

fn main() -> Result<(), Box<dyn Error>> {
    sweep(&Subject {
        name: "blackburn",
        tunes: false,
        device: |name| match name {
            Some(name) => Ok(Some(blackburn::device_from(name)?)),
            None => Ok(blackburn::device_from("cuda")
                .inspect_err(|reason| eprintln!("skipped: {reason}. `--device` names another"))
                .ok()),
        },
    })
}
