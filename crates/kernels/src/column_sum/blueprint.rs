use super::{ColumnSumProblem, clusters, problem::OP};
use crate::{DeviceProfile, Promise, device::widest_vector, plan::tell_plan};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// Units of a cube side by side: one memory transaction of 32 vectors of 16 bytes.
pub(crate) const VECTOR_LANES: u32 = 32;
/// Units of a cube on different rows. Together 256, which every adapter allows.
pub(crate) const ROW_LANES: u32 = 8;

/// How a column sum is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnSumBlueprint {
    /// Columns that a unit sums.
    pub vector_size: VectorSize,
    /// Cubes that share the rows of a sum; more than one need a second launch.
    pub splits: usize,
}

impl ColumnSumBlueprint {
    /// Cubes for each multiprocessor: four hide the latency of memory, of which each holds eight.
    const CUBES_PER_MULTIPROCESSOR: usize = 4;
    /// Rows that a unit adds up before it pays to bring in another cube.
    const ROWS_PER_UNIT: usize = 4;
    /// The most that clusters read.
    const CLUSTER_BYTES: usize = 16 << 20;
    /// Five cubes of 256 units a multiprocessor: one more than a launch counts on.
    pub(crate) const PROMISE: Promise = Promise::registers(48);
    /// A cube of 512 units a multiprocessor, each with eight loads of 16 bytes on the way.
    pub(crate) const CLUSTER_PROMISE: Promise = Promise::registers(80);

    /// The widest vectors that fit columns and strides, and as many splits as fill the device.
    pub fn plan(problem: &ColumnSumProblem, client: &Client) -> Self {
        let fits = |size: usize| {
            let sizes = [problem.columns, problem.row_stride, problem.outer_stride];
            // One row or batch is never stepped over.
            let steps = [true, problem.rows > 1, problem.outer > 1];
            sizes.iter().zip(steps).all(|(value, used)| !used || value.is_multiple_of(size))
        };
        let vector_size = widest_vector(client, problem.dtype.size(), fits);
        let device = DeviceProfile::of(client);
        let wanted = device.multiprocessors * Self::CUBES_PER_MULTIPROCESSOR;
        let without_split = Self::column_cubes(problem.columns, vector_size) * problem.outer;
        let most = problem.rows.div_ceil(ROW_LANES as usize * Self::ROWS_PER_UNIT);
        let plan = Self { vector_size, splits: wanted.div_ceil(without_split).min(most).max(1) };
        let reason = format_args!("{wanted} cubes fill the device, rows are enough for {most}");
        tell_plan(OP, problem, &plan, reason);
        plan
    }

    /// Whether clusters take the place of two launches: where each cube has a multiprocessor to itself, and at least half of
    /// all are busy. Two launches read memory faster, so that they win where there is more of it.
    pub(super) fn is_for_clusters(
        &self,
        problem: &ColumnSumProblem,
        device: DeviceProfile,
    ) -> bool {
        let has_clusters = matches!(device.compute_capability, Some(90..=109));
        let cubes = clusters::cubes(problem, self.vector_size) * problem.outer;
        let are_at_once =
            (device.multiprocessors.div_ceil(2)..=device.multiprocessors).contains(&cubes);
        let is_small = problem.bytes() <= Self::CLUSTER_BYTES;
        has_clusters && self.splits > 1 && are_at_once && is_small
    }

    /// The share of lanes that have columns to work on.
    pub(crate) fn busy_lanes(&self, columns: usize) -> f64 {
        let lanes = Self::column_cubes(columns, self.vector_size) * VECTOR_LANES as usize;
        (columns / self.vector_size) as f64 / lanes as f64
    }

    /// Cubes side by side.
    pub(super) fn column_cubes(columns: usize, vector_size: VectorSize) -> usize {
        (columns / vector_size).div_ceil(VECTOR_LANES as usize)
    }
}

impl fmt::Display for ColumnSumBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, splits } = self;
        write!(f, "vectors of {vector_size}, {splits} splits")
    }
}
