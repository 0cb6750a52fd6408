//! Softmax on the tensor cores' accumulators: a unit has pairs of columns of two rows, 8 apart, every
//! eighth column on, and the four units of a quad have a row between them.
//!
//! Weights are powers of two, so that one multiply-add and one instruction make each.

use super::{
    kept_bits::{is_kept, kept_bits},
    polynomial::{exp2_by_polynomial, is_by_polynomial},
    rules::{Heads, Sequence, Side, origin},
    seen_words::{is_seen, seen_words},
};
use crate::ptx::{
    convert::round_tf32, exp2_fast, mma::TF32, output_address, pack_bf16, pack_f16, store_numbers,
    store_word, vector_of,
};
use cubecl::prelude::{Sequence as Elements, *};
use std::f64::consts::LN_2;

/// What a score is that does not count.
pub(super) const UNSEEN: f32 = f32::NEG_INFINITY;
/// What the largest score of a row begins with. Finite, so that no difference of a score to it is NaN.
pub(super) const LEAST: f32 = f32::MIN;

/// How far a score may lie, in powers of two, above what weights are relative to, where rows are rescaled lazily
/// (`FlashAttention-4`): weights of 2^8 and sums of them fit f16 and f32.
const SLACK: f32 = 8.0;

/// The largest or the sum of what the four units of a row hold.
#[cube]
fn quad_max(x: f32) -> f32 {
    let pair = max(x, plane_shuffle_xor(x, 1u32));
    max(pair, plane_shuffle_xor(pair, 2u32))
}

#[cube]
pub(super) fn quad_sum(x: f32) -> f32 {
    let pair = x + plane_shuffle_xor(x, 1u32);
    pair + plane_shuffle_xor(pair, 2u32)
}

/// A unit's part of its warp's queries.
#[derive(CubeType)]
pub(super) struct Queries<'a, I: Float, M: Numeric> {
    pub(super) sequence: Sequence<'a, I, M>,
    /// The first of its two rows, which are 8 apart.
    pub(super) row: u32,
    /// Its place among the four units of a row.
    pub(super) quad: u32,
    /// A score counts so much in powers of two.
    pub(super) exponent: f32,
    /// Keys of a tile.
    #[cube(comptime)]
    pub(super) tile_kv: usize,
    /// PTX type of the weights: `bf16` or `f16`.
    #[cube(comptime)]
    pub(super) dtype: &'static str,
}

/// The part of a unit of which the first row is `row`.
#[cube]
pub(super) fn queries_at<'a, I: Float, M: Numeric>(
    sequence: Sequence<'a, I, M>,
    row: u32,
    quad: u32,
    exponent: f32,
    #[comptime] tile_kv: usize,
    #[comptime] dtype: &'static str,
) -> Queries<'a, I, M> {
    Queries::<'a, I, M> { sequence, row, quad, exponent, tile_kv, dtype }
}

/// What a unit knows of its two rows.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowState {
    /// What weights are relative to: the largest scores so far, or lazily ones a little less.
    pub(super) peak_upper: f32,
    pub(super) peak_lower: f32,
    /// Sums of this unit's weights, relative to them.
    pub(super) total_upper: f32,
    pub(super) total_lower: f32,
    /// What sums and outputs are to be multiplied by since the last tile.
    pub(super) rescale_upper: f32,
    pub(super) rescale_lower: f32,
}

/// Rows of which nothing was seen yet.
#[cube]
pub(super) fn unseen() -> RowState {
    RowState {
        peak_upper: LEAST.runtime(),
        peak_lower: LEAST.runtime(),
        total_upper: 0.0f32,
        total_lower: 0.0f32,
        rescale_upper: 0.0f32,
        rescale_lower: 0.0f32,
    }
}

/// Puts bounds and bias into a tile of scores, and what is not seen where some pair may not be: if it
/// `is_checked`.
#[cube]
pub(super) fn apply_rules<I: Float, M: Numeric, R: Size>(
    scores: Vector<f32, R>,
    queries: &Queries<'_, I, M>,
    first_key: u32,
    is_checked: bool,
) -> Vector<f32, R> {
    let options = comptime!(queries.sequence.rules.options);
    if comptime!(options.looks_up_pairs()) || is_checked {
        apply_rules_to::<I, M, R>(scores, queries, first_key, true)
    } else {
        apply_rules_to::<I, M, R>(scores, queries, first_key, false)
    }
}

/// As [`apply_rules`], with what is not seen if `masked`. There is no branch: the tensor cores would have to
/// be done before it.
#[cube]
pub(super) fn apply_rules_to<I: Float, M: Numeric, R: Size>(
    scores: Vector<f32, R>,
    queries: &Queries<'_, I, M>,
    first_key: u32,
    #[comptime] masked: bool,
) -> Vector<f32, R> {
    let sequence = &queries.sequence;
    let options = comptime!(queries.sequence.rules.options);
    let count = comptime!(queries.tile_kv / 2);
    let mut ruled = Elements::<f32>::new();
    let words = if comptime!(masked && options.mapped) {
        let (row, quad) = (queries.row, queries.quad);
        seen_words(sequence, row, first_key, quad, queries.tile_kv, Side::Queries)
    } else {
        Elements::<u32>::new()
    };
    #[unroll]
    for i in 0..count {
        let key = first_key + comptime!((i / 4 * 8 + i % 2) as u32) + 2 * queries.quad;
        // Rows and keys beyond the last do not count, but nothing may be read beyond them either.
        let query = min(queries.row + comptime!(8 * ((i / 2) % 2) as u32), sequence.seq_q - 1);
        let within = min(key, sequence.seq_kv - 1);
        let mut score = scores.extract(i);
        if comptime!(options.softcap || options.bias) {
            score = sequence.rules.bounded_score(score) + sequence.bias_at(query, within);
        }
        if comptime!(masked) {
            let visible = if comptime!(options.mapped) {
                is_seen(&words, i) && sequence.is_in_window(query, within)
            } else {
                key < sequence.seq_kv && sequence.is_visible(query, within)
            };
            score = select(visible, score, UNSEEN);
        }
        ruled.push(score);
    }
    with_first::<R>(scores, ruled, count)
}

/// The vector with its first `count` elements replaced by `first`.
#[cube]
pub(super) fn with_first<R: Size>(
    vector: Vector<f32, R>,
    first: Elements<f32>,
    #[comptime] count: usize,
) -> Vector<f32, R> {
    let mut all = first;
    #[unroll]
    for i in count..R::value().comptime() {
        all.push(vector.extract(i));
    }
    vector_of::<f32, R>(all)
}

/// A score less the row's largest, as a power of two. `from` is the largest as one.
///
/// With a bias scores may be as large as a mask. Their difference is then taken first: it is exact where
/// scores are near each other, and it cannot overflow to NaN.
#[cube]
fn power(score: f32, largest: f32, from: f32, exponent: f32, #[comptime] has_bias: bool) -> f32 {
    if comptime!(has_bias) { (score - largest) * exponent } else { score * exponent - from }
}

/// What weights are relative to from now on: the largest score, unless what they were relative to is as good.
#[cube]
fn reference(largest: f32, before: f32, exponent: f32) -> f32 {
    let has_grown = before == LEAST || (largest - before) * exponent > SLACK;
    select(has_grown, largest, before)
}

/// The largest of `peak` and the unit's scores of a row, of which the first register is `first`. By two maxima: each
/// instruction of one would wait for the one before it.
#[cube]
fn most_of_row<R: Size>(
    scores: Vector<f32, R>,
    peak: f32,
    #[comptime] first: usize,
    #[comptime] count: usize,
) -> f32 {
    let mut most = peak;
    let mut other = scores.extract(first);
    #[unroll]
    for pair in 0..comptime!(count / 4) {
        let register = comptime!(first + 4 * pair);
        if comptime!(pair % 2 == 0) {
            other = max(max(other, scores.extract(register)), scores.extract(register + 1));
        } else {
            most = max(max(most, scores.extract(register)), scores.extract(register + 1));
        }
    }
    max(most, other)
}

/// Makes weights of a tile of scores and updates the rows. Registers behind the scores stay.
#[cube]
pub(super) fn weigh<I: Float, M: Numeric, R: Size>(
    scores: Vector<f32, R>,
    state: &mut RowState,
    queries: &Queries<'_, I, M>,
    first_key: u32,
) -> Vector<f32, R> {
    let drawn = Elements::<u32>::new();
    weigh_kept::<I, M, R>(scores, state, queries, first_key, &drawn, false, false)
}

/// As [`weigh`]. Where what dropout leaves of the tile is `drawn`, weights that it leaves out stay until
/// [`pack_kept`](super::kept_bits::pack_kept): two are left out at once there.
///
/// `lazily`, a row is rescaled only where its largest score grew by much, and else exactly by 1. With a bias it is
/// whenever it grew: the backward pass counts on the largest score then. With `polynomials` a quarter of the weights is
/// made by them.
#[cube]
pub(super) fn weigh_kept<I: Float, M: Numeric, R: Size>(
    scores: Vector<f32, R>,
    state: &mut RowState,
    queries: &Queries<'_, I, M>,
    first_key: u32,
    drawn: &Elements<u32>,
    #[comptime] lazily: bool,
    #[comptime] polynomials: bool,
) -> Vector<f32, R> {
    let options = comptime!(queries.sequence.rules.options);
    let (count, has_bias) = comptime!((queries.tile_kv / 2, options.bias));
    let exponent = queries.exponent;
    let upper_most = most_of_row::<R>(scores, state.peak_upper, 0usize, count);
    let lower_most = most_of_row::<R>(scores, state.peak_lower, 2usize, count);
    let mut upper = quad_max(upper_most);
    let mut lower = quad_max(lower_most);
    if comptime!(lazily && !has_bias) {
        upper = reference(upper, state.peak_upper, exponent);
        lower = reference(lower, state.peak_lower, exponent);
    }
    // The product of the least number may be minus infinity, which less itself is NaN.
    let upper_from = select(upper == LEAST, 0.0f32, upper * exponent);
    let lower_from = select(lower == LEAST, 0.0f32, lower * exponent);
    state.rescale_upper = exp2_fast(power(state.peak_upper, upper, upper_from, exponent, has_bias));
    state.rescale_lower = exp2_fast(power(state.peak_lower, lower, lower_from, exponent, has_bias));
    if comptime!(lazily) {
        state.rescale_upper = select(upper == state.peak_upper, 1.0f32, state.rescale_upper);
        state.rescale_lower = select(lower == state.peak_lower, 1.0f32, state.rescale_lower);
    }
    state.peak_upper = upper;
    state.peak_lower = lower;
    let mut upper_sum = state.total_upper * state.rescale_upper;
    let mut lower_sum = state.total_lower * state.rescale_lower;
    let mut weights = Elements::<f32>::new();
    let mut kept = 0u32;
    #[unroll]
    for i in 0..count {
        let is_upper = comptime!((i / 2) % 2 == 0);
        let (largest, from) =
            if comptime!(is_upper) { (upper, upper_from) } else { (lower, lower_from) };
        let power = power(scores.extract(i), largest, from, exponent, has_bias);
        let mut weight = if comptime!(polynomials && is_by_polynomial(i)) {
            exp2_by_polynomial(power)
        } else {
            exp2_fast(power)
        };
        if comptime!(is_upper) {
            upper_sum += weight;
        } else {
            lower_sum += weight;
        }
        if comptime!(options.dropout && drawn.len() * 32 != count) {
            if comptime!(i % 32 == 0) {
                let column = first_key + comptime!(2 * i as u32) + 2 * queries.quad;
                kept = kept_bits(&queries.sequence, queries.row, column, Side::Queries);
            }
            weight = select(is_kept(kept, i, Side::Queries), weight, 0.0f32);
        }
        weights.push(weight);
    }
    state.total_upper = upper_sum;
    state.total_lower = lower_sum;
    with_first::<R>(scores, weights, count)
}

/// Packs `count` registers from the `first` on, as the tensor cores take them: in pairs, or alone as TF32.
#[cube]
pub(super) fn pack_registers<R: Size, P: Size>(
    weights: Vector<f32, R>,
    #[comptime] first: usize,
    #[comptime] count: usize,
    #[comptime] dtype: &'static str,
) -> Vector<u32, P> {
    let mut packed = Elements::<u32>::new();
    #[unroll]
    for pair in 0..comptime!(count / 2) {
        let low = weights.extract(comptime!(first + 2 * pair));
        let high = weights.extract(comptime!(first + 2 * pair + 1));
        if comptime!(dtype == TF32) {
            packed.push(round_tf32(low));
            packed.push(round_tf32(high));
        } else {
            packed.push(pack(low, high, dtype));
        }
    }
    vector_of::<u32, P>(packed)
}

/// Writes two neighboring elements in the tensors' type, if they are there.
#[cube]
pub(super) fn store_pair(
    base: u64,
    element: u32,
    low: f32,
    high: f32,
    are_there: bool,
    #[comptime] dtype: &'static str,
) {
    if comptime!(dtype == TF32) {
        if are_there {
            store_numbers(base, element, low, high);
        }
    } else {
        let word = pack(low, high, dtype);
        if are_there {
            store_word(base, element, word);
        }
    }
}

/// Two numbers, packed.
#[cube]
pub(super) fn pack(low: f32, high: f32, #[comptime] dtype: &'static str) -> u32 {
    match comptime!(dtype) {
        "f16" => pack_f16(low, high),
        _ => pack_bf16(low, high),
    }
}

/// Multiplies the rows of the output by what their sums were multiplied by.
#[cube]
pub(super) fn rescale<R: Size>(
    sums: Vector<f32, R>,
    upper: f32,
    lower: f32,
    #[comptime] first: usize,
    #[comptime] used: usize,
) -> Vector<f32, R> {
    let unused = Vector::<f32, R>::empty();
    let mut scaled = Elements::<f32>::new();
    #[unroll]
    for at in 0..R::value().comptime() {
        if comptime!(at >= first && at < first + used) {
            let is_upper = comptime!(((at - first) / 2).is_multiple_of(2));
            let factor = if comptime!(is_upper) { upper } else { lower };
            scaled.push(sums.extract(at) * factor);
        } else {
            scaled.push(unused.extract(at));
        }
    }
    vector_of::<f32, R>(scaled)
}

/// Sums of the weights of a unit's two rows, and what the outputs are to be multiplied by in the end.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowTotals {
    upper: f32,
    lower: f32,
    upper_factor: f32,
    lower_factor: f32,
}

#[cube]
pub(super) fn row_totals<I: Float, M: Numeric>(
    state: &RowState,
    queries: &Queries<'_, I, M>,
) -> RowTotals {
    let kept = queries.sequence.rules.numbers.kept;
    let upper = quad_sum(state.total_upper);
    let lower = quad_sum(state.total_lower);
    RowTotals {
        upper,
        lower,
        upper_factor: select(upper == 0.0f32, 0.0f32, kept / upper),
        lower_factor: select(lower == 0.0f32, 0.0f32, kept / lower),
    }
}

/// Divides the outputs, which lie from register `first` on, by the sums of their weights, and writes
/// both rows, their largest scores and their logarithms.
#[cube]
pub(super) fn write_rows<I: Float, M: Numeric, R: Size>(
    sums: Vector<f32, R>,
    #[comptime] first: usize,
    state: &RowState,
    queries: &Queries<'_, I, M>,
    out: &mut Heads<I>,
    lse: &mut [f32],
    #[comptime] head_dim: usize,
) {
    let totals = row_totals(state, queries);
    write_columns::<I, M, R>(sums, first, &totals, queries, out, 0usize, head_dim);
    write_row_values(state, &totals, queries, lse);
}

/// Writes the largest scores of both rows and the logarithms of their sums.
#[cube]
pub(super) fn write_row_values<I: Float, M: Numeric>(
    state: &RowState,
    totals: &RowTotals,
    queries: &Queries<'_, I, M>,
    lse: &mut [f32],
) {
    let (sequence, row) = (&queries.sequence, queries.row);
    let rules = sequence.rules;
    if queries.quad == 0 {
        let largest = sequence.origin_of_row_values() + row;
        let logs = rules.all_rows() + largest;
        // With options that need it, scores were scaled before; the factor is 1 but for a rounding,
        // which would move a mask's size.
        let mut to_scores = 1.0f32.runtime();
        if comptime!(!(rules.options.softcap || rules.options.bias)) {
            to_scores = queries.exponent * comptime!(LN_2 as f32);
        }
        if row < sequence.seq_q {
            lse[largest as usize] = state.peak_upper * to_scores;
            lse[logs as usize] = totals.upper.ln();
        }
        if row + 8 < sequence.seq_q {
            lse[(largest + 8) as usize] = state.peak_lower * to_scores;
            lse[(logs + 8) as usize] = totals.lower.ln();
        }
    }
}

/// Writes `columns` columns of both rows from `column` on, which lie from register `first` on.
#[cube]
pub(super) fn write_columns<I: Float, M: Numeric, R: Size>(
    sums: Vector<f32, R>,
    #[comptime] first: usize,
    totals: &RowTotals,
    queries: &Queries<'_, I, M>,
    out: &mut Heads<I>,
    #[comptime] column: usize,
    #[comptime] columns: usize,
) {
    let (sequence, row) = (&queries.sequence, queries.row);
    let out_origin = origin(&out.strides, sequence.batch, sequence.head, sequence.first_q);
    let stride = out.strides.row;
    let base = output_address::<I>(&mut out.memory);
    #[unroll]
    for pair in 0..comptime!(columns / 4) {
        let i = comptime!(2 * pair);
        let at = row + comptime!(8 * (pair % 2) as u32);
        let factor =
            if comptime!(pair % 2 == 0) { totals.upper_factor } else { totals.lower_factor };
        let register = comptime!(first + i);
        let low = sums.extract(register) * factor;
        let high = sums.extract(comptime!(register + 1)) * factor;
        let column = comptime!((column + i / 4 * 8) as u32) + 2 * queries.quad;
        let element = out_origin + at * stride + column;
        store_pair(base, element, low, high, at < sequence.seq_q, comptime!(queries.dtype));
    }
}
