use super::GeluProblem;
use crate::{
    Promise,
    column_sum::{ColumnSumBlueprint, ColumnSumProblem},
};
use cubecl::{client::Client, ir::VectorSize};

/// How a GELU kernel is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GeluBlueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// Units in a cube.
    pub units_per_cube: u32,
}

impl GeluBlueprint {
    /// Enough units to hide the latency of memory on every GPU, few enough for every adapter.
    const UNITS: u32 = 256;
    /// Five cubes a multiprocessor, which has 65,536 registers, hide the latency of memory.
    pub(crate) const PROMISE: Promise = Promise::registers(48);

    /// The widest loads that the device gains from and that divide the problem evenly, so that no
    /// unit needs a tail.
    pub fn plan(problem: &GeluProblem, client: &Client) -> Self {
        let vector_size = client
            .io_optimized_vector_sizes(problem.dtype.size())
            .filter(|size| problem.elements.is_multiple_of(*size))
            .max()
            .unwrap_or(1);
        let units_per_cube = Self::UNITS.min(client.properties().hardware.max_units_per_cube);
        Self { vector_size, units_per_cube }
    }
}

/// How the gradient of GELU and the sums of its columns are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GeluSumBlueprint {
    /// By one kernel, spread over the device as that of a column sum.
    Fused(ColumnSumBlueprint),
    /// By the gradient's kernel, and a column sum that reads what it wrote.
    Separate,
}

impl GeluSumBlueprint {
    /// The share of lanes with columns from which one kernel pays. Idle ones slow the gradient down as
    /// much as they slow the sum, and the sum takes a third of the gradient's time: a third of its bytes
    /// at about the same rate (bf16, H200).
    const BUSY_LANES: f64 = 0.75;
    /// Four cubes of 256 units a multiprocessor, all that a launch has for it.
    pub(crate) const PROMISE: Promise = Promise::registers(64);

    /// One kernel, unless columns leave too many of its lanes idle or allow only narrower vectors than
    /// the gradient by itself has.
    pub fn plan(problem: &ColumnSumProblem, client: &Client) -> Self {
        let sum = ColumnSumBlueprint::plan(problem, client);
        let elements = problem.outer * problem.rows * problem.columns;
        let gradient = GeluBlueprint::plan(&GeluProblem { elements, dtype: problem.dtype }, client);
        let pays = sum.vector_size == gradient.vector_size
            && sum.busy_lanes(problem.columns) >= Self::BUSY_LANES;
        if pays { Self::Fused(sum) } else { Self::Separate }
    }
}
