//! Floats of all formats: values from bits, and bits from exact values, rounded as an instruction says.

use half::{bf16, f16};

/// How a result is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To nearest, ties to even.
    Even,
    /// To nearest, ties away from zero.
    Away,
    Zero,
    Down,
    Up,
}

/// A format of at most 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    pub(crate) exponent_bits: u32,
    pub(crate) mantissa_bits: u32,
    /// Whether there are infinities.
    pub(crate) infinite: bool,
    /// What an operation makes of NaN.
    pub(crate) nan: u64,
}

pub(crate) const F64: Format =
    Format { exponent_bits: 11, mantissa_bits: 52, infinite: true, nan: 0x7fff_ffff_ffff_ffff };
pub(crate) const F32: Format =
    Format { exponent_bits: 8, mantissa_bits: 23, infinite: true, nan: 0x7fff_ffff };
pub(crate) const F16: Format =
    Format { exponent_bits: 5, mantissa_bits: 10, infinite: true, nan: 0x7fff };
pub(crate) const BF16: Format =
    Format { exponent_bits: 8, mantissa_bits: 7, infinite: true, nan: 0x7fff };
/// The largest number is 448: its exponent's last mantissa is NaN.
pub(crate) const E4M3: Format =
    Format { exponent_bits: 4, mantissa_bits: 3, infinite: false, nan: 0x7f };
pub(crate) const E5M2: Format =
    Format { exponent_bits: 5, mantissa_bits: 2, infinite: true, nan: 0x7f };
/// Before its zeros in the low bits of an f32 are appended.
pub(crate) const TF32: Format =
    Format { exponent_bits: 8, mantissa_bits: 10, infinite: true, nan: 0x3_ffff };

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// Bits of the largest number.
    pub(crate) fn largest(self) -> u64 {
        let top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits;
        if self.infinite { top - 1 } else { (top | ((1 << self.mantissa_bits) - 1)) - 1 }
    }

    /// Bits of an infinity, or of NaN where there is none.
    fn overflow(self) -> u64 {
        self.largest() + 1
    }

    /// The bits of `value + residue`, rounded once. The residue is less than half a unit in the last place of
    /// `value`, as the sum of two floats leaves it. `saturate` keeps numbers finite.
    pub(crate) fn round(self, value: f64, residue: f64, rounding: Rounding, saturate: bool) -> u64 {
        let sign_bit = 1 << (self.exponent_bits + self.mantissa_bits);
        if value.is_nan() {
            return self.nan;
        }
        let negative = value.is_sign_negative();
        let sign = if negative { sign_bit } else { 0 };
        let beyond = if saturate { self.largest() } else { self.overflow() };
        if value.is_infinite() {
            return sign | beyond;
        }
        if value == 0.0 {
            return sign;
        }
        let bits = value.to_bits();
        let raw_exponent = (bits >> 52 & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let (mut mantissa, exponent) = match raw_exponent {
            0 => (u128::from(fraction), -1074),
            raw => (u128::from(fraction | 1 << 52), raw - 1075),
        };
        // Two more bits, of which the last tells on which side of `value` the sum lies.
        mantissa <<= 2;
        let exponent = exponent - 2;
        if residue != 0.0 {
            if residue.is_sign_negative() == negative {
                mantissa |= 1;
            } else {
                mantissa -= 1;
            }
        }
        let top = 127 - mantissa.leading_zeros() as i32;
        // The exponent of the leading bit, not below that of the smallest normal number.
        let leading = (exponent + top).max(1 - self.bias());
        let unit = leading - self.mantissa_bits as i32;
        let drop = unit - exponent;
        let (mut kept, rest, half) = match drop {
            drop if drop <= 0 => (mantissa << -drop, 0, 1),
            drop if drop >= 128 => (0, 1, 2),
            drop => {
                let kept = mantissa >> drop;
                (kept, mantissa - (kept << drop), 1 << (drop - 1))
            }
        };
        let up = match rounding {
            Rounding::Even => rest > half || rest == half && drop > 0 && kept & 1 == 1,
            Rounding::Away => drop > 0 && rest >= half,
            Rounding::Zero => false,
            Rounding::Down => rest > 0 && negative,
            Rounding::Up => rest > 0 && !negative,
        };
        kept += u128::from(up);
        let exponent_field = (leading + self.bias()) as u64;
        // A normal number's leading bit adds one to the exponent, a carry another one.
        let magnitude = ((exponent_field - 1) << self.mantissa_bits) + kept as u64;
        let toward_zero = match rounding {
            Rounding::Zero => true,
            Rounding::Down => !negative,
            Rounding::Up => negative,
            _ => false,
        };
        if magnitude > self.largest() {
            return sign | if toward_zero { self.largest() } else { beyond };
        }
        sign | magnitude
    }

    /// The value of bits.
    pub(crate) fn value(self, bits: u64) -> f64 {
        let negative = bits >> (self.exponent_bits + self.mantissa_bits) & 1 == 1;
        let magnitude = bits & ((1 << (self.exponent_bits + self.mantissa_bits)) - 1);
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let fraction = magnitude & ((1 << self.mantissa_bits) - 1);
        let size = if magnitude > self.largest() {
            if self.infinite && magnitude == self.overflow() { f64::INFINITY } else { f64::NAN }
        } else if exponent == 0 {
            fraction as f64 * power(1 - self.bias() - self.mantissa_bits as i32)
        } else {
            (fraction | 1 << self.mantissa_bits) as f64
                * power(exponent - self.bias() - self.mantissa_bits as i32)
        };
        if negative { -size } else { size }
    }
}

/// A power of two.
fn power(exponent: i32) -> f64 {
    2.0_f64.powi(exponent)
}

/// The sum of two numbers and what rounding took from it.
pub(crate) fn exact_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    if !sum.is_finite() {
        return (sum, 0.0);
    }
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

pub(crate) fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

pub(crate) fn f64_of(bits: u64) -> f64 {
    f64::from_bits(bits)
}

pub(crate) fn f16_of(bits: u64) -> f32 {
    f16::from_bits(bits as u16).to_f32()
}

pub(crate) fn bf16_of(bits: u64) -> f32 {
    bf16::from_bits(bits as u16).to_f32()
}

/// Bits of an f32 result, with the NaN that arithmetic gives.
pub(crate) fn f32_bits(value: f32) -> u64 {
    if value.is_nan() { F32.nan } else { u64::from(value.to_bits()) }
}

pub(crate) fn f64_bits(value: f64) -> u64 {
    if value.is_nan() { F64.nan } else { value.to_bits() }
}

/// Zero for what is too small to be normal.
pub(crate) fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_bf16_and_fp8_comes_back_as_its_bits() {
        for (format, bits) in [(F16, 16), (BF16, 16), (E4M3, 8), (E5M2, 8)] {
            for pattern in 0..1_u64 << bits {
                let value = format.value(pattern);
                let expected = if value.is_nan() { format.nan } else { pattern };
                let rounded = format.round(value, 0.0, Rounding::Even, false);
                assert_eq!(rounded, expected, "{pattern:#x}");
            }
        }
    }

    #[test]
    fn rounding_of_f32_to_16_bits_agrees_with_half() {
        let mut state = 1_u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = f32::from_bits((state >> 32) as u32);
            if x.is_nan() {
                continue;
            }
            let to = |format: Format| format.round(f64::from(x), 0.0, Rounding::Even, false);
            assert_eq!(to(F16), u64::from(f16::from_f32(x).to_bits()), "{x:e}");
            assert_eq!(to(BF16), u64::from(bf16::from_f32(x).to_bits()), "{x:e}");
            assert_eq!(to(F32), u64::from(x.to_bits()), "{x:e}");
        }
    }

    #[test]
    fn directed_rounding_goes_where_it_says() {
        let third = 1.0 / 3.0;
        let [down, up, zero] = [Rounding::Down, Rounding::Up, Rounding::Zero]
            .map(|rounding| f32_of(F32.round(third, 0.0, rounding, false)));
        assert!(f64::from(down) < third && third < f64::from(up));
        assert_eq!(down, zero);
        assert_eq!(f32_of(F32.round(-third, 0.0, Rounding::Down, false)), -up);
    }

    #[test]
    fn a_residue_breaks_a_tie() {
        let tie = 1.0 + 2.0_f64.powi(-24);
        let round = |residue| f32_of(F32.round(tie, residue, Rounding::Even, false));
        assert_eq!(round(0.0), 1.0);
        assert_eq!(round(1e-30), 1.0 + f32::EPSILON);
        assert_eq!(round(-1e-30), 1.0);
    }

    #[test]
    fn fp8_saturates_at_448_and_57344() {
        assert_eq!(E4M3.round(1e9, 0.0, Rounding::Even, true), 0x7e);
        assert_eq!(E4M3.value(0x7e), 448.0);
        assert_eq!(E5M2.round(-1e9, 0.0, Rounding::Even, true), 0xfb);
        assert_eq!(E5M2.value(0x7b), 57344.0);
        assert_eq!(E4M3.round(f64::NAN, 0.0, Rounding::Even, true), 0x7f);
    }
}
