//! Magnitudes of floating-point types of a few bits: an exponent, a mantissa, and subnormal numbers.

/// The largest magnitude, or NaN where there is one.
pub(crate) fn largest(values: &[f64]) -> f64 {
    // `f64::max` drops NaN, which has to show.
    let larger = |a: f64, v: &f64| if v.is_nan() { f64::NAN } else { a.max(v.abs()) };
    values.iter().fold(0.0, |a: f64, v| if a.is_nan() { a } else { larger(a, v) })
}

/// The finite numbers of a type, without their signs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SmallFloat {
    pub(crate) mantissa_bits: i32,
    /// The exponent of the smallest normal number.
    pub(crate) min_exponent: i32,
    pub(crate) max_finite: f64,
}

impl SmallFloat {
    /// Half the distance between 1 and the next number.
    pub(crate) fn unit_roundoff(self) -> f64 {
        2f64.powi(-1 - self.mantissa_bits)
    }

    /// The code of the number that is nearest to a magnitude, of two the even one. What is too large becomes the
    /// largest number.
    pub(crate) fn code(self, magnitude: f64) -> u8 {
        let magnitude = magnitude.min(self.max_finite);
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(self.min_exponent);
        // Scaling by a power of two is exact, so this is the only rounding.
        let unit = 2f64.powi(exponent - self.mantissa_bits);
        let significand = (magnitude / unit).round_ties_even() as i32;
        // The significand's leading bit adds 1 to the exponent field, which counts normal exponents
        // from 1; a significand that was rounded up to the next power of two adds one more.
        (((exponent - self.min_exponent) << self.mantissa_bits) + significand) as u8
    }

    /// What a code stands for.
    pub(crate) fn number(self, code: u8) -> f64 {
        let field = i32::from(code >> self.mantissa_bits);
        let mantissa = i32::from(code) & ((1 << self.mantissa_bits) - 1);
        let significand = if field == 0 { 0 } else { 1 << self.mantissa_bits } + mantissa;
        let exponent = self.min_exponent + field.max(1) - 1;
        f64::from(significand) * 2f64.powi(exponent - self.mantissa_bits)
    }
}
