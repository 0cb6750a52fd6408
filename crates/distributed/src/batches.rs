//! How the samples of a step are dealt to ranks.

use crate::DistributedError;

/// The samples of a step: `ranks` x `accumulate` batches of `batch` samples.
///
/// Batches of the whole training are numbered; those of a step go to the ranks in turn. So which samples a step
/// has depends on its number and on how many it has, and not on the ranks:
///
/// ```
/// use blackburn_distributed::StepShape;
///
/// let on_two = StepShape { batch: 8, accumulate: 1, ranks: 2 };
/// let on_one = on_two.on_ranks(1)?;
/// assert_eq!(on_one, StepShape { batch: 8, accumulate: 2, ranks: 1 });
/// // Steps 5 of both begin with batch 10.
/// assert_eq!((on_two.first_batch(5, 0), on_two.first_batch(5, 1)), (10, 11));
/// assert_eq!(on_one.first_batch(5, 0), 10);
/// # Ok::<(), blackburn_distributed::DistributedError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Samples that a rank computes at once.
    pub batch: usize,
    /// Batches of each rank.
    pub accumulate: usize,
    /// Processes that train together.
    pub ranks: usize,
}

impl StepShape {
    /// Samples of a step.
    pub fn samples(&self) -> usize {
        self.batch.saturating_mul(self.accumulate).saturating_mul(self.ranks)
    }

    /// The number of the first batch of `rank` in a step, counted from 0. Its next ones are `ranks` further each,
    /// in the steps that follow, too.
    pub fn first_batch(&self, step: usize, rank: usize) -> u64 {
        (step as u64) * (self.accumulate as u64) * (self.ranks as u64) + rank as u64
    }

    /// Steps of the same samples on another number of ranks. Batches stay as large as they are where they can be
    /// dealt out anew, and become smaller where they cannot.
    ///
    /// # Errors
    ///
    /// When the ranks cannot have equal shares.
    pub fn on_ranks(self, ranks: usize) -> Result<Self, DistributedError> {
        let batches = self.accumulate.saturating_mul(self.ranks);
        let accumulate = batches.div_ceil(ranks.max(1));
        let parts = accumulate.saturating_mul(ranks);
        let samples = self.samples();
        if parts == 0 || !samples.is_multiple_of(parts) {
            return Err(DistributedError::Shares { samples, from: self.ranks, to: ranks });
        }
        Ok(Self { batch: samples / parts, accumulate, ranks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(batch: usize, accumulate: usize, ranks: usize, to: usize) -> Option<(usize, usize)> {
        let shape = StepShape { batch, accumulate, ranks }.on_ranks(to).ok()?;
        assert_eq!(shape.samples(), batch * accumulate * ranks);
        Some((shape.batch, shape.accumulate))
    }

    #[test]
    fn batches_are_dealt_out_anew_and_cut_where_they_must_be() {
        assert_eq!(dealt(8, 1, 1, 1), Some((8, 1)));
        assert_eq!(dealt(8, 4, 1, 2), Some((8, 2)));
        assert_eq!(dealt(8, 1, 2, 1), Some((8, 2)));
        assert_eq!(dealt(8, 1, 1, 2), Some((4, 1)));
        assert_eq!(dealt(8, 3, 1, 2), Some((6, 2)));
        assert_eq!(dealt(8, 1, 3, 2), Some((6, 2)));
        assert_eq!(dealt(7, 1, 1, 2), None);
        assert_eq!(dealt(7, 1, 1, 0), None);
    }

    #[test]
    fn every_batch_of_a_training_is_taken_once() {
        let shape = StepShape { batch: 1, accumulate: 3, ranks: 2 };
        let mut taken = Vec::new();
        for step in 0..4 {
            for rank in 0..2 {
                let first = shape.first_batch(step, rank);
                taken.extend((0..3).map(|batch| first + 2 * batch));
            }
        }
        taken.sort_unstable();
        assert_eq!(taken, (0..24).collect::<Vec<u64>>());
    }
}
