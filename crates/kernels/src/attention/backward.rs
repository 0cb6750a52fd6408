//! The backward pass, on any runtime, from q, k, v, the output, the largest scores and the logarithms of
//! the sums; the weights are computed again. No two cubes write the same element, so the same input gives the same
//! bits each time.
//!
//! 1. `delta = rowsum(dout * out)`, which is `rowsum(dP * P)`, dropout included.
//! 2. A cube for each tile of keys of a head of keys: dk and dv, over all queries that see them.
//! 3. A cube for each tile of queries: dq, over all keys that they see, and the gradient of the bias.

use super::{
    rules::{Heads, Rules, Sequence, origin},
    tile::{
        Parts, PortableBlueprint, Span, UNITS, accumulate, load_rows, of_keys, of_queries, parts,
        products, store_rows,
    },
};
use cubecl::prelude::*;

/// Units of a cube of [`attention_delta_kernel`]: each has a row.
pub(crate) const DELTA_UNITS: u32 = 64;

/// `delta = rowsum(dout * out)`; rows along x, heads along y, batches from `first_batch` on along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_delta_kernel<I: Float>(
    out: &Heads<I>,
    dout: &Heads<I>,
    delta: &mut [f32],
    rows: u32,
    heads: u32,
    head_dim: u32,
    first_batch: u32,
    #[define(I)] _element: ElemType,
) {
    let row = ABSOLUTE_POS_X;
    let batch = CUBE_POS_Z + first_batch;
    if row < rows {
        let out_at = origin(&out.strides, batch, CUBE_POS_Y, row);
        let dout_at = origin(&dout.strides, batch, CUBE_POS_Y, row);
        let mut sum = 0.0f32;
        for column in 0..head_dim {
            sum += f32::cast_from(out.memory[(out_at + column) as usize])
                * f32::cast_from(dout.memory[(dout_at + column) as usize]);
        }
        delta[((batch * heads + CUBE_POS_Y) * rows + row) as usize] = sum;
    }
}

/// What the backward kernels read, beside the rules.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Inputs<I: Float> {
    pub(crate) q: Heads<I>,
    pub(crate) k: Heads<I>,
    pub(crate) v: Heads<I>,
    pub(crate) dout: Heads<I>,
}

/// What forward and [`attention_delta_kernel`] computed of each query.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowValues {
    /// Largest scores, then logarithms.
    pub(crate) lse: Box<[f32]>,
    pub(crate) delta: Box<[f32]>,
}

/// Shared memory of a cube.
#[derive(CubeType)]
struct Tiles {
    parts: Parts,
    /// `dropout(P)`.
    weights: Shared<[f32]>,
    /// `dS`, the gradient of the products without the scale.
    slopes: Shared<[f32]>,
    rows: Shared<[f32]>,
}

#[cube]
fn tiles(#[comptime] blueprint: PortableBlueprint) -> Tiles {
    Tiles {
        parts: parts(blueprint),
        weights: Shared::<[f32]>::new_slice(comptime!(blueprint.pair_elements())),
        slopes: Shared::<[f32]>::new_slice(comptime!(blueprint.pair_elements())),
        rows: Shared::<[f32]>::new_slice(comptime!(blueprint.row_elements())),
    }
}

/// A tile of pairs: its queries and keys, by the tensors that they are read from.
#[derive(CubeType, Clone, Copy)]
struct PairSpans {
    q: Span,
    k: Span,
    v: Span,
    dout: Span,
}

/// Makes weights and slopes of a tile of pairs, and the gradients of their scores.
#[cube]
fn pair_gradients<I: Float, M: Numeric>(
    gradients: &mut Array<f32>,
    scores: &mut Array<f32>,
    tiles: &mut Tiles,
    inputs: &Inputs<I>,
    values: &RowValues,
    sequence: &Sequence<'_, I, M>,
    row_values: u32,
    spans: &PairSpans,
    #[comptime] blueprint: PortableBlueprint,
) {
    let (q, k) = (&inputs.q.memory, &inputs.k.memory);
    products::<I>(scores, q, k, &spans.q, &spans.k, &mut tiles.parts, blueprint);
    let (dout, v) = (&inputs.dout.memory, &inputs.v.memory);
    products::<I>(gradients, dout, v, &spans.dout, &spans.v, &mut tiles.parts, blueprint);
    let rules = sequence.rules;
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    let pitch = comptime!(blueprint.side() + 1);
    #[unroll]
    for i in 0..unit_tile {
        let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
        let query = spans.q.first + row;
        #[unroll]
        for j in 0..unit_tile {
            let column = UNIT_POS_X + comptime!(UNITS * j as u32);
            let key = spans.k.first + column;
            let pair = comptime!(i * unit_tile + j);
            let mut weight = 0.0f32;
            let mut slope = 0.0f32;
            let mut gradient = 0.0f32;
            if query < sequence.seq_q && key < sequence.seq_kv {
                if sequence.is_visible(query, key) {
                    let bounded = rules.bounded_score(scores[pair]);
                    let score = bounded + sequence.bias_at(query, key);
                    let at = (row_values + query) as usize;
                    let log = values.lse[(rules.all_rows() + row_values + query) as usize];
                    // No score is above the largest, unless forward added it up in another order:
                    // at the size of a mask, the last bit is then a large number.
                    let below = min(score - values.lse[at], 0.0f32);
                    // A row of which all scores are minus infinity has no weights.
                    let p = select(log < f32::min_value(), 0.0f32, (below - log).exp());
                    let mut kept = rules.numbers.kept;
                    if !sequence.is_kept(query, key) {
                        kept = 0.0f32;
                    }
                    weight = kept * p;
                    gradient = p * (kept * gradients[pair] - values.delta[at]);
                    slope = gradient * rules.score_slope(bounded);
                }
            }
            gradients[pair] = gradient;
            tiles.weights[(row * pitch + column) as usize] = weight;
            tiles.slopes[(row * pitch + column) as usize] = slope;
        }
    }
}

/// Writes a tile of pairs to a contiguous tensor of all pairs.
#[cube]
fn store_pairs<I: Float, M: Numeric>(
    values: &Array<f32>,
    out: &mut [f32],
    sequence: &Sequence<'_, I, M>,
    spans: &PairSpans,
    #[comptime] blueprint: PortableBlueprint,
) {
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    let sizes = &sequence.rules.sizes;
    let head = sequence.batch * sizes.heads_q + sequence.head;
    #[unroll]
    for i in 0..unit_tile {
        let query = spans.q.first + UNIT_POS_Y + comptime!(UNITS * i as u32);
        #[unroll]
        for j in 0..unit_tile {
            let key = spans.k.first + UNIT_POS_X + comptime!(UNITS * j as u32);
            if query < sequence.seq_q && key < sequence.seq_kv {
                let at = (head * sizes.seq_q + query) * sizes.seq_kv + key;
                out[at as usize] = values[comptime!(i * unit_tile + j)];
            }
        }
    }
}

/// dk and dv; tiles of keys along x, heads of keys along y, sequences along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_kv_portable_kernel<I: Float, M: Numeric>(
    inputs: &Inputs<I>,
    rules: &Rules<I, M>,
    values: &RowValues,
    dk: &mut Heads<I>,
    dv: &mut [I],
    #[comptime] blueprint: PortableBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
) {
    let side = comptime!(blueprint.side());
    let mut tiles = tiles(blueprint);
    let mut dk_sums = Array::<f32>::new(comptime!(blueprint.elements()));
    let mut dv_sums = Array::<f32>::new(comptime!(blueprint.elements()));
    #[unroll]
    for i in 0..comptime!(blueprint.elements()) {
        dk_sums[i] = 0.0f32;
        dv_sums[i] = 0.0f32;
    }
    let mut scores = Array::<f32>::new(comptime!(blueprint.pairs()));
    let mut gradients = Array::<f32>::new(comptime!(blueprint.pairs()));

    let first_key = CUBE_POS_X * side;
    let batch = rules.batch_of(CUBE_POS_Z);
    for member in 0..rules.sizes.group {
        let head = CUBE_POS_Y * rules.sizes.group + member;
        let sequence = rules.sequence(batch, head);
        let row_values = sequence.origin_of_row_values();
        let k = of_keys(&inputs.k.strides, &sequence, CUBE_POS_Y, first_key);
        let v = of_keys(&inputs.v.strides, &sequence, CUBE_POS_Y, first_key);
        let queries = sequence.queries_of(first_key, min(first_key + side, sequence.seq_kv));
        let mut first_row = queries.0 / side * side;
        while first_row < queries.1 && first_key < sequence.seq_kv {
            let q = of_queries(&inputs.q.strides, &sequence, head, first_row);
            let dout = of_queries(&inputs.dout.strides, &sequence, head, first_row);
            let spans = PairSpans { q, k, v, dout };
            pair_gradients::<I, M>(
                &mut gradients,
                &mut scores,
                &mut tiles,
                inputs,
                values,
                &sequence,
                row_values,
                &spans,
                blueprint,
            );
            let tile_rows = min(side, sequence.seq_q - first_row);
            let (weights, slopes) = (tiles.weights.as_slice(), tiles.slopes.as_slice());
            load_rows::<I>(&inputs.dout.memory, tiles.rows.as_mut_slice(), &dout, blueprint);
            sync_cube();
            accumulate(&mut dv_sums, weights, tiles.rows.as_slice(), tile_rows, true, blueprint);
            sync_cube();
            load_rows::<I>(&inputs.q.memory, tiles.rows.as_mut_slice(), &q, blueprint);
            sync_cube();
            accumulate(&mut dk_sums, slopes, tiles.rows.as_slice(), tile_rows, true, blueprint);
            sync_cube();
            first_row += side;
        }
    }
    let sequence = rules.sequence(batch, 0u32);
    let span = of_keys(&dk.strides, &sequence, CUBE_POS_Y, first_key);
    store_rows::<I>(&dk_sums, &mut dk.memory, &span, rules.numbers.scale, blueprint);
    store_rows::<I>(&dv_sums, dv, &span, 1.0f32, blueprint);
}

/// dq, and the gradient of the bias for every pair where it is asked for; tiles of queries along x,
/// heads along y, sequences along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_q_portable_kernel<I: Float, M: Numeric>(
    inputs: &Inputs<I>,
    rules: &Rules<I, M>,
    values: &RowValues,
    dq: &mut Heads<I>,
    dbias: &mut [f32],
    #[comptime] writes_bias: bool,
    #[comptime] blueprint: PortableBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
) {
    let side = comptime!(blueprint.side());
    let mut tiles = tiles(blueprint);
    let mut sums = Array::<f32>::new(comptime!(blueprint.elements()));
    #[unroll]
    for i in 0..comptime!(blueprint.elements()) {
        sums[i] = 0.0f32;
    }
    let mut scores = Array::<f32>::new(comptime!(blueprint.pairs()));
    let mut gradients = Array::<f32>::new(comptime!(blueprint.pairs()));

    let (first_row, head) = (CUBE_POS_X * side, CUBE_POS_Y);
    let sequence = rules.sequence(rules.batch_of(CUBE_POS_Z), head);
    let row_values = sequence.origin_of_row_values();
    let head_kv = head / rules.sizes.group;
    let q = of_queries(&inputs.q.strides, &sequence, head, first_row);
    let dout = of_queries(&inputs.dout.strides, &sequence, head, first_row);
    let mut keys = sequence.keys_of(first_row, min(first_row + side, sequence.seq_q));
    if comptime!(writes_bias) {
        // Pairs that the window leaves out have a gradient, too: zero.
        keys = (0u32, sequence.seq_kv);
    }
    let mut first_key = keys.0 / side * side;
    while first_key < keys.1 && first_row < sequence.seq_q {
        let k = of_keys(&inputs.k.strides, &sequence, head_kv, first_key);
        let v = of_keys(&inputs.v.strides, &sequence, head_kv, first_key);
        let spans = PairSpans { q, k, v, dout };
        pair_gradients::<I, M>(
            &mut gradients,
            &mut scores,
            &mut tiles,
            inputs,
            values,
            &sequence,
            row_values,
            &spans,
            blueprint,
        );
        if comptime!(writes_bias) {
            store_pairs(&gradients, dbias, &sequence, &spans, blueprint);
        }
        load_rows::<I>(&inputs.k.memory, tiles.rows.as_mut_slice(), &k, blueprint);
        sync_cube();
        let tile_keys = min(side, sequence.seq_kv - first_key);
        let (slopes, rows) = (tiles.slopes.as_slice(), tiles.rows.as_slice());
        accumulate(&mut sums, slopes, rows, tile_keys, false, blueprint);
        sync_cube();
        first_key += side;
    }
    let span = of_queries(&dq.strides, &sequence, head, first_row);
    store_rows::<I>(&sums, &mut dq.memory, &span, rules.numbers.scale, blueprint);
}
