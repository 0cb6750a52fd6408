//! The backward pass on Hopper's tensor cores with each pair's products computed once ([`once`](super::once)), of heads
//! above 128: two warpgroups share 64 keys, as the sums of dv and dk of these fill the registers of both.
//!
//! | | first | second |
//! |---|---|---|
//! | columns of dv, dk and dq | the first 128 | the others |
//! | a product alone | `S^T = k q^T` | `dP^T = v dout^T` |
//! | makes of it | P, which it hands to the second | dS of that and P, which it hands to the first |
//!
//! What one hands to the other lies in the registers of either as an operand of its sums has to, so that a unit takes it
//! from the same unit of the other warpgroup. dS lies in shared memory as an operand, too: that of dq, which both
//! multiply a tile later.

use super::{
    mma_plan::MOST_OWN_COLUMNS,
    once::{OnceBlueprint, SIDE},
    once_fetch::{Maps, Places, fetch, init_barriers, places},
    once_pairs::{
        gradient_place, gradient_words, load_gradients, load_weights, store_gradients,
        store_weights, weight_words, weights_of,
    },
    pairs::{GradientRows, PairTile, is_checked, open_keys, pair_tile, store, tiles_of},
    pipeline::{UNITS_OF_GROUP, slot_of},
    query_sums::{add_tile, sums_tile},
    rules::{Rules, Sequence, Side, Strides, origin, score_exponent},
};
use crate::ptx::{
    ROW_BYTES,
    access::show_to_async,
    acquire_registers,
    barrier::{barrier_arrive, barrier_wait},
    output_address, release_registers, shared_address,
    wgmma::{tile_descriptor, wgmma_product},
    wgmma_sums::{
        wgmma_across, wgmma_pin_registers, wgmma_sum_started, wgmma_sums, wgmma_sums_clear,
        wgmma_sums_declare, wgmma_wait,
    },
};
use cubecl::prelude::{Sequence as Elements, *};
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// One of the two warpgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Role {
    /// Makes the weights.
    Weights,
    /// Makes the gradients of the scores.
    Gradients,
}

impl Role {
    fn first_column(self) -> usize {
        match self {
            Self::Weights => 0,
            Self::Gradients => MOST_OWN_COLUMNS,
        }
    }

    fn columns(self, blueprint: OnceBlueprint) -> usize {
        match self {
            Self::Weights => MOST_OWN_COLUMNS,
            Self::Gradients => blueprint.head_dim - MOST_OWN_COLUMNS,
        }
    }

    /// Bytes from a tile's beginning to where its columns begin.
    fn bytes(self) -> u32 {
        (self.first_column() / 64 * SIDE * ROW_BYTES) as u32
    }
}

/// What a warpgroup has of a stage of the ring, and where dS goes.
#[derive(CubeType, Clone, Copy)]
struct Stage {
    q: u32,
    dout: u32,
    terms: u32,
    gradients: u32,
    gradients_full: u32,
    gradients_empty: u32,
    /// Parities to wait for: that dS is there, and that its memory is free; and that weights are there.
    gradients_phase: u32,
    weights_phase: u32,
}

/// The warp of unit `lane` arrives.
#[cube]
fn arrive(barrier: u32, lane: u32) {
    let in_warp = lane % 32;
    if in_warp == 0 {
        barrier_arrive(barrier);
    }
}

/// Computes a tile's weights and hands them on, adds to dv, and to dk once the other warpgroup has dS.
#[cube]
fn weigh<I: Float, M: Numeric>(
    places: &Places,
    stage: &Stage,
    tile: &PairTile<'_, I, M>,
    lane: u32,
    #[comptime] masked: bool,
    #[comptime] blueprint: OnceBlueprint,
) {
    let (role, dtype) = comptime!((Role::Weights, blueprint.dtype));
    let [of_dv, of_dk] = comptime!(blueprint.sums(role.columns(blueprint)));
    let scores = wgmma_product::<Const<32>>(
        tile_descriptor(places.k, true),
        tile_descriptor(stage.q, true),
        comptime!(blueprint.products()),
    );
    let (weights, _slopes) = weights_of::<I, M, Const<32>>(scores, stage.terms, tile, masked);
    // The other warpgroup has read those of the tile before: it told that dS of that tile was there.
    store_weights(weights, places.weights, lane);
    sync_plane();
    arrive(places.weights_full, lane);
    let packed = weight_words::<I, M, Const<32>>(weights, tile, dtype);
    wgmma_sum_started::<Const<16>>(packed, tile_descriptor(stage.dout, false), of_dv);
    wgmma_wait();
    barrier_wait(stage.gradients_full, stage.gradients_phase);
    let gradients = load_gradients(&gradient_place(stage.gradients, lane));
    wgmma_sum_started::<Const<16>>(gradients, tile_descriptor(stage.q, false), of_dk);
    wgmma_wait();
}

/// Computes the gradients of a tile's scores and hands them on, and adds to dv and dk.
#[cube]
fn differentiate<I: Float, M: Numeric>(
    places: &Places,
    stage: &Stage,
    tile: &PairTile<'_, I, M>,
    lane: u32,
    #[comptime] blueprint: OnceBlueprint,
) {
    let (role, dtype) = comptime!((Role::Gradients, blueprint.dtype));
    let [of_dv, of_dk] = comptime!(blueprint.sums(role.columns(blueprint)));
    let products = wgmma_product::<Const<32>>(
        tile_descriptor(places.v, true),
        tile_descriptor(stage.dout, true),
        comptime!(blueprint.products()),
    );
    barrier_wait(places.weights_full, stage.weights_phase);
    let weights = load_weights(places.weights, lane);
    // Scores with a cap are declined.
    let slopes = Elements::<f32>::new();
    let gradients = gradient_words::<I, M, Const<32>>(
        weights,
        products,
        0usize,
        &slopes,
        stage.terms,
        tile,
        dtype,
    );
    barrier_wait(stage.gradients_empty, stage.gradients_phase ^ 1);
    store_gradients(gradients, &gradient_place(stage.gradients, lane));
    show_to_async();
    sync_plane();
    arrive(stage.gradients_full, lane);
    let packed = weight_words::<I, M, Const<32>>(weights, tile, dtype);
    let columns = comptime!(role.bytes());
    wgmma_sum_started::<Const<16>>(packed, tile_descriptor(stage.dout + columns, false), of_dv);
    wgmma_sum_started::<Const<16>>(gradients, tile_descriptor(stage.q + columns, false), of_dk);
    wgmma_wait();
}

/// Multiplies the cube's tile `index` of dS with the role's columns of the keys, and adds to tile `to` of the sums of dq.
#[cube]
fn add_to_queries(
    places: &Places,
    index: u32,
    query_sums: &mut [f32],
    to: u32,
    lane: u32,
    #[comptime] role: Role,
    #[comptime] blueprint: OnceBlueprint,
) {
    let slot = slot_of(index, comptime!(blueprint.gradients));
    barrier_wait(places.gradients_full + slot.stage * 8, slot.phase);
    let gradients = places.gradients + slot.stage * comptime!(blueprint.gradient_bytes() as u32);
    let columns = comptime!(role.columns(blueprint));
    let sums = wgmma_across::<Const<64>>(
        tile_descriptor(gradients, false),
        tile_descriptor(places.k + comptime!(role.bytes()), false),
        comptime!(blueprint.queries(columns)),
    );
    arrive(places.gradients_empty + slot.stage * 8, lane);
    let base = output_address::<f32>(query_sums);
    let (head_dim, first) = comptime!((blueprint.head_dim, role.first_column()));
    add_tile::<Const<64>>(sums, base, to, lane, head_dim, first, columns);
}

/// All that a warpgroup does with the cube's keys.
#[cube]
fn multiply<I: Float, M: Numeric>(
    places: &Places,
    rules: &Rules<I, M>,
    own: &Sequence<'_, I, M>,
    first_row: u32,
    tiles: (u32, u32),
    batch: u32,
    query_sums: &mut [f32],
    dk: &mut [I],
    dv: &mut [I],
    out_strides: &Strides,
    #[comptime] role: Role,
    #[comptime] blueprint: OnceBlueprint,
) {
    acquire_registers(comptime!(blueprint.registers().0));
    wgmma_pin_registers(u32::cast_from(rules.sizes.batch == 0));
    let (tile_bytes, side) = comptime!((blueprint.tile_bytes() as u32, SIDE as u32));
    let columns = comptime!(role.columns(blueprint));
    let group = rules.sizes.group;
    let lane = UNIT_POS % UNITS_OF_GROUP;
    let quad = lane % 4;
    let row = first_row + lane / 32 * 16 + lane % 32 / 4;
    let exponent = score_exponent(rules);
    wgmma_sums_clear(columns);
    let mut index = 0u32;
    // Tile of the sums of dq of the tile before.
    let mut before = 0u32;
    let mut open = open_keys(own, first_row, tiles.0 * side, side, Side::Keys);
    barrier_wait(places.fixed_full, 0u32);
    for member in 0..group {
        for at in tiles.0..tiles.1 {
            let sequence = rules.sequence(batch, CUBE_POS_Y * group + member);
            let of_sums = sums_tile::<I, M>(&sequence, at);
            let column = at * side;
            if index > 0 {
                add_to_queries(places, index - 1, query_sums, before, lane, role, blueprint);
            }
            let tile = pair_tile::<I, M>(sequence, row, column, quad, exponent, Side::Keys, false);
            let from = slot_of(index, comptime!(blueprint.stages));
            let to = slot_of(index, comptime!(blueprint.gradients));
            let q_at = places.ring + from.stage * 2 * tile_bytes;
            let stage = Stage {
                q: q_at,
                dout: q_at + tile_bytes,
                terms: places.terms + from.stage * comptime!(blueprint.terms_bytes() as u32),
                gradients: places.gradients
                    + to.stage * comptime!(blueprint.gradient_bytes() as u32),
                gradients_full: places.gradients_full + to.stage * 8,
                gradients_empty: places.gradients_empty + to.stage * 8,
                gradients_phase: to.phase,
                weights_phase: index % 2,
            };
            barrier_wait(places.full + from.stage * 8, from.phase);
            match comptime!(role) {
                Role::Weights => {
                    let checked =
                        is_checked(&tile.sequence, first_row, column, open, side, Side::Keys);
                    // Of the next tile. All heads have one mask.
                    let next = select(at + 1 < tiles.1, at + 1, tiles.0);
                    open = open_keys(own, first_row, next * side, side, Side::Keys);
                    let options = comptime!(rules.options);
                    if comptime!(options.looks_up_pairs()) || checked {
                        weigh::<I, M>(places, &stage, &tile, lane, true, blueprint);
                    } else {
                        weigh::<I, M>(places, &stage, &tile, lane, false, blueprint);
                    }
                }
                Role::Gradients => {
                    differentiate::<I, M>(places, &stage, &tile, lane, blueprint);
                }
            }
            arrive(places.empty + from.stage * 8, lane);
            before = of_sums;
            index += 1;
        }
    }
    if index > 0 {
        add_to_queries(places, index - 1, query_sums, before, lane, role, blueprint);
    }
    let sums = wgmma_sums::<Const<128>>(columns);
    let origin = origin(out_strides, batch, CUBE_POS_Y, own.first_kv)
        + comptime!(role.first_column() as u32);
    let (stride, end) = (out_strides.row, own.seq_kv);
    let rows = GradientRows { origin, stride, row, end, quad };
    let dtype = comptime!(blueprint.dtype);
    store::<I, Const<128>>(sums, 0usize, dv, &rows, 1.0f32, columns, dtype);
    let behind_dv = comptime!(columns / 2);
    store::<I, Const<128>>(sums, behind_dv, dk, &rows, rules.numbers.scale, columns, dtype);
}

/// As [`attention_backward_once_wgmma_kernel`], of heads above 128. Cubes: tiles of 64 keys along x, heads of keys along
/// y, sequences along z. The scale has to be positive.
///
/// [`attention_backward_once_wgmma_kernel`]: super::once_backward::attention_backward_once_wgmma_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_once_wide_wgmma_kernel<I: Float, M: Numeric>(
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    q: &TensorMap<u32, Tiled>,
    dout: &TensorMap<u32, Tiled>,
    rules: &Rules<I, M>,
    terms: &[f32],
    query_sums: &mut [f32],
    dk: &mut [I],
    dv: &mut [I],
    out_strides: Strides,
    #[comptime] blueprint: OnceBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
) {
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let places = places(shared_address::<u32>(memory.as_slice()), blueprint);
    wgmma_sums_declare(MOST_OWN_COLUMNS);
    init_barriers(&places, blueprint);
    sync_cube();

    let side = comptime!(SIDE as u32);
    let (first_row, batch) = (CUBE_POS_X * side, rules.batch_of(CUBE_POS_Z));
    let own = rules.sequence(batch, CUBE_POS_Y * rules.sizes.group);
    if first_row < own.seq_kv {
        let tiles = tiles_of(&own, first_row, side, Side::Keys);
        // The compiler sees that units of a warp go the same way.
        let warpgroup = plane_shuffle(UNIT_POS / UNITS_OF_GROUP, 0u32);
        if warpgroup == 0 {
            release_registers(comptime!(blueprint.registers().1));
            let maps = Maps {
                k: tensor_map_address::<u32, Tiled>(k),
                v: tensor_map_address::<u32, Tiled>(v),
                q: tensor_map_address::<u32, Tiled>(q),
                dout: tensor_map_address::<u32, Tiled>(dout),
            };
            fetch::<I, M>(&maps, rules, terms, &places, &own, first_row, tiles, batch, blueprint);
        } else if warpgroup == 1 {
            multiply::<I, M>(
                &places,
                rules,
                &own,
                first_row,
                tiles,
                batch,
                query_sums,
                dk,
                dv,
                &out_strides,
                Role::Weights,
                blueprint,
            );
        } else {
            multiply::<I, M>(
                &places,
                rules,
                &own,
                first_row,
                tiles,
                batch,
                query_sums,
                dk,
                dv,
                &out_strides,
                Role::Gradients,
                blueprint,
            );
        }
    }
}
