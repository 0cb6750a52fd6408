use cubecl::prelude::*;

/// Adds up the rows of each index. Columns along x, places along y, of which the first of an index writes
/// its row; `columns` counts vectors.
#[cube(launch_unchecked)]
pub(crate) fn embedding_backward_kernel<I: Float, N: Size>(
    index: &[i32],
    order: &[u32],
    starts: &[u32],
    counts: &[u32],
    dy: &[Vector<I, N>],
    dw: &mut [Vector<I, N>],
    n: u32,
    rows: u32,
    columns: u32,
    #[define(I)] _dtype: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let mut place = CUBE_POS_Y * CUBE_DIM_Y + UNIT_POS_Y;
    while place < n {
        let count = counts[place as usize];
        let row = index[place as usize];
        if count > 0 && row >= 0 && u32::cast_from(row) < rows && column < columns {
            let start = starts[place as usize];
            let mut sum = Vector::<f32, N>::new(0.0f32);
            for k in 0..count {
                let from = order[(start + k) as usize];
                sum += Vector::cast_from(dy[(from * columns + column) as usize]);
            }
            dw[(u32::cast_from(row) * columns + column) as usize] = Vector::cast_from(sum);
        }
        place += CUBE_COUNT_Y * CUBE_DIM_Y;
    }
}
