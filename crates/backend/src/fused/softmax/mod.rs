//! The provider that runs `softmax` and `log_softmax`, and with the latter `burn::nn::loss::CrossEntropyLoss`, on the softmax
//! kernels.
//!
//! Burn emits the logarithm of softmax over the last dimension as six operations, of which a loss takes
//! one element a row ([`FORWARD`]), and the gradient of that as twelve ([`BACKWARD`]), each of which goes
//! over all elements. Here the forward pass reads them twice, a pass over them for what autodiff keeps:
//! `shifted`, which the backward pass reads once, where it writes the gradient. Sums are taken in f32.
//!
//! A cast to f32 in front of the forward pass, and one to any type behind the backward pass, is taken with
//! it, so that there is neither a copy of the logits in f32 nor a gradient.
//!
//! Taken are a forward pass at the head of a block, or behind one arithmetic operation; what a program
//! reads of its steps is written (the largest elements, `shifted`, the sums and the logarithms). And the
//! backward pass where it starts with zeros: that of the targets' elements. Burn shows operations in front
//! of a target or of a gradient behind the head of that block; such as do not go over the elements are let
//! in, and run first, as Burn runs them.
//!
//! Softmax itself is five operations ([`SOFTMAX`]), one kernel, which reads each element once, and a mask in front of
//! it. Others in front of that run first, as Burn runs them.
//!
//! Left to Burn are other dimensions than the last; logits that nothing made, where autodiff follows the
//! largest element with its index; and the gradient of a `log_softmax` that is used otherwise, as with label
//! smoothing, whose steps gradient checkpointing makes again, or that Burn does not show in one block, as
//! behind a mean over two dimensions.
//!
//! The gradient of softmax ([`GRADIENT`]) is one kernel, with the mask and the factor of attention's scores behind it. It begins as
//! that of every division does; the search for layer norms waits for the others that are common.

mod backward;
mod forward;
mod gradient;
mod mask;
mod pass;
mod probabilities;
mod search;
#[cfg(test)]
mod tests;

use crate::stream::{
    Pattern,
    PatternStep::{
        Add, Div, Exp, Gather, Log, MaxRow, Mul, MulScalar, Ones, Recip, ScatterAdd, Sub, SumRow,
        Zeros,
    },
};
pub(crate) use pass::SoftmaxPass;
pub(crate) use search::SoftmaxSearch;

const OP: &str = "softmax";

/// `ActivationOps::log_softmax` of burn-backend, and the elements at the targets.
const FORWARD: Pattern = &[
    ("peak", MaxRow("x")),
    ("shifted", Sub("x", "peak")),
    ("exp", Exp("shifted")),
    ("sum", SumRow("exp")),
    ("log", Log("sum")),
    ("y", Sub("shifted", "log")),
    ("picked", Gather("y", "targets")),
];

/// What burn-autodiff makes of [`FORWARD`].
const BACKWARD: Pattern = &[
    ("zeros", Zeros),
    ("dy", ScatterAdd("zeros", "targets", "grad")),
    ("negative", MulScalar("dy", -1.0)),
    ("dlog", SumRow("negative")),
    ("inverse", Recip("sum")),
    ("dsum", Mul("dlog", "inverse")),
    ("ones", Ones),
    ("of_row", SumRow("dsum")),
    ("dexp", Mul("ones", "of_row")),
    ("exp", Exp("shifted")),
    ("of_exp", Mul("dexp", "exp")),
    ("dx", Add("of_exp", "dy")),
];

/// `ActivationOps::softmax` of burn-backend.
const SOFTMAX: Pattern = &[
    ("peak", MaxRow("x")),
    ("shifted", Sub("x", "peak")),
    ("exp", Exp("shifted")),
    ("sum", SumRow("exp")),
    ("y", Div("exp", "sum")),
];

/// What burn-autodiff makes of [`SOFTMAX`].
macro_rules! gradient {
    ($($first:expr),*) => {
        &[
            $($first,)*
            ("plain", Mul("dy", "inverse")),
            ("negative", MulScalar("exp", -1.0)),
            ("square", Mul("sum", "sum")),
            ("factor", Div("negative", "square")),
            ("weighted", Mul("dy", "factor")),
            ("dsum", SumRow("weighted")),
            ("ones", Ones),
            ("of_row", SumRow("dsum")),
            ("of_sum", Mul("ones", "of_row")),
            ("dexp", Add("of_sum", "plain")),
            ("exp_again", Exp("shifted")),
            ("dx", Mul("dexp", "exp_again")),
        ]
    };
}

const GRADIENT: Pattern = gradient!(("inverse", Recip("sum")));

/// The same where Burn ran the first operation with products in front.
const GRADIENT_OF_INVERSE: Pattern = gradient!();
