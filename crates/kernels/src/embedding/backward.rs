use cubecl::prelude::*;

/// Units of a cube that share the rows of an index.
pub(super) const SHARES: u32 = 8;
/// Units of a cube along columns.
pub(super) const COLUMN_UNITS: u32 = 32;

/// Adds up the rows of each index. Columns along x; places along y of the grid, of which the first of an
/// index writes its row. The units along y of a cube share an index's rows: a token that is half of the
/// text has thousands. `columns` counts vectors.
#[cube(launch_unchecked)]
pub(crate) fn embedding_backward_kernel<I: Float, N: Size>(
    index: &[i32],
    order: &[u32],
    starts: &[u32],
    counts: &[u32],
    dy: &[Vector<I, N>],
    dw: &mut [Vector<I, N>],
    places: u32,
    rows: u32,
    columns: u32,
    #[define(I)] _dtype: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let lanes = comptime!((SHARES * COLUMN_UNITS) as usize);
    let mut parts = Shared::<[Vector<f32, N>]>::new_slice(lanes);
    let mut place = CUBE_POS_Y;
    while place < places {
        // The same for all units of the cube.
        let count = counts[place as usize];
        let row = index[place as usize];
        if count > 0 && row >= 0 && u32::cast_from(row) < rows {
            let start = starts[place as usize];
            let mut sum = Vector::<f32, N>::new(0.0f32);
            if column < columns {
                let mut k = UNIT_POS_Y;
                while k < count {
                    let from = order[(start + k) as usize];
                    sum += Vector::cast_from(dy[(from * columns + column) as usize]);
                    k += SHARES;
                }
            }
            if count > 1 {
                parts[(UNIT_POS_Y * CUBE_DIM_X + UNIT_POS_X) as usize] = sum;
                sync_cube();
                if UNIT_POS_Y == 0 {
                    for share in 1..SHARES {
                        sum += parts[(share * CUBE_DIM_X + UNIT_POS_X) as usize];
                    }
                }
                sync_cube();
            }
            if UNIT_POS_Y == 0 && column < columns {
                dw[(u32::cast_from(row) * columns + column) as usize] = Vector::cast_from(sum);
            }
        }
        place += CUBE_COUNT_Y;
    }
}
