use crate::philox::{combined, philox4x32};
use cubecl::prelude::*;

/// Elements that a call of the generator has words for.
const WORDS: usize = 4;

/// y, a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn dropout_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    key: &[u32],
    y: &mut [Vector<F, N>],
    low: u32,
    high: u32,
    threshold: u32,
    scale: f32,
    #[comptime] adds: bool,
    #[comptime] has_key: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let size = N::value().comptime();
    let value = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
    let mut kept = Vector::<f32, N>::empty();
    let first = u32::cast_from(ABSOLUTE_POS) * comptime!(size as u32);
    let (low, high) = combined(low, high, key, has_key);
    // 1. A call for every four elements: vectors are aligned, and have one or two of these, or a part.
    #[unroll]
    for call in 0..comptime!(size.div_ceil(WORDS)) {
        let counter = first / 4 + comptime!(call as u32);
        let words = philox4x32((counter, 0u32, 0u32, 0u32), low, high);
        #[unroll]
        for lane in 0..comptime!(if size < WORDS { size } else { WORDS }) {
            let place = first % 4 + comptime!(lane as u32);
            let at = comptime!(call * WORDS + lane);
            let even = select(place & 2 != 0, words.2, words.0);
            let odd = select(place & 2 != 0, words.3, words.1);
            let word = select(place & 1 != 0, odd, even);
            kept.insert(at, select(word < threshold, 0.0f32, value.extract(at) * scale));
        }
    }

    // 2. What it is added to.
    if comptime!(adds) {
        kept += Vector::<f32, N>::cast_from(residual[ABSOLUTE_POS]);
    }
    y[ABSOLUTE_POS] = Vector::cast_from(kept);
}
