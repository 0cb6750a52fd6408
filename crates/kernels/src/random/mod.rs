//! Random numbers by a key that lies on the device.
//!
//! ```text
//! w(i)        = word i mod 4 of Philox4x32-7 at counter (i / 4, number, 0, 1) under the key
//! Bernoulli   y[i] = 1 if h(i) < p 2^16, else 0                  h(i) = half i mod 2, low first, of word i / 2 mod 4 at
//!                                                                counter (i / 8, number, 0, 1)
//!             y[i] = 1 if w(i) < p 2^32, else 0                  where p or 1 - p is below 1 / 64
//! uniform     y[i] = low + (high - low) u(i)                     u(i) = floor(w(i) / 2^(32 - b)) / 2^b
//! normal      y[i] = mean + deviation r cos(2 pi u(i')), and the next one with sin
//!             r = sqrt(-2 ln((1 + floor(w(i) / 2^8)) / 2^24))    i' = i + 1, i even
//! ```
//!
//! `number` tells tensors under one key apart. `b` is how many bits the type has for a number just below 1 (24
//! for f32, 11 for f16, 8 for bf16), so that u(i) is below 1 in the type, too. What low and high make of it is
//! rounded.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | key | 2 | contiguous | u32 |
//! | y | elements | contiguous | f32, f16 or bf16 |
//!
//! A recorded launch keeps `number`, and a new key gives other numbers. Nothing but y is moved.
//!
//! Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); Box and Muller, "A note on the
//! generation of random normal deviates" (1958).

mod forward;
mod launch;
mod problem;
mod variants;

pub(crate) use launch::check_key;
pub use launch::random;
pub use problem::{RandomDistribution, RandomProblem};
pub(crate) use problem::{Threshold, threshold};
pub(crate) use variants::variants;
