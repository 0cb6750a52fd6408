//! Tensors in 8-bit floating point, with scales that are chosen from the tensor itself.
//!
//! One scale for a whole matrix ([`quantize`]):
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
//! One scale for each block of 32 elements along a row ([`quantize_blocks`]), a power of two, as in MXFP8:
//!
//! ```text
//! amax      = max |x| of the block, NaN and infinity apart
//! exponent  = ceil(log2(amax / largest))   at least -126
//! code      = round(2^-exponent x)         as above
//! scale     = exponent + 127               as ue8m0
//! ```
//!
//! A transpose has blocks along columns of x, so its codes are others. Codes and scales are made in one pass over x, and
//! scales are written in the order in which tensor cores take them: see [`scale_words`].
//!
//! Nothing is read back to the host. The largest magnitude is exact and the same each time: it is
//! found by comparing bit patterns, in which infinity and NaN come after every number. Values are
//! scaled in f32 and rounded once more to 8 bits, which may give the neighbor of the nearest code
//! where a value lies in the middle between two.
//!
//! 1. `amax`: each cube writes the largest magnitude that it saw. Where the kernel that made x told its
//!    [magnitudes](crate::magnitude), this is left out.
//! 2. `cast`: each cube takes the largest of those, scales and rounds tiles of 128 rows by 128
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
//! `Float8CurrentScaling`. Blocks: OCP Microscaling Formats (MX) Specification v1.0; exponents are rounded up instead of
//! down as in Mishra et al., "Recipes for Pre-training LLMs with MXFP8" (2025), so that no number saturates.
//!
//! Not served: empty matrices, and matrices of nearly 2^32 elements and more.

mod amax;
mod blocks;
mod blueprint;
mod cast;
mod codes;
mod decode;
mod launch;
mod problem;
pub mod variants;

pub use blueprint::QuantizeBlueprint;
pub use launch::{
    Blocks, Quantized, QuantizedBlocks, decode, decode_blocks, quantize, quantize_blocks,
    quantize_with,
};
pub use problem::{Fp8Format, Layouts, QuantizeProblem, padded_row, scale_words};
pub(crate) use variants::variants;
