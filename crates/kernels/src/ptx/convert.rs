//! Conversions to narrower floats (PTX ISA, "cvt").

use super::load;
use cubecl::prelude::*;

/// Four numbers rounded to nearest, ties to even, and packed, the first in the lowest byte. `ptx_type`
/// is `e4m3` or `e5m2`. What is too large, infinity with it, becomes the largest number; NaN becomes 0x7f.
#[cube]
pub(crate) fn pack_fp8(a: f32, b: f32, c: f32, d: f32, #[comptime] ptx_type: &'static str) -> u32 {
    let packed: u32;
    gpu_asm!("{{ .reg .b16 low, high;\ncvt.rn.satfinite.{ty}x2.f32 low, {b}, {a};\ncvt.rn.satfinite.{ty}x2.f32 high, {d}, {c};\nmov.b32 {r}, {{low, high}}; }}",
        ty = const ptx_type, r = out(_) packed,
        a = in(_) load::<f32>(a), b = in(_) load::<f32>(b), c = in(_) load::<f32>(c), d = in(_) load::<f32>(d),
        options(nomem));
    packed
}

/// The number of TF32 that is nearest, ties away from zero.
#[cube]
pub(crate) fn round_tf32(x: f32) -> u32 {
    let rounded: u32;
    gpu_asm!("cvt.rna.tf32.f32 {r}, {x};", r = out(_) rounded, x = in(_) load::<f32>(x),
        options(nomem));
    rounded
}
