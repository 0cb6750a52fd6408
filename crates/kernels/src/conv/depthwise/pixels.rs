//! y, and the gradient of x: a tile of neighboring pixels for each unit.

use super::line::Line;
use crate::{
    conv::gather::{ImageStrides, Pixel},
    divisor::{Divisor, divide},
};
use cubecl::prelude::*;

/// Units of a cube: few, because a unit has many registers.
pub(super) const UNITS: u32 = 128;
/// The most channels that a cube has: 256 bytes of 16 bits each, and 512 of f32.
pub(super) const CHUNK_CHANNELS: usize = 128;

/// How the kernel for pixels is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PixelTile {
    pub(super) rows: Line,
    pub(super) columns: Line,
    pub(super) bias: bool,
}

/// How the tiles of all images are walked. Vectors count in all distances.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Walk {
    pub(super) tiles: u32,
    /// Tiles of a cube.
    pub(super) cube_tiles: u32,
    pub(super) image_tiles: Divisor,
    pub(super) row_tiles: Divisor,
    /// Vectors of a pixel.
    pub(super) vectors: u32,
    /// Vectors of a cube's channels, and the tiles that its units take at once.
    pub(super) chunk: Divisor,
    pub(super) lanes: Divisor,
}

/// How tiles lie in a tensor of images. The first row and column may be negative: they wrap around.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Canvas {
    pub(super) height: u32,
    pub(super) width: u32,
    pub(super) first_row: u32,
    pub(super) first_column: u32,
    /// Pixels from tile to tile.
    pub(super) step_row: u32,
    pub(super) step_column: u32,
    pub(super) strides: ImageStrides,
}

/// The weights of a channel: distances in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct TapStrides {
    pub(super) channels: u32,
    pub(super) channel: u32,
    pub(super) row: u32,
    pub(super) column: u32,
}

/// A unit's place in its cube: a vector of channels, a tile of those that are taken at once, and what is beyond.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub(super) vector: u32,
    pub(super) lane: u32,
    pub(super) beyond: u32,
}

/// Where this unit stands.
#[cube]
pub(super) fn place(walk: &Walk) -> Place {
    let (rest, vector) = divide(UNIT_POS_X, &walk.chunk);
    let (beyond, lane) = divide(rest, &walk.lanes);
    Place { vector, lane, beyond }
}

/// Where a tile begins, at a vector of channels.
#[cube]
pub(super) fn tile_at(index: u32, vector: u32, walk: &Walk, canvas: &Canvas) -> Pixel {
    let (image, within) = divide(index, &walk.image_tiles);
    let (tile_row, tile_column) = divide(within, &walk.row_tiles);
    let row = tile_row * canvas.step_row + canvas.first_row;
    let column = tile_column * canvas.step_column + canvas.first_column;
    let strides = &canvas.strides;
    let image = image * strides.image + vector;
    Pixel { image, row, column, element: image + row * strides.row + column * strides.column }
}

/// `count` neighboring pixels of a row, `row` rows below the tile's first: zeros outside of the image.
#[cube]
pub(super) fn load_row<I: Float, N: Size>(
    memory: &[Vector<I, N>],
    first: &Pixel,
    row: u32,
    canvas: &Canvas,
    #[comptime] count: usize,
) -> Array<Vector<f32, N>> {
    let is_row = first.row + row < canvas.height;
    let begin = first.element + row * canvas.strides.row;
    let mut loaded = Array::<Vector<I, N>>::new(count);
    // All loads before the first use, and none of them in a branch: halves of a register that has two values to merge
    // would have to be taken apart as soon as they are there, before the next load.
    #[unroll]
    for j in 0..count {
        let column = comptime!(j as u32);
        let is_there = is_row && first.column + column < canvas.width;
        loaded[j] = memory[select(is_there, begin + column * canvas.strides.column, 0u32) as usize];
    }
    let mut values = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for j in 0..count {
        let is_there = is_row && first.column + comptime!(j as u32) < canvas.width;
        values[j] = select(is_there, Vector::cast_from(loaded[j]), Vector::new(0.0f32));
    }
    values
}

/// The weights of a cube's channels as f32, a row of vectors for each tap, and the bias as one row more.
#[cube]
fn stage_weights<I: Float, O: Float, N: Size>(
    weights: &[I],
    bias: &[O],
    staged: &mut Shared<[Vector<f32, N>]>,
    first_vector: u32,
    walk: &Walk,
    strides: &TapStrides,
    #[comptime] tile: PixelTile,
) {
    let size = N::value().comptime();
    let chunk = comptime!((CHUNK_CHANNELS / size) as u32);
    let taps = comptime!((tile.rows.taps * tile.columns.taps) as u32);
    let rows = comptime!(taps + tile.bias as u32);
    let mut item = UNIT_POS_X;
    while item < rows * walk.chunk.divisor {
        let (tap, vector) = divide(item, &walk.chunk);
        let channel = (first_vector + vector) * comptime!(size as u32);
        let mut values = Vector::<f32, N>::new(0.0f32);
        if channel < strides.channels {
            let tap_row = tap / comptime!(tile.columns.taps as u32);
            let tap_column = tap % comptime!(tile.columns.taps as u32);
            let at =
                channel * strides.channel + tap_row * strides.row + tap_column * strides.column;
            #[unroll]
            for lane in 0..size {
                let next = comptime!(lane as u32);
                let mut value = 0.0f32;
                if tap < taps {
                    value = f32::cast_from(weights[(at + next * strides.channel) as usize]);
                } else if comptime!(tile.bias) {
                    value = f32::cast_from(bias[(channel + next) as usize]);
                }
                values.insert(lane, value);
            }
        }
        staged[(tap * chunk + vector) as usize] = values;
        item += UNITS;
    }
    sync_cube();
}

/// `out[pixel, channel] = bias[channel] + sum over taps`. Cubes: tiles along x, channels along y.
#[cube(launch_unchecked)]
pub(super) fn conv_depthwise_kernel<I: Float, O: Float, N: Size>(
    gathered: &[Vector<I, N>],
    weights: &[I],
    bias: &[O],
    out: &mut [Vector<O, N>],
    walk: Walk,
    source: Canvas,
    result: Canvas,
    strides: TapStrides,
    #[comptime] tile: PixelTile,
    #[define(I)] _input: ElemType,
    #[define(O)] _output: ElemType,
) {
    let size = N::value().comptime();
    let chunk = comptime!((CHUNK_CHANNELS / size) as u32);
    let taps = comptime!(tile.rows.taps * tile.columns.taps);
    let slots = comptime!((taps + tile.bias as usize) * (CHUNK_CHANNELS / size));
    let area = comptime!(tile.rows.pixels * tile.columns.pixels);

    // 1. Weights.
    let mut staged = Shared::<[Vector<f32, N>]>::new_slice(slots);
    let first_vector = CUBE_POS_Y * walk.chunk.divisor;
    stage_weights::<I, O, N>(weights, bias, &mut staged, first_vector, &walk, &strides, tile);

    let unit = place(&walk);
    let vector = first_vector + unit.vector;
    let first_tile = CUBE_POS_X * walk.cube_tiles;
    let end = min(first_tile + walk.cube_tiles, walk.tiles);
    if unit.beyond == 0 && vector < walk.vectors {
        let mut index = first_tile + unit.lane;
        while index < end {
            // 2. Each row that the tile meets, into every row of the tile that it meets.
            let from = tile_at(index, vector, &walk, &source);
            let mut sums = Array::<Vector<f32, N>>::new(area);
            #[unroll]
            for pixel in 0..area {
                sums[pixel] = Vector::new(0.0f32);
            }
            #[unroll]
            for row in 0..comptime!(tile.rows.sources()) {
                let values = load_row::<I, N>(
                    gathered,
                    &from,
                    comptime!(row as u32),
                    &source,
                    comptime!(tile.columns.sources()),
                );
                #[unroll]
                for a in 0..comptime!(tile.rows.at_source(row).len()) {
                    let met = comptime!(tile.rows.at_source(row)[a]);
                    #[unroll]
                    for tap in 0..comptime!(tile.columns.taps) {
                        let slot = comptime!((met.tap * tile.columns.taps + tap) as u32 * chunk);
                        let weight = staged[(slot + unit.vector) as usize];
                        #[unroll]
                        for b in 0..comptime!(tile.columns.of_tap(tap).len()) {
                            let term = comptime!(tile.columns.of_tap(tap)[b]);
                            let at = comptime!(met.pixel * tile.columns.pixels + term.pixel);
                            sums[at] = fma(values[comptime!(term.source)], weight, sums[at]);
                        }
                    }
                }
            }

            // 3. Finish and write.
            let to = tile_at(index, vector, &walk, &result);
            let mut offset = Vector::<f32, N>::new(0.0f32);
            if comptime!(tile.bias) {
                offset = staged[(comptime!(taps as u32 * chunk) + unit.vector) as usize];
            }
            #[unroll]
            for i in 0..comptime!(tile.rows.pixels) {
                let below = comptime!(i as u32);
                #[unroll]
                for j in 0..comptime!(tile.columns.pixels) {
                    let beside = comptime!(j as u32);
                    let is_there =
                        to.row + below < result.height && to.column + beside < result.width;
                    if is_there {
                        let at = to.element
                            + below * result.strides.row
                            + beside * result.strides.column;
                        let mut sum = sums[comptime!(i * tile.columns.pixels + j)];
                        if comptime!(tile.bias) {
                            sum += offset;
                        }
                        out[at as usize] = Vector::cast_from(sum);
                    }
                }
            }
            index += walk.lanes.divisor;
        }
    }
}
