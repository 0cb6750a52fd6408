//! The largest magnitude of a tensor, in bits.

use cubecl::prelude::*;

/// Units of a cube; every adapter allows that many.
pub(crate) const UNITS: u32 = 256;

/// What is left of a float's bits without its sign: larger for larger magnitudes, above every
/// number's for infinity, and above that for NaN.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// `partials[c]` is the largest of the magnitudes that cube c saw.
///
/// It goes through x from the end, which the kernel that made x wrote last, and leaves the beginning in the cache,
/// where the cast begins.
#[cube(launch_unchecked)]
pub(crate) fn quantize_amax_kernel<I: Float, N: Size>(
    x: &[Vector<I, N>],
    partials: &mut [u32],
    vectors: u32,
    #[define(I)] _input: ElemType,
) {
    let mut largest = 0u32;
    let mut index = CUBE_POS_X * UNITS + UNIT_POS;
    while index < vectors {
        let value = Vector::<f32, N>::cast_from(x[(vectors - 1 - index) as usize]);
        #[unroll]
        for lane in 0..N::value().comptime() {
            largest = max(largest, u32::reinterpret(value.extract(lane)) & MAGNITUDE);
        }
        index += CUBE_COUNT_X * UNITS;
    }
    let largest = largest_of_cube(largest);
    if UNIT_POS == 0 {
        partials[CUBE_POS_X as usize] = largest;
    }
}

/// The largest of the units' numbers, for all of them.
#[cube]
pub(super) fn largest_of_cube(mine: u32) -> u32 {
    let mut all = Shared::<[u32]>::new_slice(comptime!(UNITS as usize));
    all[UNIT_POS as usize] = mine;
    sync_cube();
    #[unroll]
    for step in 1..comptime!(UNITS.ilog2() + 1) {
        let distance = comptime!(UNITS >> step);
        if UNIT_POS < distance {
            let other = all[(UNIT_POS + distance) as usize];
            all[UNIT_POS as usize] = max(all[UNIT_POS as usize], other);
        }
        sync_cube();
    }
    all[0]
}
