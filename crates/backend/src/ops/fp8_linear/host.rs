//! The primitives in plain Rust: for the CPU.

use super::{Format, Fp8Matrix, Layout, Product, Rounding, Scaling, primitives::padded_row};
use crate::tensors::Optional;
use burn::{
    backend::{
        Backend, ExecutionError, TensorMetadata,
        tensor::{FloatTensor, IntTensor},
        try_read_sync,
    },
    tensor::{DType, TensorData},
};

/// Elements along a row that share a scale, where blocks have scales.
const BLOCK: usize = 32;

#[cfg(feature = "flex")]
impl super::Fp8Primitives for burn::backend::Flex {
    fn fp8_quantize(x: FloatTensor<Self>, rounding: Rounding, layout: Layout) -> Fp8Matrix<Self> {
        let [copy] = quantize(x, rounding, [layout]);
        copy
    }

    fn fp8_quantize_both(
        x: FloatTensor<Self>,
        rounding: Rounding,
    ) -> (Fp8Matrix<Self>, Fp8Matrix<Self>) {
        quantize(x, rounding, [Layout::Rows, Layout::Transposed]).into()
    }

    fn fp8_matmul(
        lhs: Fp8Matrix<Self>,
        rhs: Fp8Matrix<Self>,
        bias: Optional<Self>,
        how: Product,
    ) -> FloatTensor<Self> {
        matmul(lhs, rhs, bias, how)
    }
}

/// Rounds a matrix and stores it in each of `layouts`.
pub(super) fn quantize<B: Backend, const N: usize>(
    x: FloatTensor<B>,
    rounding: Rounding,
    layouts: [Layout; N],
) -> [Fp8Matrix<B>; N] {
    let device = x.device();
    let shape = x.shape();
    let (rows, columns) = (shape[0], shape[1]);
    let x = floats::<B>(x);
    // NaN is no smaller than anything, and stays.
    let larger = |a: f32, v: &f32| if a.is_nan() || v.abs() <= a { a } else { v.abs() };
    let amax = x.iter().fold(0.0, larger);
    let of_tensor = scale_for(amax, rounding);
    layouts.map(|layout| {
        let (rows, columns, row_stride, column_stride) = match layout {
            Layout::Rows => (rows, columns, columns, 1),
            Layout::Transposed => (columns, rows, 1, columns),
        };
        let pitch = padded_row(columns);
        let mut codes = vec![0u8; rows * pitch];
        let mut scales = Vec::new();
        for (r, row) in codes.chunks_exact_mut(pitch).enumerate() {
            for (b, codes) in row[..columns].chunks_mut(BLOCK).enumerate() {
                let value = |c: usize| x[r * row_stride + (b * BLOCK + c) * column_stride];
                let scale = match rounding.scaling {
                    Scaling::Tensor => of_tensor,
                    Scaling::Blocks => block_scale((0..codes.len()).map(value), rounding.format),
                };
                scales.push(1.0 / scale);
                for (c, code) in codes.iter_mut().enumerate() {
                    *code = rounding.format.encode(scale * value(c));
                }
            }
        }
        if rounding.scaling == Scaling::Tensor {
            scales = vec![1.0 / of_tensor, amax];
        }
        let count = scales.len();
        Fp8Matrix {
            codes: B::int_from_data(TensorData::new(codes, [rows, pitch]), &device),
            scale: B::float_from_data(TensorData::new(scales, [count]), &device),
            rows,
            columns,
            format: rounding.format,
            scaling: rounding.scaling,
        }
    })
}

/// `lhs rhs^T + bias` in f32, rounded once.
pub(super) fn matmul<B: Backend>(
    lhs: Fp8Matrix<B>,
    rhs: Fp8Matrix<B>,
    bias: Optional<B>,
    how: Product,
) -> FloatTensor<B> {
    let device = lhs.scale.device();
    // A tensor's scale meets the sums, and those of blocks the numbers.
    let scale = |matrix: &Fp8Matrix<B>| match matrix.scaling {
        Scaling::Tensor => floats::<B>(matrix.scale.clone())[0],
        Scaling::Blocks => 1.0,
    };
    let scale = scale(&lhs) * scale(&rhs);
    let decoded = |matrix: Fp8Matrix<B>| {
        let shape = [matrix.rows, matrix.columns];
        let pitch = padded_row(matrix.columns);
        let codes = bytes::<B>(matrix.codes);
        let rows = codes.chunks_exact(pitch).map(|row| &row[..matrix.columns]);
        let mut numbers: Vec<f32> =
            rows.flatten().map(|code| matrix.format.decode(*code)).collect();
        if matrix.scaling == Scaling::Blocks {
            let rows = numbers.chunks_exact_mut(matrix.columns);
            let blocks = rows.flat_map(|row| row.chunks_mut(BLOCK));
            for (block, scale) in blocks.zip(floats::<B>(matrix.scale)) {
                block.iter_mut().for_each(|number| *number *= scale);
            }
        }
        B::float_from_data(TensorData::new(numbers, shape), &device)
    };
    let outputs = rhs.rows;
    let product = B::float_matmul(decoded(lhs), B::float_transpose(decoded(rhs)));
    let mut y = B::float_mul_scalar(product, scale.into());
    if let Optional::Present(bias) = bias {
        let bias = B::float_cast(bias, DType::F32.into());
        y = B::float_add(y, B::float_reshape(bias, [1, outputs].into()));
    }
    if how.out == DType::F32 { y } else { B::float_cast(y, how.out.into()) }
}

/// The factor that takes `amax` to the format's largest number, less the margin; 1 where there is
/// none.
fn scale_for(amax: f32, rounding: Rounding) -> f32 {
    let target = rounding.format.max_finite() * (-f64::from(rounding.margin)).exp2() as f32;
    let scale = target / amax;
    if amax > 0.0 && amax.is_finite() && scale.is_finite() { scale } else { 1.0 }
}

/// The factor that takes no number of a block beyond the format's largest: the largest such power of two, and at most
/// 2^126. NaN and infinity do not count.
fn block_scale(values: impl Iterator<Item = f32>, format: Format) -> f32 {
    let numbers = values.map(f32::abs).filter(|magnitude| magnitude.is_finite());
    let amax = numbers.fold(0.0, f32::max);
    // Mantissas above that of the format's largest number count as the next power of two.
    let above = (1 << 23) - 1 - (format.max_finite().to_bits() & ((1 << 23) - 1));
    let exponent = (amax.to_bits() + above) >> 23;
    let most = format.max_finite().to_bits() >> 23;
    // Of 127 + 127 - the exponent's field less that of the largest number.
    f32::from_bits((254 - (exponent + 127).saturating_sub(most).max(1)) << 23)
}

fn floats<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    read(try_read_sync(B::float_into_data(tensor))).iter::<f32>().collect()
}

fn bytes<B: Backend>(tensor: IntTensor<B>) -> Vec<u8> {
    read(try_read_sync(B::int_into_data(tensor))).iter::<u8>().collect()
}

fn read(data: Option<Result<TensorData, ExecutionError>>) -> TensorData {
    data.expect("this backend reads its memory without waiting")
        .unwrap_or_else(|error| panic!("fp8::linear: its tensors could not be read: {error}"))
}

impl Format {
    fn max_finite(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
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

    /// The code of `value`, rounded to nearest with ties to even. What is too large becomes the
    /// largest finite number; infinity and NaN become the code that GPUs give NaN.
    fn encode(self, value: f32) -> u8 {
        const NAN: u8 = 0x7f;
        if !value.is_finite() {
            return NAN;
        }
        let magnitude = value.abs().min(self.max_finite());
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(self.min_exponent());
        // Both factors are powers of two, so nothing is rounded before `round_ties_even`.
        let unit = f32::from_bits(((127 - exponent + self.mantissa_bits()) as u32) << 23);
        let significand = (magnitude * unit).round_ties_even() as i32;
        // The leading bit adds 1 to the field of the exponent, which counts normal ones from 1.
        let code = ((exponent - self.min_exponent()) << self.mantissa_bits()) + significand;
        code as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
    }

    /// The number that `code` stands for.
    fn decode(self, code: u8) -> f32 {
        let magnitude = i32::from(code & 0x7f);
        let largest = i32::from(self.encode(f32::MAX));
        let number = if magnitude <= largest {
            let field = magnitude >> self.mantissa_bits();
            let mantissa = magnitude & ((1 << self.mantissa_bits()) - 1);
            let leading = if field == 0 { 0 } else { 1 << self.mantissa_bits() };
            let exponent = self.min_exponent() + field.max(1) - 1 - self.mantissa_bits();
            (leading + mantissa) as f32 * f32::from_bits(((127 + exponent) as u32) << 23)
        } else if self == Self::E5m2 && magnitude == largest + 1 {
            f32::INFINITY
        } else {
            f32::NAN
        };
        if code & 0x80 == 0 { number } else { -number }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_keeps_its_code() {
        for format in [Format::E4m3, Format::E5m2] {
            for code in 0..=u8::MAX {
                let number = format.decode(code);
                if number.is_finite() {
                    assert_eq!(format.encode(number), code, "{format:?} {number}");
                }
            }
        }
    }

    #[test]
    fn values_round_to_the_nearest_number_and_saturate_and_what_is_not_finite_is_nan() {
        let e4m3 = [17.0, 19.0, 1e9, -f32::MAX, 0.000_976_562_5, 0.002_929_687_5, 1e-40];
        assert_eq!(
            e4m3.map(|value| Format::E4m3.decode(Format::E4m3.encode(value))),
            [16.0, 20.0, 448.0, -448.0, 0.0, 0.003_906_25, 0.0]
        );
        for format in [Format::E4m3, Format::E5m2] {
            let codes = [f32::NAN, f32::INFINITY, -f32::INFINITY].map(|x| format.encode(x));
            assert_eq!(codes, [0x7f; 3]);
        }
        assert!(Format::E5m2.decode(0x7f).is_nan() && Format::E4m3.decode(0xff).is_nan());
        assert_eq!(Format::E5m2.decode(0xfc), f32::NEG_INFINITY);
    }

    #[test]
    fn no_number_of_a_block_saturates() {
        for (amax, factor) in
            [(448.0, 1.0), (449.0, 0.5), (-224.0, 2.0), (225.0, 1.0), (1e-40, 2f32.powi(126))]
        {
            let values = [0.5 * amax, f32::NAN, amax, f32::INFINITY];
            assert_eq!(block_scale(values.into_iter(), Format::E4m3), factor, "{amax}");
        }
        assert_eq!(block_scale([57345.0, 1.0].into_iter(), Format::E5m2), 0.5);
        assert_eq!(block_scale([f32::NAN].into_iter(), Format::E5m2), 2f32.powi(126));
    }

    #[test]
    fn a_scale_that_does_not_exist_is_1() {
        let rounding = Rounding { format: Format::E4m3, margin: 1, scaling: Scaling::Tensor };
        assert_eq!(scale_for(7.0, rounding), 32.0);
        for amax in [0.0, f32::NAN, f32::INFINITY, 1e-40] {
            assert_eq!(scale_for(amax, rounding), 1.0, "{amax}");
        }
    }
}
