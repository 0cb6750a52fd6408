use super::blueprint::UNITS;
use cubecl::prelude::*;

/// The sum of `losses`, if there are any, or with `is_mean` their mean over the rows that are not ignored, to `reduced`, and
/// to `factor` what a row's share of its gradient is. One cube; the order of addition is fixed.
#[cube(launch_unchecked)]
pub(crate) fn cross_entropy_reduce_kernel(
    losses: &[f32],
    targets: &[i32],
    reduced: &mut [f32],
    factor: &mut [f32],
    rows: u32,
    ignore_index: i32,
    invalid: f32,
    #[comptime] ignores: bool,
    #[comptime] is_mean: bool,
    #[comptime] has_losses: bool,
) {
    // 1. Each unit adds up its rows.
    let mut sum = 0.0f32;
    let mut count = 0u32;
    let mut row = UNIT_POS;
    while row < rows {
        if comptime!(has_losses) {
            sum += losses[row as usize];
        }
        if comptime!(ignores && is_mean) {
            count += select(targets[row as usize] == ignore_index, 0u32, 1u32);
        } else {
            count += 1;
        }
        row += UNITS;
    }

    // 2. The units meet.
    let mut sums = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let mut counts = Shared::<[u32]>::new_slice(comptime!(UNITS as usize));
    sums[UNIT_POS as usize] = sum;
    counts[UNIT_POS as usize] = count;
    sync_cube();
    #[unroll]
    for step in 1..comptime!(UNITS.ilog2() + 1) {
        let distance = comptime!(UNITS >> step);
        if UNIT_POS < distance {
            let other = (UNIT_POS + distance) as usize;
            sums[UNIT_POS as usize] += sums[other];
            counts[UNIT_POS as usize] += counts[other];
        }
        sync_cube();
    }
    if UNIT_POS == 0 {
        let total = sums[0];
        if comptime!(is_mean) {
            let number = f32::cast_from(max(counts[0], 1u32));
            reduced[0] = select(counts[0] == 0, invalid, total / number);
            factor[0] = 1.0f32 / number;
        } else {
            reduced[0] = total;
            factor[0] = 1.0f32.runtime();
        }
    }
}
