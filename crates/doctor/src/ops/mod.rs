//! The cases of each operation: what is drawn, what runs, and what it is held to.

mod attention;
mod batch_norm;
mod conv;
mod cross_entropy;
mod elements;
mod embedding;
mod fp8_matmul;
mod matmul;
mod norm;
mod optimizers;
mod quantize;
mod softmax;

use crate::{
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};

/// An operation to draw cases of.
#[derive(Clone, Copy, Debug)]
pub struct KernelOp {
    /// What it is called.
    pub name: &'static str,
    /// Draws a case, runs it and compares what comes out.
    pub case: fn(&Target, &mut Draw, &mut Check) -> Result<(), Stop>,
}

/// All of them, those with several families first.
pub const OPS: [KernelOp; 16] = [
    KernelOp { name: "matmul", case: matmul::case },
    KernelOp { name: "fp8_matmul", case: fp8_matmul::case },
    KernelOp { name: "conv", case: conv::case },
    KernelOp { name: "attention", case: attention::case },
    KernelOp { name: "norm", case: norm::case },
    KernelOp { name: "batch_norm", case: batch_norm::case },
    KernelOp { name: "cross_entropy", case: cross_entropy::case },
    KernelOp { name: "softmax", case: softmax::case },
    KernelOp { name: "gelu", case: elements::gelu },
    KernelOp { name: "swiglu", case: elements::swiglu },
    KernelOp { name: "column_sum", case: elements::column_sum },
    KernelOp { name: "dropout", case: elements::dropout },
    KernelOp { name: "embedding", case: embedding::case },
    KernelOp { name: "adamw", case: optimizers::adamw },
    KernelOp { name: "sgd", case: optimizers::sgd },
    KernelOp { name: "fp8_cast", case: quantize::case },
];
