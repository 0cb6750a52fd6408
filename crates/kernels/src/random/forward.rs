use crate::philox::philox4x32;
use cubecl::prelude::*;
use std::f32::consts::TAU;

/// Numbers that a call of the generator makes.
pub(super) const WORDS: usize = 4;

/// Bits of a uniform number that a logarithm is taken of.
const BITS: u32 = 24;

/// What a word becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Bernoulli,
    /// With so many bits.
    Uniform(u32),
    Normal,
}

/// y, four numbers a unit, with what is left of the last four.
#[cube(launch_unchecked)]
pub(crate) fn random_kernel<F: Float>(
    key: &[u32],
    y: &mut [F],
    number: u32,
    threshold: u32,
    low: f32,
    scale: f32,
    #[comptime] kind: Kind,
    #[define(F)] _dtype: ElemType,
) {
    let first = ABSOLUTE_POS * WORDS;
    if first >= y.len() {
        terminate!();
    }
    let counter = u32::cast_from(ABSOLUTE_POS);
    let (w0, w1, w2, w3) = philox4x32((counter, number, 0u32, 1u32), key[0], key[1]);
    let mut numbers = Array::<f32>::new(WORDS);
    match comptime!(kind) {
        Kind::Bernoulli => {
            numbers[0] = select(w0 < threshold, 1.0f32, 0.0f32);
            numbers[1] = select(w1 < threshold, 1.0f32, 0.0f32);
            numbers[2] = select(w2 < threshold, 1.0f32, 0.0f32);
            numbers[3] = select(w3 < threshold, 1.0f32, 0.0f32);
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
    for lane in 0..WORDS {
        if first + lane < y.len() {
            y[first + lane] = F::cast_from(numbers[lane]);
        }
    }
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
