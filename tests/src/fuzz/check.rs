//! Comparisons of a case's results with the reference.

use blackburn_kernels::KernelError;
use blackburn_reference::{softmax::Bounded, tolerance::compare};
use std::{fmt::Debug, result::Result};

/// Why a case went no further.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Something is wrong.
    Wrong(String),
    /// No kernel serves the case here, as the error says.
    Declined(String),
}

impl From<KernelError> for Stop {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Unsupported { .. } => Self::Declined(error.to_string()),
            other => Self::Wrong(format!("an error: {other}")),
        }
    }
}

impl From<String> for Stop {
    fn from(error: String) -> Self {
        Self::Wrong(error)
    }
}

impl From<&str> for Stop {
    fn from(error: &str) -> Self {
        Self::Wrong(error.into())
    }
}

impl From<libtest_mimic::Failed> for Stop {
    fn from(error: libtest_mimic::Failed) -> Self {
        Self::Wrong(error.message().unwrap_or("no message").into())
    }
}

/// Lets NaN and infinities pass for each other where `may` holds. It holds where a factor of an infinity may be
/// zero in a device's arithmetic and is not in the reference's.
pub fn settle(actual: &mut [f64], expected: &[f64], may: impl Fn(usize) -> bool) {
    for (i, (actual, expected)) in actual.iter_mut().zip(expected).enumerate() {
        if !actual.is_finite() && !expected.is_finite() && may(i) {
            *actual = *expected;
        }
    }
}

/// What a case's comparisons came to.
#[derive(Clone, Debug, Default)]
pub struct Check {
    /// Whether the first result with elements gets a fault.
    plant: bool,
    /// Whether it has got it.
    planted: bool,
    /// Elements that were compared.
    compared: usize,
    /// Results that were refused, as they had to be.
    refused: usize,
    /// The error that is largest by its bound, and which result it is in.
    worst: Option<(f64, String)>,
}

impl Check {
    /// No comparisons yet. With `plant`, one element of the first result is moved out of its bound before it
    /// is compared: the case has to fail then.
    pub fn new(plant: bool) -> Self {
        Self { plant, ..Self::default() }
    }

    /// Whether a fault was planted, which takes a result with an element.
    pub fn planted(&self) -> bool {
        self.planted
    }

    /// Elements that were compared.
    pub fn compared(&self) -> usize {
        self.compared
    }

    /// Errors that came where they had to.
    pub fn refused(&self) -> usize {
        self.refused
    }

    /// The error that is largest by its bound, as a share of that, and the result that it is in.
    pub fn worst(&self) -> Option<&(f64, String)> {
        self.worst.as_ref()
    }

    /// Holds a result against what is right.
    ///
    /// Where that is NaN or infinite, the result has to be the same, and nowhere else.
    ///
    /// # Errors
    ///
    /// The worst element, where it is out of bounds.
    pub fn compare(
        &mut self,
        what: &str,
        mut actual: Vec<f64>,
        expected: &[f64],
        bounds: &[f64],
    ) -> Result<(), Stop> {
        if actual.len() != expected.len() {
            let (is, should) = (actual.len(), expected.len());
            return Err(format!("{what} has {is} elements, not {should}").into());
        }
        self.plant(&mut actual, expected, bounds);
        self.compared += actual.len();
        let agreement = compare(&actual, expected, bounds)
            .map_err(|mismatch| Stop::Wrong(format!("{what}: {mismatch}")))?;
        if self.worst.as_ref().is_none_or(|(worst, _)| agreement.worst_ratio > *worst) {
            self.worst = Some((agreement.worst_ratio, what.to_owned()));
        }
        Ok(())
    }

    /// As [`compare`](Self::compare), of numbers with their bounds.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn within(
        &mut self,
        what: &str,
        actual: Vec<f64>,
        expected: &[Bounded],
    ) -> Result<(), Stop> {
        let (expected, bounds): (Vec<f64>, Vec<f64>) = expected.iter().copied().unzip();
        self.compare(what, actual, &expected, &bounds)
    }

    fn plant(&mut self, actual: &mut [f64], expected: &[f64], bounds: &[f64]) {
        if !self.plant || self.planted {
            return;
        }
        // The middle one, or the next that is a number.
        let places = (0..actual.len()).map(|i| (i + actual.len() / 2) % actual.len());
        let sound = |i: &usize| expected[*i].is_finite() && bounds[*i].is_finite();
        let place = places.into_iter().find(sound);
        if let Some(place) = place {
            // Where nothing may be off, by as little as there is.
            let moved = expected[place] + 1.5 * bounds[place];
            actual[place] = if moved == expected[place] { moved.next_up() } else { moved };
            self.planted = true;
        }
    }

    /// Whether a call was refused, as a contradiction has to be: by an error that names the argument.
    ///
    /// # Errors
    ///
    /// A call that went through.
    pub fn refuses<T: Debug>(
        &mut self,
        what: &str,
        result: Result<T, KernelError>,
    ) -> Result<(), Stop> {
        match result {
            Err(KernelError::InvalidProblem { .. } | KernelError::Unsupported { .. }) => {
                self.refused += 1;
                Ok(())
            }
            other => Err(format!("{what} was not refused: {other:?}").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_fault_is_out_of_bounds_and_comes_once() {
        let mut check = Check::new(true);
        check.compare("nothing", vec![], &[], &[]).unwrap();
        assert!(!check.planted());
        let found = check.compare("y", vec![1.0, 2.0], &[1.0, 2.0], &[0.0, 0.0]);
        assert!(matches!(found, Err(Stop::Wrong(message)) if message.starts_with("y: 1 of 2")));
        check.compare("z", vec![1.0], &[1.0], &[0.0]).unwrap();
        assert!(Check::new(true).compare("y", vec![7.0], &[7.0], &[1.0]).is_err());
        assert_eq!((check.compared(), check.planted()), (3, true));
    }

    #[test]
    fn numbers_and_what_is_none_do_not_pass_for_each_other() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let compare = |actual: f64, expected: f64| {
            Check::new(false).compare("y", vec![actual], &[expected], &[f64::MAX]).is_ok()
        };
        assert!(compare(nan, nan) && compare(inf, inf));
        assert!(!compare(inf, nan) && !compare(nan, inf) && !compare(inf, -inf));
        assert!(!compare(nan, 1.0) && !compare(inf, 1.0) && !compare(1.0, nan));
    }

    #[test]
    fn what_is_no_number_passes_for_another_where_it_may_and_for_a_number_nowhere() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let mut actual = [nan, nan, inf, 1.0, nan];
        settle(&mut actual, &[inf, inf, nan, nan, 1.0], |i| i != 1);
        assert_eq!((actual[0], actual[3]), (inf, 1.0));
        assert!(actual[1].is_nan() && actual[2].is_nan() && actual[4].is_nan());
    }

    #[test]
    fn a_bound_that_judges_nothing_is_wrong() {
        for bound in [f64::NAN, f64::INFINITY] {
            let found = Check::new(false).compare("y", vec![1.0], &[1.0], &[bound]);
            assert!(matches!(found, Err(Stop::Wrong(message)) if message.contains("reference")));
        }
    }

    #[test]
    fn results_of_another_length_are_wrong() {
        let mut check = Check::new(false);
        assert!(check.compare("y", vec![1.0], &[1.0, 2.0], &[1.0, 1.0]).is_err());
    }

    #[test]
    fn what_is_declined_is_told_from_what_is_wrong() {
        let declined = KernelError::Unsupported { op: "x", reason: "y".into() };
        assert!(matches!(Stop::from(declined), Stop::Declined(_)));
        let launch = KernelError::Launch { op: "x", reason: "y".into() };
        assert!(matches!(Stop::from(launch), Stop::Wrong(_)));
    }
}
