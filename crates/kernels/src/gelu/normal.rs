//! The standard normal distribution.

use crate::functions::{Functions, power_of_two_by, reciprocal_by};
use cubecl::prelude::*;
use std::f32::consts::{FRAC_1_SQRT_2, LOG2_E, PI};

/// The distribution Phi(x), and its density phi(x).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Normal<N: Size> {
    pub(crate) cdf: Vector<f32, N>,
    pub(crate) pdf: Vector<f32, N>,
}

/// Both at x.
#[cube]
pub(crate) fn normal<N: Size>(x: Vector<f32, N>, #[comptime] functions: Functions) -> Normal<N> {
    let scale = comptime!(1.0 / (2.0 * PI).sqrt());
    match comptime!(functions) {
        Functions::Library => {
            let half = Vector::new(0.5f32);
            Normal::<N> {
                cdf: half + half * (x * Vector::new(FRAC_1_SQRT_2)).erf(),
                pdf: Vector::new(scale) * (x * x * Vector::new(-0.5f32)).exp(),
            }
        }
        Functions::Approximate { hardware } => {
            let mut cdf = Vector::<f32, N>::empty();
            let mut pdf = Vector::<f32, N>::empty();
            #[unroll]
            for lane in 0..N::value().comptime() {
                let x = x.extract(lane);
                let bell = power_of_two_by(x * x * comptime!(-0.5 * LOG2_E), hardware);
                let tail = scaled_tail(x.abs(), hardware) * bell;
                cdf.insert(lane, select(x < 0.0f32, tail, 1.0f32 - tail));
                pdf.insert(lane, scale * bell);
            }
            Normal::<N> { cdf, pdf }
        }
    }
}

/// Phi(-x) of x that is not negative, over e^(-x^2 / 2).
///
/// Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26, whose erf is off by 1.5e-7 at most.
#[cube]
fn scaled_tail(x: f32, #[comptime] hardware: bool) -> f32 {
    let t = reciprocal_by(fma(x, comptime!(0.327_591_1 * FRAC_1_SQRT_2), 1.0f32), hardware);
    // Half of each coefficient.
    let mut sum = 0.530_702_7f32;
    sum = fma(sum, t, -0.726_576_f32);
    sum = fma(sum, t, 0.710_706_9f32);
    sum = fma(sum, t, -0.142_248_37f32);
    sum = fma(sum, t, 0.127_414_8f32);
    sum * t
}
