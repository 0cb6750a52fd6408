//! Where vectors lie, and how a gradient's are read.

use super::Walk;
use cubecl::prelude::*;

/// Row and column of the vector `index`, which is the column itself where rows are not asked for.
#[cube]
pub(super) fn row_and_column(index: u32, columns: u32, #[comptime] walk: Walk) -> (u32, u32) {
    if comptime!(walk == Walk::Rows) { (index / columns, index % columns) } else { (0u32, index) }
}

/// Where a tensor has its vector of that row and column.
#[cube]
pub(super) fn place(row: u32, column: u32, pitch: u32, #[comptime] walk: Walk) -> usize {
    if comptime!(walk == Walk::Rows) { (row * pitch + column) as usize } else { column as usize }
}

/// A gradient's vector of that row and column: as it lies, or, if it is gathered, from two rows at most.
#[cube]
pub(super) fn load_gradient<G: Float, N: Size, M: Size>(
    gradient: &[Vector<G, M>],
    row: u32,
    column: u32,
    columns: u32,
    pitch: u32,
    #[comptime] walk: Walk,
) -> Vector<f32, N> {
    let mut g = Vector::<f32, N>::empty();
    let size = N::value().comptime();
    if comptime!(walk == Walk::Gathered) {
        let first = column * comptime!(size as u32);
        let row = first / columns;
        let column = first % columns;
        #[unroll]
        for lane in 0..size {
            let beside = column + comptime!(lane as u32);
            let gap = pitch - columns;
            let skipped = select(beside < columns, 0u32, gap);
            let at = (row * pitch + beside + skipped) as usize;
            g.insert(lane, f32::cast_from(gradient[at].extract(0usize)));
        }
    } else {
        let values = gradient[place(row, column, pitch, walk)];
        #[unroll]
        for lane in 0..size {
            g.insert(lane, f32::cast_from(values.extract(lane)));
        }
    }
    g
}
