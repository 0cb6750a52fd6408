//! Matrices in MXFP8 and MXFP4: elements of 8 or 4 bits, of which 32 of a row share a scale, a power of two.
//!
//! Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.3.

use crate::{fp4, fp8::Fp8, small_float::largest};

/// Elements of a row that share a scale; the last ones of a row may be fewer.
pub const SCALED_BY: usize = 32;

/// The code of the scale that is no number.
const NAN: u8 = u8::MAX;

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MxElement {
    /// Of 8 bits.
    Fp8(Fp8),
    /// Of 4 bits.
    E2m1,
}

impl From<Fp8> for MxElement {
    fn from(format: Fp8) -> Self {
        Self::Fp8(format)
    }
}

impl MxElement {
    /// The codes of `values`, each in a byte, rounded to nearest.
    pub fn encode(self, values: &[f64]) -> Vec<u8> {
        match self {
            Self::Fp8(format) => format.encode(values),
            Self::E2m1 => fp4::encode(values),
        }
    }

    /// The numbers that the codes stand for.
    pub fn decode(self, codes: &[u8]) -> Vec<f64> {
        match self {
            Self::Fp8(format) => format.decode(codes),
            Self::E2m1 => fp4::decode(codes),
        }
    }

    /// The largest finite number.
    fn max_finite(self) -> f64 {
        match self {
            Self::Fp8(format) => format.max_finite(),
            Self::E2m1 => 6.0,
        }
    }

    /// The exponent of the largest number.
    fn most_exponent(self) -> i32 {
        match self {
            Self::Fp8(Fp8::E4m3) => 8,
            Self::Fp8(Fp8::E5m2) => 15,
            Self::E2m1 => 2,
        }
    }
}

/// A matrix in MXFP8 or MXFP4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MxMatrix {
    /// Type of the elements.
    pub format: MxElement,
    /// Elements of a row.
    pub columns: usize,
    /// Codes of the elements, row by row, each in a byte: [`fp4::pack`] has two of 4 bits in one.
    pub elements: Vec<u8>,
    /// Codes of the scales, `columns / 32` rounded up for each row.
    pub scales: Vec<u8>,
}

/// What a code of a scale stands for: `2^(code - 127)`, or NaN.
pub fn scale(code: u8) -> f64 {
    match code {
        NAN => f64::NAN,
        code => 2f64.powi(i32::from(code) - 127),
    }
}

/// How the scale of a block follows from its largest magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleRule {
    /// The power of two that takes it between the largest power of two of the format and the next one, as the
    /// specification has it: what is above the format's largest number saturates. Where it is not finite, the scale is NaN.
    Down,
    /// The smallest power of two, and at least 2^-126, that takes it to no more than the format's largest number, as Mishra
    /// et al. train, "Recipes for Pre-training LLMs with MXFP8" (2025). NaN and infinity become NaN by themselves, and do
    /// not count.
    Up,
}

impl ScaleRule {
    /// The code of the scale of such a block.
    fn scale_of(self, block: &[f64], format: MxElement) -> u8 {
        match self {
            Self::Down => scale_for(largest(block), format),
            Self::Up => {
                let numbers = block.iter().map(|value| value.abs()).filter(|x| x.is_finite());
                let amax = numbers.fold(0.0, f64::max);
                let most = format.max_finite();
                (1..=254).find(|code| amax <= most * scale(*code)).unwrap_or(254)
            }
        }
    }
}

/// The scale of numbers whose largest magnitude is `amax`, by [`ScaleRule::Down`].
fn scale_for(amax: f64, format: MxElement) -> u8 {
    if !amax.is_finite() {
        return NAN;
    }
    // A zero and subnormal numbers have the least exponent.
    let exponent = ((amax.to_bits() >> 52) as i32 - 1023) - format.most_exponent();
    (exponent + 127).clamp(0, 254) as u8
}

/// Rows of `columns` elements, each times the scale of its block of `scaled_by`.
pub(crate) fn with_scales(
    elements: &[f64],
    columns: usize,
    scales: &[f64],
    scaled_by: usize,
) -> Vec<f64> {
    let row_scales = columns.div_ceil(scaled_by);
    let of = |at: usize| at / columns * row_scales + at % columns / scaled_by;
    elements.iter().enumerate().map(|(at, value)| value * scales[of(at)]).collect()
}

impl MxMatrix {
    /// `values` in rows of so many `columns`, rounded: each to the nearest element at its block's scale by
    /// [`ScaleRule::Down`], saturating.
    ///
    /// # Panics
    ///
    /// When the last row is not whole.
    pub fn quantize(values: &[f64], columns: usize, format: impl Into<MxElement>) -> Self {
        Self::quantize_by(ScaleRule::Down, values, columns, format)
    }

    /// The same by any rule.
    ///
    /// # Panics
    ///
    /// When the last row is not whole.
    pub fn quantize_by(
        rule: ScaleRule,
        values: &[f64],
        columns: usize,
        format: impl Into<MxElement>,
    ) -> Self {
        let format = format.into();
        assert!(values.len().is_multiple_of(columns), "{} values of {columns}", values.len());
        let (mut elements, mut scales) = (Vec::with_capacity(values.len()), Vec::new());
        for block in values.chunks_exact(columns).flat_map(|row| row.chunks(SCALED_BY)) {
            let code = rule.scale_of(block, format);
            let factor = if code == NAN { 1.0 } else { scale(code) };
            let scaled: Vec<f64> = block.iter().map(|value| value / factor).collect();
            elements.extend(format.encode(&scaled));
            scales.push(code);
        }
        Self { format, columns, elements, scales }
    }

    /// The numbers that elements and scales stand for.
    pub fn decode(&self) -> Vec<f64> {
        let scales: Vec<f64> = self.scales.iter().map(|code| scale(*code)).collect();
        with_scales(&self.format.decode(&self.elements), self.columns, &scales, SCALED_BY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::normal, storage::Storage, tolerance::sqnr_db};

    #[test]
    fn the_largest_number_of_a_block_sets_its_scale() {
        for (amax, e4m3, e5m2, e2m1) in [
            (448.0, 127, 120, 133),
            (256.0, 127, 120, 133),
            (255.0, 126, 119, 132),
            (1.0, 119, 112, 125),
            (1e300, 254, 254, 254),
        ] {
            assert_eq!(scale_for(amax, Fp8::E4m3.into()), e4m3, "{amax}");
            assert_eq!(scale_for(amax, Fp8::E5m2.into()), e5m2, "{amax}");
            assert_eq!(scale_for(amax, MxElement::E2m1), e2m1, "{amax}");
        }
        assert_eq!(scale_for(0.0, Fp8::E4m3.into()), 0);
        for none in [f64::NAN, f64::INFINITY] {
            let matrix = MxMatrix::quantize(&[1.0, none], 2, Fp8::E4m3);
            assert_eq!(matrix.scales, [NAN]);
            assert!(matrix.decode().iter().all(|value| value.is_nan()));
        }
        // What lies between the format's largest number and the next power of two saturates.
        assert_eq!(MxMatrix::quantize(&[500.0, 1.0], 2, Fp8::E4m3).decode(), [448.0, 1.0]);
        let pairs = MxMatrix::quantize(&[7.5, 0.75, -2.5], 3, MxElement::E2m1);
        assert_eq!((pairs.scales[0], pairs.decode()), (127, vec![6.0, 1.0, -2.0]));
    }

    #[test]
    fn rounded_up_no_number_saturates_and_what_is_none_does_not_count() {
        for (amax, code) in [(448.0, 127), (449.0, 128), (224.0, 126), (225.0, 127), (0.0, 1)] {
            assert_eq!(ScaleRule::Up.scale_of(&[amax], Fp8::E4m3.into()), code, "{amax}");
        }
        let [mixed, e5m2] = [Fp8::E4m3, Fp8::E5m2].map(|format| {
            let values = [1.0, f64::NAN, -3.0, f64::INFINITY];
            MxMatrix::quantize_by(ScaleRule::Up, &values, 4, format).decode()
        });
        for values in [mixed, e5m2] {
            assert_eq!([values[0], values[2]], [1.0, -3.0]);
            assert!(values[1].is_nan() && values[3].is_nan(), "{values:?}");
        }
    }

    #[test]
    fn every_block_of_a_row_has_its_scale_and_the_last_may_be_short() {
        let values: Vec<f64> = (0..80).map(|at| if at < 40 { 1.0 } else { 1024.0 }).collect();
        let matrix = MxMatrix::quantize(&values, 40, Fp8::E4m3);
        assert_eq!(matrix.scales, [119, 119, 129, 129]);
        assert_eq!(matrix.decode(), values);
        let mixed = MxMatrix::quantize(&[vec![1.0; 32], vec![1024.0; 8]].concat(), 40, Fp8::E5m2);
        assert_eq!(mixed.scales, [112, 122]);
    }

    #[test]
    fn blocks_keep_the_ratio_that_one_scale_for_all_loses() {
        let mut values = normal(3, 4096, 1.0, Storage::F32);
        // Rows of very different size.
        for (row, values) in values.chunks_exact_mut(64).enumerate() {
            values.iter_mut().for_each(|value| *value *= 2f64.powi(-(row as i32)));
        }
        let back = MxMatrix::quantize(&values, 64, Fp8::E4m3).decode();
        for (back, values) in back.chunks_exact(64).zip(values.chunks_exact(64)) {
            assert!(sqnr_db(back, values) > 26.0, "{}", sqnr_db(back, values));
        }
    }
}
