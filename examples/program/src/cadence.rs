//! How often a run does what it does besides steps.

use anyhow::{Result, ensure};

/// Steps between two reports, validations and checkpoints, and how many checkpoints are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cadence {
    /// `--log-every`.
    pub log: usize,
    /// `--eval-every`.
    pub evaluate: usize,
    /// `--checkpoint-every`.
    pub checkpoint: usize,
    /// `--keep`.
    pub keep: usize,
}

impl Cadence {
    /// Without options: a report every ten steps, `times` validations and checkpoints in `steps`, and the last
    /// three checkpoints.
    pub fn new(steps: usize, times: usize) -> Self {
        let part = steps.div_ceil(times);
        Self { log: 10, evaluate: part, checkpoint: part, keep: 3 }
    }

    /// With the options that are given.
    ///
    /// # Errors
    ///
    /// When one is 0.
    pub fn with(
        self,
        log: Option<usize>,
        evaluate: Option<usize>,
        checkpoint: Option<usize>,
        keep: Option<usize>,
    ) -> Result<Self> {
        for (option, value) in [
            ("--log-every", log),
            ("--eval-every", evaluate),
            ("--checkpoint-every", checkpoint),
            ("--keep", keep),
        ] {
            ensure!(value != Some(0), "{option}: expected at least 1, got 0");
        }
        Ok(Self {
            log: log.unwrap_or(self.log),
            evaluate: evaluate.unwrap_or(self.evaluate),
            checkpoint: checkpoint.unwrap_or(self.checkpoint),
            keep: keep.unwrap_or(self.keep),
        })
    }

    /// Whether a report, a validation and a checkpoint are due after step `number` of `steps`: the last one has
    /// all of them.
    pub fn due(&self, number: usize, steps: usize) -> [bool; 3] {
        [self.log, self.evaluate, self.checkpoint]
            .map(|every| number == steps || number.is_multiple_of(every))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_win_and_zeros_are_refused() {
        let cadence = Cadence::new(101, 10);
        assert_eq!((cadence.evaluate, cadence.keep), (11, 3));
        let given = cadence.with(Some(2), None, Some(7), None).expect("none is 0");
        assert_eq!(given, Cadence { log: 2, checkpoint: 7, ..cadence });
        let refused = cadence.with(None, None, None, Some(0)).expect_err("it is 0");
        assert_eq!(refused.to_string(), "--keep: expected at least 1, got 0");
    }

    #[test]
    fn the_last_step_has_all_of_them() {
        let cadence = Cadence { log: 2, evaluate: 3, checkpoint: 4, keep: 1 };
        assert_eq!(cadence.due(6, 7), [true, true, false]);
        assert_eq!(cadence.due(7, 7), [true; 3]);
        assert_eq!(cadence.due(1, 7), [false; 3]);
    }
}
