//! The two 8-bit floating-point types of tensor cores, and their scales.
//!
//! Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), and the OCP 8-bit floating
//! point specification (OFP8), which names the first one E4M3 without infinities.

/// The code of NaN in both types, as CUDA's conversions give it.
const NAN: u8 = 0x7f;

/// An 8-bit floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// 4 bits of exponent, 3 of mantissa: numbers up to 448, one NaN a sign, no infinities. For
    /// activations and weights.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa, special values as in IEEE types: numbers up to 57344. For
    /// gradients.
    E5m2,
}

impl Fp8 {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::E4m3, Self::E5m2];

    /// Half the distance between 1 and the next number: the relative error of rounding to nearest.
    pub fn unit_roundoff(self) -> f64 {
        2f64.powi(-1 - self.mantissa_bits())
    }

    /// The largest finite number.
    pub fn max_finite(self) -> f64 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// Half the distance between the smallest numbers: the absolute error of rounding near zero.
    pub fn underflow(self) -> f64 {
        2f64.powi(self.min_exponent() - self.mantissa_bits() - 1)
    }

    /// `value`, rounded to nearest with ties to even. What is too large, infinity with it, becomes
    /// the largest finite number of its sign, as under CUDA's `satfinite`; NaN stays NaN.
    pub fn round(self, value: f64) -> f64 {
        self.number(self.code(value))
    }

    /// The codes of `values`, rounded as [`Fp8::round`] does.
    pub fn encode(self, values: &[f64]) -> Vec<u8> {
        values.iter().map(|value| self.code(*value)).collect()
    }

    /// The numbers that the codes stand for.
    pub fn decode(self, codes: &[u8]) -> Vec<f64> {
        codes.iter().map(|code| self.number(*code)).collect()
    }

    /// The factor that takes the largest magnitude of `values` to [`Fp8::max_finite`], rounded to
    /// f32, in which a device holds it. It is 1 where no such factor exists: all values are zero,
    /// one is not finite, or the factor would leave the range of f32.
    pub fn scale_for(self, values: &[f64]) -> f64 {
        // `f64::max` drops NaN, which has to show.
        let larger = |a: f64, v: &f64| if v.is_nan() { f64::NAN } else { a.max(v.abs()) };
        let amax = values.iter().fold(0.0, |a: f64, v| if a.is_nan() { a } else { larger(a, v) });
        let scale = f64::from((self.max_finite() / amax) as f32);
        if scale.is_finite() && scale > 0.0 { scale } else { 1.0 }
    }

    /// `values` times their scale as codes, and the factor by which decoded codes are multiplied to
    /// have the values back.
    pub fn quantize(self, values: &[f64]) -> (Vec<u8>, f64) {
        let scale = self.scale_for(values);
        let codes = values.iter().map(|value| self.code(value * scale)).collect();
        (codes, f64::from((1.0 / scale) as f32))
    }

    fn mantissa_bits(self) -> i32 {
        match self {
            Self::E4m3 => 3,
            Self::E5m2 => 2,
        }
    }

    /// The exponent of the smallest normal number.
    fn min_exponent(self) -> i32 {
        match self {
            Self::E4m3 => -6,
            Self::E5m2 => -14,
        }
    }

    fn code(self, value: f64) -> u8 {
        if value.is_nan() {
            return NAN;
        }
        let magnitude = value.abs().min(self.max_finite());
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(self.min_exponent());
        // Scaling by a power of two is exact, so this is the only rounding.
        let unit = 2f64.powi(exponent - self.mantissa_bits());
        let significand = (magnitude / unit).round_ties_even() as i32;
        // The significand's leading bit adds 1 to the exponent field, which counts normal exponents
        // from 1; a significand that was rounded up to the next power of two adds one more.
        let code = ((exponent - self.min_exponent()) << self.mantissa_bits()) + significand;
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        sign | code as u8
    }

    fn number(self, code: u8) -> f64 {
        let magnitude = code & 0x7f;
        let field = i32::from(magnitude >> self.mantissa_bits());
        let mantissa = i32::from(magnitude) & ((1 << self.mantissa_bits()) - 1);
        let number = match (self, magnitude) {
            (Self::E4m3, 0x7f) | (Self::E5m2, 0x7d..) => f64::NAN,
            (Self::E5m2, 0x7c) => f64::INFINITY,
            _ => {
                let significand = if field == 0 { 0 } else { 1 << self.mantissa_bits() } + mantissa;
                let exponent = self.min_exponent() + field.max(1) - 1;
                f64::from(significand) * 2f64.powi(exponent - self.mantissa_bits())
            }
        };
        if code & 0x80 == 0 { number } else { -number }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::normal, storage::Storage, tolerance::sqnr_db};

    /// Codes of the numbers from 0 to the largest finite one, in order.
    fn finite_codes(fp8: Fp8) -> std::ops::RangeInclusive<u8> {
        0..=match fp8 {
            Fp8::E4m3 => 0x7e,
            Fp8::E5m2 => 0x7b,
        }
    }

    #[test]
    fn every_code_comes_back_from_its_number() {
        for fp8 in Fp8::ALL {
            for code in 0..=u8::MAX {
                let number = fp8.decode(&[code])[0];
                let back = fp8.encode(&[number])[0];
                if number.is_nan() {
                    assert_eq!(back, NAN, "{fp8:?} {code:#x}");
                } else if number.is_infinite() {
                    assert_eq!(back, code - 1, "{fp8:?} {code:#x} saturates");
                } else {
                    assert_eq!(back, code, "{fp8:?} {number}");
                }
            }
        }
    }

    #[test]
    fn known_numbers_have_their_codes() {
        let e4m3 = [1.0, 448.0, 2f64.powi(-6), 2f64.powi(-9), -1.5, 0.875 * 2f64.powi(-6)];
        assert_eq!(Fp8::E4m3.encode(&e4m3), [0x38, 0x7e, 0x08, 0x01, 0xbc, 0x07]);
        let e5m2 = [1.0, 57344.0, 2f64.powi(-14), 2f64.powi(-16), -1.5, 0.75 * 2f64.powi(-14)];
        assert_eq!(Fp8::E5m2.encode(&e5m2), [0x3c, 0x7b, 0x04, 0x01, 0xbe, 0x03]);
        assert_eq!((Fp8::E4m3.unit_roundoff(), Fp8::E5m2.unit_roundoff()), (0.0625, 0.125));
        for fp8 in Fp8::ALL {
            assert_eq!(fp8.decode(&[*finite_codes(fp8).end()]), [fp8.max_finite()]);
            assert_eq!(fp8.decode(&[1]), [2.0 * fp8.underflow()]);
        }
    }

    #[test]
    fn rounding_goes_to_the_nearest_number_and_from_the_middle_to_the_even_one() {
        for fp8 in Fp8::ALL {
            for low in *finite_codes(fp8).start()..*finite_codes(fp8).end() {
                let (a, b) = (fp8.number(low), fp8.number(low + 1));
                let middle = 0.5 * (a + b);
                assert_eq!(fp8.code(middle), low + low % 2, "{fp8:?} between {a} and {b}");
                assert_eq!(fp8.round(middle.next_down()), a);
                assert_eq!(fp8.round(middle.next_up()), b);
                assert_eq!(fp8.round(-middle.next_up()), -b);
            }
        }
    }

    #[test]
    fn what_is_too_large_saturates_and_nan_stays() {
        for fp8 in Fp8::ALL {
            let max = fp8.max_finite();
            for large in [max.next_up(), 1.04 * max, 1e300, f64::INFINITY] {
                assert_eq!((fp8.round(large), fp8.round(-large)), (max, -max));
            }
            assert!(fp8.round(f64::NAN).is_nan() && fp8.round(-f64::NAN).is_nan());
            assert_eq!(fp8.round(f64::MIN_POSITIVE / 4.0), 0.0);
            assert_eq!(fp8.encode(&[-0.0]), [0x80]);
        }
    }

    #[test]
    fn scales_take_the_largest_magnitude_to_the_largest_number() {
        assert_eq!(Fp8::E4m3.scale_for(&[0.5, -3.5]), 128.0);
        assert_eq!(Fp8::E5m2.quantize(&[0.5, -3.5]), (vec![0x70, 0xfb], 2f64.powi(-14)));
        for odd in [0.0, f64::NAN, f64::INFINITY, 1e-40, 1e60] {
            assert_eq!(Fp8::E4m3.scale_for(&[odd, 0.0]), 1.0, "{odd}");
        }
        assert_eq!(Fp8::E4m3.scale_for(&[f64::NAN, 2.0]), 1.0);
        assert_eq!(Fp8::E4m3.scale_for(&[]), 1.0);
    }

    #[test]
    fn scaled_numbers_keep_the_ratio_that_their_mantissa_allows_and_unscaled_ones_lose_it() {
        let values = normal(1, 10_000, 1e-4, Storage::F32);
        for (fp8, expected_db) in [(Fp8::E4m3, 30.0), (Fp8::E5m2, 24.0)] {
            let (codes, dequantization_scale) = fp8.quantize(&values);
            let back: Vec<f64> =
                fp8.decode(&codes).iter().map(|v| v * dequantization_scale).collect();
            // Uniform rounding errors of a logarithmically uniform mantissa: about 6 dB a bit.
            assert!(sqnr_db(&back, &values) > expected_db, "{}", sqnr_db(&back, &values));
        }
        let unscaled = Fp8::E4m3.decode(&Fp8::E4m3.encode(&values));
        assert!(sqnr_db(&unscaled, &values) < 3.0);
    }
}
