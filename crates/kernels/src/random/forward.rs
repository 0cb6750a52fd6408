use crate::philox::{LOW_HALF, philox4x32};
use cubecl::prelude::*;
use std::f32::consts::TAU;

/// Numbers that a call of the generator makes of whole words.
const WORDS: usize = 4;

/// Bits of a uniform number that a logarithm is taken of.
const BITS: u32 = 24;

/// What a word becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Bernoulli,
    /// Of which each half of a word makes one.
    BernoulliOfHalves,
    /// With so many bits.
    Uniform(u32),
    Normal,
}

impl Kind {
    /// Numbers that a call of the generator makes.
    pub(super) fn numbers(self) -> usize {
        match self {
            Self::BernoulliOfHalves => 2 * WORDS,
            Self::Bernoulli | Self::Uniform(_) | Self::Normal => WORDS,
        }
    }
}

/// y, a call of the generator a unit, with what is left of the last one's numbers.
#[cube(launch_unchecked)]
pub(crate) fn random_kernel<F: Float, N: Size>(
    key: &[u32],
    y: &mut [Vector<F, N>],
    number: u32,
    threshold: u32,
    low: f32,
    scale: f32,
    #[comptime] kind: Kind,
    #[define(F)] _dtype: ElemType,
) {
    let size = N::value().comptime();
    let vectors = comptime!(kind.numbers() / size);
    let first = ABSOLUTE_POS * vectors;
    if first >= y.len() {
        terminate!();
    }
    let counter = u32::cast_from(ABSOLUTE_POS);
    let (w0, w1, w2, w3) = philox4x32((counter, number, 0u32, 1u32), key[0], key[1]);
    let mut numbers = Array::<f32>::new(comptime!(kind.numbers()));
    match comptime!(kind) {
        Kind::Bernoulli => {
            numbers[0] = is_below(w0, threshold);
            numbers[1] = is_below(w1, threshold);
            numbers[2] = is_below(w2, threshold);
            numbers[3] = is_below(w3, threshold);
        }
        Kind::BernoulliOfHalves => {
            numbers[0] = is_below(w0 & LOW_HALF, threshold);
            numbers[1] = is_below(w0 >> 16, threshold);
            numbers[2] = is_below(w1 & LOW_HALF, threshold);
            numbers[3] = is_below(w1 >> 16, threshold);
            numbers[4] = is_below(w2 & LOW_HALF, threshold);
            numbers[5] = is_below(w2 >> 16, threshold);
            numbers[6] = is_below(w3 & LOW_HALF, threshold);
            numbers[7] = is_below(w3 >> 16, threshold);
        }
        Kind::Uniform(bits) => {
            numbers[0] = low + scale * unit(w0, bits);
            numbers[1] = low + scale * unit(w1, bits);
            numbers[2] = low + scale * unit(w2, bits);
            numbers[3] = low + scale * unit(w3, bits);
        }
        Kind::Normal => {
            let (n0, n1) = normal_pair(w0, w1);
            let (n2, n3) = normal_pair(w2, w3);
            numbers[0] = low + scale * n0;
            numbers[1] = low + scale * n1;
            numbers[2] = low + scale * n2;
            numbers[3] = low + scale * n3;
        }
    }
    #[unroll]
    for v in 0..vectors {
        if first + v < y.len() {
            let mut vector = Vector::<F, N>::empty();
            #[unroll]
            for lane in 0..size {
                vector.insert(lane, F::cast_from(numbers[comptime!(v * size + lane)]));
            }
            y[first + v] = vector;
        }
    }
}

/// 1 if `word` is below `threshold`, else 0.
#[cube]
fn is_below(word: u32, threshold: u32) -> f32 {
    select(word < threshold, 1.0f32, 0.0f32)
}

/// A number from 0 to below 1, of so many bits.
#[cube]
fn unit(word: u32, #[comptime] bits: u32) -> f32 {
    f32::cast_from(word >> comptime!(32 - bits)) * comptime!((-(bits as f32)).exp2())
}

/// Two independent numbers of mean 0 and deviation 1.
#[cube]
fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    let least = comptime!((-(BITS as f32)).exp2());
    // Above 0, so that the logarithm is finite.
    let radius = f32::sqrt(-2.0f32 * f32::ln(unit(a, BITS) + least));
    let angle = TAU * unit(b, BITS);
    (radius * f32::cos(angle), radius * f32::sin(angle))
}
