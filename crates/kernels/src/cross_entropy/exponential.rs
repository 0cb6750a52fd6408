//! The exponential, by the device's fastest way that is exact enough.

use super::CrossEntropyBlueprint;
#[cfg(feature = "cuda")]
use crate::ptx::exp2_fast;
use cubecl::prelude::*;

/// `e^x`.
#[cube]
pub(super) fn exponential(x: f32, #[comptime] blueprint: CrossEntropyBlueprint) -> f32 {
    exponential_by(x, comptime!(blueprint.hardware))
}

/// `e^x`, with `hardware` by NVIDIA's instruction for powers of two. The `exp` of CUDA's library takes
/// eight instructions, with which passes over rows would wait for arithmetic; a product and a power of two
/// take two.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn exponential_by(x: f32, #[comptime] hardware: bool) -> f32 {
    if comptime!(hardware) { exp2_fast(x * comptime!(std::f32::consts::LOG2_E)) } else { x.exp() }
}

/// `e^x`.
#[cfg(not(feature = "cuda"))]
#[cube]
pub(crate) fn exponential_by(x: f32, #[comptime] _hardware: bool) -> f32 {
    x.exp()
}
