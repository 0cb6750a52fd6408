use cubecl::prelude::*;

/// Words along an edge of the square that a cube turns.
pub(crate) const EDGE: u32 = 32;
/// Rows of units in a cube.
pub(crate) const SHARES: u32 = 8;
/// Words from one row of the square to the next one in shared memory: units that read along the other edge meet other
/// banks.
const PITCH: u32 = EDGE + 1;

/// `target[r, c] = source[c, r]` of words. Rows of `source` are `pitch` words apart. Cubes: columns along x, rows along y.
#[cube(launch_unchecked)]
pub(crate) fn transpose_words_kernel(
    source: &[u32],
    target: &mut [u32],
    rows: u32,
    columns: u32,
    pitch: u32,
) {
    let (first_row, first_column) = (CUBE_POS_Y * EDGE, CUBE_POS_X * EDGE);
    let mut square = Shared::<[u32]>::new_slice(comptime!((EDGE * PITCH) as usize));
    #[unroll]
    for round in 0..comptime!(EDGE / SHARES) {
        let column = UNIT_POS_Y + comptime!(round * SHARES);
        let (at_row, at_column) = (first_row + UNIT_POS_X, first_column + column);
        if at_row < rows && at_column < columns {
            square[(column * PITCH + UNIT_POS_X) as usize] =
                source[(at_column * pitch + at_row) as usize];
        }
    }
    sync_cube();
    #[unroll]
    for round in 0..comptime!(EDGE / SHARES) {
        let row = UNIT_POS_Y + comptime!(round * SHARES);
        let (at_row, at_column) = (first_row + row, first_column + UNIT_POS_X);
        if at_row < rows && at_column < columns {
            target[(at_row * columns + at_column) as usize] =
                square[(UNIT_POS_X * PITCH + row) as usize];
        }
    }
}

/// The same of halves of words. A square has as many words of two rows, and columns of twice the number. `columns` and
/// `pitch` are even; where `rows` is odd, the word behind the last row is read and not written.
#[cube(launch_unchecked)]
pub(crate) fn transpose_halves_kernel(
    source: &[u32],
    target: &mut [u32],
    rows: u32,
    columns: u32,
    pitch: u32,
) {
    let (first_row, first_column) = (CUBE_POS_Y * (2 * EDGE), CUBE_POS_X * (2 * EDGE));
    let mut square = Shared::<[u32]>::new_slice(comptime!((2 * EDGE * PITCH) as usize));
    #[unroll]
    for round in 0..comptime!(2 * EDGE / SHARES) {
        let column = UNIT_POS_Y + comptime!(round * SHARES);
        let (at_row, at_column) = (first_row + 2 * UNIT_POS_X, first_column + column);
        if at_row < rows && at_column < columns {
            square[(column * PITCH + UNIT_POS_X) as usize] =
                source[((at_column * pitch + at_row) / 2) as usize];
        }
    }
    sync_cube();
    #[unroll]
    for round in 0..comptime!(EDGE / SHARES) {
        let pair = UNIT_POS_Y + comptime!(round * SHARES);
        let (at_row, at_column) = (first_row + 2 * pair, first_column + 2 * UNIT_POS_X);
        if at_row < rows && at_column < columns {
            let left = square[(2 * UNIT_POS_X * PITCH + pair) as usize];
            let right = square[((2 * UNIT_POS_X + 1) * PITCH + pair) as usize];
            let at = (at_row * columns + at_column) / 2;
            target[at as usize] = (left & 0xffff) | (right << 16);
            if at_row + 1 < rows {
                target[(at + columns / 2) as usize] = (left >> 16) | (right & 0xffff_0000);
            }
        }
    }
}
