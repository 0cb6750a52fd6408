//! The cases of each operation: what is drawn, what runs, and what it is held to.

mod attention;
mod attention_cache;
mod batch_norm;
mod block_scaled;
mod conv;
mod conv_depthwise;
mod cross_entropy;
mod elements;
mod embedding;
mod fp8_matmul;
mod group_norm;
pub mod interpolate;
mod matmul;
mod norm;
mod optimizers;
pub mod pool;
mod quantize;
mod rotary;
mod softmax;
mod sums;

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
    /// Whether CUDA alone has kernels for it.
    pub needs_cuda: bool,
    /// Draws a case, runs it and compares what comes out.
    pub case: Case,
}

/// Draws a case, runs it and compares what comes out.
pub type Case = fn(&Target, &mut Draw, &mut Check) -> Result<(), Stop>;

const fn op(name: &'static str, case: Case) -> KernelOp {
    KernelOp { name, needs_cuda: false, case }
}

/// All of them, those with several families first.
pub const OPS: [KernelOp; 26] = [
    op("matmul", matmul::case),
    KernelOp { name: "fp8_matmul", needs_cuda: true, case: fp8_matmul::case },
    op("conv", conv::case),
    op("attention", attention::case),
    op("conv_depthwise", conv_depthwise::case),
    op("attention_decode", attention_cache::decode),
    op("attention_append", attention_cache::append),
    op("norm", norm::case),
    op("batch_norm", batch_norm::case),
    op("group_norm", group_norm::case),
    op("pool", pool::case),
    op("interpolate", interpolate::case),
    op("cross_entropy", cross_entropy::case),
    op("softmax", softmax::case),
    op("gelu", elements::gelu),
    op("swiglu", elements::swiglu),
    op("rotary", rotary::case),
    op("column_sum", sums::column_sum),
    op("row_sum", sums::row_sum),
    op("square_sum", sums::square_sum),
    op("dropout", elements::dropout),
    op("embedding", embedding::case),
    op("adamw", optimizers::adamw),
    op("sgd", optimizers::sgd),
    op("fp8_cast", quantize::case),
    op("mxfp8_cast", quantize::blocks),
];
