//! The largest magnitude of a tensor, in bits.

use crate::magnitude::{larger, largest_of_cube};
use cubecl::prelude::*;

/// Units of a cube; every adapter allows that many.
pub(crate) const UNITS: u32 = 256;

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
        largest = larger::<N>(largest, Vector::cast_from(x[(vectors - 1 - index) as usize]));
        index += CUBE_COUNT_X * UNITS;
    }
    let largest = largest_of_cube(largest, UNITS);
    if UNIT_POS == 0 {
        partials[CUBE_POS_X as usize] = largest;
    }
}
