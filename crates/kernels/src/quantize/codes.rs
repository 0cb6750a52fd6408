//! Between f32 and the codes of 8-bit floats, by integer arithmetic on the bits of f32.

use super::Fp8Format;
#[cfg(feature = "cuda")]
use crate::ptx::convert::pack_fp8;
use cubecl::prelude::*;

/// Bits of f32.
pub(super) const MANTISSA_BITS: u32 = 23;
const BIAS: u32 = 127;
pub(super) const INFINITY: u32 = 0xff << MANTISSA_BITS;
/// NaN's code in both types, as the hardware's conversion gives it.
const NAN_CODE: u32 = 0x7f;

/// Four values as codes, the first one in the lowest byte.
#[cube]
pub(super) fn encode_four(
    a: f32,
    b: f32,
    c: f32,
    d: f32,
    #[comptime] format: Fp8Format,
    #[comptime] hardware: bool,
) -> u32 {
    if comptime!(hardware) {
        encode_on_hardware(a, b, c, d, format)
    } else {
        encode(a, format)
            | encode(b, format) << 8
            | encode(c, format) << 16
            | encode(d, format) << 24
    }
}

#[cfg(feature = "cuda")]
#[cube]
fn encode_on_hardware(a: f32, b: f32, c: f32, d: f32, #[comptime] format: Fp8Format) -> u32 {
    let ptx_type = comptime!(match format {
        Fp8Format::E4m3 => "e4m3",
        Fp8Format::E5m2 => "e5m2",
    });
    pack_fp8(
        nan_for_infinity(a),
        nan_for_infinity(b),
        nan_for_infinity(c),
        nan_for_infinity(d),
        ptx_type,
    )
}

/// NaN in the place of infinity, of which the conversion would make the largest number.
#[cfg(feature = "cuda")]
#[cube]
fn nan_for_infinity(value: f32) -> f32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & comptime!(!(1u32 << 31));
    let nan = u32::cast_from(magnitude == INFINITY) << comptime!(MANTISSA_BITS - 1);
    f32::reinterpret(bits | nan)
}

/// Builds without CUDA never ask for it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn encode_on_hardware(a: f32, b: f32, c: f32, d: f32, #[comptime] format: Fp8Format) -> u32 {
    encode_four(a, b, c, d, format, false)
}

/// The code of `value`: to nearest, ties to even, saturating; infinity becomes NaN.
#[cube]
fn encode(value: f32, #[comptime] format: Fp8Format) -> u32 {
    let mantissa_bits = comptime!(format.mantissa_bits());
    // Exponent, as f32 has it, of the smallest normal number.
    let smallest = comptime!(BIAS + 1 - format.bias());
    let dropped = comptime!(MANTISSA_BITS - mantissa_bits);
    let bits = u32::reinterpret(value);
    let magnitude = bits & comptime!(!(1u32 << 31));

    // Half a unit less one, and one more where the last bit that stays is odd. A carry out of the
    // mantissa goes to the exponent, where it belongs.
    let odd = (magnitude >> dropped) & 1;
    let rounded = (magnitude + comptime!((1u32 << (dropped - 1)) - 1) + odd) >> dropped;
    let rebiased = max(rounded, comptime!((smallest - 1) << mantissa_bits))
        - comptime!((smallest - 1) << mantissa_bits);
    let normal = min(rebiased, comptime!(format.max_code()));

    // Below the normal numbers the unit is fixed. With 25 bits dropped nothing is left of 24.
    let exponent = min(magnitude >> MANTISSA_BITS, smallest);
    let significand =
        (magnitude & comptime!((1u32 << MANTISSA_BITS) - 1)) | comptime!(1u32 << MANTISSA_BITS);
    let shift = min(comptime!(dropped + smallest) - exponent, 25u32);
    let odd = (significand >> shift) & 1;
    let subnormal = (significand + (1u32 << (shift - 1)) - 1 + odd) >> shift;

    let code = select(magnitude < comptime!(smallest << MANTISSA_BITS), subnormal, normal);
    select(magnitude >= INFINITY, NAN_CODE.runtime(), code | ((bits >> 24) & 0x80))
}

/// The number that `code`, a byte, stands for.
#[cube]
pub(super) fn decode_one(code: u32, #[comptime] format: Fp8Format) -> f32 {
    let mantissa_bits = comptime!(format.mantissa_bits());
    let smallest = comptime!(BIAS + 1 - format.bias());
    let magnitude = code & 0x7f;
    // Zero and subnormal numbers count the smallest one; they are normal in f32.
    let unit = comptime!((1.0 - f64::from(format.bias()) - f64::from(mantissa_bits)).exp2() as f32);
    let subnormal = u32::reinterpret(f32::cast_from(magnitude) * unit);
    let normal = (magnitude << comptime!(MANTISSA_BITS - mantissa_bits))
        + comptime!((smallest - 1) << MANTISSA_BITS);
    let finite = select(magnitude < comptime!(1u32 << mantissa_bits), subnormal, normal);
    let above = magnitude - min(magnitude, comptime!(format.max_code() + 1));
    // Of E5M2 the first code above the numbers is infinity; E4M3 has NaN alone there.
    let first = comptime!(match format {
        Fp8Format::E4m3 => 1u32,
        Fp8Format::E5m2 => 0u32,
    });
    let special = INFINITY | ((above + first) << comptime!(MANTISSA_BITS - 2));
    let bits = select(magnitude > comptime!(format.max_code()), special, finite);
    f32::reinterpret(bits | ((code & 0x80) << 24))
}
