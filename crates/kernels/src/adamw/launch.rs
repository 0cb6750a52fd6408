use super::{AdamwBlueprint, AdamwProblem, AdamwStep, AdamwTuning, Chance, Gate};
use crate::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Update, update_many, update_one},
};
use cubecl::client::Client;

/// A parameter and what belongs to it.
#[derive(Clone, Debug)]
pub struct AdamwTensors {
    /// p.
    pub parameter: Rows,
    /// g.
    pub gradient: Rows,
    /// m.
    pub first: Rows,
    /// v.
    pub second: Rows,
}

/// The parameter and its moments after one step, in the memory of those before it where nobody else
/// holds that, and laid out as they were. A parameter in f32 is not rounded, with a chance or without.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] for numbers that [`AdamwStep::check`] refuses and tensors that do not
/// go together; [`KernelError::Unsupported`] as for [`AdamwProblem::new`].
pub fn adamw_update(
    client: &Client,
    step: &AdamwStep,
    tensors: AdamwTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
) -> Result<AdamwTensors, KernelError> {
    adamw_update_with(client, step, tensors, gate, chance, AdamwBlueprint::plan)
}

/// [`adamw_update`] by the blueprint that `plan` makes of the problem.
///
/// # Errors
///
/// As there, and [`KernelError::InvalidProblem`] for a blueprint that does not serve the problem.
pub fn adamw_update_with(
    client: &Client,
    step: &AdamwStep,
    tensors: AdamwTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
    plan: impl FnOnce(&AdamwProblem, &Client) -> AdamwBlueprint,
) -> Result<AdamwTensors, KernelError> {
    update_one(client, step, tensors, gate, chance, plan)
}

/// A parameter's step, of several in one launch.
pub type AdamwUpdate = Update<AdamwStep, AdamwTensors>;

/// [`adamw_update`] of several parameters, in their order, which no tensor of another's depends on. With a
/// `seed` those in 16 bits are rounded by chance.
///
/// Up to [`MOST_TENSORS`](super::MOST_TENSORS) take one launch: those that are alike in their types, in how
/// their elements are found, and in what of them somebody else holds, which goes to new memory.
///
/// # Errors
///
/// As there, before anything is launched.
pub fn adamw_update_many(
    client: &Client,
    updates: Vec<AdamwUpdate>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
) -> Result<Vec<AdamwTensors>, KernelError> {
    adamw_update_many_with(client, updates, gate, seed, AdamwTuning::default())
}

/// [`adamw_update_many`] by plans that are tuned so.
///
/// # Errors
///
/// As there.
pub fn adamw_update_many_with(
    client: &Client,
    updates: Vec<AdamwUpdate>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
    tuning: AdamwTuning,
) -> Result<Vec<AdamwTensors>, KernelError> {
    update_many(client, updates, gate, seed, tuning)
}
