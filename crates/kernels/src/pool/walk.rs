//! Where units, windows and pixels lie: what all kernels of pools share.

use crate::divisor::{Divisor, divide};
use cubecl::prelude::*;

/// One dimension of the images and of the windows that walk them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Line {
    /// Pixels of x.
    pub(crate) size: u32,
    /// Windows.
    pub(crate) windows: u32,
    pub(crate) taps: u32,
    pub(crate) stride: Divisor,
    pub(crate) padding: u32,
    pub(crate) dilation: u32,
}

/// How a kernel's units are spread over images: over windows, or over cells of pixels.
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

/// Taps of a window that are inside of the image, or of the image with its padding, in one dimension. The dilation
/// is 1.
#[cube]
pub(crate) fn count(window: u32, line: &Line, #[comptime] padded: bool) -> u32 {
    let first = window * line.stride.divisor;
    let end = line.size + line.padding;
    if comptime!(padded) {
        min(line.taps, end + line.padding - first)
    } else {
        min(first + line.taps, end) - max(first, line.padding)
    }
}

/// One in every lane.
#[cube]
pub(crate) fn lanes<N: Size>(condition: bool) -> Vector<bool, N> {
    Vector::new(condition)
}
