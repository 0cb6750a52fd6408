//! The family that runs everywhere and multiplies f32 exactly: ordinary multiply-adds in f32.

use super::epilogue::{EpilogueTensors, Outputs, bias_of, factor, finish, row_in_memory};
use cubecl::prelude::*;

/// Units of a cube along each dimension of the output.
pub(crate) const UNITS: u32 = 16;
/// Depth of a k block.
pub(crate) const DEPTH: u32 = 16;

/// How the portable kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PortableBlueprint {
    /// Rows and columns that a unit computes: a cube's tile is 16 times that.
    pub(crate) unit_tile: u32,
    /// Whether neighbors in memory are neighbors along k, for coalesced loads.
    pub(crate) lhs_k_major: bool,
    /// As `lhs_k_major`.
    pub(crate) rhs_k_major: bool,
}

/// Where an operand's matrix lies: strides of its rows or columns, of k, and of the batches.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Strides {
    pub(crate) mn: u32,
    pub(crate) k: u32,
    pub(crate) outer: u32,
    pub(crate) inner: u32,
}

/// An operand as it lies in memory.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StridedOperand<T: CubePrimitive> {
    pub(crate) memory: Box<[T]>,
    pub(crate) strides: Strides,
}

/// Copies a k block of an operand to shared memory as f32, k rows of `tile` elements; zero beyond
/// the operand's ends.
#[cube]
fn load_tile<I: Float>(
    source: &StridedOperand<I>,
    tile_memory: &mut [f32],
    origin: u32,
    first_mn: u32,
    first_k: u32,
    limit_mn: u32,
    limit_k: u32,
    #[comptime] tile: u32,
    #[comptime] k_major: bool,
) {
    let unit = UNIT_POS;
    #[unroll]
    for round in 0..comptime!(tile * DEPTH / (UNITS * UNITS)) {
        let index = round * comptime!(UNITS * UNITS) + unit;
        // Neighboring units read neighboring addresses.
        let (mn, k) = if comptime!(k_major) {
            (index / DEPTH, index % DEPTH)
        } else {
            (index % tile, index / tile)
        };
        let mut value = 0.0f32;
        if first_mn + mn < limit_mn && first_k + k < limit_k {
            let at =
                origin + (first_mn + mn) * source.strides.mn + (first_k + k) * source.strides.k;
            value = f32::cast_from(source.memory[at as usize]);
        }
        // One element more a row: units along k write to different banks.
        tile_memory[(k * (tile + 1) + mn) as usize] = value;
    }
}

/// Adds the product of two blocks in shared memory, of [`DEPTH`] rows, to the sums of a unit: every 16th row
/// and column.
#[cube]
pub(crate) fn multiply_tiles(
    sums: &mut Array<f32>,
    lhs_tile: &[f32],
    rhs_tile: &[f32],
    #[comptime] unit_tile: usize,
) {
    let row_elements = comptime!(unit_tile as u32 * UNITS + 1);
    let mut lhs_column = Array::<f32>::new(unit_tile);
    for depth in 0..DEPTH {
        let row_start = depth * row_elements;
        #[unroll]
        for i in 0..unit_tile {
            let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
            lhs_column[i] = lhs_tile[(row_start + row) as usize];
        }
        #[unroll]
        for j in 0..unit_tile {
            let column = UNIT_POS_X + comptime!(UNITS * j as u32);
            let value = rhs_tile[(row_start + column) as usize];
            #[unroll]
            for i in 0..unit_tile {
                sums[comptime!(i * unit_tile + j)] += lhs_column[i] * value;
            }
        }
    }
}

/// `out[b, m, n] = epilogue(sum_k lhs[b, m, k] rhs[b, k, n])`. Cubes: n along x, m along y, batches
/// along z; each unit computes every 16th row and column of its cube's tile.
#[cube(launch_unchecked)]
pub(crate) fn matmul_portable_kernel<I: Float, O: Float>(
    lhs: &StridedOperand<I>,
    rhs: &StridedOperand<I>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<O>,
    m: u32,
    n: u32,
    k: u32,
    inner_batches: u32,
    #[comptime] blueprint: PortableBlueprint,
    #[define(I, O)] _types: [ElemType; 2],
) {
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    let tile = comptime!(blueprint.unit_tile * UNITS);
    let mut lhs_tile = Shared::<[f32]>::new_slice(comptime!((DEPTH * (tile + 1)) as usize));
    let mut rhs_tile = Shared::<[f32]>::new_slice(comptime!((DEPTH * (tile + 1)) as usize));
    let (first_row, first_column) = (CUBE_POS_Y * tile, CUBE_POS_X * tile);
    let (outer, inner) = (CUBE_POS_Z / inner_batches, CUBE_POS_Z % inner_batches);
    let lhs_origin = outer * lhs.strides.outer + inner * lhs.strides.inner;
    let rhs_origin = outer * rhs.strides.outer + inner * rhs.strides.inner;

    // 1. Sum over k, a block at a time.
    let mut sums = Array::<f32>::new(comptime!(unit_tile * unit_tile));
    #[unroll]
    for i in 0..comptime!(unit_tile * unit_tile) {
        sums[i] = 0.0f32;
    }
    let mut first_k = 0u32;
    while first_k < k {
        load_tile::<I>(
            lhs,
            lhs_tile.as_mut_slice(),
            lhs_origin,
            first_row,
            first_k,
            m,
            k,
            tile,
            comptime!(blueprint.lhs_k_major),
        );
        load_tile::<I>(
            rhs,
            rhs_tile.as_mut_slice(),
            rhs_origin,
            first_column,
            first_k,
            n,
            k,
            tile,
            comptime!(blueprint.rhs_k_major),
        );
        sync_cube();
        multiply_tiles(&mut sums, lhs_tile.as_slice(), rhs_tile.as_slice(), unit_tile);
        sync_cube();
        first_k += DEPTH;
    }

    // 2. Finish and write.
    let steps = comptime!(epilogue.steps);
    let scale = factor(epilogue);
    #[unroll]
    for j in 0..unit_tile {
        let column = first_column + UNIT_POS_X + comptime!(UNITS * j as u32);
        let offset = bias_of::<O>(&epilogue.bias, column, epilogue.bias_columns, steps);
        #[unroll]
        for i in 0..unit_tile {
            let row = first_row + UNIT_POS_Y + comptime!(UNITS * i as u32);
            if row < m && column < n {
                let value = scale * sums[comptime!(i * unit_tile + j)] + offset;
                let row =
                    row_in_memory(CUBE_POS_Z, row, m, inner_batches, comptime!(steps.interleaved));
                finish::<O>(epilogue, outputs, value, row * n + column);
            }
        }
    }
}
