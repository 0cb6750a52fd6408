//! What TMA's maps of the form im2col can express (PTX ISA, "Im2col mode"; CUDA driver API,
//! `cuTensorMapEncodeIm2col`).
//!
//! A map has a box for the pixels at which a tap may stand, in each image. A copy begins at a pixel of the box and
//! goes on by its columns, rows and images, a stride at a time, until it has as many as the map says; each is
//! read an offset away, which belongs to the tap and is not negative. Taps that walk back are therefore counted
//! from the last one, which is the first in the image.

use super::{ConvProblem, parts::Part};
use std::ops::RangeInclusive;

/// The boxes' corners have to lie within these, from the image's first pixel and from its last one.
const CORNERS: RangeInclusive<i32> = -128..=127;
/// The farthest offset of a tap.
const FARTHEST: isize = 255;
/// The largest stride.
const WIDEST_STRIDE: usize = 8;

/// The box in which a part's pixels stand with the tap that is first in the image; rows, then columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PixelBox {
    /// The first pixel.
    pub(super) lower: [i32; 2],
    /// The last one, from the image's last.
    pub(super) upper: [i32; 2],
    /// Pixels from one to the next.
    pub(super) stride: [usize; 2],
}

impl PixelBox {
    /// The box of a part, or of its pixels alone where no tap meets them; `None` where no map has it.
    pub(super) fn of(problem: &ConvProblem, part: &Part) -> Option<Self> {
        let size = problem.gathered_size();
        let corners = |dim: usize| {
            let reach = part.taps[dim].saturating_sub(1) as isize * part.step[dim];
            let lower = part.shift[dim] + reach.min(0);
            // A whole number of strides, so that it does not matter which way they are counted.
            let upper = lower + (part.grid[dim] * part.scale[dim]) as isize - size[dim] as isize;
            let (lower, upper) = (i32::try_from(lower).ok()?, i32::try_from(upper).ok()?);
            (reach.abs() <= FARTHEST).then_some([lower, upper])
        };
        let ([above, below], [left, right]) = (corners(0)?, corners(1)?);
        let found = Self { lower: [above, left], upper: [below, right], stride: part.scale };
        found.has_map().then_some(found)
    }

    fn has_map(&self) -> bool {
        self.lower.iter().chain(&self.upper).all(|corner| CORNERS.contains(corner))
            && self.stride.iter().all(|stride| *stride <= WIDEST_STRIDE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conv::{ConvOptions, ConvPass, parts::parts},
        matmul::{F32Precision, TensorLayout},
    };
    use cubecl::ir::{ElemType, FloatKind};

    fn problem(pass: ConvPass, options: ConvOptions, [input, kernel]: [usize; 2]) -> ConvProblem {
        let dtype = ElemType::Float(FloatKind::BF16);
        let [[above, below], _] = options.padding;
        let reach = (kernel - 1) * options.dilation[0] + 1;
        let out = (input + above + below - reach) / options.stride[0] + 1;
        let image = |size: usize| ([2, 64, size, size], [size * size * 64, 1, size * 64, 64]);
        let ((x, x_strides), (y, y_strides)) = (image(input), image(out));
        let x = TensorLayout { shape: &x, strides: &x_strides, dtype };
        let dy = TensorLayout { shape: &y, strides: &y_strides, dtype };
        let taps = kernel * kernel;
        let (w, strides) = ([64, 64, kernel, kernel], [64 * taps, taps, kernel, 1]);
        let w = TensorLayout { shape: &w, strides: &strides, dtype };
        let precision = F32Precision::Tf32;
        match pass {
            ConvPass::Fprop => ConvProblem::fprop(x, w, options, dtype, precision),
            ConvPass::Dgrad => ConvProblem::dgrad(dy, w, [input; 2], options, dtype, precision),
            ConvPass::Wgrad => ConvProblem::wgrad(x, dy, [kernel; 2], options, dtype, precision),
        }
        .unwrap()
    }

    /// Where the taps of every pixel of a column of the grid stand, by the box, and by the part.
    fn check(pass: ConvPass, options: ConvOptions, sizes: [usize; 2]) {
        let problem = problem(pass, options, sizes);
        for part in parts(&problem) {
            let found = PixelBox::of(&problem, &part).unwrap();
            let size = problem.gathered_size()[0] as isize;
            let (first, last) = (found.lower[0] as isize, size - 1 + found.upper[0] as isize);
            let pixels: Vec<isize> = (first..=last).step_by(found.stride[0]).collect();
            assert_eq!(pixels.len(), part.grid[0]);
            let back = (part.step[0] * part.taps[0].saturating_sub(1) as isize).min(0);
            for (i, pixel) in pixels.into_iter().enumerate() {
                for tap in 0..part.taps[0] as isize {
                    let offset = tap * part.step[0] - back;
                    assert!((0..=FARTHEST).contains(&offset));
                    let expected =
                        (i * part.scale[0]) as isize + part.shift[0] + tap * part.step[0];
                    assert_eq!(pixel + offset, expected, "{pass:?} {options:?} {sizes:?}");
                }
            }
        }
    }

    #[test]
    fn boxes_hold_the_pixels_of_the_grid_and_offsets_lead_to_their_taps() {
        for (stride, dilation, padding) in
            [(1, 1, [1, 1]), (2, 1, [1, 1]), (1, 2, [2, 2]), (3, 2, [0, 3]), (2, 3, [4, 1])]
        {
            let options = ConvOptions {
                stride: [stride; 2],
                dilation: [dilation; 2],
                padding: [padding; 2],
                groups: 1,
            };
            for sizes in [[13, 3], [14, 3], [16, 5], [17, 1]] {
                check(ConvPass::Fprop, options, sizes);
                check(ConvPass::Wgrad, options, sizes);
                check(ConvPass::Dgrad, options, sizes);
            }
        }
    }

    #[test]
    fn what_no_map_can_express_has_no_box() {
        let has_box = |options: ConvOptions, sizes| {
            let problem = problem(ConvPass::Fprop, options, sizes);
            parts(&problem).iter().all(|part| PixelBox::of(&problem, part).is_some())
        };
        let of = |stride, dilation, padding| ConvOptions {
            stride: [stride; 2],
            dilation: [dilation; 2],
            padding: [[padding; 2]; 2],
            groups: 1,
        };
        assert!(has_box(of(8, 1, 120), [40, 3]) && !has_box(of(9, 1, 1), [40, 3]));
        assert!(has_box(of(1, 1, 128), [40, 3]) && !has_box(of(1, 1, 129), [40, 3]));
        assert!(has_box(of(1, 127, 127), [300, 3]) && !has_box(of(1, 128, 128), [300, 3]));
    }
}
