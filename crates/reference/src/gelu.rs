//! GELU in its exact (erf) form.

use crate::{column_sum, storage::Storage};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// Absolute error of the portable erf in f32: 1.5e-7 of Abramowitz and Stegun 7.1.26, and the
/// rounding of its f32 evaluation, a dozen operations on numbers of at most 1.5.
pub const PORTABLE_ERF_ERROR: f64 = 1.5e-7 + 18.0 / (1u64 << 24) as f64;

/// Absolute error of CUDA's `erff`: at most 2 ulp of a number below 1 (CUDA C++ Programming Guide,
/// mathematical functions).
pub const CUDA_ERF_ERROR: f64 = 2.0 / (1u64 << 23) as f64;

/// Absolute error of the erf that GELU's kernels have for elements of that type: the portable one for 16 bits.
pub fn erf_error(is_cuda: bool, storage: Storage) -> f64 {
    if is_cuda && storage == Storage::F32 { CUDA_ERF_ERROR } else { PORTABLE_ERF_ERROR }
}

/// Relative error of a device's f32 `exp` over the exponents of a normal density: 2 ulp of CUDA's
/// fast exponential, growing with the exponent, and the 3 + 2 |x| ulp that WGSL allows.
const EXP_ULP: f64 = 3.0;

/// Phi(x).
fn normal_cdf(x: f64) -> f64 {
    0.5 * (1.0 + libm::erf(x * FRAC_1_SQRT_2))
}

/// phi(x).
fn normal_pdf(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// x Phi(x).
pub fn gelu(x: f64) -> f64 {
    x * normal_cdf(x)
}

/// Phi(x) + x phi(x).
pub fn gelu_derivative(x: f64) -> f64 {
    normal_cdf(x) + x * normal_pdf(x)
}

/// How far off y = gelu(x) may be when it is computed in f32, by an erf of that absolute error,
/// and stored in `storage`.
pub fn forward_bound(x: f64, storage: Storage, erf_error: f64) -> f64 {
    x.abs() * cdf_error(erf_error) + output_error(gelu(x), storage)
}

/// How far off dx = dy gelu'(x) may be.
pub fn backward_bound(x: f64, dy: f64, storage: Storage, erf_error: f64) -> f64 {
    dy.abs() * derivative_error(x, erf_error) + output_error(dy * gelu_derivative(x), storage)
}

/// How far off the sum of the gradients of such `pairs` of x and dy may be: each term computed in f32
/// and rounded to `terms`, added up in f32, the sum rounded to `storage`.
pub fn backward_sum_bound(
    pairs: impl Iterator<Item = (f64, f64)>,
    terms: Storage,
    storage: Storage,
    erf_error: f64,
) -> f64 {
    let (mut count, mut sum, mut magnitudes, mut errors) = (0, 0.0, 0.0, 0.0);
    for (x, dy) in pairs {
        let (dx, error) = (dy * gelu_derivative(x), backward_bound(x, dy, terms, erf_error));
        count += 1;
        sum += dx;
        magnitudes += dx.abs() + error;
        errors += error;
    }
    errors + column_sum::bound(sum, magnitudes, count, storage) + errors * storage.unit_roundoff()
}

/// How far off gelu'(x) may be in f32.
pub(crate) fn derivative_error(x: f64, erf_error: f64) -> f64 {
    let u = Storage::F32.unit_roundoff();
    let exponent = 0.5 * x * x;
    // The exponent is rounded thrice before exp sees it, and an absolute error there is a relative
    // one of the result.
    let pdf_relative = 3.0 * u * exponent + exp_relative_error(exponent) + 4.0 * u;
    cdf_error(erf_error) + (x * normal_pdf(x)).abs() * pdf_relative + 2.0 * u
}

/// Relative error of a device's exp of that exponent, which it knows exactly.
pub(crate) fn exp_relative_error(exponent: f64) -> f64 {
    2.0 * Storage::F32.unit_roundoff() * (EXP_ULP + 2.0 * exponent.abs())
}

/// Phi(x) = 1/2 + 1/2 erf: half of erf's error, with that of its rounded argument (erf' is at most
/// 1.13), and the roundings of numbers of at most 1.
pub(crate) fn cdf_error(erf_error: f64) -> f64 {
    let u = Storage::F32.unit_roundoff();
    0.5 * erf_error + 3.0 * u
}

/// The last operations in f32, and the rounding to storage.
pub(crate) fn output_error(y: f64, storage: Storage) -> f64 {
    let f32_error = 2.0 * Storage::F32.unit_roundoff();
    y.abs() * (storage.unit_roundoff() + f32_error) + storage.underflow()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradcheck::check_derivative;

    #[test]
    fn the_derivative_is_the_function_s_own() {
        for i in -60..=60 {
            check_derivative(gelu, gelu_derivative, f64::from(i) / 10.0).unwrap();
        }
    }

    #[test]
    fn known_values_come_out() {
        assert_eq!(gelu(0.0), 0.0);
        // Phi(1) = 0.841344746068543
        assert!((gelu(1.0) - 0.841_344_746_068_543).abs() < 1e-15);
        assert!((gelu(-1.0) + 0.158_655_253_931_457).abs() < 1e-15);
        assert_eq!(gelu_derivative(0.0), 0.5);
    }

    #[test]
    fn bounds_are_tight_enough_to_tell_the_tanh_form_apart() {
        let x = 2.0f64;
        let inner = (2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3));
        let approximation = 0.5 * x * (1.0 + inner.tanh());
        let bound = forward_bound(x, Storage::F32, PORTABLE_ERF_ERROR);
        assert!((approximation - gelu(x)).abs() > 10.0 * bound);
    }
}
