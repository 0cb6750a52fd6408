use crate::buffer::Buffer;
use cubecl::{client::Client, ir::VectorSize};

/// Sums that tensors add to: enough cubes to keep any GPU of today busy (132 multiprocessors with room
/// for eight each on an H200), and few enough to be added up by a last one.
pub const PLACES: usize = 1024;

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;

/// How a sum is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SquareSumBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Cubes that have something to read, at most [`PLACES`].
    pub cubes: u32,
}

impl SquareSumBlueprint {
    /// The widest loads that divide the tensor evenly, so that no unit needs a tail.
    pub fn plan(x: &Buffer, client: &Client) -> Self {
        let vector_size = client
            .io_optimized_vector_sizes(x.dtype.size())
            .filter(|size| x.elements.is_multiple_of(*size))
            .max()
            .unwrap_or(1);
        let needed = (x.elements / vector_size).div_ceil(UNITS as usize);
        Self { vector_size, cubes: needed.min(PLACES) as u32 }
    }
}
