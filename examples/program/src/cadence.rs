//! How often a run does what it does besides steps.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The options of a [`Cadence`] that were given. Saved with a run, so that it goes on as it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CadenceOptions {
    /// `--log-every`.
    pub log_every: Option<usize>,
    /// `--eval-every`.
    pub eval_every: Option<usize>,
    /// `--checkpoint-every`.
    pub checkpoint_every: Option<usize>,
    /// `--keep`.
    pub keep: Option<usize>,
}

impl CadenceOptions {
    /// Refuses zeros.
    ///
    /// # Errors
    ///
    /// When an option is 0.
    pub fn check(&self) -> Result<()> {
        for (option, value) in [
            ("--log-every", self.log_every),
            ("--eval-every", self.eval_every),
            ("--checkpoint-every", self.checkpoint_every),
            ("--keep", self.keep),
        ] {
            ensure!(value != Some(0), "{option}: expected at least 1, got 0");
        }
        Ok(())
    }

    /// These, and those of `saved` in the place of what is missing.
    #[must_use]
    pub fn or(self, saved: Self) -> Self {
        Self {
            log_every: self.log_every.or(saved.log_every),
            eval_every: self.eval_every.or(saved.eval_every),
            checkpoint_every: self.checkpoint_every.or(saved.checkpoint_every),
            keep: self.keep.or(saved.keep),
        }
    }

    /// Steps between two reports: ten, if not told otherwise.
    pub fn log_every(&self) -> usize {
        self.log_every.unwrap_or(10)
    }

    /// What they come to in a run of `steps` steps: without options `times` validations and checkpoints, and the
    /// last three checkpoints.
    pub fn cadence(&self, steps: usize, times: usize) -> Cadence {
        let part = steps.div_ceil(times);
        Cadence {
            evaluate: self.eval_every.unwrap_or(part),
            checkpoint: self.checkpoint_every.unwrap_or(part),
            keep: self.keep.unwrap_or(3),
        }
    }
}

/// Steps between two validations and checkpoints, and how many checkpoints are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cadence {
    /// Between validations.
    pub evaluate: usize,
    /// Between checkpoints.
    pub checkpoint: usize,
    /// Checkpoints.
    pub keep: usize,
}

impl Cadence {
    /// Whether a validation and a checkpoint are due after step `number` of `steps`: the last one has both.
    pub fn due(&self, number: usize, steps: usize) -> [bool; 2] {
        [self.evaluate, self.checkpoint]
            .map(|every| number == steps || number.is_multiple_of(every))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_are_given_win_and_zeros_are_refused() {
        let without = CadenceOptions::default().cadence(101, 10);
        assert_eq!(without, Cadence { evaluate: 11, checkpoint: 11, keep: 3 });
        assert_eq!(CadenceOptions::default().log_every(), 10);
        let saved = CadenceOptions { log_every: Some(2), keep: Some(5), ..Default::default() };
        let given = CadenceOptions { keep: Some(1), eval_every: Some(7), ..Default::default() };
        given.check().expect("none is 0");
        let expected = Cadence { evaluate: 7, keep: 1, ..without };
        assert_eq!(given.or(saved).cadence(101, 10), expected);
        assert_eq!(given.or(saved).log_every(), 2);
        let none = CadenceOptions { keep: Some(0), ..saved };
        let refused = none.check().expect_err("it is 0");
        assert_eq!(refused.to_string(), "--keep: expected at least 1, got 0");
    }

    #[test]
    fn the_last_step_has_both() {
        let cadence = Cadence { evaluate: 3, checkpoint: 4, keep: 1 };
        assert_eq!(cadence.due(6, 7), [true, false]);
        assert_eq!(cadence.due(7, 7), [true; 2]);
        assert_eq!(cadence.due(1, 7), [false; 2]);
    }
}
