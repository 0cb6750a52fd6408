//! Matrices in MXFP8: elements of 8 bits, of which 32 of a row share a scale, a power of two.
//!
//! Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.3.

use crate::fp8::Fp8;

/// Elements of a row that share a scale; the last ones of a row may be fewer.
pub const SCALED_BY: usize = 32;

/// The code of the scale that is no number.
const NAN: u8 = u8::MAX;

/// A matrix in MXFP8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MxMatrix {
    /// Type of the elements.
    pub format: Fp8,
    /// Elements of a row.
    pub columns: usize,
    /// Codes of the elements, row by row.
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

/// The scale of numbers whose largest magnitude is `amax`: the power of two that takes amax between the largest power
/// of two of the format and the next one. NaN where amax is not finite.
fn scale_for(amax: f64, format: Fp8) -> u8 {
    // The exponent of the format's largest number.
    let most = match format {
        Fp8::E4m3 => 8,
        Fp8::E5m2 => 15,
    };
    if !amax.is_finite() {
        return NAN;
    }
    // A zero and subnormal numbers have the least exponent.
    let exponent = ((amax.to_bits() >> 52) as i32 - 1023) - most;
    (exponent + 127).clamp(0, 254) as u8
}

impl MxMatrix {
    /// `values` in rows of so many `columns`, rounded: each to the nearest element at its block's scale, saturating.
    /// Blocks with NaN or infinity have the scale NaN.
    ///
    /// # Panics
    ///
    /// When the last row is not whole.
    pub fn quantize(values: &[f64], columns: usize, format: Fp8) -> Self {
        assert!(values.len().is_multiple_of(columns), "{} values of {columns}", values.len());
        let (mut elements, mut scales) = (Vec::with_capacity(values.len()), Vec::new());
        for block in values.chunks_exact(columns).flat_map(|row| row.chunks(SCALED_BY)) {
            let larger = |a: f64, v: &f64| if v.is_nan() { f64::NAN } else { a.max(v.abs()) };
            let amax =
                block.iter().fold(0.0, |a: f64, v| if a.is_nan() { a } else { larger(a, v) });
            let code = scale_for(amax, format);
            let factor = if code == NAN { 1.0 } else { scale(code) };
            let scaled: Vec<f64> = block.iter().map(|value| value / factor).collect();
            elements.extend(format.encode(&scaled));
            scales.push(code);
        }
        Self { format, columns, elements, scales }
    }

    /// The numbers that elements and scales stand for.
    pub fn decode(&self) -> Vec<f64> {
        let rows = self.format.decode(&self.elements);
        let row_scales = self.columns.div_ceil(SCALED_BY);
        let of = |at: usize| at / self.columns * row_scales + at % self.columns / SCALED_BY;
        rows.iter().enumerate().map(|(at, value)| value * scale(self.scales[of(at)])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::normal, storage::Storage, tolerance::sqnr_db};

    #[test]
    fn the_largest_number_of_a_block_sets_its_scale() {
        for (amax, e4m3, e5m2) in [
            (448.0, 127, 120),
            (256.0, 127, 120),
            (255.0, 126, 119),
            (1.0, 119, 112),
            (1e300, 254, 254),
        ] {
            assert_eq!(scale_for(amax, Fp8::E4m3), e4m3, "{amax}");
            assert_eq!(scale_for(amax, Fp8::E5m2), e5m2, "{amax}");
        }
        assert_eq!(scale_for(0.0, Fp8::E4m3), 0);
        for none in [f64::NAN, f64::INFINITY] {
            let matrix = MxMatrix::quantize(&[1.0, none], 2, Fp8::E4m3);
            assert_eq!(matrix.scales, [NAN]);
            assert!(matrix.decode().iter().all(|value| value.is_nan()));
        }
        // What lies between the format's largest number and the next power of two saturates.
        assert_eq!(MxMatrix::quantize(&[500.0, 1.0], 2, Fp8::E4m3).decode(), [448.0, 1.0]);
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
