//! The family that runs everywhere and multiplies f32 exactly: ordinary multiply-adds in f32, on tiles in
//! shared memory that are gathered element by element.

use super::gather::{
    Gather, ImageStrides, WeightStrides, element_at, is_inside, pixel_at, shift_of, source_at,
    tap_at, weight_at,
};
use crate::matmul::{
    EpilogueBlueprint, PORTABLE_DEPTH as DEPTH, PORTABLE_UNITS as UNITS, bias_of, multiply_tiles,
};
use cubecl::prelude::*;

/// How the portable kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PortableBlueprint {
    /// Rows and columns that a unit computes: a cube's tile is 16 times that.
    pub(crate) unit_tile: u32,
    /// Pixels are terms, and the gathered image is the right operand; else pixels are rows and it is the left.
    pub(crate) sums_pixels: bool,
    /// Whether neighbors in memory are neighbors along the terms, for coalesced loads.
    pub(crate) lhs_k_major: bool,
    /// As `lhs_k_major`.
    pub(crate) rhs_k_major: bool,
}

/// Sizes of a group's product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    /// Terms of a split.
    pub(crate) split_k: u32,
    pub(crate) groups: u32,
}

/// Row or column, and term, of the element that this unit copies in a round.
#[cube]
fn copied(round: u32, #[comptime] tile: u32, #[comptime] k_major: bool) -> (u32, u32) {
    let index = round * comptime!(UNITS * UNITS) + UNIT_POS;
    // Neighboring units read neighboring addresses.
    if comptime!(k_major) { (index / DEPTH, index % DEPTH) } else { (index % tile, index / tile) }
}

/// Copies a block of the gathered operand to shared memory as f32, a row of `tile` elements for each term;
/// zero beyond the image's edges.
#[cube]
fn load_gathered<I: Float>(
    source: &[I],
    tile_memory: &mut [f32],
    gather: &Gather,
    group: u32,
    first_mn: u32,
    first_k: u32,
    limit_taps: u32,
    #[comptime] tile: u32,
    #[comptime] blueprint: PortableBlueprint,
) {
    let k_major = comptime!(if blueprint.sums_pixels {
        blueprint.rhs_k_major
    } else {
        blueprint.lhs_k_major
    });
    #[unroll]
    for round in 0..comptime!(tile * DEPTH / (UNITS * UNITS)) {
        let (mn, k) = copied(round, tile, k_major);
        let (pixel_index, tap_index) = if comptime!(blueprint.sums_pixels) {
            (first_k + k, first_mn + mn)
        } else {
            (first_mn + mn, first_k + k)
        };
        let pixel = pixel_at(pixel_index, gather);
        let tap = tap_at(tap_index, gather);
        let shift = shift_of(&tap, gather);
        let mut value = 0.0f32;
        if is_inside(&pixel, &shift, gather) && tap_index < limit_taps {
            let channel = group * gather.channels + tap.channel;
            let at = source_at(&pixel, &shift, gather) + channel * gather.source.channel;
            value = f32::cast_from(source[at as usize]);
        }
        // One element more a row: units along k write to different banks.
        tile_memory[(k * (tile + 1) + mn) as usize] = value;
    }
}

/// As [`load_gathered`], of the operand that is not gathered: weights by taps and channels, or the gradient of
/// the output by pixels.
#[cube]
fn load_other<I: Float>(
    source: &[I],
    tile_memory: &mut [f32],
    gather: &Gather,
    weights: &WeightStrides,
    images: &ImageStrides,
    group: u32,
    first_mn: u32,
    first_k: u32,
    limit_mn: u32,
    limit_k: u32,
    #[comptime] tile: u32,
    #[comptime] blueprint: PortableBlueprint,
) {
    let k_major = comptime!(if blueprint.sums_pixels {
        blueprint.lhs_k_major
    } else {
        blueprint.rhs_k_major
    });
    #[unroll]
    for round in 0..comptime!(tile * DEPTH / (UNITS * UNITS)) {
        let (mn, k) = copied(round, tile, k_major);
        let (mn_at, k_at) = (first_mn + mn, first_k + k);
        let mut value = 0.0f32;
        if mn_at < limit_mn && k_at < limit_k {
            let at = if comptime!(blueprint.sums_pixels) {
                element_at(k_at, gather, images) + (group * limit_mn + mn_at) * images.channel
            } else {
                group * weights.group + weight_at(mn_at, &tap_at(k_at, gather), weights)
            };
            value = f32::cast_from(source[at as usize]);
        }
        tile_memory[(k * (tile + 1) + mn) as usize] = value;
    }
}

/// A product with one gathered operand. Cubes: rows along x, columns along y, splits of groups along z; each
/// unit computes every 16th row and column of its cube's tile. `images` are the output where pixels are rows,
/// and the gradient of the output where they are terms.
#[cube(launch_unchecked)]
pub(crate) fn conv_portable_kernel<I: Float, O: Float>(
    gathered: &[I],
    other: &[I],
    bias: &[O],
    out: &mut [O],
    extent: Extent,
    gather: Gather,
    weights: WeightStrides,
    images: ImageStrides,
    #[comptime] blueprint: PortableBlueprint,
    #[comptime] epilogue: EpilogueBlueprint,
    #[define(I)] _input: ElemType,
    #[define(O)] _output: ElemType,
) {
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    let tile = comptime!(blueprint.unit_tile * UNITS);
    let mut lhs_tile = Shared::<[f32]>::new_slice(comptime!((DEPTH * (tile + 1)) as usize));
    let mut rhs_tile = Shared::<[f32]>::new_slice(comptime!((DEPTH * (tile + 1)) as usize));
    let (first_row, first_column) = (CUBE_POS_X * tile, CUBE_POS_Y * tile);
    let (split, group) = (CUBE_POS_Z / extent.groups, CUBE_POS_Z % extent.groups);
    let mut first_k = split * extent.split_k;
    let last_k = min(first_k + extent.split_k, extent.k);

    // 1. Sum over the terms, a block at a time.
    let mut sums = Array::<f32>::new(comptime!(unit_tile * unit_tile));
    #[unroll]
    for i in 0..comptime!(unit_tile * unit_tile) {
        sums[i] = 0.0f32;
    }
    while first_k < last_k {
        if comptime!(blueprint.sums_pixels) {
            load_other::<I>(
                other,
                lhs_tile.as_mut_slice(),
                &gather,
                &weights,
                &images,
                group,
                first_row,
                first_k,
                extent.m,
                last_k,
                tile,
                blueprint,
            );
            load_gathered::<I>(
                gathered,
                rhs_tile.as_mut_slice(),
                &gather,
                group,
                first_column,
                first_k,
                extent.n,
                tile,
                blueprint,
            );
        } else {
            load_gathered::<I>(
                gathered,
                lhs_tile.as_mut_slice(),
                &gather,
                group,
                first_row,
                first_k,
                last_k,
                tile,
                blueprint,
            );
            load_other::<I>(
                other,
                rhs_tile.as_mut_slice(),
                &gather,
                &weights,
                &images,
                group,
                first_column,
                first_k,
                extent.n,
                last_k,
                tile,
                blueprint,
            );
        }
        sync_cube();
        multiply_tiles(&mut sums, lhs_tile.as_slice(), rhs_tile.as_slice(), unit_tile);
        sync_cube();
        first_k += DEPTH;
    }

    // 2. Finish and write.
    #[unroll]
    for i in 0..unit_tile {
        let row = first_row + UNIT_POS_Y + comptime!(UNITS * i as u32);
        let start = if comptime!(blueprint.sums_pixels) {
            (CUBE_POS_Z * extent.m + row) * extent.n
        } else {
            element_at(row, &gather, &images) + group * extent.n
        };
        #[unroll]
        for j in 0..unit_tile {
            let column = first_column + UNIT_POS_X + comptime!(UNITS * j as u32);
            if row < extent.m && column < extent.n {
                let channel = group * extent.n + column;
                let offset = bias_of::<O>(bias, channel, extent.groups * extent.n, epilogue);
                let value = sums[comptime!(i * unit_tile + j)] + offset;
                out[(start + column) as usize] = O::cast_from(value);
            }
        }
    }
}
