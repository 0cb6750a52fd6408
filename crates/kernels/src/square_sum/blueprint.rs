use crate::buffer::Buffer;
use cubecl::{client::Client, ir::VectorSize};

/// Sums that tensors add to: enough cubes to keep any GPU of today busy (132 multiprocessors with room
/// for eight each on an H200), and few enough to be added up by a last one.
pub const PLACES: usize = 1024;

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;

/// Tensors of a launch: a launch takes two microseconds, and many a tensor less.
pub const MOST_TENSORS: usize = 8;

/// How a sum is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SquareSumBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Cubes that have something to read, at most [`PLACES`].
    pub cubes: u32,
}

impl SquareSumBlueprint {
    /// The widest loads that divide all tensors evenly, so that no unit needs a tail.
    pub fn plan(tensors: &[Buffer], client: &Client) -> Self {
        let bytes = tensors.first().map_or(size_of::<f32>(), |x| x.dtype.size());
        let divides = |size: usize| tensors.iter().all(|x| x.elements.is_multiple_of(size));
        let vector_size = client
            .io_optimized_vector_sizes(bytes)
            .filter(|size| divides(*size))
            .max()
            .unwrap_or(1);
        let largest = tensors.iter().map(|x| x.elements / vector_size).max().unwrap_or(0);
        Self { vector_size, cubes: largest.div_ceil(UNITS as usize).min(PLACES) as u32 }
    }
}
