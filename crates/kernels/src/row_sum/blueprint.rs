use crate::{DeviceProfile, Promise, buffer::Rows, device::widest_vector, plan::tell_plan};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// Units of a cube: every adapter takes as many.
pub(super) const UNITS: u32 = 256;

/// How a row sum is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowSumBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Units that share a row in a cube, a power of two; the cube's others take the next rows.
    pub lanes: u32,
    /// Cubes that share a row; more than one need a second launch.
    pub splits: usize,
}

impl RowSumBlueprint {
    /// Cubes for each multiprocessor: eight of 256 units are all that it holds.
    const CUBES_PER_MULTIPROCESSOR: usize = 8;
    /// Vectors that a unit adds up before it pays to bring in another cube.
    const VECTORS_PER_UNIT: usize = 8;
    /// All units that a multiprocessor has room for.
    pub(super) const PROMISE: Promise = Promise::registers(32);

    /// The widest vectors that the rows take, as many lanes as they have vectors, and as many splits as fill the
    /// device.
    pub fn plan(x: &Rows, client: &Client) -> Self {
        let vector_size = widest_vector(client, x.buffer.dtype.size(), |size| {
            x.columns.is_multiple_of(size) && x.takes_vectors(size, false)
        });
        let vectors = x.columns / vector_size;
        let lanes = vectors.next_power_of_two().min(UNITS as usize) as u32;
        let device = DeviceProfile::of(client);
        let cubes = x.rows.div_ceil((UNITS / lanes) as usize);
        let wanted = (device.multiprocessors * Self::CUBES_PER_MULTIPROCESSOR).div_ceil(cubes);
        let most = vectors.div_ceil(lanes as usize * Self::VECTORS_PER_UNIT);
        let plan = Self { vector_size, lanes, splits: wanted.min(most).max(1) };
        let reason = format_args!("{wanted} splits fill the device, rows are enough for {most}");
        tell_plan("row_sum", &[x.rows, x.columns, x.pitch], &plan, reason);
        plan
    }

    /// The same for what the splits leave.
    pub(super) fn of_partial_sums(partial: &Rows, client: &Client) -> Self {
        Self { splits: 1, ..Self::plan(partial, client) }
    }
}

impl fmt::Display for RowSumBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, lanes, splits } = self;
        write!(f, "{lanes} units a row, vectors of {vector_size}, {splits} splits")
    }
}
