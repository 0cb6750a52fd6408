//! Sums of dq in f32, which tiles of keys add to in global memory, and what becomes of them.
//!
//! ```text
//! sums = 0                          by the kernel of the terms of rows, before
//! sums[i] += sum_j ds[i, j] k_j     for each tile of keys j, in any order, four numbers at once
//! dq[i] = round(scale sums[i])
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | sums | heads of tiles of 64 queries by `head_dim` | see below | f32 |
//! | dq | `[batch, heads_q, seq_q, head_dim]` | rows contiguous | f16, bf16 |
//!
//! A tile lies as Hopper's tensor cores leave it: four neighboring registers of each of the 128 units of a
//! warpgroup, then the next four. A warp so adds to 512 bytes side by side. Units of a quad have two of eight
//! neighboring columns of a row each, and the same of the row 8 below.
//!
//! Tiles of sequences that are packed begin with the sequence, not at multiples of 64 rows: the one that begins
//! at row r as number b has its tiles from `r / 64 + b` on, which leaves each as many as it needs.

use super::rules::{Rules, Sequence, Strides, origin};
use crate::ptx::access::add_to_numbers;
use cubecl::prelude::*;

/// Units of a cube that rounds.
pub(crate) const UNITS: u32 = 256;
/// Numbers that are added at once.
pub(crate) const WIDTH: usize = 4;
/// Elements of a row that a unit writes at once.
pub(crate) const COLUMNS: usize = 8;

/// Tiles of a head: of `rows` rows, in `sequences` sequences that are packed.
pub(super) fn tiles_of_head(rows: usize, sequences: Option<usize>) -> usize {
    match sequences {
        None => rows.div_ceil(64),
        Some(sequences) => rows / 64 + sequences,
    }
}

/// Which of all tiles is the sequence's tile `index`.
#[cube]
pub(super) fn sums_tile<I: Float, M: Numeric>(sequence: &Sequence<'_, I, M>, index: u32) -> u32 {
    let sizes = &sequence.rules.sizes;
    if comptime!(sequence.rules.options.packed) {
        let of_head = sizes.rows_q / 64 + sizes.batch;
        sequence.head * of_head + sequence.first_q / 64 + sequence.batch + index
    } else {
        (sequence.batch * sizes.heads_q + sequence.head) * sizes.rows_q.div_ceil(64) + index
    }
}

/// Adds so many `columns` of a tile of 64 queries, from column `first` on; each of a warpgroup's units has half as many
/// numbers.
#[cube]
pub(super) fn add_tile<R: Size>(
    sums: Vector<f32, R>,
    base: u64,
    tile: u32,
    unit: u32,
    #[comptime] head_dim: usize,
    #[comptime] first: usize,
    #[comptime] columns: usize,
) {
    let address = base
        + u64::cast_from(tile) * comptime!(256 * head_dim as u64)
        + u64::cast_from(unit * 16 + comptime!(256 * first as u32));
    #[unroll]
    for i in 0..comptime!(columns / 8) {
        add_to_numbers(
            address + comptime!(2048 * i as u64),
            sums.extract(comptime!(4 * i)),
            sums.extract(comptime!(4 * i + 1)),
            sums.extract(comptime!(4 * i + 2)),
            sums.extract(comptime!(4 * i + 3)),
        );
    }
}

/// dq of the sums; tiles of 64 queries along x, heads along y, sequences along z. It reads and writes rows
/// once: memory is all that it takes.
#[cube(launch_unchecked)]
pub(crate) fn attention_dq_kernel<I: Float, M: Numeric>(
    sums: &[Vector<f32, Const<4>>],
    rules: &Rules<I, M>,
    dq: &mut [Vector<I, Const<8>>],
    strides: Strides,
    #[comptime] head_dim: usize,
    #[define(I, M)] _types: [ElemType; 2],
) {
    let sequence = rules.sequence(rules.batch_of(CUBE_POS_Z), CUBE_POS_Y);
    let first_row = CUBE_POS_X * 64;
    if first_row < sequence.seq_q {
        let chunks = comptime!((head_dim / COLUMNS) as u32);
        let tile = sums_tile::<I, M>(&sequence, CUBE_POS_X) * comptime!(16 * head_dim as u32);
        let scale = rules.numbers.scale;
        let origin = origin(&strides, sequence.batch, sequence.head, sequence.first_q);
        // Two rows, 8 apart, by eight columns: what a quad of units had.
        let mut item = UNIT_POS_X;
        while item < 32 * chunks {
            let (pair, chunk) = (item / chunks, item % chunks);
            let quad = pair / 8 * 32 + pair % 8 * 4;
            let mut upper = Vector::<I, Const<8>>::empty();
            let mut lower = Vector::<I, Const<8>>::empty();
            #[unroll]
            for i in 0..4usize {
                let four = sums[(tile + chunk * 128 + quad + comptime!(i as u32)) as usize];
                upper.insert(comptime!(2 * i), I::cast_from(four.extract(0usize) * scale));
                upper.insert(comptime!(2 * i + 1), I::cast_from(four.extract(1usize) * scale));
                lower.insert(comptime!(2 * i), I::cast_from(four.extract(2usize) * scale));
                lower.insert(comptime!(2 * i + 1), I::cast_from(four.extract(3usize) * scale));
            }
            let row = first_row + pair / 8 * 16 + pair % 8;
            let at = (origin + row * strides.row) / 8 + chunk;
            if row < sequence.seq_q {
                dq[at as usize] = upper;
            }
            if row + 8 < sequence.seq_q {
                dq[(at + strides.row) as usize] = lower;
            }
            item += UNITS;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_sequences_have_tiles_of_their_own() {
        for lengths in [vec![1, 63, 64, 65, 130], vec![64; 4], vec![0, 5, 0, 200], vec![127, 129]] {
            let (mut start, mut end) = (0, 0);
            for (number, length) in lengths.iter().enumerate() {
                let first = start / 64 + number;
                assert!(first >= end, "{lengths:?}");
                end = first + usize::div_ceil(*length, 64);
                start += length;
            }
            assert!(end <= tiles_of_head(start, Some(lengths.len())), "{lengths:?}");
        }
    }
}
