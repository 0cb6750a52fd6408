use super::{AdamwWalk, rounding::round_by_chance};
use crate::philox::philox4x32;
#[cfg(feature = "cuda")]
use crate::ptx::math::{approximate_quotient, approximate_sqrt};
use cubecl::prelude::*;

/// What an update multiplies by.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Factors {
    /// `1 - beta_1`.
    pub(crate) of_first: f32,
    /// `1 - beta_2`.
    pub(crate) of_second: f32,
    /// Rate times decay.
    pub(crate) decay: f32,
    /// The rate, over `1 - beta_1^t` unless gated.
    pub(crate) rate: f32,
    /// `1 / (1 - beta_2^t)`, 1 if gated.
    pub(crate) correction: f32,
    pub(crate) epsilon: f32,
    /// The rest is read by gated updates only.
    pub(crate) log_beta_1: f32,
    pub(crate) log_beta_2: f32,
    pub(crate) time: f32,
}

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

/// The vector `at` of a parameter rounded by chance; rows of that many vectors and elements.
#[cube]
pub(crate) fn round_at<N: Size>(
    values: Vector<f32, N>,
    at: u32,
    columns: u32,
    elements: u32,
    draw: u32,
    seed: &[u32],
    #[comptime] walk: AdamwWalk,
    #[comptime] dtype: ElemType,
) -> Vector<f32, N> {
    let size = N::value().comptime();
    let is_by_rows = comptime!(walk == AdamwWalk::Rows);
    let mut element = at * comptime!(size as u32);
    if comptime!(is_by_rows) {
        let row = at / columns;
        element = row * elements + at % columns * comptime!(size as u32);
    }
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

/// Where elements lie, for the walks that ask.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Pitches {
    /// Vectors of a row, begun ones too, or its elements where the gradient is gathered.
    pub(crate) columns: u32,
    /// Elements of a row.
    pub(crate) elements: u32,
    /// From one row to the next, in vectors, but in elements where the gradient is gathered.
    pub(crate) parameter: u32,
    pub(crate) gradient: u32,
    pub(crate) first: u32,
    pub(crate) second: u32,
    pub(crate) parameter_out: u32,
    pub(crate) first_out: u32,
    pub(crate) second_out: u32,
}

/// Where the vector `index` of a tensor lies.
#[cube]
pub(crate) fn place(index: u32, columns: u32, pitch: u32, #[comptime] walk: AdamwWalk) -> usize {
    if comptime!(walk == AdamwWalk::Rows) {
        (index / columns * pitch + index % columns) as usize
    } else {
        index as usize
    }
}

/// The vector `index` of a gradient: as it lies, or from two rows at most.
#[cube]
pub(crate) fn load_gradient<G: Float, N: Size, M: Size>(
    gradient: &[Vector<G, M>],
    index: u32,
    columns: u32,
    pitch: u32,
    #[comptime] walk: AdamwWalk,
) -> Vector<f32, N> {
    let mut g = Vector::<f32, N>::empty();
    let size = N::value().comptime();
    if comptime!(walk == AdamwWalk::Gathered) {
        let first = index * comptime!(size as u32);
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
        let values = gradient[place(index, columns, pitch, walk)];
        #[unroll]
        for lane in 0..size {
            g.insert(lane, f32::cast_from(values.extract(lane)));
        }
    }
    g
}

/// One step; `vectors` are those of the parameter. `taken`, `skipped` and `factor` are read if it is
/// `gated`, `seed` if it is `by_chance`. Vectors of the gradient are of one element where it is gathered.
#[cube(launch_unchecked)]
pub(crate) fn adamw_update_kernel<P: Float, G: Float, N: Size, M: Size>(
    parameter: &[Vector<P, N>],
    gradient: &[Vector<G, M>],
    first: &[Vector<f32, N>],
    second: &[Vector<f32, N>],
    taken: &[f32],
    skipped: &[f32],
    factor: &[f32],
    seed: &[u32],
    parameter_out: &mut [Vector<P, N>],
    first_out: &mut [Vector<f32, N>],
    second_out: &mut [Vector<f32, N>],
    factors: Factors,
    pitches: Pitches,
    draw: u32,
    vectors: u32,
    #[comptime] compiled: Compiled,
    #[define(P)] parameter_dtype: ElemType,
    #[define(G)] _gradient_dtype: ElemType,
) {
    let Compiled { walk, unroll, by_ptx, gated, by_chance } = comptime!(compiled);

    // 1. What depends on the steps that were taken. At the least this one was, which keeps the divisions
    //    finite where it is not taken either.
    let mut rate = factors.rate;
    let mut correction = factors.correction;
    let mut is_taken = true;
    let mut of_gradient = 1.0f32;
    if comptime!(gated) {
        is_taken = taken[0] != 0.0f32;
        of_gradient = factor[0];
        let steps = max(factors.time - skipped[0], 1.0f32);
        rate /= complement_of_power(factors.log_beta_1, steps);
        correction = 1.0f32 / complement_of_power(factors.log_beta_2, steps);
    }

    let columns = pitches.columns;
    let step = CUBE_COUNT as u32 * CUBE_DIM;
    let mut index = ABSOLUTE_POS as u32;
    if is_taken {
        while index < vectors {
            // 2. All loads before any is used, so that they are on the way together. Units beyond the end
            //    load the last vector again, and leave it.
            let mut stored = Array::<Vector<P, N>>::new(unroll);
            let mut gradients = Array::<Vector<f32, N>>::new(unroll);
            let mut old_first = Array::<Vector<f32, N>>::new(unroll);
            let mut old_second = Array::<Vector<f32, N>>::new(unroll);
            #[unroll]
            for ahead in 0..unroll {
                let at = min(index + comptime!(ahead as u32) * step, vectors - 1);
                stored[ahead] = parameter[place(at, columns, pitches.parameter, walk)];
                gradients[ahead] =
                    load_gradient::<G, N, M>(gradient, at, columns, pitches.gradient, walk);
                old_first[ahead] = first[place(at, columns, pitches.first, walk)];
                old_second[ahead] = second[place(at, columns, pitches.second, walk)];
            }
            #[unroll]
            for ahead in 0..unroll {
                let at = index + comptime!(ahead as u32) * step;

                // 3. The moments.
                let mut g = gradients[ahead];
                if comptime!(gated) {
                    g *= Vector::new(of_gradient);
                }
                let new_first =
                    old_first[ahead] + Vector::new(factors.of_first) * (g - old_first[ahead]);
                let new_second = old_second[ahead]
                    + Vector::new(factors.of_second) * (g * g - old_second[ahead]);

                // 4. The parameter.
                let p = Vector::<f32, N>::cast_from(stored[ahead]);
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
                        at,
                        columns,
                        pitches.elements,
                        draw,
                        seed,
                        walk,
                        parameter_dtype,
                    );
                }
                if at < vectors {
                    let new = Vector::cast_from(updated);
                    parameter_out[place(at, columns, pitches.parameter_out, walk)] = new;
                    first_out[place(at, columns, pitches.first_out, walk)] = new_first;
                    second_out[place(at, columns, pitches.second_out, walk)] = new_second;
                }
            }
            index += comptime!(unroll as u32) * step;
        }
    } else {
        // 5. Or nothing, in memory that may be new.
        while index < vectors {
            let same = parameter[place(index, columns, pitches.parameter, walk)];
            parameter_out[place(index, columns, pitches.parameter_out, walk)] = same;
            let same = first[place(index, columns, pitches.first, walk)];
            first_out[place(index, columns, pitches.first_out, walk)] = same;
            let same = second[place(index, columns, pitches.second, walk)];
            second_out[place(index, columns, pitches.second_out, walk)] = same;
            index += step;
        }
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Compiled {
    pub(crate) walk: AdamwWalk,
    /// Vectors of each tensor on the way at once.
    pub(crate) unroll: usize,
    /// Root and quotient by PTX.
    pub(crate) by_ptx: bool,
    pub(crate) gated: bool,
    pub(crate) by_chance: bool,
}
