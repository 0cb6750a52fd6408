//! Gradients against central differences.

/// Step of the differences: near the cube root of f64's unit roundoff, where truncation and
/// rounding err alike.
const STEP: f64 = 1e-6;

/// Whether `derivative` is the derivative of `function` at `x`, to a relative 1e-3 and an absolute
/// 1e-5: the tolerances that PyTorch's gradcheck has.
///
/// For references in f64 only; a device's gradient is compared with the reference's.
///
/// # Errors
///
/// Both values, in words.
pub fn check_derivative(
    function: impl Fn(f64) -> f64,
    derivative: impl Fn(f64) -> f64,
    x: f64,
) -> Result<(), String> {
    let numeric = (function(x + STEP) - function(x - STEP)) / (2.0 * STEP);
    let analytic = derivative(x);
    if (numeric - analytic).abs() <= 1e-5 + 1e-3 * numeric.abs() {
        return Ok(());
    }
    Err(format!("at {x}: derivative {analytic}, central difference {numeric}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_derivative_passes_and_a_wrong_one_fails() {
        check_derivative(|x| x * x, |x| 2.0 * x, 3.0).unwrap();
        assert!(check_derivative(|x| x * x, |x| 2.1 * x, 3.0).is_err());
    }
}
