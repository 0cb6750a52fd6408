//! Frames of volumes side by side: what makes a convolution of volumes one of images.
//!
//! A kernel of T by R by S meets T frames of a volume at once. With these side by side, as channels of one image, it is a
//! kernel of R by S:
//!
//! ```text
//! out[n, d, pixel, g, t, c] = x[n, f, pixel, g, c],  f = (d scale + shift + t step) / stride
//! ```
//!
//! and zero where f is not whole or not a frame. Each group has its taps beside each other.
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | x, read | n, frames, pixels, groups, channels | f32, f16, bf16 |
//! | out, overwritten | n, frames of the output, pixels, groups, taps, channels | the same |
//!
//! Both are contiguous. This takes as much memory as T tensors of x, and T copies of x in time.

mod launch;
mod stack;
mod variants;

pub use launch::{FrameProblem, FrameWalk, stack_frames};
pub(crate) use variants::variants;
