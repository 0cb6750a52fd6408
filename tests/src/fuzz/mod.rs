//! Random shapes: draws cases of an operation, runs them on a device, and holds the results against the f64
//! reference, forward and backward.
//!
//! Every case follows from a seed and its index ([`Draw`]), so that a case that fails can be run again alone.
//! Sizes, strides, types, options and epilogues are drawn; some cases hold NaN or infinity, some are empty, and
//! some contradict themselves, which has to be refused with an error.
//!
//! | module | gives |
//! |---|---|
//! | [`command`] | the command line |
//! | `jobs` | the cases in several processes |
//! | [`run`] | many cases on many threads, and smaller ones where one fails |
//! | [`draw`] | what a case is made of |
//! | [`check`] | comparisons with the reference, and the planted fault |
//! | [`target`] | the device, and what it computes in |
//! | the others | an operation each, or a few |

pub mod check;
pub mod command;
pub mod draw;
pub mod run;
pub mod target;

mod attention;
mod cross_entropy;
mod elements;
mod embedding;
mod jobs;
mod linear;
mod matmul;
mod memory;
mod norm;
mod optimizers;
mod quantize;
mod softmax;

use check::{Check, Stop};
use draw::Draw;
use target::Target;

/// An operation to draw cases of.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// What it is called.
    pub name: &'static str,
    /// Plans that a run draws from, unless it is told another number: as many as are compiled in a minute or
    /// two.
    pub plans: u64,
    /// Draws a case, runs it and compares what comes out.
    pub case: fn(&Target, &mut Draw, &mut Check) -> Result<(), Stop>,
}

/// All of them.
pub const OPS: [Op; 12] = [
    Op { name: "matmul", plans: 48, case: matmul::case },
    Op { name: "linear", plans: 32, case: linear::case },
    Op { name: "attention", plans: 32, case: attention::case },
    Op { name: "norm", plans: 64, case: norm::case },
    Op { name: "cross_entropy", plans: 48, case: cross_entropy::case },
    Op { name: "softmax", plans: 64, case: softmax::case },
    Op { name: "gelu", plans: 24, case: elements::gelu },
    Op { name: "column_sum", plans: 24, case: elements::column_sum },
    Op { name: "embedding", plans: 24, case: embedding::case },
    Op { name: "adamw", plans: 32, case: optimizers::adamw },
    Op { name: "sgd", plans: 32, case: optimizers::sgd },
    Op { name: "fp8_cast", plans: 32, case: quantize::case },
];
