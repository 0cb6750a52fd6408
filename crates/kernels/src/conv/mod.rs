//! Convolutions of images and their gradients.
//!
//! ```text
//! y[n, k, p, q]   = bias[k] + sum_{c, r, s} x[n, c, p u + r d - a, q u + s d - b] w[k, c, r, s]
//! dx[n, c, h, v]  = sum_{k, p, q, r, s: p u + r d - a = h, q u + s d - b = v} dy[n, k, p, q] w[k, c, r, s]
//! dw[k, c, r, s]  = sum_{n, p, q} dy[n, k, p, q] x[n, c, p u + r d - a, q u + s d - b]
//! ```
//!
//! with strides u, dilations d and paddings a and b, each for rows and columns; x is zero outside of the
//! image. With groups, an output channel sees the channels of its own group. A convolution of one dimension is
//! one of images of height 1; a transposed one is the gradient of x.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, dy | n, c, h, w | any strides; channels that follow each other (NHWC) are read in place | f32, f16, bf16 |
//! | w | k, c / groups, r, s | any strides; KRSC is read in place | that of x |
//! | bias | k for y, c for dx | contiguous | that of the output |
//! | y, dx | n, c, h, w | NHWC, contiguous | that of the operands, or f32 |
//! | dw | k, c / groups, r, s | KRSC, contiguous | that of the operands, or f32 |
//!
//! Sums are accumulated in f32 and rounded once. The output is overwritten. The same input gives the same bits
//! each time. A zero of the padding is a term like any other: times NaN it is NaN.
//!
//! All three passes are matrix products with one operand that is never written down ("implicit GEMM",
//! Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3):
//!
//! | pass | rows | columns | terms |
//! |---|---|---|---|
//! | [`ConvPass::Fprop`] | pixels of y | channels of y | taps by channels of x |
//! | [`ConvPass::Dgrad`] | pixels of x | channels of x | taps by channels of y |
//! | [`ConvPass::Wgrad`] | channels of y | taps by channels of x | pixels of y, in parts that are added in order |
//!
//! With a stride u, a pixel of x meets only some taps: those of the same residue modulo u. `Dgrad` is a
//! product for each residue of rows and columns, so that no term is a known zero.
//!
//! | plan | serves |
//! |---|---|
//! | [`ConvBlueprint::Product`] | kernels of 1 by 1 with stride 1, by the plans of [`matmul`](crate::matmul), but for `Wgrad` as TF32 where those copy |
//! | [`ConvBlueprint::Implicit`] with [`Family::Wgmma`](crate::Family::Wgmma) | f16 and bf16 in one group, channels in whole 64s: Hopper |
//! | [`ConvBlueprint::Implicit`] with [`Family::Mma`](crate::Family::Mma) | f16 and bf16, and f32 as TF32: Ampere and later |
//! | [`ConvBlueprint::Implicit`] with [`Family::Portable`](crate::Family::Portable) | everything, everywhere; f32 in full precision |
//! | [`ConvBlueprint::Depthwise`] | groups of one channel each way that lie side by side, kernels of up to 7 by 7 |
//! | [`ConvBlueprint::Grouped`] | groups of two, four or eight channels each way that lie side by side |
//! | [`ConvBlueprint::Direct`] | other groups of few channels, and single channels that the former does not take |
//!
//! Sizes, strides and paddings are arguments of the kernels, so that a network compiles few of them; those of
//! `Depthwise` know kernel, stride and dilation.
//! Unsupported: empty tensors, and tensors beyond 32-bit indices.

mod blueprint;
#[cfg(feature = "cuda")]
mod bulk;
mod call;
mod depthwise;
mod direct;
mod gather;
mod grouped;
mod im2col;
mod launch;
#[cfg(feature = "cuda")]
mod mma;
mod parts;
mod portable;
mod problem;
mod product;
#[cfg(feature = "cuda")]
mod tensor_core;
pub mod variants;
#[cfg(feature = "cuda")]
mod wgmma;

pub use blueprint::{ConvBlueprint, ImplicitBlueprint};
pub use depthwise::DepthwiseBlueprint;
pub use launch::{conv, conv_with};
pub use problem::{ConvOptions, ConvPass, ConvProblem};
pub(crate) use variants::variants;
