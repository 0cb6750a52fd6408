//! What the backward passes on tensor cores do alike with pairs of queries and keys.
//!
//! One side's rows stay with a cube, those of the other come in, 64 at a time:
//!
//! | | stay | come in | products | sums |
//! |---|---|---|---|---|
//! | queries | q, dout | k, v | `S = q k^T`, `dP = dout v^T` | `dq += dS k` |
//! | keys | k, v | q, dout | `S^T = k q^T`, `dP^T = v dout^T` | `dv += P^T dout`, `dk += dS^T q` |
//!
//! Weights and their gradients stay in registers, where they lie as left operands of the sums have to.
//! The products are computed twice, once for either side: no two cubes then write the same element, so
//! the same input gives the same bits each time, and nothing is added up in global memory. Hopper's kernel that
//! computes them once ([`once`](super::once)) takes part of this, for keys.

use super::{
    kept_bits::{is_kept, kept_bits, kept_bits_anew},
    mma_plan::MOVING,
    rules::{Sequence, Side},
    seen_words::{is_seen, seen_words},
    softmax::store_pair,
};
use crate::ptx::{exp2_fast, output_address};
use cubecl::prelude::{Sequence as Elements, *};

/// The rows of the other side that `rows` rows from `first` on meet, as tiles of 64: the first and the
/// one after the last.
#[cube]
pub(super) fn tiles_of<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    first: u32,
    #[comptime] rows: u32,
    #[comptime] side: Side,
) -> (u32, u32) {
    let range = match comptime!(side) {
        Side::Queries => sequence.keys_of(first, min(first + rows, sequence.seq_q)),
        Side::Keys => sequence.queries_of(first, min(first + rows, sequence.seq_kv)),
    };
    let moving = comptime!(MOVING as u32);
    (range.0 / moving, range.1.div_ceil(moving))
}

/// A unit's part of its warp's rows that stay, and of a tile of those that came in.
#[derive(CubeType)]
pub(super) struct PairTile<'a, I: Float, M: Numeric> {
    pub(super) sequence: Sequence<'a, I, M>,
    /// The first of its two rows among those that stay, which are 8 apart.
    pub(super) row: u32,
    /// First row of those that came in.
    pub(super) first_column: u32,
    /// Its place among the four units of a row.
    pub(super) quad: u32,
    /// Where the head's deltas begin among the terms of rows, and how many there are of each term.
    pub(super) deltas: u32,
    pub(super) rows: u32,
    /// A score counts so much in powers of two.
    pub(super) exponent: f32,
    /// Bits of what dropout leaves.
    pub(super) kept: u32,
    /// Which rows stay.
    #[cube(comptime)]
    pub(super) side: Side,
}

/// The part of a unit of which the first row is `row`, in the tile of the rows from `first_column` on. Dropout is drawn
/// `anew` where the generator has few registers.
#[cube]
pub(super) fn pair_tile<'a, I: Float, M: Numeric>(
    sequence: Sequence<'a, I, M>,
    row: u32,
    first_column: u32,
    quad: u32,
    exponent: f32,
    #[comptime] side: Side,
    #[comptime] anew: bool,
) -> PairTile<'a, I, M> {
    let deltas = sequence.origin_of_row_values();
    let rows = sequence.rules.all_rows();
    // Before the products, which take the registers that the generator needs.
    let mut kept = 0u32;
    if comptime!(sequence.rules.options.dropout) {
        let column = first_column + 2 * quad;
        kept = if comptime!(anew) {
            kept_bits_anew(&sequence, row, column, side)
        } else {
            kept_bits(&sequence, row, column, side)
        };
    }
    PairTile::<'a, I, M> { sequence, row, first_column, quad, deltas, rows, exponent, kept, side }
}

#[cube]
impl<'a, I: Float, M: Numeric> PairTile<'a, I, M> {
    /// What the mask leaves of the tile, if it is `masked` and the mask has a map.
    pub(super) fn seen_words(&self, #[comptime] masked: bool) -> Elements<u32> {
        if comptime!(masked && self.sequence.rules.options.mapped) {
            let moving = comptime!(MOVING);
            seen_words(&self.sequence, self.row, self.first_column, self.quad, moving, self.side)
        } else {
            Elements::<u32>::new()
        }
    }
}

/// Makes `dropout(P)` of the first 32 registers and `dS`, without the scale, of the others: the gradient of products, or
/// that of what is `behind_cap`, as a bias is. Pairs that are not seen are sought where there may be some: if it
/// `is_checked`.
#[cube]
pub(super) fn pair_gradients<I: Float, M: Numeric, R: Size>(
    products: Vector<f32, R>,
    terms: &[f32],
    tile: &PairTile<'_, I, M>,
    is_checked: bool,
    #[comptime] behind_cap: bool,
) -> Vector<f32, R> {
    let options = comptime!(tile.sequence.rules.options);
    if comptime!(options.looks_up_pairs()) || is_checked {
        gradients_of::<I, M, R>(products, terms, tile, true, behind_cap)
    } else {
        gradients_of::<I, M, R>(products, terms, tile, false, behind_cap)
    }
}

#[cube]
fn gradients_of<I: Float, M: Numeric, R: Size>(
    products: Vector<f32, R>,
    terms: &[f32],
    tile: &PairTile<'_, I, M>,
    #[comptime] masked: bool,
    #[comptime] behind_cap: bool,
) -> Vector<f32, R> {
    let sequence = &tile.sequence;
    let rules = sequence.rules;
    let options = comptime!(tile.sequence.rules.options);
    let mut made = products;
    let words = tile.seen_words(masked);
    #[unroll]
    for i in 0..32usize {
        let row = tile.row + comptime!(8 * ((i / 2) % 2) as u32);
        let column = tile.first_column + comptime!((i / 4 * 8 + i % 2) as u32) + 2 * tile.quad;
        let (query, key) = match comptime!(tile.side) {
            Side::Queries => (row, column),
            Side::Keys => (column, row),
        };
        // What lies beyond the ends does not count, but nothing may be read there either.
        let within_q = min(query, sequence.seq_q - 1);
        let within_kv = min(key, sequence.seq_kv - 1);
        let mut score = products.extract(i);
        let mut slope = 1.0f32;
        if comptime!(options.softcap || options.bias) {
            score = rules.bounded_score(score);
            if comptime!(!behind_cap) {
                slope = rules.score_slope(score);
            }
            score += sequence.bias_at(within_q, within_kv);
        }
        let at = (tile.deltas + within_q) as usize;
        let shift = terms[(tile.deltas + tile.rows + within_q) as usize];
        let power = if comptime!(options.bias) {
            // See `row_terms` for why these are two terms. No score is above the largest, unless
            // forward added it up in another order: at the size of a mask, the last bit is then a
            // large number.
            let log = terms[(tile.deltas + 2 * tile.rows + within_q) as usize];
            min(score - shift, 0.0f32) * tile.exponent - log
        } else {
            score * tile.exponent - shift
        };
        let mut weight = exp2_fast(power);
        if comptime!(masked) {
            let visible = if comptime!(options.mapped) {
                is_seen(&words, i) && sequence.is_in_window(within_q, within_kv)
            } else {
                query < sequence.seq_q
                    && key < sequence.seq_kv
                    && sequence.is_visible(within_q, within_kv)
            };
            weight = select(visible, weight, 0.0f32);
        }
        let mut dropped = weight;
        let mut gradient = products.extract(comptime!(32 + i));
        if comptime!(options.dropout) {
            let kept = is_kept(tile.kept, i, tile.side);
            dropped = select(kept, weight, 0.0f32);
            gradient = select(kept, gradient, 0.0f32);
        }
        made.insert(i, dropped);
        made.insert(comptime!(32 + i), weight * (gradient - terms[at]) * slope);
    }
    made
}

/// Where a unit's two rows of a gradient lie.
#[derive(CubeType, Clone, Copy)]
pub(super) struct GradientRows {
    /// Element where row 0 begins.
    pub(super) origin: u32,
    pub(super) stride: u32,
    pub(super) row: u32,
    /// The first row that is not there.
    pub(super) end: u32,
    pub(super) quad: u32,
}

/// Writes the unit's two rows of a gradient, which lie from register `first` on.
#[cube]
pub(super) fn store<I: Float, R: Size>(
    sums: Vector<f32, R>,
    #[comptime] first: usize,
    out: &mut [I],
    rows: &GradientRows,
    factor: f32,
    #[comptime] head_dim: usize,
    #[comptime] dtype: &'static str,
) {
    let base = output_address::<I>(out);
    #[unroll]
    for pair in 0..comptime!(head_dim / 4) {
        let i = comptime!(2 * pair);
        let at = rows.row + comptime!(8 * (pair % 2) as u32);
        let low = sums.extract(comptime!(first + i)) * factor;
        let high = sums.extract(comptime!(first + i + 1)) * factor;
        let column = comptime!((i / 4 * 8) as u32) + 2 * rows.quad;
        store_pair(base, rows.origin + at * rows.stride + column, low, high, at < rows.end, dtype);
    }
}

/// Keys that the mask leaves to all queries of `rows` rows and the rows that come in: the first and the one after the
/// last.
#[cube]
pub(super) fn open_keys<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    first_row: u32,
    first_column: u32,
    #[comptime] rows: u32,
    #[comptime] side: Side,
) -> (u32, u32) {
    match comptime!(side) {
        Side::Queries => sequence.open_to_all(first_row, rows),
        Side::Keys => sequence.open_to_all(first_column, comptime!(MOVING as u32)),
    }
}

/// Whether some pair of `rows` rows and the rows that came in may not be seen, by the window, the ends or the mask, which
/// leaves the `open` keys.
#[cube]
pub(super) fn is_checked<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    first_row: u32,
    first_column: u32,
    open: (u32, u32),
    #[comptime] rows: u32,
    #[comptime] side: Side,
) -> bool {
    let numbers = &sequence.rules.numbers;
    let moving = comptime!(MOVING as u32);
    let (query, queries, key, keys) = match comptime!(side) {
        Side::Queries => (first_row, rows, first_column, moving),
        Side::Keys => (first_column, moving, first_row, rows),
    };
    let mut checked = query + queries > sequence.seq_q || key + keys > sequence.seq_kv;
    // How far the first key is from the diagonal of the first query.
    let distance = i32::cast_from(key) - i32::cast_from(query) - sequence.diagonal;
    if comptime!(sequence.rules.options.right) {
        checked = checked || distance + i32::cast_from(keys) - 1 > numbers.right;
    }
    if comptime!(sequence.rules.options.left) {
        checked = checked || distance - i32::cast_from(queries) + 1 < -numbers.left;
    }
    if comptime!(sequence.rules.options.mapped) {
        checked = checked || key < open.0 || key + keys > open.1;
    }
    checked
}
