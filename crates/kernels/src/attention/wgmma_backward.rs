//! The backward pass on Hopper's tensor cores: one kernel for tiles of queries and for tiles of keys.
//!
//! 128 rows of one side stay in shared memory, 64 for each of two warpgroups, while a third has TMA
//! bring in tiles of 64 rows of the other side.
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
    pipeline::{Side, Slot, UNITS_OF_GROUP, WgmmaBackwardBlueprint, advance, load_tile},
    rules::{
        Options, RowStrides, Rules, Sequence, bias_at, bounded_score, is_visible, keys_of, origin,
        origin_of_row_values, queries_of, score_slope, seeds_of, sequence_of,
    },
    softmax::{kept_bits, pack, pack_registers},
};
use crate::ptx::{
    barrier::{barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    exp2_fast, load, output_address, shared_address, store_word,
    wgmma::{tile_descriptor, wgmma_products, wgmma_weights},
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;
use std::f64::consts::LOG2_E;

/// More than any score in powers of two: what a row without weights subtracts.
const NO_WEIGHTS: f32 = 1e30;

/// The rows of the other side that a tile of `first..` meets, as tiles of 64: the first and the one
/// after the last.
#[cube]
fn tiles_of(
    sequence: &Sequence,
    rules: &Rules,
    first: u32,
    #[comptime] side: Side,
    #[comptime] options: Options,
) -> (u32, u32) {
    let range = match comptime!(side) {
        Side::Queries => keys_of(sequence, rules, first, min(first + 128, sequence.seq_q), options),
        Side::Keys => {
            queries_of(sequence, rules, first, min(first + 128, sequence.seq_kv), options)
        }
    };
    (range.0 / 64, range.1.div_ceil(64))
}

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

/// Where a unit is in a tile of 64 by 64.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// Its first row among those that stay; its second is 8 below.
    row: u32,
    /// First row of those that came in.
    first_column: u32,
    quad: u32,
    /// Where the logarithms and deltas of the head begin.
    row_values: u32,
    exponent: f32,
    /// Bits of what dropout leaves.
    kept: u32,
}

/// Makes `dropout(P)` of the first 32 registers and `dS`, without the scale, of the others.
#[cube]
fn pair_gradients<I: Float, M: Numeric, R: Size>(
    products: Vector<f32, R>,
    mask: &[M],
    bias: &[I],
    lse: &[f32],
    delta: &[f32],
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
        let at = (place.row_values + within_q) as usize;
        let sum = lse[at];
        let from = select(sum < f32::min_value(), NO_WEIGHTS, sum * comptime!(LOG2_E as f32));
        let mut weight = exp2_fast(score * place.exponent - from);
        if comptime!(masked) {
            let visible = query < sequence.seq_q
                && key < sequence.seq_kv
                && is_visible::<M>(mask, sequence, rules, within_q, within_kv, options);
            weight = select(visible, weight, 0.0f32);
        }
        let mut kept = rules.numbers.kept;
        if comptime!(options.dropout) {
            kept = select(place.kept & comptime!(1u32 << i) != 0, kept, 0.0f32);
        }
        let gradient = products.extract(comptime!(32 + i));
        made.insert(i, kept * weight);
        made.insert(comptime!(32 + i), weight * (kept * gradient - delta[at]) * slope);
    }
    made
}

/// Writes the unit's two rows of a gradient.
#[cube]
fn store<I: Float, R: Size>(
    sums: Vector<f32, R>,
    out: &mut [I],
    origin: u32,
    stride: u32,
    row: u32,
    end: u32,
    quad: u32,
    factor: f32,
    #[comptime] blueprint: WgmmaBackwardBlueprint,
) {
    let base = output_address::<I>(out);
    #[unroll]
    for pair in 0..comptime!(blueprint.head_dim / 4) {
        let i = comptime!(2 * pair);
        let at = row + comptime!(8 * (pair % 2) as u32);
        let low = sums.extract(i) * factor;
        let high = sums.extract(comptime!(i + 1)) * factor;
        let word = pack(low, high, comptime!(blueprint.dtype));
        if at < end {
            let column = comptime!((i / 4 * 8) as u32) + 2 * quad;
            store_word(base, origin + at * stride + column, word);
        }
    }
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
    mask: &[M],
    bias: &[I],
    starts: &[u32],
    lse: &[f32],
    delta: &[f32],
    first_out: &mut [I],
    second_out: &mut [I],
    rules: Rules,
    out_strides: RowStrides,
    #[comptime] side: Side,
    #[comptime] blueprint: WgmmaBackwardBlueprint,
    #[comptime] options: Options,
    #[define(I)] _element: ElemType,
    #[define(M)] _mask_type: ElemType,
    #[define(R)] _registers: usize,
    #[define(P)] _packed: usize,
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

    let (first_row, batch) = (CUBE_POS_X * 128, CUBE_POS_Z);
    let group = rules.sizes.group;
    let (first_head, members) = match comptime!(side) {
        Side::Queries => (CUBE_POS_Y, 1u32.runtime()),
        Side::Keys => (CUBE_POS_Y * group, group),
    };
    let own = sequence_of(starts, &rules, batch, first_head, options);
    let end = match comptime!(side) {
        Side::Queries => own.seq_q,
        Side::Keys => own.seq_kv,
    };
    if first_row < end {
        let tiles = tiles_of(&own, &rules, first_row, side, options);
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
            batch: if comptime!(options.packed) { 0u32.runtime() } else { batch },
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
        let exponent = if comptime!(options.softcap || options.bias) {
            comptime!(LOG2_E as f32).runtime()
        } else {
            rules.numbers.scale * comptime!(LOG2_E as f32)
        };
        let first_tile = tile_descriptor(fixed_at + warpgroup * tile_bytes, true);
        let second_tile = tile_descriptor(fixed_at + (2 + warpgroup) * tile_bytes, true);
        let mut first_sums = Vector::<f32, R>::new(0.0f32);
        let mut second_sums = Vector::<f32, R>::new(0.0f32);
        let mut slot = Slot { stage: 0u32, phase: 0u32 };
        let mut emptied = Slot { stage: 0u32, phase: 0u32 };
        barrier_wait(fixed_full, 0u32);
        for index in 0..moving.count {
            let head = first_head + index / moving.of_member;
            let sequence = sequence_of(starts, &rules, batch, head, options);
            let first_column = (tiles.0 + index % moving.of_member) * 64;
            let row_values = origin_of_row_values(&sequence, &rules, options);
            // Before the products, which take the registers that the generator needs.
            let mut kept = 0u32;
            if comptime!(options.dropout) {
                let (seeds, threshold) = (seeds_of(&sequence, &rules), rules.numbers.threshold);
                kept = kept_bits(row, first_column + 2 * quad, threshold, &seeds, side);
            }
            let place = Place { row, first_column, quad, row_values, exponent, kept };
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
            let checked = is_checked(&sequence, &rules, group_row, first_column, side, options);
            let made = if comptime!(options.mask || options.dropout) || checked {
                pair_gradients::<I, M, R>(
                    products, mask, bias, lse, delta, &sequence, &rules, &place, true, side,
                    options,
                )
            } else {
                pair_gradients::<I, M, R>(
                    products, mask, bias, lse, delta, &sequence, &rules, &place, false, side,
                    options,
                )
            };
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
        let out_origin = origin(&out_strides, batch, CUBE_POS_Y, start);
        let stride = out_strides.row;
        let scale = rules.numbers.scale;
        store::<I, R>(first_sums, first_out, out_origin, stride, row, end, quad, scale, blueprint);
        if comptime!(side == Side::Keys) {
            store::<I, R>(
                second_sums,
                second_out,
                out_origin,
                stride,
                row,
                end,
                quad,
                1.0f32,
                blueprint,
            );
        }
    }
}

/// Whether some pair of 64 rows and 64 columns may not be seen, by the window or the ends.
#[cube]
fn is_checked(
    sequence: &Sequence,
    rules: &Rules,
    first_row: u32,
    first_column: u32,
    #[comptime] side: Side,
    #[comptime] options: Options,
) -> bool {
    let (query, key) = match comptime!(side) {
        Side::Queries => (first_row, first_column),
        Side::Keys => (first_column, first_row),
    };
    let mut checked = query + 64 > sequence.seq_q || key + 64 > sequence.seq_kv;
    // The key's distance from the diagonal of the first query; others differ by less than 64.
    let distance = i32::cast_from(key) - i32::cast_from(query) - sequence.diagonal;
    if comptime!(options.right) {
        checked = checked || distance + 63 > rules.numbers.right;
    }
    if comptime!(options.left) {
        checked = checked || distance - 63 < -rules.numbers.left;
    }
    checked
}
