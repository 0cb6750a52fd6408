use super::{SgdProblem, SgdTuning, SgdWalk, problem::OP};
use crate::{DeviceProfile, KernelError, adamw::divide};
use cubecl::{client::Client, ir::VectorSize};

/// How an update is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SgdBlueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// How it finds them.
    pub walk: SgdWalk,
    /// Cubes, which go through the parameter together.
    pub cubes: u32,
}

impl SgdBlueprint {
    /// [`tuned`](Self::tuned) as AdamW's steps were measured to be best; of its own it has no
    /// measurement yet.
    pub fn plan(problem: &SgdProblem, client: &Client) -> Self {
        Self::tuned(problem, client, SgdTuning::default())
    }

    /// The widest loads that serve all tensors, with the walk that has them, in as many cubes as `tuning`
    /// has at most.
    pub fn tuned(problem: &SgdProblem, client: &Client, tuning: SgdTuning) -> Self {
        let is_nvidia = DeviceProfile::of(client).compute_capability.is_some();
        let wider = problem.parameter.size().max(problem.gradient.size());
        // The velocity is moved as two of the device's vectors then.
        let bytes = if is_nvidia && tuning.widest > 4 { wider } else { size_of::<f32>() };
        let (walk, vector_size) = problem.layout.way(client, tuning.widest, bytes);
        let passes = problem.layout.passes(walk, vector_size);
        let cubes = divide(tuning.most_cubes(client), &[passes])[0];
        Self { vector_size, walk, cubes }
    }

    /// Whether a problem can be walked in this way.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] where it cannot.
    pub(super) fn check(&self, problem: &SgdProblem) -> Result<(), KernelError> {
        if problem.layout.is_served(self.walk, self.vector_size, self.cubes) {
            return Ok(());
        }
        Err(KernelError::InvalidProblem {
            op: OP,
            argument: "blueprint",
            expected: format!("one that serves {problem:?}"),
            actual: format!("{self:?}"),
        })
    }
}
