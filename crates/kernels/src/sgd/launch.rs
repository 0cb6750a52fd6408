use super::{Chance, Gate, SgdBlueprint, SgdProblem, SgdStep, SgdTuning};
use crate::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Update, update_many, update_one},
};
use cubecl::client::Client;

/// A parameter and what belongs to it.
#[derive(Clone, Debug)]
pub struct SgdTensors {
    /// p.
    pub parameter: Rows,
    /// g.
    pub gradient: Rows,
    /// v.
    pub velocity: Rows,
}

/// The parameter and its velocity after one step, in the memory of those before it where nobody else
/// holds that, and laid out as they were. A parameter in f32 is not rounded, with a chance or without.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] for numbers that [`SgdStep::check`] refuses and tensors that do not
/// go together; [`KernelError::Unsupported`] as for [`SgdProblem::new`].
pub fn sgd_update(
    client: &Client,
    step: &SgdStep,
    tensors: SgdTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
) -> Result<SgdTensors, KernelError> {
    sgd_update_with(client, step, tensors, gate, chance, SgdBlueprint::plan)
}

/// [`sgd_update`] by the blueprint that `plan` makes of the problem.
///
/// # Errors
///
/// As there, and [`KernelError::InvalidProblem`] for a blueprint that does not serve the problem.
pub fn sgd_update_with(
    client: &Client,
    step: &SgdStep,
    tensors: SgdTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
    plan: impl FnOnce(&SgdProblem, &Client) -> SgdBlueprint,
) -> Result<SgdTensors, KernelError> {
    update_one(client, step, tensors, gate, chance, plan)
}

/// A parameter's step, of several in one launch.
pub type SgdUpdate = Update<SgdStep, SgdTensors>;

/// [`sgd_update`] of several parameters, in their order, which no tensor of another's depends on. With a
/// `seed` those in 16 bits are rounded by chance.
///
/// Up to [`MOST_TENSORS`](super::MOST_TENSORS) take one launch: those that are alike in their types, in how
/// their elements are found, in whether they look ahead as Nesterov does, and in what of them somebody else
/// holds, which goes to new memory.
///
/// # Errors
///
/// As there, before anything is launched.
pub fn sgd_update_many(
    client: &Client,
    updates: Vec<SgdUpdate>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
) -> Result<Vec<SgdTensors>, KernelError> {
    sgd_update_many_with(client, updates, gate, seed, SgdTuning::default())
}

/// [`sgd_update_many`] by plans that are tuned so.
///
/// # Errors
///
/// As there.
pub fn sgd_update_many_with(
    client: &Client,
    updates: Vec<SgdUpdate>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
    tuning: SgdTuning,
) -> Result<Vec<SgdTensors>, KernelError> {
    update_many(client, updates, gate, seed, tuning)
}
