//! Column sums in one launch: the cubes that share the rows of a sum are a cluster, and meet in the shared memory of its
//! first cube.

use super::{ColumnSumProblem, forward::sum_of_rows};
use crate::ptx::{
    cluster::{cube_rank, in_first_cube, store_in_cluster, sync_cluster},
    shared_address,
};
use cubecl::{ir::VectorSize, prelude::*};

/// Cubes of a cluster, which share the rows of its columns: as many as every device with clusters allows.
pub(super) const CUBES: u32 = 8;
/// Units of a cube side by side: a whole line of the cache of 128 bytes.
pub(super) const VECTOR_LANES: u32 = 8;
/// Units of a cube on different rows.
pub(super) const ROW_LANES: u32 = 64;
/// Rows that a unit asks for before it adds the first. There are fewer units than in the form with two launches.
const ROWS_AT_ONCE: usize = 8;
/// Terms of the sums by which the units of a column meet.
const PARTS: u32 = 8;

/// Cubes side by side, of whole clusters.
pub(super) fn cubes(problem: &ColumnSumProblem, vector_size: VectorSize) -> usize {
    let clusters = (problem.columns / vector_size).div_ceil(VECTOR_LANES as usize);
    clusters * CUBES as usize
}

/// As [`column_sum_kernel`](super::forward::column_sum_kernel), with `y[o, c]` for all splits. Cubes: clusters along x,
/// outer along z.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(CUBES))]
pub(super) fn column_sum_cluster_kernel<I: Float, N: Size>(
    x: &[Vector<I, N>],
    means: &[Vector<I, N>],
    y: &mut [Vector<I, N>],
    rows: u32,
    columns: u32,
    outer_stride: u32,
    row_stride: u32,
    factor: f32,
    #[comptime] squares: bool,
    #[define(I)] _element: ElemType,
) {
    let rank = cube_rank(CUBES);
    let column = CUBE_POS_X / CUBES * VECTOR_LANES + UNIT_POS_X;

    // 1. Each unit adds up its rows.
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < columns {
        sum = sum_of_rows::<I, N>(
            x,
            means,
            CUBE_POS_Z * outer_stride + column,
            CUBE_POS_Z * columns + column,
            rank * ROW_LANES + UNIT_POS_Y,
            CUBES * ROW_LANES,
            rows,
            row_stride,
            squares,
            ROWS_AT_ONCE,
        );
    }

    // 2. The units of a column meet, in two rounds.
    let lanes = comptime!((VECTOR_LANES * ROW_LANES) as usize);
    let mut sums = Shared::<[Vector<f32, N>]>::new_slice(lanes);
    let place = UNIT_POS_Y * VECTOR_LANES + UNIT_POS_X;
    sums[place as usize] = sum;
    sync_cube();
    if UNIT_POS_Y < ROW_LANES / PARTS {
        #[unroll]
        for part in 1..PARTS {
            let row = part * comptime!(ROW_LANES / PARTS) + UNIT_POS_Y;
            sum += sums[(row * VECTOR_LANES + UNIT_POS_X) as usize];
        }
        // Nobody else reads what is overwritten.
        sums[place as usize] = sum;
    }
    sync_cube();
    if UNIT_POS_Y == 0 {
        #[unroll]
        for part in 1..comptime!(ROW_LANES / PARTS) {
            sum += sums[(part * VECTOR_LANES + UNIT_POS_X) as usize];
        }
    }

    // 3. So do the cubes, in the first one's memory. It is there once all have begun.
    let width = N::value().comptime();
    let gathered =
        Shared::<[Vector<f32, N>]>::new_slice(comptime!((VECTOR_LANES * CUBES) as usize));
    sync_cluster();
    if UNIT_POS_Y == 0 {
        let bytes = comptime!((width * size_of::<f32>()) as u32);
        let mine = shared_address(&gathered) + (rank * VECTOR_LANES + UNIT_POS_X) * bytes;
        let there = in_first_cube(mine);
        #[unroll]
        for i in 0..width {
            store_in_cluster(there + comptime!((i * size_of::<f32>()) as u32), sum.extract(i));
        }
    }
    sync_cluster();
    if rank == 0 && UNIT_POS_Y == 0 && column < columns {
        let mut total = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for cube in 0..CUBES {
            total += gathered[(cube * VECTOR_LANES + UNIT_POS_X) as usize];
        }
        y[(CUBE_POS_Z * columns + column) as usize] =
            Vector::cast_from(total * Vector::new(factor));
    }
}
