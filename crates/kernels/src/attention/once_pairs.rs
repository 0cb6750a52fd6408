//! What a tile's scores and products become: weights, and the scores' gradients. [`pairs`](super::pairs) has
//! the same of the kernels that compute each pair twice; here the terms of queries come from shared memory.

use super::{
    kept_bits::is_kept, once::TERM_BYTES, pairs::PairTile, seen_words::is_seen, softmax::pack,
};
use crate::ptx::{
    access::{load_shared_pair, store_shared_word},
    exp2_fast, vector_of,
};
use cubecl::prelude::{Sequence as Elements, *};

/// The weights in place of the 32 scores, with the gradients that may still come behind them, if they do, and what
/// the scores' gradients grow by with the products where scores are bounded.
///
/// Pairs that are not seen have a weight of 0 if `masked`. Queries beyond the end have it by their terms.
#[cube]
pub(super) fn weights_of<I: Float, M: Numeric, R: Size>(
    products: Vector<f32, R>,
    terms_at: u32,
    tile: &PairTile<'_, I, M>,
    #[comptime] masked: bool,
) -> (Vector<f32, R>, Elements<f32>) {
    let sequence = &tile.sequence;
    let rules = sequence.rules;
    let options = comptime!(tile.sequence.rules.options);
    let mut made = Elements::<f32>::new();
    let mut slopes = Elements::<f32>::new();
    let words = tile.seen_words(masked);
    #[unroll]
    for four in 0..8usize {
        let at = terms_at + comptime!(32 * four as u32) + 8 * tile.quad;
        let shifts = load_shared_pair(at + comptime!(TERM_BYTES as u32));
        #[unroll]
        for j in 0..4usize {
            let key = tile.row + comptime!(8 * (j / 2) as u32);
            let query = tile.first_column + comptime!((8 * four + j % 2) as u32) + 2 * tile.quad;
            let shift = shifts.extract(comptime!(j % 2));
            let mut score = products.extract(comptime!(4 * four + j));
            if comptime!(options.softcap || options.bias) {
                score = rules.bounded_score(score);
                if comptime!(options.softcap) {
                    slopes.push(rules.score_slope(score));
                }
                // What lies beyond the ends does not count, but nothing may be read there either.
                let within_q = min(query, sequence.seq_q - 1);
                let within_kv = min(key, sequence.seq_kv - 1);
                score += sequence.bias_at(within_q, within_kv);
            }
            let power = if comptime!(options.bias) {
                // See `pairs` for why these are two terms.
                let logs = load_shared_pair(at + comptime!(2 * TERM_BYTES as u32));
                min(score - shift, 0.0f32) * tile.exponent - logs.extract(comptime!(j % 2))
            } else {
                score * tile.exponent - shift
            };
            let mut weight = exp2_fast(power);
            if comptime!(masked) {
                let within_q = min(query, sequence.seq_q - 1);
                let within_kv = min(key, sequence.seq_kv - 1);
                let visible = if comptime!(options.mapped) {
                    is_seen(&words, comptime!(4 * four + j))
                        && sequence.is_in_window(within_q, within_kv)
                } else {
                    query < sequence.seq_q
                        && key < sequence.seq_kv
                        && sequence.is_visible(within_q, within_kv)
                };
                weight = select(visible, weight, 0.0f32);
            }
            made.push(weight);
        }
    }
    #[unroll]
    for i in 32..R::value().comptime() {
        made.push(products.extract(i));
    }
    (vector_of::<f32, R>(made), slopes)
}

/// What dropout multiplies weight `i` by.
#[cube]
fn kept_factor<I: Float, M: Numeric>(tile: &PairTile<'_, I, M>, #[comptime] i: usize) -> f32 {
    select(is_kept(tile.kept, i), tile.sequence.rules.numbers.kept, 0.0f32)
}

/// `dropout(P)`, packed as the tensor cores take it.
#[cube]
pub(super) fn weight_words<I: Float, M: Numeric, R: Size>(
    made: Vector<f32, R>,
    tile: &PairTile<'_, I, M>,
    #[comptime] dtype: &'static str,
) -> Vector<u32, Const<16>> {
    let options = comptime!(tile.sequence.rules.options);
    let mut packed = Elements::<u32>::new();
    #[unroll]
    for pair in 0..16usize {
        let mut low = made.extract(comptime!(2 * pair));
        let mut high = made.extract(comptime!(2 * pair + 1));
        if comptime!(options.dropout) {
            low *= kept_factor(tile, comptime!(2 * pair));
            high *= kept_factor(tile, comptime!(2 * pair + 1));
        }
        packed.push(pack(low, high, dtype));
    }
    vector_of::<u32, Const<16>>(packed)
}

/// `dS`, without the scale, of weights, and of products from register `first` on; packed as the tensor cores take it.
/// Slopes that are none count as 1.
#[cube]
pub(super) fn gradient_words<I: Float, M: Numeric, R: Size>(
    weights: Vector<f32, R>,
    products: Vector<f32, R>,
    #[comptime] first: usize,
    slopes: &Elements<f32>,
    terms_at: u32,
    tile: &PairTile<'_, I, M>,
    #[comptime] dtype: &'static str,
) -> Vector<u32, Const<16>> {
    let options = comptime!(tile.sequence.rules.options);
    let mut packed = Elements::<u32>::new();
    #[unroll]
    for four in 0..8usize {
        let deltas = load_shared_pair(terms_at + comptime!(32 * four as u32) + 8 * tile.quad);
        let mut gradients = Elements::<f32>::new();
        #[unroll]
        for j in 0..4usize {
            let i = comptime!(4 * four + j);
            let mut product = products.extract(comptime!(first + i));
            if comptime!(options.dropout) {
                product *= kept_factor(tile, i);
            }
            let mut gradient = weights.extract(i) * (product - deltas.extract(comptime!(j % 2)));
            if comptime!(slopes.len() == 32) {
                gradient *= slopes[i];
            }
            gradients.push(gradient);
        }
        packed.push(pack(gradients[0], gradients[1], dtype));
        packed.push(pack(gradients[2], gradients[3], dtype));
    }
    vector_of::<u32, Const<16>>(packed)
}

/// Writes `dS` to shared memory as TMA would swizzle it: rows of keys, of which the unit's first is at `row_at`, and
/// chunks of 8 queries, which `swizzle` permutes.
#[cube]
pub(super) fn store_gradients(gradients: Vector<u32, Const<16>>, row_at: u32, swizzle: u32) {
    #[unroll]
    for pair in 0..16usize {
        let chunk = comptime!((pair / 2 * 16) as u32) ^ swizzle;
        let address = row_at + chunk + comptime!((pair % 2 * 8 * 128) as u32);
        store_shared_word(address, gradients.extract(pair));
    }
}
