//! How kernels over images are spread over a device: a vector of channels of a place a unit.

use crate::{
    device::widest_vector,
    divisor::{Divisor, divide, divisor},
};
use cubecl::{
    CubeCount, CubeDim, calculate_cube_count_elemwise, client::Client, ir::VectorSize, prelude::*,
};
use std::fmt;

/// How a kernel's units are spread over images: over places such as pixels, windows, or cells of pixels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) units: u32,
    /// Vectors of a pixel.
    pub(crate) vectors: Divisor,
    pub(crate) columns: Divisor,
    pub(crate) rows: Divisor,
    /// Vectors from one pixel of what is read to the next.
    pub(crate) pitch: u32,
}

/// A unit's place.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) image: u32,
    pub(crate) row: u32,
    pub(crate) column: u32,
    pub(crate) vector: u32,
}

#[cube]
pub(crate) fn place_of(unit: u32, spread: &Spread) -> Place {
    let (rest, vector) = divide(unit, &spread.vectors);
    let (rest, column) = divide(rest, &spread.columns);
    let (image, row) = divide(rest, &spread.rows);
    Place { image, row, column, vector }
}

/// Pixels that a kernel reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    /// Of all images.
    pub(crate) pixels: usize,
    /// Elements from one to the next.
    pub(crate) stride: usize,
    /// Bytes of an element.
    pub(crate) bytes: usize,
}

/// How a launch is spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PixelPlan {
    /// Channels that a unit loads at once.
    pub(crate) vector_size: VectorSize,
    /// Units of a cube.
    units_per_cube: u32,
    units: usize,
    /// Rows and columns of units in an image.
    grid: [usize; 2],
    /// Vectors from a pixel of what is read to the next.
    pitch: usize,
    vectors: usize,
}

impl PixelPlan {
    /// Enough units to hide the latency of memory on every GPU, few enough for every adapter.
    const UNITS: u32 = 256;

    /// A unit for each vector of `channels` of each place of a `grid` in so many images. Vectors are the widest that
    /// fit channels and the distance of pixels.
    pub(crate) fn new(
        client: &Client,
        [images, channels]: [usize; 2],
        grid: [usize; 2],
        read: Read,
    ) -> Self {
        let Read { pixels, stride, bytes } = read;
        let vector_size = widest_vector(client, bytes, |size| {
            // One pixel is never stepped over.
            channels.is_multiple_of(size) && (pixels == 1 || stride.is_multiple_of(size))
        });
        let vectors = channels / vector_size;
        let units_per_cube = Self::UNITS.min(client.properties().hardware.max_units_per_cube);
        let units = images * grid[0] * grid[1] * vectors;
        Self { vector_size, units_per_cube, units, grid, pitch: stride / vector_size, vectors }
    }

    pub(crate) fn cubes(&self, client: &Client) -> (CubeCount, CubeDim) {
        let dim = CubeDim::new_1d(self.units_per_cube);
        (calculate_cube_count_elemwise(client, self.units, dim), dim)
    }

    pub(crate) fn spread(&self) -> SpreadLaunch {
        SpreadLaunch {
            units: self.units as u32,
            vectors: divisor(self.vectors),
            columns: divisor(self.grid[1]),
            rows: divisor(self.grid[0]),
            pitch: self.pitch as u32,
        }
    }
}

impl fmt::Display for PixelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, units, units_per_cube, .. } = self;
        write!(f, "{units} units of vectors of {vector_size}, cubes of {units_per_cube}")
    }
}
