//! The step of one tensor.

use super::{
    AdamwWalk,
    kernel::{Compiled, Part, Readings},
    rounding::round_by_chance,
};
use crate::philox::philox4x32;
#[cfg(feature = "cuda")]
use crate::ptx::math::{approximate_quotient, approximate_sqrt};
use cubecl::prelude::*;

/// Up to here a power's complement is summed, since `1 - exp` would lose digits.
const SMALL: f32 = -0.5;
/// Terms of the sum: the next one is below 2^-30 of it.
const TERMS: u32 = 9;

/// `1 - beta^steps`, of the logarithm of beta.
#[cube]
fn complement_of_power(log_beta: f32, steps: f32) -> f32 {
    let exponent = log_beta * steps;
    // 1 + x/2 (1 + x/3 (1 + ...))
    let mut sum = 1.0f32;
    #[unroll]
    for term in 1..TERMS {
        sum = 1.0f32 + exponent * comptime!(1.0 / (TERMS + 1 - term) as f32) * sum;
    }
    select(exponent > SMALL, -exponent * sum, 1.0f32 - exponent.exp())
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
pub(crate) fn round_at<N: Size>(
    values: Vector<f32, N>,
    row: u32,
    column: u32,
    elements: u32,
    draw: u32,
    seed: &[u32],
    #[comptime] walk: AdamwWalk,
    #[comptime] dtype: ElemType,
) -> Vector<f32, N> {
    let is_by_rows = comptime!(walk == AdamwWalk::Rows);
    let size = N::value().comptime();
    let within = column * comptime!(size as u32);
    let element = if comptime!(is_by_rows) { row * elements + within } else { within };
    round_vector::<N>(values, element, draw, seed, comptime!(!is_by_rows), dtype)
}

/// The root of each element.
#[cube]
fn root<N: Size>(x: Vector<f32, N>, #[comptime] by_ptx: bool) -> Vector<f32, N> {
    if comptime!(by_ptx) {
        let mut roots = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..N::value().comptime() {
            roots.insert(lane, approximate_sqrt(x.extract(lane)));
        }
        roots
    } else {
        x.sqrt()
    }
}

/// `a / b`, element by element.
#[cube]
fn quotient<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    #[comptime] by_ptx: bool,
) -> Vector<f32, N> {
    if comptime!(by_ptx) {
        let mut quotients = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..N::value().comptime() {
            quotients.insert(lane, approximate_quotient(a.extract(lane), b.extract(lane)));
        }
        quotients
    } else {
        a / b
    }
}

/// Builds without CUDA never ask for it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn approximate_sqrt(x: f32) -> f32 {
    x.sqrt()
}

/// Builds without CUDA never ask for it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn approximate_quotient(a: f32, b: f32) -> f32 {
    a / b
}

/// Row and column of the vector `index`, which is the column itself where rows are not asked for.
#[cube]
pub(crate) fn row_and_column(index: u32, columns: u32, #[comptime] walk: AdamwWalk) -> (u32, u32) {
    if comptime!(walk == AdamwWalk::Rows) {
        (index / columns, index % columns)
    } else {
        (0u32, index)
    }
}

/// Where a tensor has its vector of that row and column.
#[cube]
pub(crate) fn place(row: u32, column: u32, pitch: u32, #[comptime] walk: AdamwWalk) -> usize {
    if comptime!(walk == AdamwWalk::Rows) {
        (row * pitch + column) as usize
    } else {
        column as usize
    }
}

/// A gradient's vector of that row and column: as it lies, or, if it is gathered, from two rows at most.
#[cube]
pub(crate) fn load_gradient<G: Float, N: Size, M: Size>(
    gradient: &[Vector<G, M>],
    row: u32,
    column: u32,
    columns: u32,
    pitch: u32,
    #[comptime] walk: AdamwWalk,
) -> Vector<f32, N> {
    let mut g = Vector::<f32, N>::empty();
    let size = N::value().comptime();
    if comptime!(walk == AdamwWalk::Gathered) {
        let first = column * comptime!(size as u32);
        let row = first / columns;
        let column = first % columns;
        #[unroll]
        for lane in 0..size {
            let beside = column + comptime!(lane as u32);
            let gap = pitch - columns;
            let skipped = select(beside < columns, 0u32, gap);
            let at = (row * pitch + beside + skipped) as usize;
            g.insert(lane, f32::cast_from(gradient[at].extract(0usize)));
        }
    } else {
        let values = gradient[place(row, column, pitch, walk)];
        #[unroll]
        for lane in 0..size {
            g.insert(lane, f32::cast_from(values.extract(lane)));
        }
    }
    g
}

/// One step of a tensor, by units each of which takes the vector `first_index` and every `stride`-th after
/// it.
#[cube]
pub(super) fn update<P: Float, G: Float, N: Size, M: Size>(
    parameter: &[Vector<P, N>],
    gradient: &[Vector<G, M>],
    first: &[Vector<f32, N>],
    second: &[Vector<f32, N>],
    seed: &[u32],
    parameter_out: &mut [Vector<P, N>],
    first_out: &mut [Vector<f32, N>],
    second_out: &mut [Vector<f32, N>],
    part: &Part,
    readings: &Readings,
    first_index: u32,
    stride: u32,
    #[comptime] compiled: Compiled,
    #[comptime] parameter_dtype: ElemType,
) {
    let Compiled { walk, by_ptx, gated, by_chance, .. } = comptime!(compiled);
    let factors = &part.factors;
    let pitches = &part.pitches;

    // 1. What depends on the steps that were taken. At the least this one was, which keeps the divisions
    //    finite where it is not taken either.
    let mut rate = factors.rate;
    let mut correction = factors.correction;
    if comptime!(gated) {
        let steps = max(factors.time - readings.skipped, 1.0f32);
        rate /= complement_of_power(factors.log_beta_1, steps);
        correction = 1.0f32 / complement_of_power(factors.log_beta_2, steps);
    }

    let columns = pitches.columns;
    let mut index = first_index;
    while index < part.vectors {
        // 2. All loads before any is used.
        let (row, column) = row_and_column(index, columns, walk);
        let stored = parameter[place(row, column, pitches.parameter, walk)];
        let mut g =
            load_gradient::<G, N, M>(gradient, row, column, columns, pitches.gradient, walk);
        let old_first = first[place(row, column, pitches.first, walk)];
        let old_second = second[place(row, column, pitches.second, walk)];

        // 3. The moments.
        if comptime!(gated) {
            g *= Vector::new(readings.factor);
        }
        let new_first = old_first + Vector::new(factors.of_first) * (g - old_first);
        let new_second = old_second + Vector::new(factors.of_second) * (g * g - old_second);
        first_out[place(row, column, pitches.first_out, walk)] = new_first;
        second_out[place(row, column, pitches.second_out, walk)] = new_second;

        // 4. The parameter.
        let p = Vector::<f32, N>::cast_from(stored);
        let deviation = root::<N>(Vector::new(correction) * new_second, by_ptx);
        let divisor = deviation + Vector::new(factors.epsilon);
        let direction = quotient::<N>(new_first, divisor, by_ptx);
        let mut change = Vector::new(rate) * direction;
        // Zero times an infinite parameter would be no number.
        if factors.decay != 0.0f32 {
            change += Vector::new(factors.decay) * p;
        }
        let mut updated = p - change;
        if comptime!(by_chance) {
            updated = round_at::<N>(
                updated,
                row,
                column,
                pitches.elements,
                part.draw,
                seed,
                walk,
                parameter_dtype,
            );
        }
        parameter_out[place(row, column, pitches.parameter_out, walk)] = Vector::cast_from(updated);
        index += stride;
    }
}

/// No step of a tensor, whose new memory is to hold what the old does.
#[cube]
pub(super) fn keep<P: Float, N: Size>(
    parameter: &[Vector<P, N>],
    first: &[Vector<f32, N>],
    second: &[Vector<f32, N>],
    parameter_out: &mut [Vector<P, N>],
    first_out: &mut [Vector<f32, N>],
    second_out: &mut [Vector<f32, N>],
    part: &Part,
    first_index: u32,
    stride: u32,
    #[comptime] walk: AdamwWalk,
) {
    let pitches = &part.pitches;
    let columns = pitches.columns;
    let mut index = first_index;
    while index < part.vectors {
        let (row, column) = row_and_column(index, columns, walk);
        let same = parameter[place(row, column, pitches.parameter, walk)];
        parameter_out[place(row, column, pitches.parameter_out, walk)] = same;
        let same = first[place(row, column, pitches.first, walk)];
        first_out[place(row, column, pitches.first_out, walk)] = same;
        let same = second[place(row, column, pitches.second, walk)];
        second_out[place(row, column, pitches.second_out, walk)] = same;
        index += stride;
    }
}
