//! Matrices in NVFP4: elements of 4 bits, of which 16 of a row share a scale in E4M3, and all a scale in f32.
//!
//! ```text
//! tensor scale = amax / (6 x 448)
//! block scale  = amax of the block / 6 / tensor scale, rounded to E4M3
//! element      = value / (block scale x tensor scale), rounded to E2M1
//! ```
//!
//! 6 and 448 are the largest numbers of E2M1 and of E4M3, so that the largest block's scale is the largest number.
//!
//! Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).

use crate::{fp4, fp8::Fp8, mx::with_scales, small_float::largest, storage::Storage};

/// Elements of a row that share a scale; the last ones of a row may be fewer.
pub const SCALED_BY: usize = 16;

/// The code of the scale that is no number.
const NAN: u8 = 0x7f;

/// A matrix in NVFP4.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Matrix {
    /// Elements of a row.
    pub columns: usize,
    /// Codes of the elements, row by row, each in a byte: [`fp4::pack`] has two in one.
    pub elements: Vec<u8>,
    /// Codes of the scales, `columns / 16` rounded up for each row, without signs.
    pub scales: Vec<u8>,
    /// The scale of all, a number of f32.
    pub tensor_scale: f64,
}

/// The scale of a tensor whose largest finite magnitude is `amax`, in f32: 1 where it would be none.
fn tensor_scale_for(amax: f64) -> f64 {
    let scale = Storage::F32.round(amax / (fp4::MAX_FINITE * Fp8::E4m3.max_finite()));
    if scale.is_finite() && scale > 0.0 { scale } else { 1.0 }
}

impl Nvfp4Matrix {
    /// `values` in rows of so many `columns`, rounded. Blocks with NaN or infinity have the scale NaN, and take no part
    /// in the scale of all; those that are too small for a scale are zeros.
    ///
    /// # Panics
    ///
    /// When the last row is not whole.
    pub fn quantize(values: &[f64], columns: usize) -> Self {
        assert!(values.len().is_multiple_of(columns), "{} values of {columns}", values.len());
        let finite: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        let tensor_scale = tensor_scale_for(largest(&finite));
        let (mut elements, mut scales) = (Vec::with_capacity(values.len()), Vec::new());
        for block in values.chunks_exact(columns).flat_map(|row| row.chunks(SCALED_BY)) {
            let amax = largest(block);
            let code = match amax.is_finite() {
                true => Fp8::E4m3.encode(&[amax / fp4::MAX_FINITE / tensor_scale])[0],
                false => NAN,
            };
            let factor = Fp8::E4m3.decode(&[code])[0] * tensor_scale;
            // A block whose scale is no positive number has no elements to tell.
            let scaled = |value: &f64| if factor > 0.0 { value / factor } else { 0.0 };
            elements.extend(fp4::encode(&block.iter().map(scaled).collect::<Vec<_>>()));
            scales.push(code);
        }
        Self { columns, elements, scales, tensor_scale }
    }

    /// The numbers that elements and scales of blocks stand for: those of the matrix, without the scale of all.
    pub fn decode_blocks(&self) -> Vec<f64> {
        let scales = Fp8::E4m3.decode(&self.scales);
        with_scales(&fp4::decode(&self.elements), self.columns, &scales, SCALED_BY)
    }

    /// The numbers that elements and scales stand for.
    pub fn decode(&self) -> Vec<f64> {
        self.decode_blocks().into_iter().map(|value| value * self.tensor_scale).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::normal, tolerance::sqnr_db};

    #[test]
    fn the_largest_block_has_the_largest_scale_and_others_theirs() {
        let mut values = vec![0.0; 48];
        values[3] = -2688.0;
        values[16] = 6.0;
        values[17] = 3.0;
        values[32] = 9.0;
        let matrix = Nvfp4Matrix::quantize(&values, 48);
        assert_eq!(matrix.tensor_scale, 1.0);
        // 448, 1 and 1.5.
        assert_eq!(matrix.scales, [0x7e, 0x38, 0x3c]);
        assert_eq!(matrix.decode(), values);
        assert_eq!(matrix.elements[3], 0xf);
        let halved: Vec<f64> = values.iter().map(|value| 0.5 * value).collect();
        let halved = Nvfp4Matrix::quantize(&halved, 48);
        assert_eq!((halved.tensor_scale, &halved.scales), (0.5, &matrix.scales));
        assert_eq!(halved.decode_blocks(), values);
    }

    #[test]
    fn scales_are_rounded_and_elements_by_the_rounded_scale() {
        // A block of amax 6.3 has the scale 1.05, which is rounded to 1: its largest element saturates.
        let mut values = vec![0.0; 32];
        (values[0], values[16], values[17]) = (2688.0, 6.3, 2.4);
        let matrix = Nvfp4Matrix::quantize(&values, 32);
        assert_eq!(matrix.scales, [0x7e, 0x38]);
        assert_eq!(matrix.decode()[16..18], [6.0, 2.0]);
    }

    #[test]
    fn the_last_block_of_a_row_may_be_short_and_blocks_end_with_rows() {
        let values: Vec<f64> = (0..40).map(|at| if at < 20 { 6.0 } else { 2688.0 }).collect();
        let matrix = Nvfp4Matrix::quantize(&values, 20);
        assert_eq!(matrix.scales, [0x38, 0x38, 0x7e, 0x7e]);
        assert_eq!(matrix.decode(), values);
    }

    #[test]
    fn what_is_no_number_spoils_its_block_alone_and_zeros_stay() {
        let mut values = vec![6.0; 64];
        (values[1], values[17]) = (f64::NAN, f64::INFINITY);
        values[32..48].fill(0.0);
        let matrix = Nvfp4Matrix::quantize(&values, 64);
        assert_eq!(matrix.scales, [NAN, NAN, 0, 0x7e]);
        let back = matrix.decode();
        assert!(back[..32].iter().all(|value| value.is_nan()));
        assert_eq!((back[32], back[63]), (0.0, f64::from(6.0f32 / 2688.0) * 448.0 * 6.0));
        let zeros = Nvfp4Matrix::quantize(&[0.0; 16], 16);
        assert_eq!((zeros.tensor_scale, zeros.decode()), (1.0, vec![0.0; 16]));
    }

    #[test]
    fn random_values_keep_their_ratio_to_the_error() {
        let values = normal(3, 4096, 1.0, Storage::F32);
        let back = Nvfp4Matrix::quantize(&values, 64).decode();
        // A uniform error of a quarter of the block's largest step leaves about 20 dB.
        assert!(sqnr_db(&back, &values) > 19.0, "{}", sqnr_db(&back, &values));
    }
}
