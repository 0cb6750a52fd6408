//! Dropout of elements, with a residual that the rest is added to.
//!
//! ```text
//! y[i]  = residual[i] + k[i] x[i]            k[i] = 0 if draw(i) < threshold, else scale
//! dx[i] = k[i] dy[i]                         dresidual = dy
//! ```
//!
//! `draw(i)` has 16 digits. The upper 8 are byte `i mod 8` of the two words of Philox2x32-7 at counter `(i / 8, h)` under
//! the key `l`, where l and h are the words of the seed, the low one first. The lower 8 are the byte of the neighbor, i
//! with its lowest bit turned, from its lowest digit on. For rates within 1/64 of 0 or 1, of which 16 digits tell too
//! little, the draw is word `i mod 2` at counter `(i / 2, h)`. Each word of the seed is combined by exclusive or with one of
//! the key, if there is a key. A draw is a function of the element's place, so backward makes it again and nothing is
//! saved. The gradient of x is the same pass over dy, without a residual. The threshold is the rate times 2^16 or 2^32,
//! rounded, and the scale `1 / (1 - rate)`.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | key | 2 | contiguous | u32 |
//! | x, residual, y | elements | contiguous | f32, f16 or bf16, all the same |
//!
//! Other operations draw the same mask on their way: see [`DropoutMask`]. Burn's own dropout draws a tensor of zeros and
//! ones, which stays for the gradient: see [`KeptElements`].
//!
//! Everything is computed in f32 and rounded once. An element that is left out becomes the residual's, whatever x holds
//! there; Burn's own dropout turns an infinity or a NaN that it leaves out into NaN. Each tensor is moved once.
//!
//! Sources: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (2014);
//! Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

mod forward;
mod launch;
mod mask;
mod masked;
mod problem;
mod variants;

pub use launch::dropout;
pub use mask::DropoutMask;
pub(crate) use mask::{DropoutForm, ElementMask};
pub use masked::{KeptElements, add_masked};
pub use problem::DropoutProblem;
pub(crate) use variants::variants;
