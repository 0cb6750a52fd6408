use super::{
    QuantizeProblem,
    amax::UNITS,
    cast::{TILE_COLUMNS, TILE_ROWS, UNIT_COLUMNS},
    problem::OP,
};
use crate::{DeviceProfile, Promise, device::widest_vector, plan::tell_plan};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// How a matrix's quantization is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizeBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Cubes that look for the largest magnitude, each of which leaves one number.
    pub amax_cubes: usize,
    /// Cubes that scale and round.
    pub cast_cubes: usize,
    /// Whether the GPU's own conversion rounds.
    pub hardware: bool,
}

impl QuantizeBlueprint {
    /// Cubes for each multiprocessor: with eight of 256 units it is full.
    const AMAX_CUBES: usize = 8;
    /// Each begins with a look at all of the numbers that the first pass left, and its units ask for eight vectors at
    /// once. Four were slower by 6 % on an H200.
    const CAST_CUBES: usize = 3;
    /// Vectors that a unit compares before it pays to bring in another cube.
    const VECTORS_PER_UNIT: usize = 4;
    /// Five cubes of 256 units a multiprocessor hide the latency of memory; of those that cast, a launch
    /// counts on three.
    pub(crate) const PROMISES: [(&str, Promise); 5] = [
        ("quantize_amax", Promise::registers(48)),
        ("quantize_cast", Promise::registers(80)),
        ("quantize_decode", Promise::registers(48)),
        // Five cubes of 128 units a multiprocessor, each of which loads eight vectors before it waits.
        ("quantize_blocks", Promise::registers(96)),
        ("quantize_decode_blocks", Promise::registers(48)),
    ];

    /// The widest loads that fit the rows, and as many cubes as fill the device.
    pub fn plan(problem: &QuantizeProblem, client: &Client) -> Self {
        let device = DeviceProfile::of(client);
        let vector_size = widest_vector(client, problem.input.size(), |size| {
            size <= UNIT_COLUMNS as usize && problem.columns.is_multiple_of(size)
        });
        let vectors = problem.elements() / vector_size;
        let tiles = problem.rows.div_ceil(TILE_ROWS as usize)
            * problem.columns.div_ceil(TILE_COLUMNS as usize);
        let plan = Self {
            vector_size,
            amax_cubes: vectors
                .div_ceil(UNITS as usize * Self::VECTORS_PER_UNIT)
                .min(device.multiprocessors * Self::AMAX_CUBES),
            cast_cubes: tiles.min(device.multiprocessors * Self::CAST_CUBES),
            hardware: device.compute_capability.is_some_and(|capability| capability >= 89),
        };
        let reason = format_args!("cubes for {} multiprocessors", device.multiprocessors);
        tell_plan(OP, problem, &plan, reason);
        plan
    }
}

impl fmt::Display for QuantizeBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, amax_cubes, cast_cubes, hardware } = self;
        let by = if *hardware { "the GPU's conversion" } else { "integer arithmetic" };
        write!(f, "{amax_cubes} and {cast_cubes} cubes, vectors of {vector_size}, by {by}")
    }
}
