use super::{Problem, Walk};
use crate::{DeviceProfile, KernelError, plan::tell_plan, together::divide};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// What of a plan is free, whatever the problem: to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuning {
    /// Elements of the widest vectors; more than four where parameter and gradient are in 16 bits.
    pub widest: VectorSize,
    /// Cubes of a multiprocessor, at most.
    pub cubes_a_multiprocessor: usize,
}

impl Default for Tuning {
    /// As many cubes as a multiprocessor has threads for. Words of the generator are drawn by four, one an
    /// element.
    fn default() -> Self {
        Self { widest: 4, cubes_a_multiprocessor: 8 }
    }
}

impl Tuning {
    /// Cubes of a launch.
    pub(super) fn most_cubes(&self, client: &Client) -> usize {
        DeviceProfile::of(client).multiprocessors * self.cubes_a_multiprocessor
    }
}

/// How an update is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// How it finds them.
    pub walk: Walk,
    /// Cubes, which go through the parameter together.
    pub cubes: u32,
}

impl Blueprint {
    /// [`tuned`](Self::tuned) as was measured to be best for AdamW.
    pub fn plan<const N: usize>(problem: &Problem<N>, client: &Client) -> Self {
        Self::tuned(problem, client, Tuning::default())
    }

    /// The widest loads that serve all tensors, with the walk that has them. As many cubes as `tuning` has
    /// at most, so that what a unit computes ahead of its elements is spread over many, and each of them
    /// with as much to do.
    pub fn tuned<const N: usize>(problem: &Problem<N>, client: &Client, tuning: Tuning) -> Self {
        let is_nvidia = DeviceProfile::of(client).compute_capability.is_some();
        let wider = problem.parameter.size().max(problem.gradient.size());
        // States are moved as two of the device's vectors then.
        let bytes = if is_nvidia && tuning.widest > 4 { wider } else { size_of::<f32>() };
        let (walk, vector_size) = problem.layout.way(client, tuning.widest, bytes);
        let passes = problem.layout.passes(walk, vector_size);
        let cubes = divide(tuning.most_cubes(client), &[passes])[0];
        let plan = Self { vector_size, walk, cubes };
        let reason = format_args!("the widest vectors of any walk, for {passes} passes of a cube");
        tell_plan(problem.op, problem, &plan, reason);
        plan
    }

    /// Whether a problem can be walked in this way.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] where it cannot.
    pub(super) fn check<const N: usize>(&self, problem: &Problem<N>) -> Result<(), KernelError> {
        if problem.layout.is_served(self.walk, self.vector_size, self.cubes) {
            return Ok(());
        }
        Err(KernelError::invalid(
            problem.op,
            "blueprint",
            format!("one that serves {problem:?}"),
            format!("{self:?}"),
        ))
    }
}

impl fmt::Display for Blueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, walk, cubes } = self;
        let walk = match walk {
            Walk::Flat => "flat",
            Walk::Rows => "by rows",
            Walk::Gathered => "gathered",
        };
        write!(f, "{walk}, {cubes} cubes, vectors of {vector_size}")
    }
}
