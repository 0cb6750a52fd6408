use super::{AdamwProblem, layout::divide, problem::OP};
use crate::{DeviceProfile, KernelError};
use cubecl::{client::Client, ir::VectorSize};

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;

/// How units find their elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AdamwWalk {
    /// Nothing lies between rows: all is one row.
    Flat,
    /// Row by row, each tensor with its own pitch. What vectors reach of the memory between rows is
    /// read and written, and means nothing.
    Rows,
    /// As [`Flat`](Self::Flat), but the gradient is by rows, and read by elements.
    Gathered,
}

/// What of a plan is free, whatever the problem: to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdamwTuning {
    /// Elements of the widest vectors; more than four where parameter and gradient are in 16 bits.
    pub widest: VectorSize,
    /// Cubes of a multiprocessor, at most.
    pub cubes_a_multiprocessor: usize,
}

impl Default for AdamwTuning {
    /// As many cubes as a multiprocessor has threads for. Words of the generator are drawn by four, one an
    /// element.
    fn default() -> Self {
        Self { widest: 4, cubes_a_multiprocessor: 8 }
    }
}

impl AdamwTuning {
    /// Cubes of a launch.
    pub(crate) fn most_cubes(&self, client: &Client) -> usize {
        DeviceProfile::of(client).multiprocessors * self.cubes_a_multiprocessor
    }
}

/// How an update is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdamwBlueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// How it finds them.
    pub walk: AdamwWalk,
    /// Root and quotient by PTX's approximations, for NVIDIA GPUs alone: rounded correctly, each is a
    /// branch, and one waits for the other.
    pub by_ptx: bool,
    /// Cubes, which go through the parameter together.
    pub cubes: u32,
}

impl AdamwBlueprint {
    /// [`tuned`](Self::tuned) as measured to be best.
    pub fn plan(problem: &AdamwProblem, client: &Client) -> Self {
        Self::tuned(problem, client, AdamwTuning::default())
    }

    /// The widest loads that serve all tensors, with the walk that has them. As many cubes as `tuning` has
    /// at most, so that what a unit computes ahead of its elements is spread over many, and each of them
    /// with as much to do.
    pub fn tuned(problem: &AdamwProblem, client: &Client, tuning: AdamwTuning) -> Self {
        let by_ptx = DeviceProfile::of(client).compute_capability.is_some();
        let wider = problem.parameter.size().max(problem.gradient.size());
        // Moments are moved as two of the device's vectors then.
        let bytes = if by_ptx && tuning.widest > 4 { wider } else { size_of::<f32>() };
        let (walk, vector_size) = problem.layout.way(client, tuning.widest, bytes);
        let passes = problem.layout.passes(walk, vector_size);
        let cubes = divide(tuning.most_cubes(client), &[passes])[0];
        Self { vector_size, walk, by_ptx, cubes }
    }

    /// Whether a problem can be walked in this way on that device.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] where it cannot.
    pub(super) fn check(&self, problem: &AdamwProblem, client: &Client) -> Result<(), KernelError> {
        let is_nvidia = DeviceProfile::of(client).compute_capability.is_some();
        let Self { vector_size, walk, by_ptx, cubes } = *self;
        let is_right = problem.layout.is_served(walk, vector_size, cubes) && (is_nvidia || !by_ptx);
        if is_right {
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
