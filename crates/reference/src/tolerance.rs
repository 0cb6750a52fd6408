//! Comparison element by element.

use std::fmt;

/// How close a comparison was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// The largest error, in units of its element's bound.
    pub worst_ratio: f64,
    /// Where.
    pub worst_index: usize,
}

/// The element that is furthest out of bounds, or the first that is not a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mismatch {
    /// Where.
    pub index: usize,
    /// What the device computed.
    pub actual: f64,
    /// What is right.
    pub expected: f64,
    /// How far off it may be.
    pub bound: f64,
    /// How many elements are out of bounds.
    pub count: usize,
    /// Of how many.
    pub total: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} elements are out of bounds; the worst is element {}: got {:e}, expected {:e}, \
             error {:e}, bound {:e}",
            self.count,
            self.total,
            self.index,
            self.actual,
            self.expected,
            (self.actual - self.expected).abs(),
            self.bound
        )?;
        if self.expected.is_finite() && !is_bound(self.bound) {
            f.write_str(
                ", which is no bound: the reference is wrong, whatever the device computed",
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for Mismatch {}

/// Whether an error can be held to `bound`: infinity would pass every number, and NaN none.
fn is_bound(bound: f64) -> bool {
    bound.is_finite() && bound >= 0.0
}

/// Whether every element of `actual` is within its bound of `expected`. Where the expected value
/// is NaN or infinite, the actual one must be the same, and the bound is not read. Elsewhere the bound must be
/// a number of at least zero: no other bound judges anything, so the element counts as out of bounds.
///
/// # Errors
///
/// The worst element out of bounds.
///
/// # Panics
///
/// When the lengths differ.
pub fn compare(actual: &[f64], expected: &[f64], bounds: &[f64]) -> Result<Agreement, Mismatch> {
    assert_eq!(actual.len(), expected.len(), "actual and expected differ in length");
    assert_eq!(bounds.len(), expected.len(), "bounds and expected differ in length");
    let mut agreement = Agreement { worst_ratio: 0.0, worst_index: 0 };
    let mut out = 0;
    for (i, ((a, e), bound)) in actual.iter().zip(expected).zip(bounds).enumerate() {
        let ratio = if e.is_finite() {
            let error = (a - e).abs();
            match error {
                _ if !is_bound(*bound) => f64::INFINITY,
                // 0 / 0 is exact agreement; a NaN error is none at all.
                0.0 => 0.0,
                _ => error / bound,
            }
        } else if a == e || (a.is_nan() && e.is_nan()) {
            0.0
        } else {
            f64::INFINITY
        };
        let ratio = if ratio.is_nan() { f64::INFINITY } else { ratio };
        if ratio > 1.0 {
            out += 1;
        }
        if ratio > agreement.worst_ratio {
            agreement = Agreement { worst_ratio: ratio, worst_index: i };
        }
    }
    if out == 0 {
        return Ok(agreement);
    }
    let index = agreement.worst_index;
    Err(Mismatch {
        index,
        actual: actual[index],
        expected: expected[index],
        bound: bounds[index],
        count: out,
        total: actual.len(),
    })
}

/// Errors that are too large taken together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsMismatch {
    /// The root of the mean square of the errors.
    pub error: f64,
    /// How large it may be.
    pub bound: f64,
    /// Over how many elements.
    pub total: usize,
}

impl fmt::Display for RmsMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { error, bound, total } = self;
        write!(
            f,
            "the errors of {total} elements are {error:e} in the root mean square, bound {bound:e}"
        )
    }
}

impl std::error::Error for RmsMismatch {}

/// Whether the root of the mean square of the errors is at most that of the bounds, over the elements whose
/// expected value is finite. It gives the first as a share of the second. A fault of many elements shows there
/// long before it leaves the bounds of a single one.
///
/// # Errors
///
/// The two.
///
/// # Panics
///
/// When the lengths differ.
pub fn compare_rms(actual: &[f64], expected: &[f64], bounds: &[f64]) -> Result<f64, RmsMismatch> {
    assert_eq!(actual.len(), expected.len(), "actual and expected differ in length");
    assert_eq!(bounds.len(), expected.len(), "bounds and expected differ in length");
    let (mut error, mut bound, mut total) = (0.0, 0.0, 0usize);
    for ((a, e), b) in actual.iter().zip(expected).zip(bounds).filter(|((_, e), _)| e.is_finite()) {
        error += (a - e) * (a - e);
        bound += b * b;
        total += 1;
    }
    let [error, bound] = [error, bound].map(|squares: f64| (squares / total.max(1) as f64).sqrt());
    if error == 0.0 && is_bound(bound) {
        Ok(0.0)
    } else if error <= bound && is_bound(bound) {
        Ok(error / bound)
    } else {
        // NaN too.
        Err(RmsMismatch { error, bound, total })
    }
}

/// How far the noise in `actual` lies below `expected`, in decibels: the signal-to-quantization-noise
/// ratio, by which results of 8-bit types are judged as a whole. Infinite where all elements are
/// equal, NaN where one is NaN.
///
/// # Panics
///
/// When the lengths differ.
pub fn sqnr_db(actual: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len(), "actual and expected differ in length");
    let signal: f64 = expected.iter().map(|e| e * e).sum();
    let noise: f64 = actual.iter().zip(expected).map(|(a, e)| (a - e) * (a - e)).sum();
    if noise == 0.0 { f64::INFINITY } else { 10.0 * (signal / noise).log10() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_within_bounds_agree_and_the_worst_is_named() {
        let agreement = compare(&[1.0, 2.1, 3.0], &[1.0, 2.0, 3.05], &[0.1, 0.2, 0.2]).unwrap();
        assert_eq!(agreement.worst_index, 1);
        assert!((agreement.worst_ratio - 0.5).abs() < 1e-9);
    }

    #[test]
    fn one_element_out_of_bounds_is_a_mismatch() {
        let mismatch = compare(&[1.0, 2.5, 3.0], &[1.0, 2.0, 3.0], &[0.1; 3]).unwrap_err();
        assert_eq!((mismatch.index, mismatch.count), (1, 1));
    }

    #[test]
    fn nan_never_passes_for_a_number_nor_a_number_for_nan() {
        assert!(compare(&[f64::NAN], &[0.0], &[f64::MAX]).is_err());
        assert!(compare(&[f64::INFINITY], &[0.0], &[f64::MAX]).is_err());
        assert!(compare(&[0.0], &[f64::NAN], &[1.0]).is_err());
        assert!(compare(&[f64::NAN], &[f64::NAN], &[0.0]).is_ok());
        assert!(compare(&[f64::INFINITY], &[f64::NEG_INFINITY], &[1.0]).is_err());
    }

    #[test]
    fn a_bound_that_is_no_number_passes_nothing_and_is_told_as_the_reference_s_fault() {
        for bound in [f64::NAN, f64::INFINITY, -1.0] {
            for actual in [1.0, 2.0] {
                let mismatch = compare(&[actual], &[1.0], &[bound]).unwrap_err();
                assert!(mismatch.to_string().contains("the reference is wrong"), "{mismatch}");
                assert!(compare_rms(&[actual], &[1.0], &[bound]).is_err() || bound == -1.0);
            }
            // Where nothing but the same passes, it is not read.
            assert!(compare(&[f64::NAN], &[f64::NAN], &[bound]).is_ok());
        }
        let mismatch = compare(&[2.0], &[1.0], &[0.5]).unwrap_err().to_string();
        assert!(!mismatch.contains("reference"), "{mismatch}");
    }

    #[test]
    fn errors_are_judged_together_where_the_expected_values_are_finite() {
        let expected = [1.0, 2.0, f64::INFINITY];
        assert_eq!(compare_rms(&expected, &expected, &[0.0; 3]), Ok(0.0));
        let share = compare_rms(&[1.1, 2.0, f64::INFINITY], &expected, &[0.1, 0.1, 9.0]).unwrap();
        assert!((share - 0.5f64.sqrt()).abs() < 1e-9, "{share}");
        let mismatch = compare_rms(&[1.1, 2.2, 0.0], &expected, &[0.1, 0.1, 9.0]).unwrap_err();
        assert_eq!(mismatch.total, 2);
        assert!(compare_rms(&[f64::NAN, 2.0, 0.0], &expected, &[1.0; 3]).is_err());
        assert_eq!(compare_rms(&[], &[], &[]), Ok(0.0));
    }

    #[test]
    fn a_tenth_of_the_amplitude_as_noise_is_20_decibels() {
        assert!((sqnr_db(&[1.1, -0.9], &[1.0, -1.0]) - 20.0).abs() < 1e-9);
        assert_eq!(sqnr_db(&[1.0], &[1.0]), f64::INFINITY);
        assert!(sqnr_db(&[f64::NAN], &[1.0]).is_nan());
    }
}
