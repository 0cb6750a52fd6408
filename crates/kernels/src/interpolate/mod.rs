//! The gradient of resized images, in every way that Burn resizes them by but Lanczos.
//!
//! ```text
//! y[n, p, q, c]  = sum over the taps (r, s) of filter(P - r) filter(Q - s) x[n, clamp(r), clamp(s), c]
//! dx[n, h, w, c] = sum over the outputs (p, q) of weight(P, h) weight(Q, w) dy[n, p, q, c]
//! weight(P, h)   = sum over the taps r with clamp(r) = h of filter(P - r)
//! ```
//!
//! P is where the center of row p of y lies between the rows of x; q and Q are the same of columns. With `H` rows of x
//! and `O` of y:
//!
//! | mode | P | taps of P | filter(t) |
//! |---|---|---|---|
//! | nearest | `p H / O` | the pixel that P is in: P rounded down | 1 |
//! | nearest, exact | `(p + 1/2) H / O` | the same | 1 |
//! | linear, cubic, corners aligned | `p (H - 1) / (O - 1)`, or 0 where O is 1 | 2, 4 around P | below |
//! | linear, cubic | `(p + 1/2) H / O - 1/2` | 2, 4 around P | below |
//!
//! ```text
//! linear  1 - |t|                        up to 1
//! cubic   1 - t^2 ((a + 3) - (a + 2)|t|) up to 1
//!         a (|t| - 1) (2 - |t|)^2        up to 2, with a = -3/4
//! ```
//!
//! The cubic is that of Keys, "Cubic Convolution Interpolation for Digital Image Processing" (1981), section II, with
//! the `a` of Burn and PyTorch. Taps beyond an end of the image read the pixel at the end: `clamp`. All of this is as
//! Burn's forward has it (cubek-interpolate 0.3.1, `definition/transform.rs` and `kernel/forward`, and burn-flex 0.22.1,
//! `ops/interpolate.rs`), on GPUs and on the CPU.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | dy | n, p, q, c | channels contiguous, any stride of pixels from `channels` | f32, f16 or bf16 |
//! | dx | n, h, w, c | contiguous | that of dy |
//!
//! Images whose pixels are contiguous (NCHW) are images of one channel, as many as there were channels: the same
//! kernel serves them, a number a unit. Nothing is saved for backward: x gives its size. dx is overwritten.
//!
//! Where an output lies is a quotient of whole numbers, and which outputs touch a pixel is decided by whole numbers. The
//! distance, the weights and the sums are in f32, and dx is rounded once. There are no atomic operations: the same
//! input gives the same bits each time. An output gives nothing to a pixel for which its weight is zero, not even NaN.
//! (Burn's own gradients on the CPU multiply by that zero.)
//!
//! # The outputs of a pixel
//!
//! An output touches a pixel h if `|P - h|` is below the filter's radius, 1 or 2. This is also true of the
//! pixels at the ends, which have the taps beyond them as well: P never lies half a pixel beyond the center of an end
//! pixel, so an output that has taps beyond the image touches the pixel at the end itself. With `P = (p scale + offset) /
//! divisor` the outputs of a pixel are those from `ceil(((h - radius) divisor + 1 - offset) / scale)` to before
//! `ceil(((h + radius) divisor - offset) / scale)`. A unit reads these, rows first, for a vector of channels of
//! its pixel. Twice as large images are read four times in linear mode and sixteen times in cubic mode, from the caches but
//! for once.
//!
//! A dimension that keeps its size, or has one pixel in x, is resized by the nearest pixel whatever the mode: this is
//! what the filters come to there.
//!
//! Not served: Lanczos, empty tensors, tensors of 2^31 elements and more, tensors that do not begin at a multiple of 16
//! bytes, and sizes whose positions take more than 31 bits.

mod backward;
mod blueprint;
mod launch;
mod position;
mod problem;
pub mod variants;

pub use blueprint::InterpolateBlueprint;
pub use launch::interpolate_backward;
pub use problem::{InterpolateProblem, Mode};
pub(crate) use variants::variants;
