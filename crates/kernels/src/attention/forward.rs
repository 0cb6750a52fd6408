//! The forward pass, on any runtime: a cube for each tile of queries of a head.
//!
//! 1. For each tile of keys that the window leaves: scores in f32, the running maximum, weights
//!    relative to it (Milakov and Gimelshein, 2018; Dao et al., 2022, algorithm 1).
//! 2. Weights times values are added to the output, which is rescaled as the maximum grows.
//! 3. The output is divided by the sum of the weights and written; so are the largest score and the
//!    sum's logarithm.

use super::{
    rules::{Heads, Rules},
    tile::{
        PortableBlueprint, UNITS, accumulate, load_rows, of_keys, of_queries, parts, products,
        store_rows,
    },
};
use cubecl::prelude::*;

/// `out = dropout(softmax(scores)) v`, and `lse`: the largest score of each query, and behind all of them
/// the logarithms of the sums of `exp(score - largest)`. That is minus infinity where a query sees no key,
/// whose output is zero. Cubes: tiles of queries along x, heads along y, sequences along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_forward_portable_kernel<I: Float, M: Numeric>(
    q: &Heads<I>,
    k: &Heads<I>,
    v: &Heads<I>,
    rules: &Rules<I, M>,
    out: &mut Heads<I>,
    lse: &mut [f32],
    #[comptime] blueprint: PortableBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
) {
    let side = comptime!(blueprint.side());
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    let pitch = comptime!(side + 1);
    let mut parts = parts(blueprint);
    let mut weights = Shared::<[f32]>::new_slice(comptime!(blueprint.pair_elements()));
    let mut values = Shared::<[f32]>::new_slice(comptime!(blueprint.row_elements()));

    let sequence = rules.sequence(rules.batch_of(CUBE_POS_Z), CUBE_POS_Y);
    let head_kv = CUBE_POS_Y / rules.sizes.group;
    let first_row = CUBE_POS_X * side;
    let q_span = of_queries(&q.strides, &sequence, CUBE_POS_Y, first_row);

    let mut sums = Array::<f32>::new(comptime!(blueprint.elements()));
    #[unroll]
    for i in 0..comptime!(blueprint.elements()) {
        sums[i] = 0.0f32;
    }
    let mut most = Array::<f32>::new(unit_tile);
    let mut total = Array::<f32>::new(unit_tile);
    #[unroll]
    for i in 0..unit_tile {
        // Finite, so that no difference of two is NaN.
        most[i] = f32::min_value();
        total[i] = 0.0f32;
    }
    let mut scores = Array::<f32>::new(comptime!(blueprint.pairs()));
    let keys = sequence.keys_of(first_row, min(first_row + side, sequence.seq_q));
    let mut first_key = keys.0 / side * side;
    while first_key < keys.1 {
        // 1. Scores. A bit tells which pairs are seen: any number may be a score.
        let k_span = of_keys(&k.strides, &sequence, head_kv, first_key);
        let v_span = of_keys(&v.strides, &sequence, head_kv, first_key);
        products::<I>(&mut scores, &q.memory, &k.memory, &q_span, &k_span, &mut parts, blueprint);
        load_rows::<I>(&v.memory, values.as_mut_slice(), &v_span, blueprint);
        let mut seen = 0u32;
        #[unroll]
        for i in 0..unit_tile {
            let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
            #[unroll]
            for j in 0..unit_tile {
                let column = UNIT_POS_X + comptime!(UNITS * j as u32);
                let pair = comptime!(i * unit_tile + j);
                let mut score = f32::min_value();
                let (query, key) = (first_row + row, first_key + column);
                if query < sequence.seq_q && key < sequence.seq_kv {
                    if sequence.is_visible(query, key) {
                        score = rules.bounded_score(scores[pair]) + sequence.bias_at(query, key);
                        seen |= comptime!(1u32 << pair);
                    }
                }
                scores[pair] = score;
                weights[(row * pitch + column) as usize] = score;
            }
        }
        sync_cube();

        // 2. Every unit of a row finds its maximum; each makes weights of its own scores. The sign
        // says which weights dropout leaves out: they count in the sum all the same.
        let tile_keys = min(side, sequence.seq_kv - first_key);
        let mut rescale = Array::<f32>::new(unit_tile);
        #[unroll]
        for i in 0..unit_tile {
            let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
            let mut peak = most[i];
            for column in 0..tile_keys {
                peak = max(peak, weights[(row * pitch + column) as usize]);
            }
            rescale[i] = (most[i] - peak).exp();
            most[i] = peak;
        }
        sync_cube();
        #[unroll]
        for i in 0..unit_tile {
            let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
            #[unroll]
            for j in 0..unit_tile {
                let column = UNIT_POS_X + comptime!(UNITS * j as u32);
                let pair = comptime!(i * unit_tile + j);
                let is_seen = seen & comptime!(1u32 << pair) != 0;
                let mut weight = select(is_seen, (scores[pair] - most[i]).exp(), 0.0f32);
                if comptime!(rules.options.dropout) {
                    let (query, key) = (first_row + row, first_key + column);
                    if !sequence.is_kept(query, key) {
                        weight = -weight;
                    }
                }
                weights[(row * pitch + column) as usize] = weight;
            }
        }
        sync_cube();
        #[unroll]
        for i in 0..unit_tile {
            let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
            total[i] *= rescale[i];
            for column in 0..tile_keys {
                total[i] += weights[(row * pitch + column) as usize].abs();
            }
            #[unroll]
            for j in 0..comptime!(blueprint.columns()) {
                sums[comptime!(i * blueprint.columns() + j)] *= rescale[i];
            }
        }
        if comptime!(rules.options.dropout) {
            sync_cube();
            #[unroll]
            for i in 0..unit_tile {
                let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
                #[unroll]
                for j in 0..unit_tile {
                    let column = UNIT_POS_X + comptime!(UNITS * j as u32);
                    let at = (row * pitch + column) as usize;
                    // A comparison that is false for NaN, which so stays.
                    weights[at] = select(weights[at] < 0.0f32, 0.0f32, weights[at]);
                }
            }
            sync_cube();
        }
        accumulate(&mut sums, weights.as_slice(), values.as_slice(), tile_keys, false, blueprint);
        sync_cube();
        first_key += side;
    }

    // 3. Finish and write.
    let lse_origin = sequence.origin_of_row_values();
    #[unroll]
    for i in 0..unit_tile {
        // Of no key the sum is 0; its logarithm is minus infinity.
        let factor = select(total[i] == 0.0f32, 0.0f32, rules.numbers.kept / total[i]);
        #[unroll]
        for j in 0..comptime!(blueprint.columns()) {
            sums[comptime!(i * blueprint.columns() + j)] *= factor;
        }
        let row = first_row + UNIT_POS_Y + comptime!(UNITS * i as u32);
        if row < sequence.seq_q && UNIT_POS_X == 0 {
            let at = lse_origin + row;
            lse[at as usize] = most[i];
            lse[(rules.all_rows() + at) as usize] = total[i].ln();
        }
    }
    let out_span = of_queries(&out.strides, &sequence, CUBE_POS_Y, first_row);
    store_rows::<I>(&sums, &mut out.memory, &out_span, 1.0f32, blueprint);
}
