//! The exponential, by the device's fastest way that is exact enough.

use super::CrossEntropyBlueprint;
#[cfg(feature = "cuda")]
use crate::ptx::exp2_fast;
use cubecl::prelude::*;

/// `e^x`. NVIDIA's `exp` of CUDA's library takes eight instructions, with which the forward pass would
/// wait for arithmetic; a product and a power of two take two.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn exponential(x: f32, #[comptime] blueprint: CrossEntropyBlueprint) -> f32 {
    if comptime!(blueprint.hardware) {
        exp2_fast(x * comptime!(std::f32::consts::LOG2_E))
    } else {
        x.exp()
    }
}

/// `e^x`.
#[cfg(not(feature = "cuda"))]
#[cube]
pub(super) fn exponential(x: f32, #[comptime] _blueprint: CrossEntropyBlueprint) -> f32 {
    x.exp()
}
