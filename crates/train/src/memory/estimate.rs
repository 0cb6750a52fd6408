//! What a training needs.

use super::{MemoryError, shown};
use serde::Serialize;
use std::fmt;

/// The memory of a training step on one device, before it is taken.
///
/// [`TrainerConfig::estimate`](crate::trainer::TrainerConfig::estimate) makes it without a step, and
/// [`Trainer::memory`](crate::trainer::Trainer::memory) of a trainer, but for activations. Bytes of parameters, states
/// and averages are exact, without the padding between tensors. Print it as a table, or as one [line](Self::line).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// Parameters, running statistics and constants of the model, as they are stored.
    pub parameters_bytes: u64,
    /// Copies of parameters that passes compute with: in the type of the policy, and where passes are recorded, of all.
    pub copies_bytes: u64,
    /// Gradients at the end of a backward pass: of the sum, and of a micro-batch beside it where there are several.
    pub gradients_bytes: u64,
    /// The optimizer's state, of this rank: two moments of AdamW, a velocity of gradient descent with momentum. `None`
    /// for optimizers of Burn's, which do not say.
    pub optimizer_bytes: Option<u64>,
    /// The average of the weights.
    pub average_bytes: u64,
    /// What the forward pass of one micro-batch leaves for the backward pass, the micro-batches included. `None`
    /// without a [dry run](super::dry_run): on a CPU, and where none was made.
    pub activations_bytes: Option<u64>,
    /// What the device's pools would reserve in all, by the dry run: with the gradients of operations, workspaces and
    /// what pages leave unused. `None` as activations.
    pub reserved_bytes: Option<u64>,
}

impl MemoryEstimate {
    /// What is known of it: all that pools reserve where that was found, and else parameters, gradients and states, below
    /// which no step remains.
    pub fn expected_bytes(&self) -> u64 {
        let parts = [
            self.parameters_bytes,
            self.copies_bytes,
            self.gradients_bytes,
            self.optimizer_bytes.unwrap_or_default(),
            self.average_bytes,
        ];
        // Activations are gone by the time that all gradients are there.
        self.reserved_bytes.unwrap_or_else(|| parts.iter().sum())
    }

    /// Compares with what there is.
    ///
    /// # Errors
    ///
    /// [`MemoryError::TooLarge`] if less than [`expected_bytes`](Self::expected_bytes) is there.
    pub fn check(&self, available_bytes: u64) -> Result<(), MemoryError> {
        match self.expected_bytes() <= available_bytes {
            true => Ok(()),
            false => {
                Err(MemoryError::TooLarge { estimate: Box::new(self.clone()), available_bytes })
            }
        }
    }

    /// All of it in one line.
    pub fn line(&self) -> String {
        let parts = self.rows().map(|(name, bytes)| format!("{name} {}", or_unknown(bytes)));
        parts.join(", ")
    }

    fn rows(&self) -> [(&'static str, Option<u64>); 7] {
        [
            ("parameters", Some(self.parameters_bytes)),
            ("copies to compute with", Some(self.copies_bytes)),
            ("gradients", Some(self.gradients_bytes)),
            ("optimizer", self.optimizer_bytes),
            ("average", Some(self.average_bytes)),
            ("activations", self.activations_bytes),
            ("reserved in all", self.reserved_bytes),
        ]
    }
}

fn or_unknown(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "not known".into(), shown)
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in self.rows() {
            writeln!(f, "{name:<22}  {:>12}", or_unknown(bytes))?;
        }
        Ok(())
    }
}
