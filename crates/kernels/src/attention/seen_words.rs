//! What a mask's [map](super::mask_map) leaves of a part of a tile, a bit for each pair.

use super::rules::{Sequence, Side};
use cubecl::prelude::{Sequence as Elements, *};

/// Words of a unit's two rows, 8 apart, over `columns` of a tile from `first_column` on: first those of the upper row. They
/// begin with the unit's first column, and [`is_seen`] tells them apart.
#[cube]
pub(super) fn seen_words<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    row: u32,
    first_column: u32,
    quad: u32,
    #[comptime] columns: usize,
    #[comptime] rows: Side,
) -> Elements<u32> {
    let of_row = comptime!(columns / 32);
    let mut words = Elements::<u32>::new();
    #[unroll]
    for at in 0..comptime!(2 * of_row) {
        let own = row + comptime!((at / of_row * 8) as u32);
        let column = first_column + comptime!((at % of_row * 32) as u32);
        words.push(sequence.seen_word(own, column, rows) >> (2 * quad));
    }
    words
}

/// Whether the pair of register `i` is seen: pairs of columns of the upper row and of the lower one in turns, 8 columns
/// apart.
#[cube]
pub(super) fn is_seen(words: &Elements<u32>, #[comptime] i: usize) -> bool {
    let word = words[comptime!(i / 2 % 2 * (words.len() / 2) + i / 16)];
    word & comptime!(1u32 << (i / 4 % 4 * 8 + i % 2)) != 0
}
