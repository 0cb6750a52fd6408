use super::ScanProblem;
use crate::{
    DeviceProfile, Promise,
    device::{plane_units, widest_vector},
    plan::tell_plan,
};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// Units of a cube that scans rows.
pub(super) const UNITS: u32 = 256;
/// Units of a cube that walks down columns.
pub(super) const COLUMN_UNITS: u32 = 128;

/// Which dimension is scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScanWay {
    /// The last one.
    Rows {
        /// Units that share a row, a power of two; the cube's others take the next rows.
        lanes: u32,
        /// Units that exchange numbers without shared memory, or 1.
        plane: u32,
        /// Neighboring vectors that a unit scans by itself.
        vectors: u32,
    },
    /// Another one.
    Columns,
}

/// How a scan is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScanBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Which dimension is scanned, and by how many units.
    pub way: ScanWay,
    /// Elements of a chunk along the scanned dimension.
    pub chunk: usize,
    /// Chunks of a row or column; more than one need a second launch.
    pub chunks: usize,
}

impl ScanBlueprint {
    /// Cubes of rows for each multiprocessor: all units that it holds.
    const CUBES_PER_MULTIPROCESSOR: usize = 8;
    /// Units of columns for each multiprocessor: all that it holds.
    const UNITS_PER_MULTIPROCESSOR: usize = 2048;
    /// Elements that a unit of rows scans by itself where vectors have one.
    const ITEMS: u32 = 4;
    /// Tiles of a cube before another cube of the same row pays for the second reading.
    const TILES_PER_CHUNK: usize = 4;
    /// The most chunks of a row. Each cube reads the totals of those before it.
    const MOST_CHUNKS: usize = 1024;
    /// Bytes of a vector of columns: units hold several rows of them.
    const COLUMN_BYTES: usize = 4;
    /// The least rows of a chunk of columns.
    const LEAST_ROWS: usize = 16;
    /// Rows are scanned by all units that a multiprocessor has room for.
    pub(super) const ROW_PROMISE: Promise = Promise::registers(40);
    /// Columns have several loads under way instead.
    pub(super) const COLUMN_PROMISE: Promise = Promise::registers(48);

    /// As few chunks as fill the device.
    pub fn plan(problem: &ScanProblem, client: &Client) -> Self {
        let device = DeviceProfile::of(client);
        let plan = if problem.inner == 1 {
            Self::of_rows(problem, client, device.multiprocessors)
        } else {
            Self::of_columns(problem, client, device.multiprocessors)
        };
        let reason = format_args!("{} multiprocessors", device.multiprocessors);
        tell_plan("scan", problem, &plan, reason);
        plan
    }

    fn of_rows(problem: &ScanProblem, client: &Client, multiprocessors: usize) -> Self {
        let length = problem.length;
        let vector_size =
            widest_vector(client, problem.dtype.size(), |size| length.is_multiple_of(size));
        let vectors = if vector_size == 1 { Self::ITEMS } else { 1 };
        let item = vectors as usize * vector_size;
        let lanes = length.div_ceil(item).next_power_of_two().min(UNITS as usize) as u32;
        let cubes = problem.outer.div_ceil((UNITS / lanes) as usize);
        let tile = lanes as usize * item;
        let tiles = length.div_ceil(tile);
        let wanted = multiprocessors * Self::CUBES_PER_MULTIPROCESSOR / cubes;
        let chunks = wanted.min(tiles / Self::TILES_PER_CHUNK).clamp(1, Self::MOST_CHUNKS);
        let chunk = tiles.div_ceil(chunks) * tile;
        let way = ScanWay::Rows { lanes, plane: plane_units(client), vectors };
        Self { vector_size, way, chunk, chunks: length.div_ceil(chunk) }
    }

    fn of_columns(problem: &ScanProblem, client: &Client, multiprocessors: usize) -> Self {
        let (length, bytes) = (problem.length, problem.dtype.size());
        let vector_size = widest_vector(client, bytes, |size| {
            size * bytes <= Self::COLUMN_BYTES && problem.inner.is_multiple_of(size)
        });
        let columns = problem.outer * problem.inner / vector_size;
        let wanted = multiprocessors * Self::UNITS_PER_MULTIPROCESSOR / columns;
        // A unit reads as many totals as rows at most.
        let most = length.isqrt().min(length / Self::LEAST_ROWS);
        let chunk = length.div_ceil(wanted.min(most).max(1));
        let way = ScanWay::Columns;
        Self { vector_size, way, chunk, chunks: length.div_ceil(chunk) }
    }

    /// The most additions, or other combinations, that an element goes through on its way into any that is written.
    pub fn most_combinations(&self) -> usize {
        let Self { vector_size, way, chunk, chunks } = *self;
        match way {
            ScanWay::Rows { lanes, plane, vectors } => {
                let item = vectors as usize * vector_size;
                let width = plane.min(lanes);
                let tiles = chunk.div_ceil(lanes as usize * item);
                let within = item + width.ilog2() as usize + (lanes / width) as usize + tiles + 4;
                // Both the total of a chunk and that of several meet in a tree.
                let units = UNITS as usize;
                let tree = UNITS.ilog2() as usize;
                let before =
                    chunk.div_ceil(units) + vector_size + chunks.div_ceil(units) + 2 * tree;
                if chunks == 1 { within } else { within + before }
            }
            ScanWay::Columns if chunks == 1 => chunk,
            ScanWay::Columns => 2 * chunk + chunks,
        }
    }
}

impl fmt::Display for ScanBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, way, chunk, chunks } = self;
        match way {
            ScanWay::Rows { lanes, vectors, .. } => write!(f, "{lanes} units a row, {vectors} ")?,
            ScanWay::Columns => f.write_str("columns, ")?,
        }
        write!(f, "vectors of {vector_size}, {chunks} chunks of {chunk}")
    }
}
