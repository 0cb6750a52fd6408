use super::GeluProblem;
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
