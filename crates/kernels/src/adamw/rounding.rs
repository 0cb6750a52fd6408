//! Rounding up or down by chance.

use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// Bits of infinity.
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 1 << 31;

/// The least normal number of f16, and the inverse of the distance of those below it.
const LEAST_NORMAL: f32 = 1.0 / 16_384.0;
const SUBNORMALS: f32 = 16_777_216.0;

/// `value` as a number that `dtype` has: one of the two around it, which one decided by `word`, the
/// nearer the likelier. Exact values, infinities and NaN stay.
#[cube]
pub(super) fn round_by_chance(value: f32, word: u32, #[comptime] dtype: ElemType) -> f32 {
    let bits = u32::reinterpret(value);
    let is_f16 = comptime!(dtype == ElemType::Float(FloatKind::F16));
    // The bits of f32 that the type lacks. What carries out of them goes up, into the exponent too.
    let lacking = comptime!((1u32 << if is_f16 { 13 } else { 16 }) - 1);
    let carried = (bits + (word & lacking)) & comptime!(!lacking);
    let mut rounded = f32::reinterpret(carried);
    if comptime!(is_f16) {
        // Subnormal numbers are whole multiples of their distance, and all of this is exact.
        let magnitude = f32::reinterpret(bits & comptime!(!SIGN));
        let multiple = magnitude * SUBNORMALS;
        let below = multiple.floor();
        let uniform = f32::cast_from(word >> 8) * comptime!(1.0 / SUBNORMALS);
        let up = select(uniform < multiple - below, 1.0f32, 0.0f32);
        let small = u32::reinterpret((below + up) * comptime!(1.0 / SUBNORMALS)) | (bits & SIGN);
        rounded = select(magnitude < LEAST_NORMAL, f32::reinterpret(small), rounded);
    }
    select(bits & INFINITY == INFINITY, value, rounded)
}
