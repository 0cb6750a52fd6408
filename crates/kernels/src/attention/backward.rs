//! The backward pass, on any runtime, from q, k, v, the output, the largest scores and the logarithms of
//! the sums; the weights are computed again. No two cubes write the same element, so the same input gives the same
//! bits each time.
//!
//! 1. `delta = rowsum(dout * out)`, which is `rowsum(dP * P)`, dropout included.
//! 2. A cube for each tile of keys of a head of keys: dk and dv, over all queries that see them.
//! 3. A cube for each tile of queries: dq, over all keys that they see, and the gradient of the bias.

use super::{
    rules::{
        Options, RowStrides, Rules, Sequence, all_rows, batch_of, bias_at, bounded_score, is_kept,
        is_visible, keys_of, origin, origin_of_row_values, queries_of, score_slope, sequence_of,
    },
    tile::{
        PortableBlueprint, UNITS, accumulate, load_rows, of_keys, of_queries, products, store_rows,
    },
};
use cubecl::prelude::*;

/// Units of a cube of [`attention_delta_kernel`]: each has a row.
pub(crate) const DELTA_UNITS: u32 = 64;

/// `delta = rowsum(dout * out)`; rows along x, heads along y, batches from `first_batch` on along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_delta_kernel<I: Float>(
    out: &[I],
    dout: &[I],
    delta: &mut [f32],
    rows: u32,
    heads: u32,
    head_dim: u32,
    first_batch: u32,
    out_strides: RowStrides,
    dout_strides: RowStrides,
    #[define(I)] _element: ElemType,
) {
    let row = ABSOLUTE_POS_X;
    let batch = CUBE_POS_Z + first_batch;
    if row < rows {
        let out_at = origin(&out_strides, batch, CUBE_POS_Y, row);
        let dout_at = origin(&dout_strides, batch, CUBE_POS_Y, row);
        let mut sum = 0.0f32;
        for column in 0..head_dim {
            sum += f32::cast_from(out[(out_at + column) as usize])
                * f32::cast_from(dout[(dout_at + column) as usize]);
        }
        delta[((batch * heads + CUBE_POS_Y) * rows + row) as usize] = sum;
    }
}

/// Makes `weights = dropout(P)` and `slopes = dS`, the gradient of the products without the scale, of
/// `scores = q k` and `gradients = dout v`. The latter become the gradients of the scores.
#[cube]
fn pair_gradients<I: Float, M: Numeric>(
    scores: &Array<f32>,
    gradients: &mut Array<f32>,
    weights: &mut [f32],
    slopes: &mut [f32],
    mask: &[M],
    bias: &[I],
    lse: &[f32],
    delta: &[f32],
    sequence: &Sequence,
    rules: &Rules,
    row_values: u32,
    first_row: u32,
    first_key: u32,
    #[comptime] blueprint: PortableBlueprint,
    #[comptime] options: Options,
) {
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    let pitch = comptime!(blueprint.side() + 1);
    #[unroll]
    for i in 0..unit_tile {
        let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
        let query = first_row + row;
        #[unroll]
        for j in 0..unit_tile {
            let column = UNIT_POS_X + comptime!(UNITS * j as u32);
            let key = first_key + column;
            let pair = comptime!(i * unit_tile + j);
            let mut weight = 0.0f32;
            let mut slope = 0.0f32;
            let mut gradient = 0.0f32;
            if query < sequence.seq_q && key < sequence.seq_kv {
                if is_visible::<M>(mask, sequence, rules, query, key, options) {
                    let bounded = bounded_score(scores[pair], rules, options);
                    let score = bounded + bias_at::<I>(bias, sequence, rules, query, key, options);
                    let at = (row_values + query) as usize;
                    let log = lse[(all_rows(rules, options) + row_values + query) as usize];
                    // No score is above the largest, unless forward added it up in another order:
                    // at the size of a mask, the last bit is then a large number.
                    let below = min(score - lse[at], 0.0f32);
                    // A row of which all scores are minus infinity has no weights.
                    let p = select(log < f32::min_value(), 0.0f32, (below - log).exp());
                    let mut kept = rules.numbers.kept;
                    if !is_kept(sequence, rules, query, key, options) {
                        kept = 0.0f32;
                    }
                    weight = kept * p;
                    gradient = p * (kept * gradients[pair] - delta[at]);
                    slope = gradient * score_slope(bounded, rules, options);
                }
            }
            gradients[pair] = gradient;
            weights[(row * pitch + column) as usize] = weight;
            slopes[(row * pitch + column) as usize] = slope;
        }
    }
}

/// Writes a tile of pairs to a contiguous tensor of all pairs.
#[cube]
fn store_pairs(
    values: &Array<f32>,
    out: &mut [f32],
    sequence: &Sequence,
    rules: &Rules,
    first_row: u32,
    first_key: u32,
    #[comptime] blueprint: PortableBlueprint,
) {
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    let head = sequence.batch * rules.sizes.heads_q + sequence.head;
    #[unroll]
    for i in 0..unit_tile {
        let query = first_row + UNIT_POS_Y + comptime!(UNITS * i as u32);
        #[unroll]
        for j in 0..unit_tile {
            let key = first_key + UNIT_POS_X + comptime!(UNITS * j as u32);
            if query < sequence.seq_q && key < sequence.seq_kv {
                let at = (head * rules.sizes.seq_q + query) * rules.sizes.seq_kv + key;
                out[at as usize] = values[comptime!(i * unit_tile + j)];
            }
        }
    }
}

/// dk and dv; tiles of keys along x, heads of keys along y, sequences along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_kv_portable_kernel<I: Float, M: Numeric>(
    q: &[I],
    k: &[I],
    v: &[I],
    dout: &[I],
    mask: &[M],
    bias: &[I],
    starts: &[u32],
    lse: &[f32],
    delta: &[f32],
    dk: &mut [I],
    dv: &mut [I],
    rules: Rules,
    q_strides: RowStrides,
    k_strides: RowStrides,
    v_strides: RowStrides,
    dout_strides: RowStrides,
    gradient_strides: RowStrides,
    #[comptime] blueprint: PortableBlueprint,
    #[comptime] options: Options,
    #[define(I)] _element: ElemType,
    #[define(M)] _mask_type: ElemType,
) {
    let side = comptime!(blueprint.side());
    let mut row_part = Shared::<[f32]>::new_slice(comptime!(blueprint.part_elements()));
    let mut key_part = Shared::<[f32]>::new_slice(comptime!(blueprint.part_elements()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(blueprint.pair_elements()));
    let mut slopes = Shared::<[f32]>::new_slice(comptime!(blueprint.pair_elements()));
    let mut rows = Shared::<[f32]>::new_slice(comptime!(blueprint.row_elements()));
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
    let batch = batch_of(CUBE_POS_Z, &rules);
    for member in 0..rules.sizes.group {
        let head = CUBE_POS_Y * rules.sizes.group + member;
        let sequence = sequence_of(starts, &rules, batch, head, options);
        let row_values = origin_of_row_values(&sequence, &rules, options);
        let k_span = of_keys(&k_strides, &sequence, CUBE_POS_Y, first_key);
        let v_span = of_keys(&v_strides, &sequence, CUBE_POS_Y, first_key);
        let queries = queries_of(
            &sequence,
            &rules,
            first_key,
            min(first_key + side, sequence.seq_kv),
            options,
        );
        let mut first_row = queries.0 / side * side;
        while first_row < queries.1 && first_key < sequence.seq_kv {
            let q_span = of_queries(&q_strides, &sequence, head, first_row);
            let dout_span = of_queries(&dout_strides, &sequence, head, first_row);
            products::<I>(
                &mut scores,
                q,
                k,
                row_part.as_mut_slice(),
                key_part.as_mut_slice(),
                &q_span,
                &k_span,
                blueprint,
            );
            products::<I>(
                &mut gradients,
                dout,
                v,
                row_part.as_mut_slice(),
                key_part.as_mut_slice(),
                &dout_span,
                &v_span,
                blueprint,
            );
            pair_gradients::<I, M>(
                &scores,
                &mut gradients,
                weights.as_mut_slice(),
                slopes.as_mut_slice(),
                mask,
                bias,
                lse,
                delta,
                &sequence,
                &rules,
                row_values,
                first_row,
                first_key,
                blueprint,
                options,
            );
            let tile_rows = min(side, sequence.seq_q - first_row);
            load_rows::<I>(dout, rows.as_mut_slice(), &dout_span, blueprint);
            sync_cube();
            accumulate(
                &mut dv_sums,
                weights.as_slice(),
                rows.as_slice(),
                tile_rows,
                true,
                blueprint,
            );
            sync_cube();
            load_rows::<I>(q, rows.as_mut_slice(), &q_span, blueprint);
            sync_cube();
            accumulate(
                &mut dk_sums,
                slopes.as_slice(),
                rows.as_slice(),
                tile_rows,
                true,
                blueprint,
            );
            sync_cube();
            first_row += side;
        }
    }
    let sequence = sequence_of(starts, &rules, batch, 0u32, options);
    let span = of_keys(&gradient_strides, &sequence, CUBE_POS_Y, first_key);
    store_rows::<I>(&dk_sums, dk, &span, rules.numbers.scale, blueprint);
    store_rows::<I>(&dv_sums, dv, &span, 1.0f32, blueprint);
}

/// dq, and the gradient of the bias for every pair where it is asked for; tiles of queries along x,
/// heads along y, sequences along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_q_portable_kernel<I: Float, M: Numeric>(
    q: &[I],
    k: &[I],
    v: &[I],
    dout: &[I],
    mask: &[M],
    bias: &[I],
    starts: &[u32],
    lse: &[f32],
    delta: &[f32],
    dq: &mut [I],
    dbias: &mut [f32],
    rules: Rules,
    q_strides: RowStrides,
    k_strides: RowStrides,
    v_strides: RowStrides,
    dout_strides: RowStrides,
    gradient_strides: RowStrides,
    #[comptime] writes_bias: bool,
    #[comptime] blueprint: PortableBlueprint,
    #[comptime] options: Options,
    #[define(I)] _element: ElemType,
    #[define(M)] _mask_type: ElemType,
) {
    let side = comptime!(blueprint.side());
    let mut row_part = Shared::<[f32]>::new_slice(comptime!(blueprint.part_elements()));
    let mut key_part = Shared::<[f32]>::new_slice(comptime!(blueprint.part_elements()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(blueprint.pair_elements()));
    let mut slopes = Shared::<[f32]>::new_slice(comptime!(blueprint.pair_elements()));
    let mut rows = Shared::<[f32]>::new_slice(comptime!(blueprint.row_elements()));
    let mut sums = Array::<f32>::new(comptime!(blueprint.elements()));
    #[unroll]
    for i in 0..comptime!(blueprint.elements()) {
        sums[i] = 0.0f32;
    }
    let mut scores = Array::<f32>::new(comptime!(blueprint.pairs()));
    let mut gradients = Array::<f32>::new(comptime!(blueprint.pairs()));

    let (first_row, head) = (CUBE_POS_X * side, CUBE_POS_Y);
    let sequence = sequence_of(starts, &rules, batch_of(CUBE_POS_Z, &rules), head, options);
    let row_values = origin_of_row_values(&sequence, &rules, options);
    let head_kv = head / rules.sizes.group;
    let q_span = of_queries(&q_strides, &sequence, head, first_row);
    let dout_span = of_queries(&dout_strides, &sequence, head, first_row);
    let mut keys =
        keys_of(&sequence, &rules, first_row, min(first_row + side, sequence.seq_q), options);
    if comptime!(writes_bias) {
        // Pairs that the window leaves out have a gradient, too: zero.
        keys = (0u32, sequence.seq_kv);
    }
    let mut first_key = keys.0 / side * side;
    while first_key < keys.1 && first_row < sequence.seq_q {
        let k_span = of_keys(&k_strides, &sequence, head_kv, first_key);
        let v_span = of_keys(&v_strides, &sequence, head_kv, first_key);
        products::<I>(
            &mut scores,
            q,
            k,
            row_part.as_mut_slice(),
            key_part.as_mut_slice(),
            &q_span,
            &k_span,
            blueprint,
        );
        products::<I>(
            &mut gradients,
            dout,
            v,
            row_part.as_mut_slice(),
            key_part.as_mut_slice(),
            &dout_span,
            &v_span,
            blueprint,
        );
        pair_gradients::<I, M>(
            &scores,
            &mut gradients,
            weights.as_mut_slice(),
            slopes.as_mut_slice(),
            mask,
            bias,
            lse,
            delta,
            &sequence,
            &rules,
            row_values,
            first_row,
            first_key,
            blueprint,
            options,
        );
        if comptime!(writes_bias) {
            store_pairs(&gradients, dbias, &sequence, &rules, first_row, first_key, blueprint);
        }
        load_rows::<I>(k, rows.as_mut_slice(), &k_span, blueprint);
        sync_cube();
        let tile_keys = min(side, sequence.seq_kv - first_key);
        accumulate(&mut sums, slopes.as_slice(), rows.as_slice(), tile_keys, false, blueprint);
        sync_cube();
        first_key += side;
    }
    let span = of_queries(&gradient_strides, &sequence, head, first_row);
    store_rows::<I>(&sums, dq, &span, rules.numbers.scale, blueprint);
}
