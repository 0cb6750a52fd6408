use crate::cross_entropy::{CrossEntropyBlueprint, Extent, Logits, join_row, nothing, see_row};
use cubecl::prelude::*;

/// The peak of each row, the sum of the exponentials of what its elements lack to that, the logarithm of
/// the sum, and with `picks` the logarithm of softmax at the row's target. Rows are spread over the cubes along x, `lanes` units a row. `invalid` is NaN, of which WGSL has
/// no constant.
#[cube(launch_unchecked)]
pub(crate) fn softmax_sums_kernel<F: Float, N: Size>(
    x: &Logits<F, N>,
    targets: &[i32],
    peaks: &mut [f32],
    sums: &mut [f32],
    logs: &mut [f32],
    picked: &mut [f32],
    extent: Extent,
    invalid: f32,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[comptime] picks: bool,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = comptime!(blueprint.lanes);
    let rows_a_cube = comptime!(blueprint.rows_a_cube());
    let lane = UNIT_POS % lanes;
    let (rows, classes, row_stride) = (extent.rows, extent.classes, extent.row_stride);
    let mut partials = Shared::<[f32]>::new_slice(comptime!(blueprint.partials()));

    let mut first_row = CUBE_POS_X * rows_a_cube;
    while first_row < rows {
        let row = first_row + UNIT_POS / lanes;
        let start = row * row_stride;
        let mut seen = nothing();
        // 1. Each unit sees its part.
        if row < rows {
            see_row::<F, N>(&mut seen, x, start, classes, lane, blueprint, false);
        }

        // 2. The units of the row meet.
        join_row(&mut seen, &mut partials, blueprint);
        if row < rows && lane == 0 {
            let log = seen.total.ln();
            peaks[row as usize] = seen.peak;
            sums[row as usize] = seen.total;
            logs[row as usize] = log;
            if comptime!(picks) {
                let target = targets[row as usize];
                let mut of_target = invalid;
                if target >= 0 && u32::cast_from(target) < classes {
                    let at = start + u32::cast_from(target);
                    of_target = f32::cast_from(x.elements[at as usize]) - seen.peak - log;
                }
                picked[row as usize] = of_target;
            }
        }
        first_row += CUBE_COUNT_X * rows_a_cube;
    }
}
