//! Convolutions of single channels: each channel of y sees one of x, by taps of its own ("depthwise").
//!
//! ```text
//! y[n, c, p, q]  = bias[c] + sum_{r, s} x[n, c, p u + r d - a, q u + s d - b] w[c, r, s]
//! dx[n, c, h, v] = sum_{p, q, r, s: p u + r d - a = h, q u + s d - b = v} dy[n, c, p, q] w[c, r, s]
//! dw[c, r, s]    = sum_{n, p, q} dy[n, c, p, q] x[n, c, p u + r d - a, q u + s d - b]
//! ```
//!
//! There are as many multiplications for each element as there are taps, so that memory is the limit, and no matrix
//! product is there to be found. What counts is that each element is read about once, in vectors, and that few
//! instructions are spent beside the multiplications.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | gathered (x, or dy for dx) | n, c, h, w | neighboring channels; any other distances | f32, f16, bf16 |
//! | w | c, 1, r, s | any strides | that of the gathered tensor |
//! | bias | c | contiguous | that of the output |
//! | y, dx | n, c, h, w | NHWC, contiguous | that of the operands, or f32 |
//! | partial sums of dw | splits, r s, c | contiguous | f32 |
//! | dw | c, 1, r, s | contiguous | that of the operands, or f32 |
//!
//! A unit owns a vector of channels, and of these a tile of neighboring pixels. It walks the rows of the gathered image
//! that the tile meets: each row goes to registers once, and there it is multiplied into every row and column of the
//! tile whose taps reach it ([`Line`]). Kernel, stride, dilation and tile are known when a kernel is compiled, so that
//! no tap costs a comparison or an address. Which tap meets which pixel is the only difference between y and dx: of a
//! stride u, a pixel of x meets the taps of one residue modulo u, and tiles begin where that residue is 0.
//!
//! 1. The weights of a cube's channels go to shared memory, as f32, with the bias behind the taps.
//! 2. Each unit takes tile after tile, neighbors in memory by neighboring units.
//! 3. Sums are in f32, in the order of the rows, and are rounded once.
//!
//! For dw, a unit keeps the sums of its taps in registers over all of its tiles; the units of a cube meet in shared
//! memory, in order, and a second launch adds the cubes' sums, in order. Wide kernels have their rows of taps shared
//! out to different units. Where the tile does not divide the image, products with pixels that are not there are left
//! out: a zero in their place would turn infinity into NaN.
//!
//! Unsupported, and left to [`ConvBlueprint::Direct`](super::ConvBlueprint::Direct): channels that do not follow each
//! other, more than one output for a channel, and kernels beyond 7 taps or far apart.

mod blueprint;
mod launch;
mod line;
mod pixels;
mod weights;

pub use blueprint::DepthwiseBlueprint;
pub(super) use launch::launch;
