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
//! | [`target`] | the device |
//! | `linear` | layers of `burn::nn`, by all that Burn makes of them |
//!
//! The cases of kernels, and what draws and compares them, are `blackburn_doctor`'s.

pub mod command;
pub mod run;
pub mod target;

mod jobs;
mod linear;

use blackburn_doctor::{
    check::{Check, Stop},
    draw::Draw,
    ops::{self, KernelOp},
};
use target::Target;

/// An operation to draw cases of.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// What it is called.
    pub name: &'static str,
    /// Plans that a run draws from, unless it is told another number: as many as are compiled in a minute or
    /// two.
    pub plans: u64,
    /// Whether CUDA alone has kernels for it.
    pub needs_cuda: bool,
    case: Case,
}

#[derive(Clone, Copy, Debug)]
enum Case {
    /// By a kernel's launcher.
    Kernel(KernelOp),
    /// By Burn's tensors.
    Tensors(fn(&Target, &mut Draw, &mut Check) -> Result<(), Stop>),
}

impl Op {
    /// Draws a case, runs it and compares what comes out.
    ///
    /// # Errors
    ///
    /// Why it went no further: something is wrong, or no kernel serves it.
    pub fn case(&self, on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
        match self.case {
            Case::Kernel(op) => (op.case)(&on.kernels, draw, check),
            Case::Tensors(case) => case(on, draw, check),
        }
    }
}

/// All of them.
pub fn ops() -> Vec<Op> {
    /// Each plan compiles its kernels.
    const PLANS: u64 = 32;
    let plans = |name: &str| match name {
        "matmul" | "cross_entropy" => 48,
        "norm" | "softmax" => 64,
        "gelu" | "column_sum" | "embedding" => 24,
        _ => PLANS,
    };
    let kernels = ops::OPS.into_iter().map(|op| Op {
        name: op.name,
        plans: plans(op.name),
        needs_cuda: op.needs_cuda,
        case: Case::Kernel(op),
    });
    let case = Case::Tensors(linear::case);
    let linear = Op { name: "linear", plans: PLANS, needs_cuda: false, case };
    kernels.chain([linear]).collect()
}
