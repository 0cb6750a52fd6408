//! Rounding up or down by chance.

use super::Walk;
use crate::philox::philox4x32;
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// Bits of infinity.
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 1 << 31;

/// The least normal number of f16, and the inverse of the distance of those below it.
const LEAST_NORMAL: f32 = 1.0 / 16_384.0;
const SUBNORMALS: f32 = 16_777_216.0;

/// `value` as a number that `dtype` has: one of the two around it, which one decided by `word`, the
/// nearer the likelier. Exact values, infinities and NaN stay.
#[cube]
fn round_by_chance(value: f32, word: u32, #[comptime] dtype: ElemType) -> f32 {
    let bits = u32::reinterpret(value);
    let is_f16 = comptime!(dtype == ElemType::Float(FloatKind::F16));
    // The bits of f32 that the type lacks. What carries out of them goes up, into the exponent too.
    let lacking = comptime!((1u32 << if is_f16 { 13 } else { 16 }) - 1);
    let carried = (bits + (word & lacking)) & comptime!(!lacking);
    let mut rounded = f32::reinterpret(carried);
    if comptime!(is_f16) {
        // Subnormal numbers are whole multiples of their distance, and all of this is exact.
        let magnitude = f32::reinterpret(bits & comptime!(!SIGN));
        let multiple = magnitude * SUBNORMALS;
        let below = multiple.floor();
        let uniform = f32::cast_from(word >> 8) * comptime!(1.0 / SUBNORMALS);
        let up = select(uniform < multiple - below, 1.0f32, 0.0f32);
        let small = u32::reinterpret((below + up) * comptime!(1.0 / SUBNORMALS)) | (bits & SIGN);
        rounded = select(magnitude < LEAST_NORMAL, f32::reinterpret(small), rounded);
    }
    select(bits & INFINITY == INFINITY, value, rounded)
}

/// The four words' `place`-th.
#[cube]
fn word_at(words: (u32, u32, u32, u32), place: u32) -> u32 {
    let even = select(place & 2 != 0, words.2, words.0);
    let odd = select(place & 2 != 0, words.3, words.1);
    select(place & 1 != 0, odd, even)
}

/// The elements of a vector rounded by chance, the first of them element `first` of the parameter, which
/// four divides where that `is_aligned`.
#[cube]
fn round_vector<N: Size>(
    values: Vector<f32, N>,
    first: u32,
    draw: u32,
    seed: &[u32],
    #[comptime] is_aligned: bool,
    #[comptime] dtype: ElemType,
) -> Vector<f32, N> {
    let size = N::value().comptime();
    // Words are drawn by four; a vector that is not aligned goes into one draw more.
    let draws = comptime!(if is_aligned { size.div_ceil(4) } else { (size + 2) / 4 + 1 });
    let mut rounded = values;
    #[unroll]
    for number in 0..draws {
        let counter = first / 4 + comptime!(number as u32);
        let words = philox4x32((counter, draw, 0u32, 0u32), seed[0], seed[1]);
        #[unroll]
        for lane in 0..size {
            let element = first + comptime!(lane as u32);
            let word = word_at(words, element % 4);
            let drawn = round_by_chance(values.extract(lane), word, dtype);
            let is_of_draw = element / 4 == counter;
            rounded.insert(lane, select(is_of_draw, drawn, rounded.extract(lane)));
        }
    }
    rounded
}

/// A parameter's vector of that row and column rounded by chance; rows of that many elements.
#[cube]
pub(super) fn round_at<N: Size>(
    values: Vector<f32, N>,
    row: u32,
    column: u32,
    elements: u32,
    draw: u32,
    seed: &[u32],
    #[comptime] walk: Walk,
    #[comptime] dtype: ElemType,
) -> Vector<f32, N> {
    let is_by_rows = comptime!(walk == Walk::Rows);
    let size = N::value().comptime();
    let within = column * comptime!(size as u32);
    let element = if comptime!(is_by_rows) { row * elements + within } else { within };
    round_vector::<N>(values, element, draw, seed, comptime!(!is_by_rows), dtype)
}
