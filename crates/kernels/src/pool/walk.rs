//! Where windows lie: what the kernels of pools that walk share.

use crate::divisor::Divisor;
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
