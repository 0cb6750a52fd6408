//! The backward pass on Hopper's tensor cores: one kernel for tiles of queries and for tiles of keys.
//!
//! 128 rows of one side stay in shared memory, 64 for each of two warpgroups. One unit has TMA bring in
//! tiles of the other side's rows, some ahead; a unit more for that alone would leave each fewer
//! registers. [`pairs`](super::pairs) tells what is computed.

use super::{
    pairs::{GradientRows, is_checked, open_keys, pair_gradients, pair_tile, store, tiles_of},
    pipeline::{Slot, UNITS_OF_GROUP, WgmmaBackwardBlueprint, advance, load_tile},
    rules::{Rules, Side, Strides, origin, score_exponent},
    softmax::pack_registers,
};
use crate::ptx::{
    barrier::{barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    load, shared_address,
    wgmma::{tile_descriptor, wgmma_products, wgmma_weights},
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The tiles that come in: those of the first head's other side, then of the next head's.
#[derive(CubeType, Clone, Copy)]
struct Moving {
    first_map: u64,
    second_map: u64,
    first_tile: u32,
    /// Tiles of a head.
    of_member: u32,
    count: u32,
    /// Row of the tensors where the sequence begins.
    start: u32,
    head: u32,
    batch: u32,
}

/// Has TMA fetch rows in tiles of 64.
#[cube]
fn fetch(
    destination: u32,
    map: u64,
    row: u32,
    head: u32,
    batch: u32,
    barrier: u32,
    #[comptime] rows: usize,
    #[comptime] blueprint: WgmmaBackwardBlueprint,
) {
    let batch = load::<u32>(batch);
    load_tile(
        destination,
        map,
        row,
        head,
        batch,
        barrier,
        rows,
        64usize,
        comptime!(blueprint.blocks()),
    );
}

/// Has TMA fetch tile `index` of both tensors.
#[cube]
fn fetch_pair(
    moving: &Moving,
    index: u32,
    destination: u32,
    barrier: u32,
    #[comptime] blueprint: WgmmaBackwardBlueprint,
) {
    let tile_bytes = comptime!(blueprint.tile_bytes() as u32);
    let head = moving.head + index / moving.of_member;
    let row = moving.start + (moving.first_tile + index % moving.of_member) * 64;
    barrier_expect(barrier, 2 * tile_bytes);
    fetch(destination, moving.first_map, row, head, moving.batch, barrier, 64usize, blueprint);
    fetch(
        destination + tile_bytes,
        moving.second_map,
        row,
        head,
        moving.batch,
        barrier,
        64usize,
        blueprint,
    );
}

/// dq to `first_out`, or dk to it and dv to `second_out`; see
/// [`attention_backward_kv_portable_kernel`] for what they are. Cubes: tiles of 128 rows along x, heads
/// of that side along y, sequences along z. The scale has to be positive.
///
/// [`attention_backward_kv_portable_kernel`]: super::backward::attention_backward_kv_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_wgmma_kernel<I: Float, M: Numeric, R: Size, P: Size>(
    first_fixed: &TensorMap<u32, Tiled>,
    second_fixed: &TensorMap<u32, Tiled>,
    first_moving: &TensorMap<u32, Tiled>,
    second_moving: &TensorMap<u32, Tiled>,
    rules: &Rules<I, M>,
    terms: &[f32],
    first_out: &mut [I],
    second_out: &mut [I],
    out_strides: Strides,
    #[comptime] side: Side,
    #[comptime] blueprint: WgmmaBackwardBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R, P)] _widths: [usize; 2],
) {
    let stages = comptime!(blueprint.stages as u32);
    let tile_bytes = comptime!(blueprint.tile_bytes() as u32);
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let fixed_at = shared_address::<u32>(memory.as_slice());
    let ring = fixed_at + 4 * tile_bytes;
    let fixed_full = ring + comptime!(2 * blueprint.stages as u32 * blueprint.tile_bytes() as u32);
    let full = fixed_full + 8;
    let empty = full + comptime!(8 * blueprint.stages as u32);
    let unit = UNIT_POS;
    if unit == 0 {
        barrier_init(fixed_full, 1u32);
        #[unroll]
        for stage in 0..stages {
            barrier_init(full + comptime!(8 * stage), 1u32);
            barrier_init(empty + comptime!(8 * stage), 2u32);
        }
        barrier_init_fence();
    }
    sync_cube();

    let (first_row, batch) = (CUBE_POS_X * 128, rules.batch_of(CUBE_POS_Z));
    let group = rules.sizes.group;
    let (first_head, members) = match comptime!(side) {
        Side::Queries => (CUBE_POS_Y, 1u32.runtime()),
        Side::Keys => (CUBE_POS_Y * group, group),
    };
    let own = rules.sequence(batch, first_head);
    let end = match comptime!(side) {
        Side::Queries => own.seq_q,
        Side::Keys => own.seq_kv,
    };
    if first_row < end {
        let tiles = tiles_of(&own, first_row, 128u32, side);
        let of_member = tiles.1 - min(tiles.0, tiles.1);
        let moving = Moving {
            first_map: tensor_map_address::<u32, Tiled>(first_moving),
            second_map: tensor_map_address::<u32, Tiled>(second_moving),
            first_tile: tiles.0,
            of_member,
            count: of_member * members,
            start: match comptime!(side) {
                Side::Queries => own.first_kv,
                Side::Keys => own.first_q,
            },
            head: match comptime!(side) {
                Side::Queries => CUBE_POS_Y / group,
                Side::Keys => first_head,
            },
            batch: if comptime!(rules.options.packed) { 0u32.runtime() } else { batch },
        };
        if unit == 0 {
            let start = match comptime!(side) {
                Side::Queries => own.first_q,
                Side::Keys => own.first_kv,
            };
            barrier_expect(fixed_full, 4 * tile_bytes);
            let first_map = tensor_map_address::<u32, Tiled>(first_fixed);
            let second_map = tensor_map_address::<u32, Tiled>(second_fixed);
            fetch(
                fixed_at,
                first_map,
                start + first_row,
                CUBE_POS_Y,
                moving.batch,
                fixed_full,
                128usize,
                blueprint,
            );
            fetch(
                fixed_at + 2 * tile_bytes,
                second_map,
                start + first_row,
                CUBE_POS_Y,
                moving.batch,
                fixed_full,
                128usize,
                blueprint,
            );
            for index in 0..min(stages, moving.count) {
                fetch_pair(
                    &moving,
                    index,
                    ring + index * 2 * tile_bytes,
                    full + index * 8,
                    blueprint,
                );
            }
        }
        let warpgroup = unit / UNITS_OF_GROUP;
        let lane = unit % UNITS_OF_GROUP;
        let quad = lane % 4;
        let group_row = first_row + warpgroup * 64;
        let row = group_row + lane / 32 * 16 + lane % 32 / 4;
        let exponent = score_exponent(rules);
        let first_tile = tile_descriptor(fixed_at + warpgroup * tile_bytes, true);
        let second_tile = tile_descriptor(fixed_at + (2 + warpgroup) * tile_bytes, true);
        let mut first_sums = Vector::<f32, R>::new(0.0f32);
        let mut second_sums = Vector::<f32, R>::new(0.0f32);
        let mut slot = Slot { stage: 0u32, phase: 0u32 };
        let mut emptied = Slot { stage: 0u32, phase: 0u32 };
        barrier_wait(fixed_full, 0u32);
        for index in 0..moving.count {
            let head = first_head + index / moving.of_member;
            let sequence = rules.sequence(batch, head);
            let first_column = (tiles.0 + index % moving.of_member) * 64;
            let tile = pair_tile::<I, M>(sequence, row, first_column, quad, exponent, side, false);
            let stage = load::<u32>(slot.stage);
            barrier_wait(full + stage * 8, load::<u32>(slot.phase));
            let first_at = ring + stage * 2 * tile_bytes;
            let second_at = first_at + tile_bytes;
            let products = wgmma_products::<R>(
                first_tile,
                tile_descriptor(first_at, true),
                second_tile,
                tile_descriptor(second_at, true),
                comptime!(blueprint.products()),
            );
            // What the other warpgroup finished with a tile ago may be overwritten.
            if unit == 0 && index > 0 && index - 1 + stages < moving.count {
                let emptied_stage = load::<u32>(emptied.stage);
                barrier_wait(empty + emptied_stage * 8, load::<u32>(emptied.phase));
                fetch_pair(
                    &moving,
                    index - 1 + stages,
                    ring + emptied_stage * 2 * tile_bytes,
                    full + emptied_stage * 8,
                    blueprint,
                );
                advance(&mut emptied, stages);
            }
            let open = open_keys(&tile.sequence, group_row, first_column, 64u32, side);
            let checked = is_checked(&tile.sequence, group_row, first_column, open, 64u32, side);
            let made = pair_gradients::<I, M, R>(products, terms, &tile, checked, false);
            let dtype = comptime!(blueprint.dtype);
            if comptime!(side == Side::Keys) {
                second_sums = wgmma_weights::<R, P>(
                    second_sums,
                    pack_registers::<R, P>(made, 0usize, 32usize, dtype),
                    tile_descriptor(second_at, false),
                    comptime!(blueprint.sums()),
                );
            }
            first_sums = wgmma_weights::<R, P>(
                first_sums,
                pack_registers::<R, P>(made, 32usize, 32usize, dtype),
                tile_descriptor(first_at, false),
                comptime!(blueprint.sums()),
            );
            if lane == 0 {
                barrier_arrive(empty + stage * 8);
            }
            advance(&mut slot, stages);
        }
        let start = match comptime!(side) {
            Side::Queries => own.first_q,
            Side::Keys => own.first_kv,
        };
        let origin = origin(&out_strides, batch, CUBE_POS_Y, start);
        let rows = GradientRows { origin, stride: out_strides.row, row, end, quad };
        let (head_dim, dtype) = comptime!((blueprint.head_dim, blueprint.dtype));
        store::<I, R>(first_sums, 0usize, first_out, &rows, rules.numbers.scale, head_dim, dtype);
        if comptime!(side == Side::Keys) {
            store::<I, R>(second_sums, 0usize, second_out, &rows, 1.0f32, head_dim, dtype);
        }
    }
}
