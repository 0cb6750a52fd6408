use super::RotaryProblem;
use crate::{
    Promise,
    attention::Order,
    buffer::{Buffer, Rows},
    device::widest_vector,
    plan::tell_plan,
};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// How the kernel is compiled, and how rows are shared out among units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RotaryBlueprint {
    /// Elements that a unit loads and stores at once, at least a pair.
    pub vector_size: VectorSize,
    /// Elements of the table that a unit loads at once: a pair of cosine and sine, or those of two columns.
    pub table_vector: VectorSize,
    /// Rows at one position that a unit turns by what it has read of the table once.
    pub rows_per_unit: usize,
    /// Rows at one position that units side by side turn.
    pub neighbors: usize,
    /// Units in a cube.
    pub units_per_cube: u32,
}

impl RotaryBlueprint {
    /// Enough units to hide the latency of memory on every GPU, few enough for every adapter.
    const UNITS: u32 = 256;
    /// Wider vectors would not leave registers for several rows and their factors.
    const WIDEST: VectorSize = 8;
    /// Factors of 8 elements are read as 64 bytes, rows of them as 16 each: from four rows on, the table is not
    /// what most of the bandwidth goes to. More rows would take the registers that more units hide latency with.
    const MOST_ROWS: usize = 4;
    /// Rows that are far apart are read in pieces of a row. So few neighbors leave a plane long pieces of each.
    const FAR_NEIGHBORS: usize = 4;
    /// Four cubes a multiprocessor, which has 65,536 registers. With four loads in flight a unit, they hide the
    /// latency of memory.
    pub(super) const PROMISE: Promise = Promise::registers(64);

    /// The widest vectors that rows, strides and the beginning of x divide into, and as many rows a unit as there
    /// are, up to four. For tensors that [`RotaryProblem::check`] takes.
    pub fn plan(problem: &RotaryProblem, x: &Buffer, table: &Rows, client: &Client) -> Self {
        let bytes = problem.dtype.size();
        let vector_size = widest_vector(client, bytes, |size| {
            let divides = |elements: usize| elements.is_multiple_of(size);
            size <= Self::WIDEST
                && divides(problem.head_dim)
                && problem.steps().into_iter().all(divides)
                && x.offset_bytes().is_multiple_of((size * bytes) as u64)
        });
        let is_dense = RotaryProblem::table_pitch(table) == 2;
        let table_vector =
            if is_dense && table.buffer.offset_bytes().is_multiple_of(16) { 4 } else { 2 };
        let rows = problem.batch * problem.heads;
        // Heads side by side in memory are read side by side.
        let neighbors = match problem.order {
            Order::PositionsFirst => problem.heads,
            Order::HeadsFirst => Self::FAR_NEIGHBORS.min(rows),
        };
        let rows_each = (rows / neighbors.max(1)).clamp(1, Self::MOST_ROWS);
        let plan = Self {
            vector_size,
            table_vector,
            // A power of two, so that few kernels are compiled.
            rows_per_unit: 1 << rows_each.ilog2(),
            neighbors,
            units_per_cube: Self::UNITS.min(client.properties().hardware.max_units_per_cube),
        };
        let reason = format_args!("the widest vectors that divide rows and strides");
        tell_plan("rotary", problem, &plan, reason);
        plan
    }
}

impl fmt::Display for RotaryBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, table_vector, rows_per_unit, neighbors, units_per_cube } = self;
        write!(
            f,
            "cubes of {units_per_cube} units, vectors of {vector_size} of {rows_per_unit} rows a unit, \
             {neighbors} rows side by side, {table_vector} elements of the table at once"
        )
    }
}
