//! What a tile's scores and products become: weights, and the scores' gradients. [`pairs`](super::pairs) has
//! the same of the kernels that compute each pair twice; here the terms of queries come from shared memory.

use super::{
    kept_bits::{is_kept, kept_pair_mask},
    once::TERM_BYTES,
    pairs::PairTile,
    seen_words::is_seen,
    softmax::pack,
};
use crate::ptx::{
    access::{
        load_shared_four, load_shared_pair, load_shared_word, store_shared_four, store_shared_word,
    },
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
        let (low, high) = comptime!((2 * pair, 2 * pair + 1));
        let mut word = pack(made.extract(low), made.extract(high), dtype);
        if comptime!(options.dropout) {
            word &= kept_pair_mask(tile.kept, pair, tile.side);
        }
        packed.push(word);
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
                product = select(is_kept(tile.kept, i, tile.side), product, 0.0f32);
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

/// Where a unit's part of a tile of dS is in shared memory, swizzled as TMA would: rows of keys, and chunks of 8 queries.
#[derive(CubeType, Clone, Copy)]
pub(super) struct GradientPlace {
    /// The unit's first row, and its place in a chunk.
    pub(super) row_at: u32,
    /// Permutes the chunks of the row.
    pub(super) swizzle: u32,
}

/// The place in a tile at `tile` of unit `lane` of a warpgroup.
#[cube]
pub(super) fn gradient_place(tile: u32, lane: u32) -> GradientPlace {
    let in_warp = lane % 32;
    let (key, quad) = (lane / 32 * 16 + in_warp / 4, in_warp % 4);
    GradientPlace { row_at: tile + key * 128 + quad * 4, swizzle: in_warp / 4 * 16 }
}

#[cube]
impl GradientPlace {
    fn of_pair(&self, #[comptime] pair: usize) -> u32 {
        let chunk = comptime!((pair / 2 * 16) as u32) ^ self.swizzle;
        self.row_at + chunk + comptime!((pair % 2 * 8 * 128) as u32)
    }
}

/// Writes a unit's part of `dS`.
#[cube]
pub(super) fn store_gradients(gradients: Vector<u32, Const<16>>, place: &GradientPlace) {
    #[unroll]
    for pair in 0..16usize {
        store_shared_word(place.of_pair(pair), gradients.extract(pair));
    }
}

/// What [`store_gradients`] wrote.
#[cube]
pub(super) fn load_gradients(place: &GradientPlace) -> Vector<u32, Const<16>> {
    let mut words = Elements::<u32>::new();
    #[unroll]
    for pair in 0..16usize {
        words.push(load_shared_word(place.of_pair(pair)));
    }
    vector_of::<u32, Const<16>>(words)
}

/// Where unit `lane` of a warpgroup hands on its weights: 512 bytes side by side for each warp and four of them.
#[cube]
fn weights_at(memory: u32, lane: u32, #[comptime] four: usize) -> u32 {
    memory + lane * 16 + comptime!((four * 2048) as u32)
}

/// Hands the 32 weights of a unit to the same unit of another warpgroup.
#[cube]
pub(super) fn store_weights(weights: Vector<f32, Const<32>>, memory: u32, lane: u32) {
    #[unroll]
    for four in 0..8usize {
        store_shared_four(
            weights_at(memory, lane, four),
            weights.extract(comptime!(4 * four)),
            weights.extract(comptime!(4 * four + 1)),
            weights.extract(comptime!(4 * four + 2)),
            weights.extract(comptime!(4 * four + 3)),
        );
    }
}

/// What [`store_weights`] handed on.
#[cube]
pub(super) fn load_weights(memory: u32, lane: u32) -> Vector<f32, Const<32>> {
    let mut weights = Elements::<f32>::new();
    #[unroll]
    for four in 0..8usize {
        let loaded = load_shared_four(weights_at(memory, lane, four));
        #[unroll]
        for i in 0..4usize {
            weights.push(loaded.extract(i));
        }
    }
    vector_of::<f32, Const<32>>(weights)
}
