//! Rotary position embedding: neighboring columns of a row are turned by an angle of the row's position.
//!
//! ```text
//! forward:   y[2i]      =  c[2i]   x[2i]   - s[2i]   x[2i+1]
//!            y[2i+1]    =  c[2i+1] x[2i+1] + s[2i+1] x[2i]
//! backward:  dx[2i]     =  c[2i]   dy[2i]   + s[2i+1] dy[2i+1]
//!            dx[2i+1]   =  c[2i+1] dy[2i+1] - s[2i]   dy[2i]
//! ```
//!
//! with `c[j] = table[start + position, j, 0]` and `s[j] = table[start + position, j, 1]`. The columns of a pair have
//! one angle in the table of `burn::nn::RotaryEncoding`, so that backward turns by the negative angle; a table with
//! two has its true gradient too.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, dy | batch, heads, seq, `head_dim` | any strides, columns contiguous | f32, f16 or bf16 |
//! | y, dx | the same | contiguous, [heads or positions first](RotaryProblem::order) | that of x |
//! | table | positions, `head_dim`, 2 | contiguous, or pairs apart as CUDA's runtime pads them | f32 |
//!
//! Everything is computed in f32 and rounded once. Nothing of x is saved for backward, and the table has no
//! gradient. y is written where x was if that lies as y does and nobody else holds its memory.
//!
//! Each element of x is moved once each way. The table, two numbers of 4 bytes for each of 2 bytes of x, would take
//! more bandwidth of L2 than x itself if every row read it. So a unit turns several rows at one position by what it
//! has read once, and its neighbors are at the same position, which the L1 cache answers.
//!
//! Source: Su et al., "`RoFormer`: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, section 3.2.

mod blueprint;
mod launch;
mod problem;
mod turn;
pub mod variants;

pub use blueprint::RotaryBlueprint;
pub use launch::{rotary, rotary_watched};
pub use problem::RotaryProblem;
pub(crate) use variants::variants;
