//! What the host knows of the products of a pass: pixels, taps, and how they walk.

use super::{
    ConvPass, ConvProblem,
    gather::{GatherLaunch, ImageStridesLaunch, WeightStridesLaunch},
};
use crate::divisor::divisor;

/// One product: a grid of pixels and the taps that they meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Rows and columns of the grid in each image.
    pub(super) grid: [usize; 2],
    /// Rows and columns of taps; 0 where no tap meets the pixels, whose sums are zero then.
    pub(super) taps: [usize; 2],
    /// Pixels of the gathered image from one pixel of the grid to the next.
    pub(super) scale: [usize; 2],
    /// Where the first tap of the first pixel stands.
    pub(super) shift: [isize; 2],
    /// From one tap to the next.
    pub(super) step: [isize; 2],
    /// First tap of the weights, and distance to the next.
    first_tap: [usize; 2],
    tap_step: [usize; 2],
    /// First pixel of the output, and distance to the next.
    first_pixel: [usize; 2],
    pixel_step: [usize; 2],
}

/// What one dimension of a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    pixels: usize,
    taps: usize,
    shift: isize,
    step: isize,
    first_tap: usize,
    tap_step: usize,
    first_pixel: usize,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The pixels of x that leave `residue` modulo the stride. Tap r of pixel `residue + stride i` meets pixel
/// `(residue + stride i + padding - r dilation) / stride` of dy, if that is whole: from the first such r on,
/// every `stride / gcd(stride, dilation)`-th.
fn line(problem: &ConvProblem, dim: usize, residue: usize) -> Line {
    let (stride, dilation) = (problem.options.stride[dim], problem.options.dilation[dim]);
    let (size, kernel) = (problem.input[dim], problem.kernel[dim]);
    let divisor = gcd(stride, dilation);
    let tap_step = stride / divisor;
    let start = (residue + problem.options.padding[dim][0]) as isize;
    let offset = |tap: usize| start - (tap * dilation) as isize;
    let meets = |tap: &usize| offset(*tap).rem_euclid(stride as isize) == 0;
    let first_tap = (0..tap_step.min(kernel)).find(meets);
    let taps = first_tap.map_or(0, |first| (kernel - first).div_ceil(tap_step));
    let first_tap = first_tap.unwrap_or(0);
    Line {
        pixels: size.saturating_sub(residue).div_ceil(stride),
        taps,
        // Whole, unless no tap meets the pixels.
        shift: offset(first_tap).div_euclid(stride as isize),
        step: -((dilation / divisor) as isize),
        first_tap,
        tap_step,
        first_pixel: residue,
    }
}

/// The products of the problem, whose pixels cover the output.
pub(super) fn parts(problem: &ConvProblem) -> Vec<Part> {
    let ConvProblem { options, .. } = problem;
    if problem.pass != ConvPass::Dgrad {
        return vec![Part {
            grid: problem.output,
            taps: problem.kernel,
            scale: options.stride,
            shift: [0, 1].map(|dim| -(options.padding[dim][0] as isize)),
            step: options.dilation.map(|dilation| dilation as isize),
            first_tap: [0; 2],
            tap_step: [1; 2],
            first_pixel: [0; 2],
            pixel_step: [1; 2],
        }];
    }
    let residues = |dim: usize| (0..options.stride[dim]).map(move |it| line(problem, dim, it));
    let pairs = residues(0).flat_map(|rows| residues(1).map(move |columns| [rows, columns]));
    let part = |lines: [Line; 2]| Part {
        grid: lines.map(|line| line.pixels),
        taps: lines.map(|line| line.taps),
        scale: [1; 2],
        shift: lines.map(|line| line.shift),
        step: lines.map(|line| line.step),
        first_tap: lines.map(|line| line.first_tap),
        tap_step: lines.map(|line| line.tap_step),
        first_pixel: lines.map(|line| line.first_pixel),
        pixel_step: options.stride,
    };
    pairs.map(part).filter(|part| part.grid[0] * part.grid[1] > 0).collect()
}

/// How the gathered images lie for a kernel: their distances, and channels of a group with its padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gathered {
    /// In the order n, c, h, w.
    pub(super) strides: [usize; 4],
    pub(super) channels: usize,
    pub(super) padded_channels: usize,
}

/// How weights lie for a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weights {
    pub(super) group: usize,
    pub(super) column: usize,
    pub(super) channel: usize,
    pub(super) taps: [usize; 2],
}

impl Weights {
    /// As they lie in the problem's second operand.
    pub(super) fn of(problem: &ConvProblem) -> Self {
        let by_filter = Self::by_filter(problem);
        if problem.pass != ConvPass::Dgrad {
            return by_filter;
        }
        Self { column: by_filter.channel, channel: by_filter.column, ..by_filter }
    }

    /// The same, with a filter as a column in every pass.
    pub(super) fn by_filter(problem: &ConvProblem) -> Self {
        let [k, c, r, s] = problem.second;
        Self { group: problem.group_channels()[1] * k, column: k, channel: c, taps: [r, s] }
    }
}

impl Part {
    /// Pixels of the grid, of all images.
    pub(super) fn pixels(&self, problem: &ConvProblem) -> usize {
        problem.batch * self.grid[0] * self.grid[1]
    }

    /// Taps that the pixels meet.
    pub(super) fn tap_count(&self) -> usize {
        self.taps[0] * self.taps[1]
    }

    pub(super) fn gather(&self, problem: &ConvProblem, source: &Gathered) -> GatherLaunch {
        let [height, width] = problem.gathered_size();
        let wrapped = |value: isize| value as i32 as u32;
        GatherLaunch::new(
            self.pixels(problem) as u32,
            divisor(self.grid[0] * self.grid[1]),
            divisor(self.grid[1]),
            self.taps[0] as u32,
            divisor(self.taps[1]),
            divisor(source.padded_channels),
            source.channels as u32,
            height as u32,
            width as u32,
            self.scale[0] as u32,
            self.scale[1] as u32,
            wrapped(self.shift[0]),
            wrapped(self.shift[1]),
            wrapped(self.step[0]),
            wrapped(self.step[1]),
            image_strides(source.strides),
        )
    }

    pub(super) fn weights(&self, weights: &Weights) -> WeightStridesLaunch {
        let (first, [row, column]) = self.taps_of(weights);
        WeightStridesLaunch::new(
            first as u32,
            weights.group as u32,
            weights.column as u32,
            weights.channel as u32,
            row as u32,
            column as u32,
        )
    }

    /// Where the part's first tap lies in the weights, and the distance from each of its rows and columns to the next.
    pub(super) fn taps_of(&self, weights: &Weights) -> (usize, [usize; 2]) {
        let [r, s] = weights.taps;
        let first = self.first_tap[0] * r + self.first_tap[1] * s;
        (first, [self.tap_step[0] * r, self.tap_step[1] * s])
    }

    /// Where the pixels of the grid lie in the output.
    pub(super) fn out(&self, problem: &ConvProblem) -> ImageStridesLaunch {
        let [image, channel, row, column] = problem.out_strides();
        ImageStridesLaunch::new(
            (self.first_pixel[0] * row + self.first_pixel[1] * column) as u32,
            image as u32,
            (self.pixel_step[0] * row) as u32,
            (self.pixel_step[1] * column) as u32,
            channel as u32,
        )
    }
}

/// A tensor of distances n, c, h, w that begins at its first element.
pub(super) fn image_strides([image, channel, row, column]: [usize; 4]) -> ImageStridesLaunch {
    ImageStridesLaunch::new(0, image as u32, row as u32, column as u32, channel as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conv::ConvOptions,
        matmul::{F32Precision, TensorLayout},
    };
    use cubecl::ir::{ElemType, FloatKind};

    const F32: ElemType = ElemType::Float(FloatKind::F32);

    fn dgrad(input: usize, kernel: usize, options: ConvOptions) -> ConvProblem {
        let reach = (kernel - 1) * options.dilation[0] + 1;
        let size =
            (input + options.padding[0][0] + options.padding[0][1] - reach) / options.stride[0] + 1;
        let dy = TensorLayout { shape: &[1, 1, size, size], strides: &[0, 0, size, 1], dtype: F32 };
        let weight = TensorLayout {
            shape: &[1, 1, kernel, kernel],
            strides: &[0, 0, kernel, 1],
            dtype: F32,
        };
        ConvProblem::dgrad(dy, weight, [input; 2], options, F32, F32Precision::Full).unwrap()
    }

    #[test]
    fn every_tap_that_meets_a_pixel_is_in_its_part_and_no_other() {
        for (stride, dilation, kernel, padding) in
            [(1, 1, 3, 1), (2, 1, 3, 1), (3, 1, 7, 2), (2, 2, 3, 2), (4, 6, 5, 0), (3, 2, 1, 0)]
        {
            let options = ConvOptions {
                stride: [stride; 2],
                dilation: [dilation; 2],
                padding: [[padding, padding + 1]; 2],
                groups: 1,
            };
            let input = 25;
            let problem = dgrad(input, kernel, options);
            let mut seen = vec![0; input];
            for part in parts(&problem).iter().filter(|part| part.first_pixel[1] == 0) {
                for i in 0..part.grid[0] {
                    let pixel = part.first_pixel[0] + i * stride;
                    seen[pixel] += 1;
                    let found: Vec<(usize, isize)> = (0..part.taps[0])
                        .map(|j| {
                            let met = i as isize + part.shift[0] + j as isize * part.step[0];
                            (part.first_tap[0] + j * part.tap_step[0], met)
                        })
                        .collect();
                    let expected: Vec<(usize, isize)> = (0..kernel)
                        .map(|tap| (tap, (pixel + padding) as isize - (tap * dilation) as isize))
                        .filter(|(_, at)| at.rem_euclid(stride as isize) == 0)
                        .map(|(tap, at)| (tap, at / stride as isize))
                        .collect();
                    assert_eq!(found, expected, "pixel {pixel} of {options:?}");
                }
            }
            assert_eq!(seen, vec![1; input], "{options:?}");
        }
    }

    #[test]
    fn a_strided_kernel_of_3_has_parts_of_1_2_2_and_4_taps() {
        let options =
            ConvOptions { stride: [2; 2], padding: [[1; 2]; 2], ..ConvOptions::default() };
        let mut taps: Vec<_> = parts(&dgrad(8, 3, options)).iter().map(Part::tap_count).collect();
        taps.sort_unstable();
        assert_eq!(taps, [1, 2, 2, 4]);
    }
}
