use super::blueprint::UNITS;
use cubecl::prelude::*;

/// Adds the squares of `x` to `sums`, each cube to its place. Cubes beyond the tensor copy theirs.
#[cube(launch_unchecked)]
pub(crate) fn square_sum_kernel<I: Float, N: Size>(
    x: &[Vector<I, N>],
    sums: &[f32],
    sums_out: &mut [f32],
    vectors: u32,
    #[define(I)] _input: ElemType,
) {
    let size = N::value().comptime();

    // 1. Each unit adds up its squares.
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut index = ABSOLUTE_POS as u32;
    let step = CUBE_COUNT as u32 * CUBE_DIM;
    while index < vectors {
        let values = Vector::<f32, N>::cast_from(x[index as usize]);
        sum += values * values;
        index += step;
    }
    let mut mine = 0.0f32;
    #[unroll]
    for lane in 0..size {
        mine += sum.extract(lane);
    }

    // 2. The units of a cube meet.
    let mut all = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    all[UNIT_POS as usize] = mine;
    sync_cube();
    #[unroll]
    for halving in 1..comptime!(UNITS.ilog2() + 1) {
        let distance = comptime!(UNITS >> halving);
        if UNIT_POS < distance {
            let other = all[(UNIT_POS + distance) as usize];
            all[UNIT_POS as usize] += other;
        }
        sync_cube();
    }
    if UNIT_POS == 0 {
        let place = CUBE_POS;
        sums_out[place] = sums[place] + all[0];
    }
}
