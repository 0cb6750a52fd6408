//! Pools of images, and their gradients: the largest number of each window, or the mean.
//!
//! ```text
//! max       y[n, p, q, c]  = max over the taps (r, s) inside of the image of x[n, h, w, c]
//!           index          = h width + w of the first such tap, rows first
//!           dx[n, h, w, c] = sum over the windows (p, q) whose index is h width + w of dy[n, p, q, c]
//! average   y[n, p, q, c]  = sum over the taps inside of the image of x[n, h, w, c] / count[p, q]
//!           dx[n, h, w, c] = sum over the windows (p, q) with a tap at (h, w) of dy[n, p, q, c] / count[p, q]
//! ```
//!
//! with `h = p stride + r dilation - padding`, and `w` likewise. A window's count is that of its taps inside of the
//! image, or with `include_padding` of those inside of the image with its padding. Windows of an adaptive average
//! have no stride: window p of P goes from `floor(p H / P)` to `ceil((p + 1) H / P)`.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, dy | n, h, w, c | channels contiguous, any stride of pixels from `channels` | f32, f16 or bf16, all the same |
//! | y, dx | n, h, w, c | contiguous | that of x |
//! | indices | n, p, q, c | contiguous | i32 |
//!
//! Images whose pixels are contiguous (NCHW) are images of one channel, as many as there were channels: the same
//! kernels serve them, a number a unit. Sums and means are computed in f32 and rounded once. Outputs are
//! overwritten. There are no atomic operations: the same input gives the same bits each time. Saved for backward:
//! the indices of a maximum, and nothing of an average.
//!
//! A maximum treats special numbers as Burn's CPU backend and PyTorch do. NaN is larger than any number, and the
//! index is that of the window's last NaN. The largest of negative infinities is negative infinity. Of equal
//! numbers the first one counts. A window without a tap inside of the image, which a dilation can make, has negative
//! infinity and the index -1. Burn's GPU kernels agree on equal numbers, but pass over NaN, and give the
//! lowest finite number and the index 0 for windows of negative infinities.
//!
//! # Kernels
//!
//! | launch | a unit has | reads |
//! |---|---|---|
//! | forward | a vector of channels of a window | the window's taps |
//! | backward | those of a cell of pixels | the windows that reach the cell |
//! | adaptive, both ways | those of a window, or of a pixel | the window's pixels, or the windows of the pixel |
//! | global average | see [`column_sum`](crate::column_sum), or [`row_sum`](crate::row_sum) for one channel | the image, in parts |
//!
//! With a stride of 1 or 2, a cell is as many pixels as windows are apart. All of its pixels are reached by the same
//! windows: `floor((kernel - 1) dilation / stride) + 1` in each dimension, so that each gradient and index is
//! read once for the whole cell. For a larger stride a cell is one pixel. Windows of at most nine taps are unrolled.
//! Loads have no condition: taps outside of the image read a pixel inside, which does not count, so that all
//! loads of a window can be on their way together. Numbers are divided by products and shifts.
//!
//! Not served: empty tensors, tensors of 2^31 elements and more, tensors that do not begin at a multiple of 16
//! bytes, and averages of windows that lie outside of the image.

mod adaptive;
mod backward;
mod blueprint;
mod forward;
mod launch;
mod problem;
pub mod variants;
mod walk;

pub use blueprint::PoolBlueprint;
pub use launch::{MaxPooled, average_pool, average_pool_backward, max_pool, max_pool_backward};
pub use problem::{PoolProblem, PoolWindow, Windows};
pub(crate) use variants::variants;
