//! Kernels that compute each element from those at the same place of other tensors: what a call asks, and
//! how it is spread over the device.

use crate::{
    KernelError, Promise,
    buffer::{Buffer, check_float},
    device::widest_vector,
    plan::tell_plan,
};
use cubecl::{
    CubeCount, CubeDim, calculate_cube_count_elemwise,
    client::Client,
    ir::{ElemType, VectorSize},
};
use std::fmt;

/// How many elements, of which type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ElementwiseProblem {
    /// Number of elements.
    pub elements: usize,
    /// Type of inputs and outputs.
    pub dtype: ElemType,
}

impl ElementwiseProblem {
    /// The problem that `input` poses.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16.
    pub fn new(op: &'static str, input: &Buffer) -> Result<Self, KernelError> {
        check_float(op, "elements", input.dtype)?;
        Ok(Self { elements: input.elements, dtype: input.dtype })
    }

    /// Checks that another operand has the same length and type as the first.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] naming `argument`.
    pub fn check_operand(
        &self,
        op: &'static str,
        argument: &'static str,
        operand: &Buffer,
    ) -> Result<(), KernelError> {
        operand.check(op, argument, self.elements, self.dtype)
    }

    /// Bytes that so many tensors of this problem hold.
    pub fn bytes(&self, tensors: usize) -> usize {
        tensors * self.elements * self.dtype.size()
    }
}

/// How a kernel is compiled and spread over the device: a vector a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ElementwiseBlueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// Units in a cube.
    pub units_per_cube: u32,
}

impl ElementwiseBlueprint {
    /// Enough units to hide the latency of memory on every GPU, few enough for every adapter.
    const UNITS: u32 = 256;
    /// Five cubes a multiprocessor, which has 65,536 registers, hide the latency of memory.
    pub(crate) const PROMISE: Promise = Promise::registers(48);

    /// The widest loads that the device gains from and that divide the problem evenly, so that no
    /// unit needs a tail.
    pub fn plan(problem: &ElementwiseProblem, client: &Client) -> Self {
        let vector_size = widest_vector(client, problem.dtype.size(), |size| {
            problem.elements.is_multiple_of(size)
        });
        let units_per_cube = Self::UNITS.min(client.properties().hardware.max_units_per_cube);
        let plan = Self { vector_size, units_per_cube };
        let reason = format_args!("the widest vectors that divide the elements");
        tell_plan("elementwise", problem, &plan, reason);
        plan
    }

    /// The same with vectors of at most `widest` elements, a power of two.
    pub(crate) fn narrowed(self, widest: VectorSize) -> Self {
        Self { vector_size: self.vector_size.min(widest), ..self }
    }

    /// The cubes of a launch that computes `elements`.
    pub(crate) fn cubes(&self, elements: usize, client: &Client) -> (CubeCount, CubeDim) {
        let dim = CubeDim::new_1d(self.units_per_cube);
        (calculate_cube_count_elemwise(client, elements / self.vector_size, dim), dim)
    }
}

impl fmt::Display for ElementwiseBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, units_per_cube } = self;
        write!(f, "cubes of {units_per_cube} units, vectors of {vector_size}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    #[test]
    fn bytes_are_those_of_each_tensor() {
        let problem =
            ElementwiseProblem { elements: 1000, dtype: ElemType::Float(FloatKind::BF16) };
        assert_eq!([2, 3].map(|tensors| problem.bytes(tensors)), [4000, 6000]);
    }
}
