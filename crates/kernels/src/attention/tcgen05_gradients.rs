//! What the warpgroups of the [backward pass by `tcgen05`](super::tcgen05_backward) do with scores and products:
//! weights and their gradients, and in the end dv and dk.

use super::{
    once::SIDE,
    once_pairs::{GradientPlace, gradient_words, store_gradients, weight_words, weights_of},
    pairs::{GradientRows, PairTile, is_checked, open_keys, pair_tile, store},
    pipeline::slot_of,
    rules::{Rules, Side, Strides, origin, score_exponent},
    tcgen05_backward::{HALF_WARP, Places, Share},
    tcgen05_once::{CHUNK_BYTES, DV, PRODUCTS, SCORES, TERM_STAGES, Tcgen05BackwardBlueprint},
};
use crate::ptx::{
    ROW_BYTES,
    access::show_to_async,
    barrier::{barrier_arrive, barrier_wait},
    computed,
    tcgen05::{
        ROWS, tensor_fence_after, tensor_fence_before, tensor_load, tensor_pin_registers,
        tensor_store_packed, tensor_wait_stores,
    },
    vector_of,
};
use cubecl::prelude::{Sequence as Elements, *};

/// Makes weights of the scores of half a warp's keys and 64 queries, and has them take their place. What the weights'
/// gradients are multiplied by is given back: weights, and slopes where scores are bounded.
#[cube]
fn make_weights<I: Float, M: Numeric>(
    scores: u32,
    terms_at: u32,
    tile: &PairTile<'_, I, M>,
    #[comptime] masked: bool,
    #[comptime] dtype: &'static str,
) -> Vector<f32, Const<32>> {
    let made = tensor_load::<Const<32>>(scores);
    let (weights, slopes) = weights_of::<I, M, Const<32>>(made, terms_at, tile, masked);
    let packed = weight_words::<I, M, Const<32>>(weights, tile, dtype);
    tensor_store_packed::<Const<16>>(scores, packed);
    if comptime!(slopes.len() == 32) {
        // At once: slopes would take as many registers as the weights until their gradients are there.
        let mut steep = Elements::<f32>::new();
        #[unroll]
        for i in 0..32usize {
            steep.push(weights.extract(i) * slopes[i]);
        }
        vector_of::<f32, Const<32>>(steep)
    } else {
        weights
    }
}

/// Makes gradients of weights and products of half a warp's keys and 64 queries. They take the products' place, and go
/// to shared memory.
#[cube]
fn make_gradients<I: Float, M: Numeric>(
    products: u32,
    place: &GradientPlace,
    weights: Vector<f32, Const<32>>,
    terms_at: u32,
    tile: &PairTile<'_, I, M>,
    #[comptime] dtype: &'static str,
) {
    let made = tensor_load::<Const<32>>(products);
    let slopes = Elements::<f32>::new();
    let gradients =
        gradient_words::<I, M, Const<32>>(weights, made, 0usize, &slopes, terms_at, tile, dtype);
    tensor_store_packed::<Const<16>>(products, gradients);
    store_gradients(gradients, place);
}

/// What a warp has of a tile of queries.
#[derive(CubeType, Clone, Copy)]
struct Part {
    /// Scores and products of its keys and of 64 queries in tensor memory.
    scores: u32,
    products: u32,
    terms: u32,
    /// Tells that the terms were read.
    terms_empty: u32,
    /// Of the tile's barriers.
    phase: u32,
}

/// Tells that a warp's weights are there.
#[cube]
fn tell_weights(at: &Places) {
    tensor_wait_stores();
    tensor_fence_before();
    if UNIT_POS_PLANE == 0 {
        barrier_arrive(at.weighed);
    }
}

/// Waits for the products of a tile. They also tell that the gradients of the tile before were multiplied.
#[cube]
fn wait_for_products(at: &Places, part: &Part) {
    barrier_wait(at.multiplied, part.phase);
    tensor_fence_after();
}

/// Makes weights and their gradients of a warp's keys and 64 queries.
#[cube]
fn step<I: Float, M: Numeric>(
    at: &Places,
    part: &Part,
    place: &GradientPlace,
    upper: &PairTile<'_, I, M>,
    lower: &PairTile<'_, I, M>,
    #[comptime] masked: bool,
    #[comptime] blueprint: Tcgen05BackwardBlueprint,
) {
    let early = comptime!(blueprint.weighs_early(upper.sequence.rules.options));
    let (terms, products, dtype) = (part.terms, part.products, comptime!(blueprint.dtype));
    let (lower_scores, lower_products) = (part.scores + HALF_WARP, products + HALF_WARP);
    let lower_place = GradientPlace {
        row_at: place.row_at + comptime!(16 * ROW_BYTES as u32),
        swizzle: place.swizzle,
    };
    barrier_wait(at.scored, part.phase);
    tensor_fence_after();
    let upper_weights = make_weights::<I, M>(part.scores, terms, upper, masked, dtype);
    if comptime!(early) {
        let lower_weights = make_weights::<I, M>(lower_scores, terms, lower, masked, dtype);
        tell_weights(at);
        wait_for_products(at, part);
        make_gradients::<I, M>(products, place, upper_weights, terms, upper, dtype);
        make_gradients::<I, M>(lower_products, &lower_place, lower_weights, terms, lower, dtype);
    } else {
        wait_for_products(at, part);
        make_gradients::<I, M>(products, place, upper_weights, terms, upper, dtype);
        let lower_weights = make_weights::<I, M>(lower_scores, terms, lower, masked, dtype);
        tell_weights(at);
        make_gradients::<I, M>(lower_products, &lower_place, lower_weights, terms, lower, dtype);
    }
    tensor_wait_stores();
    show_to_async();
    tensor_fence_before();
    sync_plane();
    if UNIT_POS_PLANE == 0 {
        barrier_arrive(at.graded);
        barrier_arrive(part.terms_empty);
    }
}

/// Writes the sums of a warp's keys, if there are any.
#[cube]
fn write<I: Float, R: Size>(
    sums: u32,
    has_sums: bool,
    out: &mut [I],
    rows: &GradientRows,
    factor: f32,
    #[comptime] blueprint: Tcgen05BackwardBlueprint,
) {
    #[unroll]
    for half in 0..2u32 {
        let mut made = Vector::<f32, R>::new(0.0f32);
        if has_sums {
            made = tensor_load::<R>(sums + comptime!(half * HALF_WARP));
        }
        let rows = GradientRows {
            origin: rows.origin,
            stride: rows.stride,
            row: rows.row + comptime!(16 * half),
            end: rows.end,
            quad: rows.quad,
        };
        let (head_dim, dtype) = comptime!((blueprint.head_dim, blueprint.dtype));
        store::<I, R>(made, 0usize, out, &rows, factor, head_dim, dtype);
    }
}

/// 4. Makes weights and gradients of a half of each tile's queries, and writes dv or dk. A warpgroup calls it.
#[cube]
pub(super) fn weigh_and_write<I: Float, M: Numeric, R: Size>(
    rules: &Rules<I, M>,
    at: &Places,
    tensor: u32,
    share: &Share,
    dk: &mut [I],
    dv: &mut [I],
    out_strides: &Strides,
    #[comptime] blueprint: Tcgen05BackwardBlueprint,
) {
    let side = comptime!(SIDE as u32);
    tensor_pin_registers(tensor, u32::cast_from(rules.sizes.batch == 0));
    // Warpgroups 2 and 3.
    let half = UNIT_POS / 128 % 2;
    let first_lane = UNIT_POS % 128 / 32 * 32;
    let (row_of_unit, quad) = (UNIT_POS_PLANE / 4, UNIT_POS_PLANE % 4);
    let warp_key = share.first_key + first_lane;
    let key = warp_key + row_of_unit;
    let exponent = score_exponent(rules);
    let lanes = tensor + (first_lane << 16);
    let row = first_lane + row_of_unit;
    let place = GradientPlace {
        row_at: at.gradients
            + half * comptime!(CHUNK_BYTES as u32)
            + row * comptime!(ROW_BYTES as u32)
            + quad * 4,
        swizzle: row_of_unit * 16,
    };
    for member in 0..share.heads {
        let head = share.first_head + member;
        for tile in 0..share.tiles {
            let column = (share.first + tile * comptime!((ROWS / SIDE) as u32) + half) * side;
            let sequence = rules.sequence(share.batch, head);
            // Queries that see all keys of the warp need no check.
            let open = open_keys(&sequence, warp_key, column, 32u32, Side::Keys);
            let checked = is_checked(&sequence, warp_key, column, open, 32u32, Side::Keys);
            let upper = pair_tile::<I, M>(sequence, key, column, quad, exponent, Side::Keys, true);
            let again = rules.sequence(share.batch, head);
            let lower =
                pair_tile::<I, M>(again, key + 16, column, quad, exponent, Side::Keys, true);
            // From the counters that are there, which spares a register.
            let index = member * share.tiles + tile;
            let slot = slot_of(index, TERM_STAGES);
            let part = Part {
                scores: lanes + SCORES + half * side,
                products: lanes + PRODUCTS + half * side,
                terms: at.terms.tiles
                    + slot.stage * comptime!(blueprint.terms_bytes() as u32)
                    + half * comptime!((blueprint.terms_bytes() / 2) as u32),
                terms_empty: at.terms.empty + slot.stage * 8,
                phase: index % 2,
            };
            barrier_wait(at.terms.full + slot.stage * 8, slot.phase);
            let options = comptime!(rules.options);
            if comptime!(options.looks_up_pairs()) || checked {
                step::<I, M>(at, &part, &place, &upper, &lower, true, blueprint);
            } else {
                step::<I, M>(at, &part, &place, &upper, &lower, false, blueprint);
            }
        }
    }
    barrier_wait(at.summed, 0u32);
    tensor_fence_after();
    let has_sums = share.heads * share.tiles > 0;
    // Computed again: what is kept until here takes registers from the weights.
    let unit = computed(UNIT_POS);
    let first_lane = unit % 128 / 32 * 32;
    let lanes = tensor + (first_lane << 16);
    let key = share.first_key + first_lane + unit % 32 / 4;
    let quad = unit % 4;
    let own = rules.sequence(share.batch, share.first_head);
    let head_kv = share.first_head / share.heads;
    let origin = origin(out_strides, share.batch, head_kv, own.first_kv);
    let rows = GradientRows { origin, stride: out_strides.row, row: key, end: own.seq_kv, quad };
    if half == 0 {
        write::<I, R>(lanes + DV, has_sums, dv, &rows, 1.0f32, blueprint);
    } else {
        let sums = lanes + comptime!(blueprint.dk());
        write::<I, R>(sums, has_sums, dk, &rows, rules.numbers.scale, blueprint);
    }
}
