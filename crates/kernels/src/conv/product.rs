//! Convolutions that are plain products of matrices.

use super::{ConvPass, ConvProblem};
use crate::matmul::{MatmulProblem, TensorLayout};

/// Rows of the fewest pixels that are worth a matrix of their own.
const FEWEST_ROWS: usize = 64;

/// The product that the problem is: kernels of 1 by 1 without groups and padding, of pixels that follow each
/// other. Of the weights' gradient, the left operand is the second one of the convolution.
pub(super) fn product(problem: &ConvProblem) -> Option<MatmulProblem> {
    let ConvProblem { pass, options, dtype, out, f32_precision, .. } = *problem;
    let is_plain = problem.kernel == [1, 1]
        && options.groups == 1
        && options.stride == [1, 1]
        && options.padding == [[0; 2]; 2];
    if !is_plain {
        return None;
    }
    let ([n, c, h, w], [shape, _, _]) = (problem.first, problem.shapes());
    let [batch, channels, height, width] = shape;
    let layout = |shape, strides| TensorLayout { shape, strides, dtype };
    let product = if pass == ConvPass::Wgrad {
        let pixels = batch * height * width;
        let (of_x, of_dy) =
            (pixel_stride(shape, problem.first)?, pixel_stride(shape, problem.second)?);
        MatmulProblem::new(
            layout(&[problem.out_channels, pixels], &[problem.second[1], of_dy]),
            layout(&[pixels, channels], &[of_x, c]),
            out,
            f32_precision,
        )
    } else {
        let [of_k, of_c, _, _] = problem.second;
        let (columns, weights) = match pass {
            ConvPass::Dgrad => (problem.in_channels, [0, 0, of_k, of_c]),
            _ => (problem.out_channels, [0, 0, of_c, of_k]),
        };
        MatmulProblem::new(
            layout(&[batch, height, width, channels], &[n, h, w, c]),
            layout(&[1, 1, channels, columns], &weights),
            out,
            f32_precision,
        )
    };
    product.ok().filter(|product| product.batches() == 1 || product.m >= FEWEST_ROWS)
}

/// The distance from pixel to pixel of a tensor n, c, h, w, where one walks all of them.
pub(super) fn pixel_stride([n, _, h, w]: [usize; 4], strides: [usize; 4]) -> Option<usize> {
    let [image, _, row, column] = strides;
    let mut walked: Option<(usize, usize)> = None;
    for (size, stride) in [(w, column), (h, row), (n, image)] {
        match walked {
            _ if size == 1 => {}
            None => walked = Some((stride, size)),
            Some((first, count)) if stride == first * count => walked = Some((first, count * size)),
            Some(_) => return None,
        }
    }
    Some(walked.map_or(1, |(stride, _)| stride))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{conv::ConvOptions, matmul::F32Precision};
    use cubecl::ir::{ElemType, FloatKind};

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);
    const NHWC: [usize; 4] = [8 * 7 * 64, 1, 7 * 64, 64];
    const NCHW: [usize; 4] = [8 * 7 * 64, 56, 7, 1];

    fn fprop(strides: [usize; 4], kernel: usize, options: ConvOptions) -> ConvProblem {
        let x = TensorLayout { shape: &[2, 64, 8, 7], strides: &strides, dtype: BF16 };
        let strides = [64 * kernel * kernel, kernel * kernel, kernel, 1];
        let w = TensorLayout { shape: &[32, 64, kernel, kernel], strides: &strides, dtype: BF16 };
        ConvProblem::fprop(x, w, options, BF16, F32Precision::Tf32).unwrap()
    }

    #[test]
    fn a_kernel_of_1_on_neighboring_channels_is_one_product() {
        let product = product(&fprop(NHWC, 1, ConvOptions::default())).unwrap();
        assert_eq!((product.batch, product.m, product.n, product.k), ([1, 1], 112, 32, 64));
        assert_eq!((product.lhs.row_stride, product.rhs.column_stride), (64, 64));
    }

    #[test]
    fn images_of_whole_planes_are_a_batch_of_products_if_they_are_large() {
        // 56 pixels an image are few.
        assert_eq!(product(&fprop(NCHW, 1, ConvOptions::default())), None);
        let mut problem = fprop(NCHW, 1, ConvOptions::default());
        (problem.input, problem.output) = ([80, 70], [80, 70]);
        problem.first = [5600 * 64, 5600, 70, 1];
        let product = product(&problem).unwrap();
        assert_eq!((product.batch, product.m), ([1, 2], 5600));
        assert_eq!((product.lhs.row_stride, product.lhs.column_stride), (1, 5600));
    }

    #[test]
    fn what_walks_its_image_is_no_plain_product() {
        let strided = ConvOptions { stride: [2, 1], ..ConvOptions::default() };
        let padded = ConvOptions { padding: [[0, 0], [0, 1]], ..ConvOptions::default() };
        assert_eq!(product(&fprop(NHWC, 1, strided)), None);
        assert_eq!(product(&fprop(NHWC, 1, padded)), None);
        assert_eq!(product(&fprop(NHWC, 3, ConvOptions::default())), None);
    }

    #[test]
    fn pixels_are_walked_by_one_stride_or_by_none() {
        assert_eq!(pixel_stride([2, 64, 8, 7], NHWC), Some(64));
        assert_eq!(pixel_stride([2, 64, 8, 7], NCHW), None);
        assert_eq!(pixel_stride([1, 64, 8, 7], NCHW), Some(1));
        assert_eq!(pixel_stride([2, 64, 1, 1], NCHW), Some(8 * 7 * 64));
    }
}
