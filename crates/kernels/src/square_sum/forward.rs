use super::blueprint::UNITS;
use cubecl::prelude::*;

/// Adds the squares of eight tensors to `sums`, each cube to its place; `vectors` of them count, of which 0
/// leaves one out. Cubes beyond all tensors copy their places.
#[cube(launch_unchecked)]
pub(crate) fn square_sum_kernel<I: Float, N: Size>(
    x0: &[Vector<I, N>],
    x1: &[Vector<I, N>],
    x2: &[Vector<I, N>],
    x3: &[Vector<I, N>],
    x4: &[Vector<I, N>],
    x5: &[Vector<I, N>],
    x6: &[Vector<I, N>],
    x7: &[Vector<I, N>],
    sums: &[f32],
    sums_out: &mut [f32],
    vectors: Counts,
    #[define(I)] _input: ElemType,
) {
    let size = N::value().comptime();

    // 1. Each unit adds up its squares.
    let mut sum = Vector::<f32, N>::new(0.0f32);
    sum += squares::<I, N>(x0, vectors.of_0);
    sum += squares::<I, N>(x1, vectors.of_1);
    sum += squares::<I, N>(x2, vectors.of_2);
    sum += squares::<I, N>(x3, vectors.of_3);
    sum += squares::<I, N>(x4, vectors.of_4);
    sum += squares::<I, N>(x5, vectors.of_5);
    sum += squares::<I, N>(x6, vectors.of_6);
    sum += squares::<I, N>(x7, vectors.of_7);
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

/// Vectors of each tensor.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) of_0: u32,
    pub(crate) of_1: u32,
    pub(crate) of_2: u32,
    pub(crate) of_3: u32,
    pub(crate) of_4: u32,
    pub(crate) of_5: u32,
    pub(crate) of_6: u32,
    pub(crate) of_7: u32,
}

/// A unit's share of the squares of one tensor.
#[cube]
fn squares<I: Float, N: Size>(x: &[Vector<I, N>], vectors: u32) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut index = ABSOLUTE_POS as u32;
    let step = CUBE_COUNT as u32 * CUBE_DIM;
    while index < vectors {
        let values = Vector::<f32, N>::cast_from(x[index as usize]);
        sum += values * values;
        index += step;
    }
    sum
}
