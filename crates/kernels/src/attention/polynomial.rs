//! Powers of two by a polynomial, as `FlashAttention-4` computes a share of the softmax: a multiprocessor of Blackwell's
//! data-center GPUs makes 16 exponentials in the time of 128 multiply-adds, and scores wait for them.

use crate::ptx::math::{max_or_nan, sum_rounded_down};
use cubecl::prelude::*;

/// Of the polynomials `1 + f (FIRST + f (SECOND + f THIRD))` the one whose largest relative error for `2^f`, `f` from 0 to
/// 1, is the least: 8.57e-5, or 2^-13.5, where bf16 rounds by 2^-9. It is 1 at 0, so that powers of whole numbers are
/// exact.
const FIRST: f32 = 0.695_116_8;
const SECOND: f32 = 0.227_644_98;
const THIRD: f32 = 0.077_067_05;

/// Its power becomes zero, as those of all numbers below.
const LEAST: f32 = -127.0;
/// f32 has only whole numbers here, so that the last bits of a sum with it are those of the power's exponent.
const EXPONENT: f32 = 12_582_912.0 + 127.0;

/// `2^f`, of `f` from 0 to 1.
#[cube]
fn power_of_fraction(f: f32) -> f32 {
    1.0f32 + f * (FIRST + f * (SECOND + f * THIRD))
}

/// `2^x` of `x` below 128, and NaN of NaN. Below 2^-126 it is zero, of minus infinity, too.
#[cube]
pub(super) fn exp2_by_polynomial(x: f32) -> f32 {
    let x = max_or_nan(x, LEAST);
    let exponent = sum_rounded_down(x, EXPONENT);
    let fraction = x - (exponent - EXPONENT);
    // A product, because a sum of exponents would make a number of NaN.
    power_of_fraction(fraction) * f32::reinterpret(u32::reinterpret(exponent) << 23)
}

/// Whether the weight of register `i` is made so: one of the four that a unit has of a row and 16 columns.
pub(super) fn is_by_polynomial(i: usize) -> bool {
    matches!(i % 8, 1 | 6)
}

#[cfg(test)]
mod tests {
    use super::{super::blueprint::POLYNOMIAL_ERROR, *};

    #[test]
    fn errors_of_fractions_are_within_the_bound_and_reach_it() {
        const STEPS: u32 = 1 << 16;
        let error = |step| {
            let fraction = step as f32 / STEPS as f32;
            (f64::from(power_of_fraction(fraction)) / f64::from(fraction).exp2() - 1.0).abs()
        };
        let largest = (0..=STEPS).map(error).fold(0.0, f64::max);
        assert!(largest <= POLYNOMIAL_ERROR && largest > 0.99 * POLYNOMIAL_ERROR, "{largest}");
        assert_eq!(power_of_fraction(0.0).to_bits(), 1.0f32.to_bits());
    }

    #[test]
    fn of_16_columns_each_row_has_one_power_by_polynomial() {
        // Pairs of registers belong to two rows in turns.
        for first in (0..64).step_by(8) {
            let made: Vec<_> = (first..first + 8).filter(|i| is_by_polynomial(*i)).collect();
            let rows: Vec<_> = made.iter().map(|i| i / 2 % 2).collect();
            assert_eq!(rows, [0, 1]);
        }
    }
}
