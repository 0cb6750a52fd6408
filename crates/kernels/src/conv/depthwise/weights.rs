//! The gradient of the weights: each unit sums over tiles of pixels, then units and cubes meet in order.

use super::{
    line::{Line, Term},
    pixels::{Canvas, UNITS, Walk, load_row, place, tile_at},
};
use crate::divisor::{Divisor, divide};
use cubecl::prelude::*;

/// Neighboring elements of dw that a cube of the second launch adds up, and units for each.
pub(super) const SUM_ELEMENTS: u32 = 32;
pub(super) const SUM_LANES: u32 = 8;

/// How the kernel for partial sums is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WeightTile {
    /// With the rows of taps of one unit.
    pub(super) rows: Line,
    pub(super) columns: Line,
    /// Units that share the rows of taps.
    pub(super) row_groups: usize,
    /// Whether a tile may reach beyond dy.
    pub(super) is_ragged: bool,
}

/// `partial[split, tap, channel]`: the sum over the tiles of a split. Cubes: splits along x, channels along y.
#[cube(launch_unchecked)]
pub(super) fn conv_depthwise_weights_kernel<I: Float, N: Size>(
    x: &[Vector<I, N>],
    dy: &[Vector<I, N>],
    partial: &mut [Vector<f32, N>],
    walk: Walk,
    of_x: Canvas,
    of_dy: Canvas,
    #[comptime] tile: WeightTile,
    #[define(I)] _input: ElemType,
) {
    let unit_taps = comptime!(tile.rows.taps * tile.columns.taps);
    let unit = place(&walk);
    let vector = CUBE_POS_Y * walk.chunk.divisor + unit.vector;
    let first_tile = CUBE_POS_X * walk.cube_tiles;
    let end = min(first_tile + walk.cube_tiles, walk.tiles);
    let is_there = unit.beyond < comptime!(tile.row_groups as u32) && vector < walk.vectors;

    // 1. The sums of the unit's taps.
    let mut sums = Array::<Vector<f32, N>>::new(unit_taps);
    #[unroll]
    for tap in 0..unit_taps {
        sums[tap] = Vector::new(0.0f32);
    }
    let first_row = unit.beyond * comptime!((tile.rows.taps * tile.rows.dilation) as u32);
    let mut index = first_tile + unit.lane;
    while is_there && index < end {
        let from = tile_at(index, vector, &walk, &of_x);
        let at = tile_at(index, vector, &walk, &of_dy);
        let mut gradients =
            Array::<Vector<f32, N>>::new(comptime!(tile.rows.pixels * tile.columns.pixels));
        #[unroll]
        for i in 0..comptime!(tile.rows.pixels) {
            let row = load_row::<I, N>(
                dy,
                &at,
                comptime!(i as u32),
                &of_dy,
                comptime!(tile.columns.pixels),
            );
            #[unroll]
            for j in 0..comptime!(tile.columns.pixels) {
                gradients[comptime!(i * tile.columns.pixels + j)] = row[j];
            }
        }
        #[unroll]
        for row in 0..comptime!(tile.rows.sources()) {
            let values = load_row::<I, N>(
                x,
                &from,
                first_row + comptime!(row as u32),
                &of_x,
                comptime!(tile.columns.sources()),
            );
            #[unroll]
            for a in 0..comptime!(tile.rows.at_source(row).len()) {
                let met = comptime!(tile.rows.at_source(row)[a]);
                #[unroll]
                for pixel in 0..comptime!(tile.columns.pixels) {
                    if comptime!(tile.is_ragged) {
                        let is_pixel = at.row + comptime!(met.pixel as u32) < of_dy.height
                            && at.column + comptime!(pixel as u32) < of_dy.width;
                        if is_pixel {
                            add_pixel::<N>(&mut sums, &values, &gradients, met, pixel, tile);
                        }
                    } else {
                        add_pixel::<N>(&mut sums, &values, &gradients, met, pixel, tile);
                    }
                }
            }
        }
        index += walk.lanes.divisor;
    }

    // 2. The units of a vector meet, a tap at a time.
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(UNITS as usize));
    #[unroll]
    for tap in 0..unit_taps {
        shared[UNIT_POS_X as usize] = sums[tap];
        sync_cube();
        if is_there && unit.lane == 0 {
            let mut sum = sums[tap];
            for lane in 1..walk.lanes.divisor {
                sum += shared[(UNIT_POS_X + lane * walk.chunk.divisor) as usize];
            }
            let row = unit.beyond * comptime!(unit_taps as u32) + comptime!(tap as u32);
            let taps = comptime!((unit_taps * tile.row_groups) as u32);
            partial[((CUBE_POS_X * taps + row) * walk.vectors + vector) as usize] = sum;
        }
        // The next tap goes to the same memory.
        sync_cube();
    }
}

/// Adds the products of a pixel of dy and the row of x that its row meets by a row of taps.
#[cube]
fn add_pixel<N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    values: &Array<Vector<f32, N>>,
    gradients: &Array<Vector<f32, N>>,
    #[comptime] row: Term,
    #[comptime] pixel: usize,
    #[comptime] tile: WeightTile,
) {
    let gradient = gradients[comptime!(row.pixel * tile.columns.pixels + pixel)];
    #[unroll]
    for b in 0..comptime!(tile.columns.of_pixel(pixel).len()) {
        let term = comptime!(tile.columns.of_pixel(pixel)[b]);
        let tap = comptime!(row.tap * tile.columns.taps + term.tap);
        sums[tap] = fma(values[comptime!(term.source)], gradient, sums[tap]);
    }
}

/// `out[channel, tap] = sum_s partial[s, tap, channel]`: a unit adds every eighth split in order, and the units of an
/// element meet in order.
#[cube(launch_unchecked)]
pub(super) fn conv_depthwise_sum_kernel<O: Float>(
    partial: &[f32],
    out: &mut [O],
    splits: u32,
    taps: u32,
    channels: Divisor,
    #[define(O)] _output: ElemType,
) {
    let elements = taps * channels.divisor;
    let element = CUBE_POS_X * SUM_ELEMENTS + UNIT_POS_X;
    let mut shared = Shared::<[f32]>::new_slice(comptime!((SUM_ELEMENTS * SUM_LANES) as usize));
    let mut sum = 0.0f32;
    if element < elements {
        let mut split = UNIT_POS_Y;
        while split < splits {
            sum += partial[(split * elements + element) as usize];
            split += SUM_LANES;
        }
    }
    shared[(UNIT_POS_Y * SUM_ELEMENTS + UNIT_POS_X) as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && element < elements {
        #[unroll]
        for lane in 1..SUM_LANES {
            sum += shared[(lane * SUM_ELEMENTS + UNIT_POS_X) as usize];
        }
        let (tap, channel) = divide(element, &channels);
        out[(channel * taps + tap) as usize] = O::cast_from(sum);
    }
}
