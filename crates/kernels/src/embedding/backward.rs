//! Adds up the rows of each index, which lie next to each other in the sorted order.

use cubecl::prelude::*;

/// Units of a cube that share the rows of an index.
pub(super) const SHARES: u32 = 8;
/// Units of a cube along columns.
pub(super) const COLUMN_UNITS: u32 = 32;
/// Sorted places whose sums are finished together. A token that is half of a text has thousands of places:
/// the cubes of many chunks add them up, and [`embedding_join_kernel`] adds what these have.
pub(super) const CHUNK: u32 = 256;

/// Adds up the rows of each index, chunk by chunk. Columns along x; sorted places along y of the grid, of
/// which the first of an index in a chunk has the cube's work. Where an index goes beyond its chunk, the sum
/// goes to `partials`: for each chunk one of the index that began before it, and one of the index that goes
/// on behind it. `columns` counts vectors. With `adds` sums are added to what `dw` holds.
#[cube(launch_unchecked)]
pub(crate) fn embedding_backward_kernel<I: Float, N: Size>(
    keys: &[u32],
    order: &[u32],
    dy: &[Vector<I, N>],
    dw: &mut [Vector<I, N>],
    partials: &mut [Vector<f32, N>],
    places: u32,
    rows: u32,
    columns: u32,
    #[comptime] adds: bool,
    #[define(I)] _dtype: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let mut place = CUBE_POS_Y;
    while place < places {
        // The same for all units of the cube.
        let key = keys[place as usize];
        let chunk = place / CHUNK;
        let limit = min(places, (chunk + 1) * CHUNK);
        let begins_chunk = place == chunk * CHUNK;
        let follows = place > 0 && keys[(max(place, 1) - 1) as usize] == key;
        if key < rows && (begins_chunk || !follows) {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut k = place + UNIT_POS_Y;
            while k < limit && keys[min(k, limit - 1) as usize] == key {
                if column < columns {
                    let from = order[k as usize];
                    sum += Vector::cast_from(dy[(from * columns + column) as usize]);
                }
                k += SHARES;
            }
            let next = place + 1;
            if next < limit && keys[min(next, limit - 1) as usize] == key {
                sum = sum_of_shares::<N>(sum);
            }
            let goes_on = limit < places && keys[min(limit, places - 1) as usize] == key;
            if UNIT_POS_Y == 0 && column < columns {
                if follows || goes_on {
                    let part = 2 * chunk + u32::cast_from(!follows);
                    partials[(part * columns + column) as usize] = sum;
                } else {
                    write_row::<I, N>(dw, (key * columns + column) as usize, sum, adds);
                }
            }
        }
        place += CUBE_COUNT_Y;
    }
}

/// Adds up the partial sums of each index that lies in more than one chunk. Columns along x; along y of the
/// grid the boundaries behind chunks, of which the first of an index has the cube's work. With `adds` sums are
/// added to what `dw` holds.
#[cube(launch_unchecked)]
pub(crate) fn embedding_join_kernel<I: Float, N: Size>(
    keys: &[u32],
    partials: &[Vector<f32, N>],
    dw: &mut [Vector<I, N>],
    places: u32,
    rows: u32,
    columns: u32,
    #[comptime] adds: bool,
    #[define(I)] _dtype: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let mut chunk = CUBE_POS_Y;
    while (chunk + 1) * CHUNK < places {
        let behind = (chunk + 1) * CHUNK;
        let key = keys[behind as usize];
        let crosses = keys[(behind - 1) as usize] == key;
        let began_before = chunk > 0 && keys[(max(chunk, 1) * CHUNK - 1) as usize] == key;
        if key < rows && crosses && !began_before {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            if UNIT_POS_Y == 0 && column < columns {
                sum += partials[((2 * chunk + 1) * columns + column) as usize];
            }
            let mut other = chunk + 1 + UNIT_POS_Y;
            while other * CHUNK < places && keys[min(other * CHUNK, places - 1) as usize] == key {
                if column < columns {
                    sum += partials[(2 * other * columns + column) as usize];
                }
                other += SHARES;
            }
            sum = sum_of_shares::<N>(sum);
            if UNIT_POS_Y == 0 && column < columns {
                write_row::<I, N>(dw, (key * columns + column) as usize, sum, adds);
            }
        }
        chunk += CUBE_COUNT_Y;
    }
}

/// Writes a finished sum, rounded once. No other cube has the row.
#[cube]
fn write_row<I: Float, N: Size>(
    dw: &mut [Vector<I, N>],
    at: usize,
    sum: Vector<f32, N>,
    #[comptime] adds: bool,
) {
    let mut all = sum;
    if comptime!(adds) {
        all += Vector::cast_from(dw[at]);
    }
    dw[at] = Vector::cast_from(all);
}

/// For the first unit of each column the sum over all, in their order; for others their own.
#[cube]
fn sum_of_shares<N: Size>(mine: Vector<f32, N>) -> Vector<f32, N> {
    let lanes = comptime!((SHARES * COLUMN_UNITS) as usize);
    let mut parts = Shared::<[Vector<f32, N>]>::new_slice(lanes);
    let mut sum = mine;
    parts[(UNIT_POS_Y * CUBE_DIM_X + UNIT_POS_X) as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 {
        for share in 1..SHARES {
            sum += parts[(share * CUBE_DIM_X + UNIT_POS_X) as usize];
        }
    }
    sync_cube();
    sum
}
