//! Looks at losses, for which the device does not wait.

use super::{HOPELESS, Trainer, TrainerError};
use crate::graph::PassTensors;
use blackburn_backend::readback::Readback;
use burn::{
    module::{Module, ModuleDisplay},
    tensor::Tensor,
};

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// Reads the losses of the last steps. Waits for the device.
    pub(super) fn check_losses(&mut self) -> Result<(), TrainerError> {
        self.look_at_losses()?;
        self.ask_for_losses();
        self.look_at_losses()
    }

    /// Asks the device for the losses of the last steps.
    pub(super) fn ask_for_losses(&mut self) {
        if !self.losses.is_empty() {
            let first = self.steps_taken - self.losses.len() + 1;
            let losses = Tensor::cat(std::mem::take(&mut self.losses), 0);
            self.asked_losses = Some((first, Readback::of(losses)));
        }
    }

    /// Waits for the losses that were asked for, if any were.
    pub(super) fn look_at_losses(&mut self) -> Result<(), TrainerError> {
        let Some((first, losses)) = self.asked_losses.take() else { return Ok(()) };
        let losses = losses.wait()?;
        let wrong = losses.into_iter().enumerate().find(|(_, loss)| !loss.is_finite());
        if let Some((index, loss)) = wrong {
            // Where a rank has failed, numbers of this one may be unfinished.
            self.group.at_step(self.steps_taken)?;
            return Err(TrainerError::Diverged { step: first + index, loss });
        }
        if self.scaler.is_enabled() {
            let state = self.scaler.state();
            if state.skipped_in_a_row >= HOPELESS {
                let (skipped, scale) = (state.skipped_in_a_row, state.scale);
                return Err(TrainerError::Hopeless { skipped, scale });
            }
        }
        Ok(())
    }
}
