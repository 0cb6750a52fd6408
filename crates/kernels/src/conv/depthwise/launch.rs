//! Launches: how tiles walk the images, and one kernel for each pass, or two for the gradient of the weights.

use super::{
    DepthwiseBlueprint,
    blueprint::{CUBES, Chunks, vector_width},
    line::Line,
    pixels::{CanvasLaunch, PixelTile, TapStridesLaunch, UNITS, WalkLaunch, conv_depthwise_kernel},
    weights::{
        SUM_ELEMENTS, SUM_LANES, WeightTile, conv_depthwise_sum_kernel,
        conv_depthwise_weights_kernel,
    },
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, F32},
    conv::{
        ConvPass, ConvProblem,
        call::Call,
        gather::ImageStridesLaunch,
        parts::Weights,
        problem::{OP, unsupported},
    },
    device::{grid, widest_vector},
    divisor::{DIVIDEND_LIMIT, divisor},
};
use cubecl::prelude::*;

/// A pass by a plan that [fits](DepthwiseBlueprint::fits) it.
pub(in super::super) fn launch(
    call: &Call<'_>,
    plan: &DepthwiseBlueprint,
) -> Result<Buffer, KernelError> {
    let width = aligned_width(call, plan.width);
    // The rest of the plan counts on registers, of which narrower vectors need fewer.
    let plan = DepthwiseBlueprint { width, ..*plan };
    match call.problem.pass {
        ConvPass::Fprop | ConvPass::Dgrad => pixels(call, &plan),
        ConvPass::Wgrad => weights(call, &plan),
    }
}

/// The widest vectors that the images, their memory and the device take.
fn aligned_width(call: &Call<'_>, most: usize) -> usize {
    let problem = call.problem;
    let images = if problem.pass == ConvPass::Wgrad { 2 } else { 1 };
    let begins = |buffer: &Buffer, width: usize| {
        buffer.elements.is_multiple_of(width)
            && buffer.offset_bytes().is_multiple_of((width * problem.dtype.size()) as u64)
    };
    let bytes = problem.dtype.size().max(if images == 1 { problem.out.size() } else { 0 });
    let most = vector_width(problem, most);
    widest_vector(call.client, bytes, |width| {
        width <= most && call.operands[..images].iter().all(|buffer| begins(buffer, width))
    })
}

/// How tiles are walked, of which a cube has so many.
fn walk(
    [images, rows, columns]: [usize; 3],
    cube_tiles: usize,
    chunks: &Chunks,
) -> Result<WalkLaunch, KernelError> {
    let tiles = images * rows * columns;
    // Cubes count on beyond the last tile.
    if tiles + cube_tiles >= DIVIDEND_LIMIT {
        return unsupported(format!("{tiles} tiles"));
    }
    Ok(WalkLaunch::new(
        tiles as u32,
        cube_tiles as u32,
        divisor(rows * columns),
        divisor(columns),
        chunks.vectors as u32,
        divisor(chunks.size),
        divisor(chunks.lanes),
    ))
}

/// A tensor of images of that size, in which tiles begin at `first` and lie `step` apart.
fn canvas(
    [height, width]: [usize; 2],
    first: [isize; 2],
    step: [usize; 2],
    strides: [usize; 4],
    vector: usize,
) -> CanvasLaunch {
    let [image, _, row, column] = strides.map(|stride| (stride / vector) as u32);
    let [first_row, first_column] = first.map(|first| first as i32 as u32);
    CanvasLaunch::new(
        height as u32,
        width as u32,
        first_row,
        first_column,
        step[0] as u32,
        step[1] as u32,
        ImageStridesLaunch::new(0, image, row, column, 1),
    )
}

/// Where the first tile begins in the gathered images.
fn first_source(problem: &ConvProblem, lines: &[Line; 2]) -> [isize; 2] {
    [0, 1].map(|dim| {
        let padding = problem.options.padding[dim][0];
        match problem.pass {
            ConvPass::Dgrad => {
                (padding / problem.options.stride[dim]) as isize + lines[dim].first()
            }
            ConvPass::Fprop | ConvPass::Wgrad => -(padding as isize),
        }
    })
}

fn pixels(call: &Call<'_>, plan: &DepthwiseBlueprint) -> Result<Buffer, KernelError> {
    /// Rounds after which the weights have been read for little.
    const MOST_ROUNDS: usize = 16;
    let problem = call.problem;
    let width = plan.width;
    let lines = plan.lines(problem);
    let chunks = Chunks::of(problem, width, 1);
    let tiles = plan.tiles(problem);
    let cubes = tiles.iter().product::<usize>().div_ceil(chunks.lanes);
    // Several cubes for each that the device holds, or the last ones to come leave it idle.
    let held = 4 * CUBES * DeviceProfile::of(call.client).multiprocessors;
    let rounds = (cubes * chunks.count / held).clamp(1, MOST_ROUNDS);
    let step = lines.map(|line| line.step());
    let source = || {
        canvas(problem.gathered_size(), first_source(problem, &lines), step, problem.first, width)
    };
    let [_, _, [_, _, out_height, out_width]] = problem.shapes();
    let lead = DepthwiseBlueprint::lead(problem).map(|lead| -(lead as isize));
    let result = || canvas([out_height, out_width], lead, plan.tile, problem.out_strides(), width);
    let of_weights = Weights::by_filter(problem);
    let [rows, columns] = lines;
    let out = Buffer::empty(call.client, problem.out_elements(), problem.out);
    // SAFETY: the operands hold the spans of the problem, the bias the output's channels, and `out` was allocated for
    // the problem; `width` divides the channels, every distance and where the images begin; the kernel reads and
    // writes pixels that are inside of the images, and channels that are there.
    ahead::launch(call.client, |client| unsafe {
        conv_depthwise_kernel::launch_unchecked(
            client,
            grid(OP, call.client, [cubes.div_ceil(rounds), chunks.count, 1])?,
            CubeDim::new_1d(UNITS),
            width,
            call.operands[0].arg(width),
            call.operands[1].arg(1),
            call.bias.unwrap_or(call.operands[0]).arg(1),
            out.arg(width),
            walk(tiles, rounds * chunks.lanes, &chunks)?,
            source(),
            result(),
            TapStridesLaunch::new(
                problem.in_channels as u32,
                of_weights.group as u32,
                of_weights.taps[0] as u32,
                of_weights.taps[1] as u32,
            ),
            PixelTile { rows, columns, bias: call.bias.is_some() },
            problem.dtype,
            out.dtype,
        );
        Ok(())
    })?;
    Ok(out)
}

fn weights(call: &Call<'_>, plan: &DepthwiseBlueprint) -> Result<Buffer, KernelError> {
    let problem = call.problem;
    let DepthwiseBlueprint { width, tile, splits } = *plan;
    let lines = plan.lines(problem);
    let row_groups = plan.row_groups(problem);
    let chunks = Chunks::of(problem, width, row_groups);
    let tiles = plan.tiles(problem);
    let cube_tiles = tiles.iter().product::<usize>().div_ceil(splits);
    let step = lines.map(|line| line.step());
    let first = first_source(problem, &lines);
    let of_x = || canvas(problem.input, first, step, problem.first, width);
    let of_dy = || canvas(problem.output, [0; 2], tile, problem.second, width);
    let elements = problem.out_elements();
    if u32::try_from(splits * elements).is_err() || elements >= DIVIDEND_LIMIT {
        return unsupported(format!("{} partial sums", splits * elements));
    }
    let [rows, columns] = lines;
    let is_ragged = [0, 1].iter().any(|dim| !problem.output[*dim].is_multiple_of(tile[*dim]));
    let partial = Buffer::empty(call.client, splits * elements, F32);
    let out = Buffer::empty(call.client, elements, problem.out);
    // SAFETY: as in `pixels`; the workspace holds as many sums as there are splits, and each cube writes its own.
    ahead::launch(call.client, |client| unsafe {
        conv_depthwise_weights_kernel::launch_unchecked(
            client,
            grid(OP, call.client, [splits, chunks.count, 1])?,
            CubeDim::new_1d(UNITS),
            width,
            call.operands[0].arg(width),
            call.operands[1].arg(width),
            partial.arg(width),
            walk(tiles, cube_tiles, &chunks)?,
            of_x(),
            of_dy(),
            WeightTile { rows, columns, row_groups, is_ragged },
            problem.dtype,
        );
        Ok(())
    })?;
    let cubes = [elements.div_ceil(SUM_ELEMENTS as usize), 1, 1];
    // SAFETY: the workspace and the output hold all elements; the kernel stops at the last one.
    ahead::launch(call.client, |client| unsafe {
        conv_depthwise_sum_kernel::launch_unchecked(
            client,
            grid(OP, call.client, cubes)?,
            CubeDim::new_2d(SUM_ELEMENTS, SUM_LANES),
            partial.arg(1),
            out.arg(1),
            splits as u32,
            problem.taps() as u32,
            divisor(problem.in_channels),
            out.dtype,
        );
        Ok(())
    })?;
    Ok(out)
}
