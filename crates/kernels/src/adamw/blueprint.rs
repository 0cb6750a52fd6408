use super::AdamwProblem;
use crate::DeviceProfile;
use cubecl::{client::Client, ir::VectorSize};

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;

/// How an update is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdamwBlueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// Cubes, which go through the parameter together.
    pub cubes: u32,
}

impl AdamwBlueprint {
    /// Words of the generator are drawn by four, one an element.
    const WIDEST: usize = 4;

    /// Cubes that a multiprocessor has room for: 2048 threads.
    const CUBES_A_MULTIPROCESSOR: usize = 8;

    /// The widest loads of moments that divide the parameter evenly, so that no unit needs a tail; those
    /// of 16-bit parameters hold as many elements and fewer bytes. As many cubes as run at once, so that
    /// what a unit computes ahead of its elements is spread over many.
    pub fn plan(problem: &AdamwProblem, client: &Client) -> Self {
        let vector_size = client
            .io_optimized_vector_sizes(size_of::<f32>())
            .filter(|size| *size <= Self::WIDEST && problem.elements.is_multiple_of(*size))
            .max()
            .unwrap_or(1);
        let needed = (problem.elements / vector_size).div_ceil(UNITS as usize);
        let at_once = DeviceProfile::of(client).multiprocessors * Self::CUBES_A_MULTIPROCESSOR;
        // At most a few thousand.
        Self { vector_size, cubes: needed.clamp(1, at_once) as u32 }
    }
}
