//! Groups of two, four or eight channels each way, which fill no tile of a matrix product: a unit computes all of a
//! group's elements, so that what it reads is read once for all of them.
//!
//! A vector has the channels of a group, and neighboring units have neighboring groups: a plane reads the channels of
//! a pixel in one piece.

use super::{
    ConvPass, ConvProblem,
    call::Call,
    gather::{
        Gather, ImageStrides, Pixel, Tap, WeightStrides, element_at, is_inside, pixel_at, shift_of,
        weight_at,
    },
    parts::{Weights, image_strides, parts},
    problem::OP,
};
use crate::{
    KernelError, ahead,
    buffer::Buffer,
    device::{ALIGNMENT_BYTES, grid},
    divisor::{Divisor, divide, divisor},
    matmul::EpilogueBlueprint,
};
use cubecl::prelude::{Sequence as Elements, *};

const UNITS: u32 = 256;
/// Groups of a cube at most: a plane's.
const MOST_LANES: usize = 32;
/// Sums of a unit that leave the registers room for weights: pixels by channels.
const SUMS: usize = 32;

/// Whether channels lie side by side in whole groups that vectors hold.
pub(super) fn serves(problem: &ConvProblem) -> bool {
    let channels = problem.group_channels();
    let is_vector = |channels: &usize| {
        matches!(channels, 2 | 4 | 8) && channels * problem.dtype.size() <= ALIGNMENT_BYTES
    };
    let is_whole = |strides: [usize; 4], channels: usize| {
        let [image, channel, row, column] = strides;
        channel == 1 && [image, row, column].into_iter().all(|it| it.is_multiple_of(channels))
    };
    let [in_channels, out_channels] = channels;
    problem.options.groups > 1
        && channels.iter().all(is_vector)
        && match problem.pass {
            ConvPass::Fprop => is_whole(problem.first, in_channels),
            ConvPass::Dgrad => is_whole(problem.first, out_channels),
            ConvPass::Wgrad => {
                is_whole(problem.first, in_channels) && is_whole(problem.second, out_channels)
            }
        }
}

/// Units of the gradient of the weights: one for each tap of each group.
pub(super) fn weight_units(problem: &ConvProblem) -> usize {
    problem.options.groups * problem.taps()
}

/// How the kernel of pixels is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupedBlueprint {
    /// Pixels of a unit.
    pixels: usize,
    /// Neighboring groups of a cube, a power of two; units along y have other pixels.
    lanes: u32,
    epilogue: EpilogueBlueprint,
}

/// `out[pixel, group, :] = bias[group, :] + sum over taps and channels of the group`, some pixels a unit. All units of a
/// cube have the same groups, whose weights of a tap they bring to shared memory together: in the device's they lie
/// apart. Cubes: pixels along x, groups along y.
#[cube(launch_unchecked)]
pub(crate) fn conv_grouped_kernel<I: Float, O: Float, C: Size, K: Size>(
    gathered: &[Vector<I, C>],
    weights: &[I],
    bias: &[O],
    out: &mut [Vector<O, K>],
    groups: u32,
    gather: Gather,
    weight_strides: WeightStrides,
    images: ImageStrides,
    #[comptime] blueprint: GroupedBlueprint,
    #[define(I, O)] _types: [ElemType; 2],
    #[define(C, K)] _widths: [usize; 2],
) {
    let (pixels, lanes) = comptime!((blueprint.pixels, blueprint.lanes));
    let (channels, columns) = (C::value().comptime(), K::value().comptime());
    let mut staged =
        Shared::<[Vector<f32, K>]>::new_slice(comptime!(channels * blueprint.lanes as usize));
    let first_group = CUBE_POS_Y * lanes;
    let group = first_group + UNIT_POS_X;
    let first = (CUBE_POS_X * comptime!(UNITS / lanes) + UNIT_POS_Y) * comptime!(pixels as u32);
    let mut all = Elements::<Pixel>::new();
    let mut sums = Array::<Vector<f32, K>>::new(pixels);
    #[unroll]
    for at in 0..pixels {
        all.push(pixel_at(first + comptime!(at as u32), &gather));
        sums[at] = Vector::new(0.0f32);
    }
    let mut weight = Array::<Vector<f32, K>>::new(channels);
    let of_group = group * comptime!(channels as u32);
    for tap_row in 0..gather.tap_rows {
        for tap_column in 0..gather.tap_columns.divisor {
            // Everyone has read the weights of the tap before.
            sync_cube();
            let mut index = UNIT_POS;
            while index < comptime!(channels as u32 * lanes) {
                let tap = Tap { row: tap_row, column: tap_column, channel: index / lanes };
                let of_lane = first_group + index % lanes;
                let mut of_columns = Vector::<f32, K>::new(0.0f32);
                if of_lane < groups {
                    #[unroll]
                    for column in 0..columns {
                        let at = of_lane * weight_strides.group
                            + weight_at(comptime!(column as u32).runtime(), &tap, &weight_strides);
                        of_columns.insert(column, f32::cast_from(weights[at as usize]));
                    }
                }
                staged[index as usize] = of_columns;
                index += UNITS;
            }
            sync_cube();
            #[unroll]
            for channel in 0..channels {
                weight[channel] = staged[(comptime!(channel as u32 * lanes) + UNIT_POS_X) as usize];
            }
            let tap = Tap { row: tap_row, column: tap_column, channel: 0u32 };
            let shift = shift_of(&tap, &gather);
            #[unroll]
            for at in 0..pixels {
                let pixel = &all[at];
                if group < groups && is_inside(pixel, &shift, &gather) {
                    let from = (pixel.element + shift.element + of_group) / channels as u32;
                    let value = Vector::<f32, C>::cast_from(gathered[from as usize]);
                    #[unroll]
                    for channel in 0..channels {
                        sums[at] =
                            fma(Vector::new(value.extract(channel)), weight[channel], sums[at]);
                    }
                }
            }
        }
    }
    let column = group * comptime!(columns as u32);
    #[unroll]
    for at in 0..pixels {
        let pixel = first + comptime!(at as u32);
        if group < groups && pixel < gather.pixels {
            let mut sum = sums[at];
            if comptime!(blueprint.epilogue.bias) {
                #[unroll]
                for lane in 0..columns {
                    let offset = bias[(column + comptime!(lane as u32)) as usize];
                    sum.insert(lane, sum.extract(lane) + f32::cast_from(offset));
                }
            }
            let to = (element_at(pixel, &gather, &images) + column) / columns as u32;
            out[to as usize] = Vector::cast_from(sum);
        }
    }
}

/// `out[split, k, tap, channel]`: the sum over the pixels of a split, all of a group's weights of a tap a unit. Units
/// count groups first; splits lie along y. `images` are the output's gradient.
#[cube(launch_unchecked)]
pub(crate) fn conv_grouped_weights_kernel<I: Float, O: Float, C: Size, K: Size>(
    gathered: &[Vector<I, C>],
    dy: &[Vector<I, K>],
    out: &mut [O],
    units: u32,
    elements: u32,
    groups: Divisor,
    split_pixels: u32,
    gather: Gather,
    images: ImageStrides,
    #[define(I, O)] _types: [ElemType; 2],
    #[define(C, K)] _widths: [usize; 2],
) {
    let index = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if index >= units {
        terminate!();
    }
    let (channels, filters) = (C::value().comptime(), K::value().comptime());
    let (tap, group) = divide(index, &groups);
    let (tap_row, tap_column) = divide(tap, &gather.tap_columns);
    let shift = shift_of(&Tap { row: tap_row, column: tap_column, channel: 0u32 }, &gather);
    let (of_group, of_filters) =
        (group * comptime!(channels as u32), group * comptime!(filters as u32));
    let mut sums = Array::<Vector<f32, K>>::new(channels);
    #[unroll]
    for channel in 0..channels {
        sums[channel] = Vector::new(0.0f32);
    }
    let first = CUBE_POS_Y * split_pixels;
    for at in first..min(first + split_pixels, gather.pixels) {
        let pixel = pixel_at(at, &gather);
        let mut value = Vector::<f32, C>::new(0.0f32);
        if is_inside(&pixel, &shift, &gather) {
            let from = (pixel.element + shift.element + of_group) / channels as u32;
            value = Vector::cast_from(gathered[from as usize]);
        }
        let from = (element_at(at, &gather, &images) + of_filters) / filters as u32;
        let gradient = Vector::<f32, K>::cast_from(dy[from as usize]);
        #[unroll]
        for channel in 0..channels {
            sums[channel] = fma(Vector::new(value.extract(channel)), gradient, sums[channel]);
        }
    }
    let taps = gather.tap_rows * gather.tap_columns.divisor;
    #[unroll]
    for filter in 0..filters {
        let row = ((of_filters + comptime!(filter as u32)) * taps + tap) * gather.channels;
        #[unroll]
        for channel in 0..channels {
            let to = CUBE_POS_Y * elements + row + comptime!(channel as u32);
            out[to as usize] = O::cast_from(sums[channel].extract(filter));
        }
    }
}

impl Call<'_> {
    /// Of memory that does not begin with a whole vector, units compute single elements.
    pub(super) fn grouped(&self, splits: usize, out: &Buffer) -> Result<(), KernelError> {
        let [in_channels, out_channels] = self.problem.group_channels();
        let [first, second] = self.operands;
        let vectors = match self.problem.pass {
            ConvPass::Fprop => vec![(first, in_channels)],
            ConvPass::Dgrad => vec![(first, out_channels)],
            ConvPass::Wgrad => vec![(first, in_channels), (second, out_channels)],
        };
        if !self.begins_whole(&vectors) {
            return self.direct(splits, out);
        }
        match self.problem.pass {
            ConvPass::Wgrad => self.grouped_weights(splits, out),
            ConvPass::Fprop | ConvPass::Dgrad => self.grouped_pixels(out),
        }
    }

    /// Whether memory begins with a whole vector.
    fn begins_whole(&self, operands: &[(&Buffer, usize)]) -> bool {
        let bytes = self.problem.dtype.size();
        operands.iter().all(|(buffer, channels)| {
            buffer.offset_bytes().is_multiple_of((channels * bytes) as u64)
        })
    }

    fn grouped_pixels(&self, out: &Buffer) -> Result<(), KernelError> {
        let problem = self.problem;
        let gathered = self.gathered();
        let groups = problem.options.groups;
        for part in parts(problem) {
            let [pixels, columns, _] = self.sizes(&part, gathered.channels);
            let lanes = groups.next_power_of_two().min(MOST_LANES);
            let kernel = GroupedBlueprint {
                pixels: SUMS / columns,
                lanes: lanes as u32,
                epilogue: self.epilogue(),
            };
            let of_cube = kernel.pixels * UNITS as usize / lanes;
            let cubes = [pixels.div_ceil(of_cube), groups.div_ceil(lanes), 1];
            // SAFETY: the operands hold the spans of the problem, whose distances are whole vectors, the bias the
            // output's channels, and `out` was allocated for the problem; the kernel stops pixels and groups at their
            // ends.
            ahead::launch(self.client, |client| unsafe {
                conv_grouped_kernel::launch_unchecked(
                    client,
                    grid(OP, self.client, cubes)?,
                    CubeDim::new_2d(lanes as u32, UNITS / lanes as u32),
                    self.operands[0].arg(gathered.channels),
                    self.operands[1].arg(1),
                    self.bias.unwrap_or(self.operands[0]).arg(1),
                    out.arg(columns),
                    groups as u32,
                    part.gather(problem, &gathered),
                    part.weights(&Weights::of(problem)),
                    part.out(problem),
                    kernel,
                    [problem.dtype, out.dtype],
                    [gathered.channels, columns],
                );
                Ok(())
            })?;
        }
        Ok(())
    }

    fn grouped_weights(&self, splits: usize, out: &Buffer) -> Result<(), KernelError> {
        let problem = self.problem;
        let [channels, filters] = problem.group_channels();
        let units = weight_units(problem);
        let cubes = [units.div_ceil(UNITS as usize), splits, 1];
        for part in parts(problem) {
            // SAFETY: as in `grouped_pixels`.
            ahead::launch(self.client, |client| unsafe {
                conv_grouped_weights_kernel::launch_unchecked(
                    client,
                    grid(OP, self.client, cubes)?,
                    CubeDim::new_1d(UNITS),
                    self.operands[0].arg(channels),
                    self.operands[1].arg(filters),
                    out.arg(1),
                    units as u32,
                    problem.out_elements() as u32,
                    divisor(problem.options.groups),
                    problem.out_pixels().div_ceil(splits) as u32,
                    part.gather(problem, &self.gathered()),
                    image_strides(problem.second),
                    [problem.dtype, out.dtype],
                    [channels, filters],
                );
                Ok(())
            })?;
        }
        Ok(())
    }
}
