//! Comparisons of a case's results with the reference.

use blackburn_kernels::KernelError;
use blackburn_reference::{softmax::Bounded, storage::Storage, tolerance::compare};
use serde::{Deserialize, Serialize};
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

/// Lets NaN and infinities pass for each other where `may` holds. It holds where a factor of an infinity may be
/// zero in a device's arithmetic and is not in the reference's.
pub fn settle(actual: &mut [f64], expected: &[f64], may: impl Fn(usize) -> bool) {
    for (i, (actual, expected)) in actual.iter_mut().zip(expected).enumerate() {
        if !actual.is_finite() && !expected.is_finite() && may(i) {
            *actual = *expected;
        }
    }
}

/// What may be wrong with a result: planted, to see that comparisons find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Flaw {
    /// The middle element is half its bound beyond it, or as little as there is.
    OutOfBounds,
    /// The middle element is no number.
    Nan,
    /// The last quarter, as a tile that was skipped, holds zeros.
    LostTile,
    /// All elements are twice as large, as where a scale was dropped.
    Doubled,
    /// Elements stand in the places of their neighbors.
    Swapped,
}

/// What a case's comparisons came to.
#[derive(Clone, Debug, Default)]
pub struct Check {
    /// What the first result gets that shows it.
    flaw: Option<Flaw>,
    /// Whether a result has got it.
    planted: bool,
    /// Elements that were compared.
    compared: usize,
    /// Results that were refused, as they had to be.
    refused: usize,
    /// The error that is largest by its bound, and which result it is in.
    worst: Option<(f64, String)>,
}

impl Check {
    /// No comparisons yet. The first result that shows the flaw gets it before it is compared: the case has to
    /// fail then.
    pub fn new(flaw: Option<Flaw>) -> Self {
        Self { flaw, ..Self::default() }
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

    /// As [`compare`](Self::compare), of what nothing may be lost of but by one rounding to `storage`.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn exactly(
        &mut self,
        what: &str,
        actual: Vec<f64>,
        expected: &[f64],
        storage: Storage,
    ) -> Result<(), Stop> {
        let expected: Vec<f64> = expected.iter().map(|value| storage.round(*value)).collect();
        self.compare(what, actual, &expected, &vec![0.0; expected.len()])
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

    fn plant(&mut self, actual: &mut Vec<f64>, expected: &[f64], bounds: &[f64]) {
        let Some(flaw) = self.flaw.filter(|_| !self.planted) else { return };
        let mut flawed = actual.clone();
        flaw.spoil(&mut flawed, expected, bounds);
        // A sum of zeros is the same twice as large.
        if compare(&flawed, expected, bounds).is_err() {
            *actual = flawed;
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

impl Flaw {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::OutOfBounds, Self::Nan, Self::LostTile, Self::Doubled, Self::Swapped];

    fn spoil(self, actual: &mut [f64], expected: &[f64], bounds: &[f64]) {
        let length = actual.len();
        // The middle one, or the next that is a number.
        let mut places = (0..length).map(|i| (i + length / 2) % length);
        let sound = |i: &usize| expected[*i].is_finite() && bounds[*i].is_finite();
        let Some(middle) = places.find(sound) else { return };
        match self {
            Self::OutOfBounds => {
                // Where nothing may be off, by as little as there is.
                let moved = expected[middle] + 1.5 * bounds[middle];
                actual[middle] = if moved == expected[middle] { moved.next_up() } else { moved };
            }
            Self::Nan => actual[middle] = f64::NAN,
            Self::LostTile => actual[length - length.div_ceil(4)..].fill(0.0),
            Self::Doubled => actual.iter_mut().for_each(|value| *value *= 2.0),
            Self::Swapped => actual.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_fault_is_out_of_bounds_and_comes_once() {
        let mut check = Check::new(Some(Flaw::OutOfBounds));
        check.compare("nothing", vec![], &[], &[]).unwrap();
        assert!(!check.planted());
        let found = check.compare("y", vec![1.0, 2.0], &[1.0, 2.0], &[0.0, 0.0]);
        assert!(matches!(found, Err(Stop::Wrong(message)) if message.starts_with("y: 1 of 2")));
        check.compare("z", vec![1.0], &[1.0], &[0.0]).unwrap();
        assert!(
            Check::new(Some(Flaw::OutOfBounds)).compare("y", vec![7.0], &[7.0], &[1.0]).is_err()
        );
        assert_eq!((check.compared(), check.planted()), (3, true));
    }

    #[test]
    fn each_flaw_is_found_and_waits_for_a_result_that_shows_it() {
        for flaw in Flaw::ALL {
            let mut check = Check::new(Some(flaw));
            // Twice as much of nothing, and neighbors that are the same, show nothing.
            let zeros = check.compare("zeros", vec![0.0; 8], &[0.0; 8], &[0.5; 8]);
            assert_eq!(zeros.is_err(), check.planted(), "{flaw:?}");
            let y: Vec<f64> = (1..=8).map(f64::from).collect();
            let found = check.compare("y", y.clone(), &y, &[0.5; 8]);
            assert!(check.planted() && (zeros.is_err() || found.is_err()), "{flaw:?}");
        }
    }

    #[test]
    fn what_has_to_be_exact_may_be_off_by_one_rounding_and_no_more() {
        let exactly = |actual: f64, storage: Storage| {
            Check::new(None).exactly("y", vec![actual], &[1.0 + 2f64.powi(-20)], storage).is_ok()
        };
        assert!(exactly(1.0, Storage::F16) && exactly(1.0 + 2f64.powi(-20), Storage::F32));
        assert!(!exactly(1.0, Storage::F32) && !exactly(1.0 + 2f64.powi(-10), Storage::F16));
    }

    #[test]
    fn numbers_and_what_is_none_do_not_pass_for_each_other() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let compare = |actual: f64, expected: f64| {
            Check::new(None).compare("y", vec![actual], &[expected], &[f64::MAX]).is_ok()
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
            let found = Check::new(None).compare("y", vec![1.0], &[1.0], &[bound]);
            assert!(matches!(found, Err(Stop::Wrong(message)) if message.contains("reference")));
        }
    }

    #[test]
    fn results_of_another_length_are_wrong() {
        let mut check = Check::new(None);
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
