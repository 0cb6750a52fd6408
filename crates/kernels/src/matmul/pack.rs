//! Copies an operand into the layout that tensor cores take: rows of k or of m and n, contiguous and
//! aligned to 16 bytes.

use cubecl::prelude::*;

/// Edge of the square that a cube transposes at once.
pub(crate) const TILE: u32 = 32;
/// Rows of units in a cube; each takes every eighth row of the square.
pub(crate) const ROWS: u32 = 8;

/// Where the source lies: strides in elements, and its size.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct PackSource {
    pub(crate) row: u32,
    pub(crate) column: u32,
    pub(crate) outer: u32,
    pub(crate) inner: u32,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    pub(crate) inner_batches: u32,
}

/// `packed[b, r, c] = source[b, r, c]`, rows `pitch` elements apart. Cubes: columns along x, rows
/// along y, batches along z. Where the source's columns are not neighbors, its rows are: the square
/// is read along them and turned in shared memory, so that both sides are coalesced.
#[cube(launch_unchecked)]
pub(crate) fn matmul_pack_kernel<E: Numeric>(
    source: &[E],
    packed: &mut [E],
    place: PackSource,
    pitch: u32,
    #[comptime] transpose: bool,
    #[define(E)] _element: ElemType,
) {
    let outer = CUBE_POS_Z / place.inner_batches;
    let inner = CUBE_POS_Z % place.inner_batches;
    let origin = outer * place.outer + inner * place.inner;
    let target = CUBE_POS_Z * place.rows * pitch;
    let (first_row, first_column) = (CUBE_POS_Y * TILE, CUBE_POS_X * TILE);
    if comptime!(transpose) {
        // One column more: units of a warp write to different banks.
        let mut square = Shared::<[E]>::new_slice(comptime!((TILE * (TILE + 1)) as usize));
        #[unroll]
        for round in 0..comptime!(TILE / ROWS) {
            let column = UNIT_POS_Y + round * ROWS;
            if first_row + UNIT_POS_X < place.rows && first_column + column < place.columns {
                let at = origin
                    + (first_row + UNIT_POS_X) * place.row
                    + (first_column + column) * place.column;
                square[(UNIT_POS_X * (TILE + 1) + column) as usize] = source[at as usize];
            }
        }
        sync_cube();
        #[unroll]
        for round in 0..comptime!(TILE / ROWS) {
            let row = UNIT_POS_Y + round * ROWS;
            if first_row + row < place.rows && first_column + UNIT_POS_X < place.columns {
                let at = target + (first_row + row) * pitch + first_column + UNIT_POS_X;
                packed[at as usize] = square[(row * (TILE + 1) + UNIT_POS_X) as usize];
            }
        }
    } else {
        #[unroll]
        for round in 0..comptime!(TILE / ROWS) {
            let row = first_row + UNIT_POS_Y + round * ROWS;
            let column = first_column + UNIT_POS_X;
            if row < place.rows && column < place.columns {
                let from = origin + row * place.row + column * place.column;
                packed[(target + row * pitch + column) as usize] = source[from as usize];
            }
        }
    }
}
