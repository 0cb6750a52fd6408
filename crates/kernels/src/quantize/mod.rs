//! Tensors in 8-bit floating point: one scale for a whole matrix, chosen from the matrix itself.
//!
//! ```text
//! amax      = max |x|
//! scale     = largest / (2^margin amax)     1 where amax is 0 or not finite, or scale overflows
//! code      = round(scale x)                to nearest, ties to even, saturating; NaN where x is not finite
//! x         ~ code / scale
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x | rows, columns | contiguous | f32, f16, bf16 |
//! | codes | rows, columns | rows padded with zeros to 16 bytes | e4m3, e5m2 |
//! | transposed codes | columns, rows | as codes | e4m3, e5m2 |
//! | scale | 2 | `[1 / scale, amax]` | f32 |
//!
//! Infinity becomes NaN, as a conversion without saturation has it, and not the largest number: an overflow
//! that became a finite number would be trained on, and no loss scaler could see it. So NaN and infinity make
//! NaN of all that is summed with them, whether the format has infinities or not.
//!
//! Nothing is read back to the host. The largest magnitude is exact and the same each time: it is
//! found by comparing bit patterns, in which infinity and NaN come after every number. Values are
//! scaled in f32 and rounded once more to 8 bits, which may give the neighbor of the nearest code
//! where a value lies in the middle between two.
//!
//! 1. `amax`: each cube writes the largest magnitude that it saw.
//! 2. `cast`: each cube takes the largest of those, scales and rounds tiles of 64 rows by 128
//!    columns, and writes codes, transposed codes, or both. Tensor cores want 8-bit operands
//!    contiguous along k, so a matrix that is multiplied from both sides needs both; made in one
//!    pass they cost one read. Rows of 16 bytes are what those products take without another copy.
//!
//! From compute capability 8.9 on, codes are rounded by the GPU's own conversion; elsewhere by
//! integer arithmetic, with the same result. [`decode()`] turns codes back into floats, for devices
//! that cannot multiply them.
//!
//! Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), sections 3 and 4; scaling
//! by the current tensor's largest magnitude is what NVIDIA's Transformer Engine calls
//! `Float8CurrentScaling`.
//!
//! Not served: empty matrices, and matrices of nearly 2^32 elements and more.

mod amax;
mod blueprint;
mod cast;
mod codes;
mod decode;
mod launch;
mod problem;
pub mod variants;

pub use blueprint::QuantizeBlueprint;
pub use launch::{Quantized, decode, quantize, quantize_with};
pub use problem::{Fp8Format, Layouts, QuantizeProblem, padded_row};
pub(crate) use variants::variants;
