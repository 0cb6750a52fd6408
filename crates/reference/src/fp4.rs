//! The 4-bit floating-point type of tensor cores, E2M1: a sign, two bits of exponent, one of mantissa. It has neither NaN
//! nor infinity.
//!
//! Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.

use crate::small_float::SmallFloat;

/// The largest number.
pub const MAX_FINITE: f64 = 6.0;

const MAGNITUDES: SmallFloat =
    SmallFloat { mantissa_bits: 1, min_exponent: 0, max_finite: MAX_FINITE };

/// The codes of `values`, each in a byte: rounded to nearest with ties to even, and to the largest number of their sign
/// where they are too large. NaN becomes the largest number, as CUDA's conversions have it.
pub fn encode(values: &[f64]) -> Vec<u8> {
    let code = |value: &f64| {
        let magnitude = if value.is_nan() { MAX_FINITE } else { value.abs() };
        let sign = if value.is_sign_negative() && !value.is_nan() { 0x8 } else { 0 };
        sign | MAGNITUDES.code(magnitude)
    };
    values.iter().map(code).collect()
}

/// The numbers that the codes stand for.
pub fn decode(codes: &[u8]) -> Vec<f64> {
    let number = |code: &u8| {
        let number = MAGNITUDES.number(code & 0x7);
        if code & 0x8 == 0 { number } else { -number }
    };
    codes.iter().map(number).collect()
}

/// Rows of `columns` codes with two in each byte, the first in its low half; the last byte of a row of an odd number of
/// them ends with zero.
///
/// # Panics
///
/// When the last row is not whole.
pub fn pack(codes: &[u8], columns: usize) -> Vec<u8> {
    assert!(codes.len().is_multiple_of(columns), "{} codes of {columns}", codes.len());
    let byte = |pair: &[u8]| pair[0] & 0xf | pair.get(1).map_or(0, |code| code << 4);
    codes.chunks_exact(columns).flat_map(|row| row.chunks(2)).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All numbers, in the order of their codes.
    const NUMBERS: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    #[test]
    fn every_code_has_its_number_and_comes_back() {
        let codes: Vec<u8> = (0..16).collect();
        let numbers = decode(&codes);
        assert_eq!(numbers[..8], NUMBERS);
        assert_eq!(numbers[8..], NUMBERS.map(|number| -number));
        assert_eq!(encode(&numbers), codes);
    }

    #[test]
    fn rounding_goes_to_the_nearest_number_and_from_the_middle_to_the_even_code() {
        for (low, pair) in NUMBERS.windows(2).enumerate() {
            let (low, middle) = (low as u8, 0.5 * (pair[0] + pair[1]));
            let below = middle.next_down();
            let expected = [low, low + low % 2, low + 1, (low + 1) | 8];
            assert_eq!(encode(&[below, middle, middle.next_up(), -middle.next_up()]), expected);
        }
        assert_eq!(encode(&[7.0, -1e300, f64::INFINITY, f64::NAN]), [7, 15, 7, 7]);
    }

    #[test]
    fn two_codes_share_a_byte_and_rows_begin_with_one() {
        assert_eq!(pack(&[1, 2, 3, 0xf, 4, 5], 3), [0x21, 0x03, 0x4f, 0x05]);
        assert_eq!(pack(&[1, 2, 3, 4], 4), [0x21, 0x43]);
    }
}
