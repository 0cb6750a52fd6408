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
//! the same input gives the same bits each time, and nothing is added up in global memory.

use super::{
    pipeline::Side,
    rules::{
        Options, Rules, Sequence, bias_at, bounded_score, is_visible, keys_of, queries_of,
        score_slope,
    },
    softmax::pack,
};
use crate::ptx::{exp2_fast, output_address, store_word};
use cubecl::prelude::*;

/// Rows that come in at once.
pub(super) const MOVING: usize = 64;

/// The rows of the other side that `rows` rows from `first` on meet, as tiles of 64: the first and the
/// one after the last.
#[cube]
pub(super) fn tiles_of(
    sequence: &Sequence,
    rules: &Rules,
    first: u32,
    #[comptime] rows: u32,
    #[comptime] side: Side,
    #[comptime] options: Options,
) -> (u32, u32) {
    let range = match comptime!(side) {
        Side::Queries => {
            keys_of(sequence, rules, first, min(first + rows, sequence.seq_q), options)
        }
        Side::Keys => {
            queries_of(sequence, rules, first, min(first + rows, sequence.seq_kv), options)
        }
    };
    let moving = comptime!(MOVING as u32);
    (range.0 / moving, range.1.div_ceil(moving))
}

/// Where a unit is in a tile of 64 by 64.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// Its first row among those that stay; its second is 8 below.
    pub(super) row: u32,
    /// First row of those that came in.
    pub(super) first_column: u32,
    pub(super) quad: u32,
    /// Where the head's deltas begin among the terms of rows, and how many there are of each term.
    pub(super) deltas: u32,
    pub(super) rows: u32,
    pub(super) exponent: f32,
    /// Bits of what dropout leaves.
    pub(super) kept: u32,
}

/// Makes `dropout(P)` of the first 32 registers and `dS`, without the scale, of the others.
#[cube]
pub(super) fn pair_gradients<I: Float, M: Numeric, R: Size>(
    products: Vector<f32, R>,
    mask: &[M],
    bias: &[I],
    terms: &[f32],
    sequence: &Sequence,
    rules: &Rules,
    place: &Place,
    #[comptime] masked: bool,
    #[comptime] side: Side,
    #[comptime] options: Options,
) -> Vector<f32, R> {
    let mut made = products;
    #[unroll]
    for i in 0..32usize {
        let row = place.row + comptime!(8 * ((i / 2) % 2) as u32);
        let column = place.first_column + comptime!((i / 4 * 8 + i % 2) as u32) + 2 * place.quad;
        let (query, key) = match comptime!(side) {
            Side::Queries => (row, column),
            Side::Keys => (column, row),
        };
        // What lies beyond the ends does not count, but nothing may be read there either.
        let within_q = min(query, sequence.seq_q - 1);
        let within_kv = min(key, sequence.seq_kv - 1);
        let mut score = products.extract(i);
        let mut slope = 1.0f32;
        if comptime!(options.softcap || options.bias) {
            score = bounded_score(score, rules, options);
            slope = score_slope(score, rules, options);
            score += bias_at::<I>(bias, sequence, rules, within_q, within_kv, options);
        }
        let at = (place.deltas + within_q) as usize;
        let shift = terms[(place.deltas + place.rows + within_q) as usize];
        let power = if comptime!(options.bias) {
            // See `row_terms` for why these are two terms. No score is above the largest, unless
            // forward added it up in another order: at the size of a mask, the last bit is then a
            // large number.
            let log = terms[(place.deltas + 2 * place.rows + within_q) as usize];
            min(score - shift, 0.0f32) * place.exponent - log
        } else {
            score * place.exponent - shift
        };
        let mut weight = exp2_fast(power);
        if comptime!(masked) {
            let visible = query < sequence.seq_q
                && key < sequence.seq_kv
                && is_visible::<M>(mask, sequence, rules, within_q, within_kv, options);
            weight = select(visible, weight, 0.0f32);
        }
        let mut kept = 1.0f32;
        if comptime!(options.dropout) {
            kept = select(place.kept & comptime!(1u32 << i) != 0, rules.numbers.kept, 0.0f32);
        }
        let gradient = products.extract(comptime!(32 + i));
        made.insert(i, kept * weight);
        made.insert(comptime!(32 + i), weight * (kept * gradient - terms[at]) * slope);
    }
    made
}

/// Writes the unit's two rows of a gradient.
#[cube]
pub(super) fn store<I: Float, R: Size>(
    sums: Vector<f32, R>,
    out: &mut [I],
    origin: u32,
    stride: u32,
    row: u32,
    end: u32,
    quad: u32,
    factor: f32,
    #[comptime] head_dim: usize,
    #[comptime] dtype: &'static str,
) {
    let base = output_address::<I>(out);
    #[unroll]
    for pair in 0..comptime!(head_dim / 4) {
        let i = comptime!(2 * pair);
        let at = row + comptime!(8 * (pair % 2) as u32);
        let low = sums.extract(i) * factor;
        let high = sums.extract(comptime!(i + 1)) * factor;
        let word = pack(low, high, dtype);
        if at < end {
            let column = comptime!((i / 4 * 8) as u32) + 2 * quad;
            store_word(base, origin + at * stride + column, word);
        }
    }
}

/// Whether some pair of `rows` rows and the rows that came in may not be seen, by the window or the
/// ends.
#[cube]
pub(super) fn is_checked(
    sequence: &Sequence,
    rules: &Rules,
    first_row: u32,
    first_column: u32,
    #[comptime] rows: u32,
    #[comptime] side: Side,
    #[comptime] options: Options,
) -> bool {
    let moving = comptime!(MOVING as u32);
    let (query, queries, key, keys) = match comptime!(side) {
        Side::Queries => (first_row, rows, first_column, moving),
        Side::Keys => (first_column, moving, first_row, rows),
    };
    let mut checked = query + queries > sequence.seq_q || key + keys > sequence.seq_kv;
    // How far the first key is from the diagonal of the first query.
    let distance = i32::cast_from(key) - i32::cast_from(query) - sequence.diagonal;
    if comptime!(options.right) {
        checked = checked || distance + i32::cast_from(keys) - 1 > rules.numbers.right;
    }
    if comptime!(options.left) {
        checked = checked || distance - i32::cast_from(queries) + 1 < -rules.numbers.left;
    }
    checked
}
