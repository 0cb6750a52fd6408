//! The two 8-bit floating-point types of tensor cores, and their scales.
//!
//! Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), and the OCP 8-bit floating
//! point specification (OFP8), which names the first one E4M3 without infinities.

use crate::{
    small_float::{SmallFloat, largest},
    storage::Storage,
};

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
        self.magnitudes().unit_roundoff()
    }

    /// The largest finite number.
    pub fn max_finite(self) -> f64 {
        self.magnitudes().max_finite
    }

    /// Half the distance between the smallest numbers: the absolute error of rounding near zero.
    pub fn underflow(self) -> f64 {
        0.5 * self.magnitudes().number(1)
    }

    /// `value`, rounded to nearest with ties to even. What is too large becomes the largest finite number of
    /// its sign. Infinity becomes NaN, as it does without saturation in the type that has no infinities: an
    /// overflow stays one.
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
        let scale = f64::from((self.max_finite() / largest(values)) as f32);
        if scale.is_finite() && scale > 0.0 { scale } else { 1.0 }
    }

    /// `values` times their scale as codes, and the factor by which decoded codes are multiplied to
    /// have the values back.
    pub fn quantize(self, values: &[f64]) -> (Vec<u8>, f64) {
        let scale = self.scale_for(values);
        let codes = values.iter().map(|value| self.code(value * scale)).collect();
        (codes, f64::from((1.0 / scale) as f32))
    }

    /// What `values` are once they were stored in 8 bits by their own scale, 2^`margin` smaller than
    /// [`Fp8::scale_for`] has it, and how far from that it may be on a device that had each value to within
    /// `errors`.
    ///
    /// An error moves a code only across the middle between two codes, and the scale with the largest
    /// magnitude. The scale and its product with a value are f32, in which quotients of short numbers often
    /// come to lie in such a middle: there the device's own rounding decides. Rounding is monotone, so what
    /// comes back lies between what becomes of the smallest and of the largest product.
    ///
    /// # Panics
    ///
    /// When the lengths differ.
    pub fn stored(self, values: &[f64], errors: &[f64], margin: u32) -> (Vec<f64>, Vec<f64>) {
        assert_eq!(values.len(), errors.len(), "values and errors differ in length");
        let room = (-f64::from(margin)).exp2();
        let scale_of = |sign: f64| {
            let moved = values.iter().zip(errors).map(|(v, e)| (v.abs() + sign * e).max(0.0));
            self.scale_for(&moved.collect::<Vec<_>>()) * room
        };
        let [scale, most, least] = [0.0, -1.0, 1.0].map(scale_of);
        let back = |product: f64, scale: f64| {
            self.round(Storage::F32.round(product)) * Storage::F32.round(1.0 / scale)
        };
        // Two roundings of f32 and a quotient of 2.5 units in the last place, twice.
        let slack = 12.0 * Storage::F32.unit_roundoff();
        let of_value = |(value, error): (&f64, &f64)| {
            let stored = back(value * scale, scale);
            let error = error + slack * value.abs();
            let products = [value - error, value + error].map(|v| [v * least, v * most]);
            let farthest = products
                .as_flattened()
                .iter()
                .flat_map(|product| [back(*product, least), back(*product, most)])
                .map(|other| (other - stored).abs())
                .fold(0.0, f64::max);
            (stored, farthest)
        };
        values.iter().zip(errors).map(of_value).unzip()
    }

    fn magnitudes(self) -> SmallFloat {
        match self {
            Self::E4m3 => SmallFloat { mantissa_bits: 3, min_exponent: -6, max_finite: 448.0 },
            Self::E5m2 => SmallFloat { mantissa_bits: 2, min_exponent: -14, max_finite: 57344.0 },
        }
    }

    fn code(self, value: f64) -> u8 {
        if !value.is_finite() {
            return NAN;
        }
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        sign | self.magnitudes().code(value.abs())
    }

    fn number(self, code: u8) -> f64 {
        let number = match (self, code & 0x7f) {
            (Self::E4m3, 0x7f) | (Self::E5m2, 0x7d..) => f64::NAN,
            (Self::E5m2, 0x7c) => f64::INFINITY,
            (_, magnitude) => self.magnitudes().number(magnitude),
        };
        if code & 0x80 == 0 { number } else { -number }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::normal, tolerance::sqnr_db};

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
                let expected = if number.is_finite() { code } else { NAN };
                assert_eq!(back, expected, "{fp8:?} {number}");
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
    fn what_is_too_large_saturates_and_what_is_not_finite_is_nan() {
        for fp8 in Fp8::ALL {
            let max = fp8.max_finite();
            for large in [max.next_up(), 1.04 * max, 1e300] {
                assert_eq!((fp8.round(large), fp8.round(-large)), (max, -max));
            }
            for none in [f64::NAN, f64::INFINITY] {
                assert!(fp8.round(none).is_nan() && fp8.round(-none).is_nan());
            }
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
    fn an_error_moves_what_is_stored_across_a_middle_and_no_further() {
        // The largest number makes the scale 1; 17 lies between 16 and 18.
        let values = [448.0, 17.0, 16.2];
        let (_, errors) = Fp8::E4m3.stored(&[448.0, 17.01, 16.2], &[0.0; 3], 0);
        assert_eq!(errors, [0.0; 3]);
        let (stored, errors) = Fp8::E4m3.stored(&values, &[0.0; 3], 0);
        // A middle is on either side.
        assert_eq!((stored, errors), (vec![448.0, 16.0, 16.0], vec![0.0, 2.0, 0.0]));
        let (stored, errors) = Fp8::E4m3.stored(&values, &[0.0, 1e-3, 1e-3], 0);
        assert_eq!((stored, errors), (vec![448.0, 16.0, 16.0], vec![0.0, 2.0, 0.0]));
        // An error of the largest magnitude moves the scale, and with it all that comes back.
        let (_, errors) = Fp8::E4m3.stored(&values, &[4.48, 0.0, 0.0], 0);
        assert!((0.15..0.17).contains(&errors[2]), "{errors:?}");
        let (stored, _) = Fp8::E4m3.stored(&values, &[0.0; 3], 3);
        assert_eq!(stored, [448.0, 16.0, 16.0]);
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
