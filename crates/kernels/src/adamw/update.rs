use super::rounding::round_by_chance;
use crate::philox::philox4x32;
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

/// The elements of a vector rounded by chance, the first of them element `first` of the parameter.
#[cube]
fn round_vector<N: Size>(
    values: Vector<f32, N>,
    first: u32,
    draw: u32,
    seed: &[u32],
    #[comptime] dtype: ElemType,
) -> Vector<f32, N> {
    let size = N::value().comptime();
    let words = philox4x32((first / 4, draw, 0u32, 0u32), seed[0], seed[1]);
    let mut rounded = Vector::<f32, N>::empty();
    #[unroll]
    for lane in 0..size {
        let word = word_at(words, first % 4 + comptime!(lane as u32));
        rounded.insert(lane, round_by_chance(values.extract(lane), word, dtype));
    }
    rounded
}

/// One step; `vectors` are those of the parameter. `taken`, `skipped` and `factor` are read if it is
/// `gated`,
/// `seed` if it is `by_chance`.
#[cube(launch_unchecked)]
pub(crate) fn adamw_update_kernel<P: Float, G: Float, N: Size>(
    parameter: &[Vector<P, N>],
    gradient: &[Vector<G, N>],
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
    draw: u32,
    vectors: u32,
    #[comptime] gated: bool,
    #[comptime] by_chance: bool,
    #[define(P)] parameter_dtype: ElemType,
    #[define(G)] _gradient_dtype: ElemType,
) {
    let size = N::value().comptime();

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

    let mut index = ABSOLUTE_POS as u32;
    let step = CUBE_COUNT as u32 * CUBE_DIM;
    while index < vectors {
        let at = index as usize;
        let stored = parameter[at];
        let old_first = first[at];
        let old_second = second[at];
        if is_taken {
            // 2. The moments.
            let mut g = Vector::<f32, N>::cast_from(gradient[at]);
            if comptime!(gated) {
                g *= Vector::new(of_gradient);
            }
            let new_first = old_first + Vector::new(factors.of_first) * (g - old_first);
            let new_second = old_second + Vector::new(factors.of_second) * (g * g - old_second);
            first_out[at] = new_first;
            second_out[at] = new_second;

            // 3. The parameter.
            let p = Vector::<f32, N>::cast_from(stored);
            let deviation = (Vector::new(correction) * new_second).sqrt();
            let direction = new_first / (deviation + Vector::new(factors.epsilon));
            let mut change = Vector::new(rate) * direction;
            // Zero times an infinite parameter would be no number.
            if factors.decay != 0.0f32 {
                change += Vector::new(factors.decay) * p;
            }
            let mut updated = p - change;
            if comptime!(by_chance) {
                let element = index * comptime!(size as u32);
                updated = round_vector::<N>(updated, element, draw, seed, parameter_dtype);
            }
            parameter_out[at] = Vector::cast_from(updated);
        } else {
            // 4. Or nothing, in memory that may be new.
            parameter_out[at] = stored;
            first_out[at] = old_first;
            second_out[at] = old_second;
        }
        index += step;
    }
}
