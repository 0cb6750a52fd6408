//! The forward pass on Hopper's tensor cores: a persistent cube of three warpgroups on every
//! multiprocessor, each tile of it 128 queries of a head.
//!
//! 1. Warpgroup 0 has TMA fetch the queries of a tile, and tiles of keys and of values into two
//!    rings, as far ahead as there is room.
//! 2. Warpgroups 1 and 2 have 64 queries each. The tensor cores multiply the queries with the next
//!    tile of keys, and the weights, which stay in registers, with the values of the last one, while
//!    the other warpgroup makes weights of its scores (Shah et al., "FlashAttention-3", 2024,
//!    section 3.2).
//! 3. They divide by the sums of their weights and write.
//!
//! Weights are powers of two, so that one multiply-add and one instruction make each.

use super::rules::{
    Options, RowStrides, Rules, Sequence, bias_at, bounded_score, is_kept, is_visible, keys_of,
    origin, origin_of_row_values, sequence_of,
};
use crate::ptx::{
    ROW_BYTES, acquire_registers,
    barrier::{barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    copy::tma_batched_tile,
    exp2_fast, load, output_address, pack_bf16, pack_f16, release_registers, shared_address,
    store_word,
    wgmma::{
        WgmmaProduct, WgmmaWeights, tile_descriptor, wgmma_overlapped, wgmma_product, wgmma_settle,
        wgmma_weights,
    },
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;
use std::f64::consts::{LN_2, LOG2_E};

/// Units of a cube: the producer's warpgroup and two that multiply.
pub(crate) const UNITS: u32 = 384;
/// Queries of a tile, 64 for each warpgroup that multiplies.
pub(crate) const TILE_Q: usize = 128;
/// Bytes of 64 rows of 64 elements.
const CHUNK_BYTES: usize = 64 * ROW_BYTES;
/// What a score is that does not count. Finite, so that no difference is NaN, and far from all that
/// is not.
const UNSEEN: f32 = -1e30;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaForwardBlueprint {
    /// PTX type of q, k, v and of the weights: `bf16` or `f16`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    /// Keys of a tile, a multiple of 64.
    pub(crate) tile_kv: usize,
    /// Tiles of keys, and of values, that are held at once.
    pub(crate) stages: usize,
}

impl WgmmaForwardBlueprint {
    /// Blocks of 64 elements of a row; the last may be filled up with zeros.
    fn blocks(self) -> usize {
        self.head_dim.div_ceil(64)
    }

    fn q_bytes(self) -> usize {
        self.blocks() * TILE_Q * ROW_BYTES
    }

    fn kv_bytes(self) -> usize {
        self.blocks() * self.tile_kv * ROW_BYTES
    }

    /// Queries, both rings, and the barriers: two for each of their tiles, two for the queries.
    pub(crate) fn shared_bytes(self) -> usize {
        self.q_bytes() + 2 * self.stages * self.kv_bytes() + 8 * (4 * self.stages + 2)
    }

    fn scores(self) -> WgmmaProduct {
        WgmmaProduct {
            n: self.tile_kv,
            dtype: self.dtype,
            k: self.head_dim,
            lhs_block_bytes: TILE_Q * ROW_BYTES,
            rhs_block_bytes: self.tile_kv * ROW_BYTES,
        }
    }

    fn weights(self) -> WgmmaWeights {
        WgmmaWeights {
            n: self.head_dim,
            dtype: self.dtype,
            k: self.tile_kv,
            rows_bytes: self.blocks() * CHUNK_BYTES,
            first: self.score_registers(),
        }
    }

    /// Registers of a unit's scores.
    fn score_registers(self) -> usize {
        self.tile_kv / 2
    }

    /// Registers of a unit's outputs.
    fn out_registers(self) -> usize {
        self.head_dim / 2
    }

    /// Registers of a vector that holds scores and behind them outputs, and of one of packed weights.
    pub(crate) fn widths(self) -> [usize; 2] {
        let both = self.score_registers() + self.out_registers();
        [both.next_power_of_two(), self.score_registers() / 2]
    }
}

/// A tile of queries.
#[derive(CubeType, Clone, Copy)]
struct Work {
    first_row: u32,
    head: u32,
    batch: u32,
}

/// Tile `index`: those of a head follow each other, so that cubes at work at the same time share keys
/// and values; the last queries first, because they may see the most keys.
#[cube]
fn work_at(index: u32, tiles: u32, heads: u32) -> Work {
    let matrix = index / tiles;
    Work {
        first_row: (tiles - 1 - index % tiles) * comptime!(TILE_Q as u32),
        head: matrix % heads,
        batch: matrix / heads,
    }
}

/// Has TMA copy 64 by 64 elements for each block of a row and each 64 rows, or all rows at once.
#[cube]
fn load_tile(
    destination: u32,
    map: u64,
    row: u32,
    head: u32,
    batch: u32,
    barrier: u32,
    #[comptime] rows: usize,
    #[comptime] box_rows: usize,
    #[comptime] blocks: usize,
) {
    #[unroll]
    for part in 0..comptime!(rows / box_rows) {
        #[unroll]
        for block in 0..blocks {
            let at =
                destination + comptime!(((part * blocks + block) * box_rows * ROW_BYTES) as u32);
            tma_batched_tile(
                at,
                map,
                comptime!(64 * block as u32).runtime(),
                row + comptime!((part * box_rows) as u32),
                head,
                batch,
                barrier,
            );
        }
    }
}

/// The largest or the sum of what the four units of a row hold.
#[cube]
fn quad_max(x: f32) -> f32 {
    let pair = max(x, plane_shuffle_xor(x, 1u32));
    max(pair, plane_shuffle_xor(pair, 2u32))
}

#[cube]
fn quad_sum(x: f32) -> f32 {
    let pair = x + plane_shuffle_xor(x, 1u32);
    pair + plane_shuffle_xor(pair, 2u32)
}

/// Where a unit is in a tile, and how it counts.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// The first of its two rows, which are 8 apart.
    row: u32,
    /// Its place among the four units of a row.
    quad: u32,
    /// A score counts so much in powers of two.
    exponent: f32,
}

/// What a unit knows of its two rows.
#[derive(CubeType, Clone, Copy)]
struct RowState {
    /// The largest scores so far.
    peak_upper: f32,
    peak_lower: f32,
    /// Sums of this unit's weights, relative to them.
    total_upper: f32,
    total_lower: f32,
    /// What sums and outputs are to be multiplied by since the last tile.
    rescale_upper: f32,
    rescale_lower: f32,
}

/// Puts bounds, bias and, with `masked`, what is not seen into a tile of scores. There is no branch:
/// the tensor cores would have to be done before it.
#[cube]
fn apply_rules<I: Float, M: Numeric, R: Size>(
    scores: Vector<f32, R>,
    mask: &[M],
    bias: &[I],
    sequence: &Sequence,
    rules: &Rules,
    place: &Place,
    first_key: u32,
    #[comptime] masked: bool,
    #[comptime] tile_kv: usize,
    #[comptime] options: Options,
) -> Vector<f32, R> {
    let mut ruled = scores;
    #[unroll]
    for i in 0..comptime!(tile_kv / 2) {
        let key = first_key + comptime!((i / 4 * 8 + i % 2) as u32) + 2 * place.quad;
        // Rows and keys beyond the last do not count, but nothing may be read beyond them either.
        let query = min(place.row + comptime!(8 * ((i / 2) % 2) as u32), sequence.seq_q - 1);
        let within = min(key, sequence.seq_kv - 1);
        let mut score = scores.extract(i);
        if comptime!(options.softcap || options.bias) {
            score = bounded_score(score, rules, options)
                + bias_at::<I>(bias, sequence, rules, query, within, options);
        }
        if comptime!(masked) {
            let visible = key < sequence.seq_kv
                && is_visible::<M>(mask, sequence, rules, query, within, options);
            score = select(visible, score, UNSEEN);
        }
        ruled.insert(i, score);
    }
    ruled
}

/// Makes weights of a tile of scores and updates the rows. Registers behind the scores stay.
#[cube]
fn weigh<R: Size>(
    scores: Vector<f32, R>,
    state: &mut RowState,
    sequence: &Sequence,
    rules: &Rules,
    place: &Place,
    first_key: u32,
    #[comptime] blueprint: WgmmaForwardBlueprint,
    #[comptime] options: Options,
) -> Vector<f32, R> {
    let exponent = place.exponent;
    let mut upper = state.peak_upper;
    let mut lower = state.peak_lower;
    #[unroll]
    for i in 0..comptime!(blueprint.tile_kv / 2) {
        if comptime!((i / 2) % 2 == 0) {
            upper = max(upper, scores.extract(i));
        } else {
            lower = max(lower, scores.extract(i));
        }
    }
    upper = quad_max(upper);
    lower = quad_max(lower);
    // Where nothing is seen yet, all weights have to be zero, and not one.
    let upper_from = select(upper == UNSEEN, 0.0f32, upper * exponent);
    let lower_from = select(lower == UNSEEN, 0.0f32, lower * exponent);
    state.rescale_upper = exp2_fast(state.peak_upper * exponent - upper_from);
    state.rescale_lower = exp2_fast(state.peak_lower * exponent - lower_from);
    state.peak_upper = upper;
    state.peak_lower = lower;
    let mut upper_sum = state.total_upper * state.rescale_upper;
    let mut lower_sum = state.total_lower * state.rescale_lower;
    let mut weights = scores;
    #[unroll]
    for i in 0..comptime!(blueprint.score_registers()) {
        let is_upper = comptime!((i / 2) % 2 == 0);
        let from = if comptime!(is_upper) { upper_from } else { lower_from };
        let mut weight = exp2_fast(scores.extract(i) * exponent - from);
        if comptime!(is_upper) {
            upper_sum += weight;
        } else {
            lower_sum += weight;
        }
        if comptime!(options.dropout) {
            let query = place.row + comptime!(8 * ((i / 2) % 2) as u32);
            let key = first_key + comptime!((i / 4 * 8 + i % 2) as u32) + 2 * place.quad;
            weight = select(is_kept(sequence, rules, query, key, options), weight, 0.0f32);
        }
        weights.insert(i, weight);
    }
    state.total_upper = upper_sum;
    state.total_lower = lower_sum;
    weights
}

/// Packs weights in pairs, as the tensor cores take them.
#[cube]
fn pack_weights<R: Size, P: Size>(
    weights: Vector<f32, R>,
    #[comptime] blueprint: WgmmaForwardBlueprint,
) -> Vector<u32, P> {
    let mut packed = Vector::<u32, P>::empty();
    #[unroll]
    for pair in 0..comptime!(blueprint.score_registers() / 2) {
        let low = weights.extract(comptime!(2 * pair));
        let high = weights.extract(comptime!(2 * pair + 1));
        packed.insert(pair, pack(low, high, comptime!(blueprint.dtype)));
    }
    packed
}

/// Two numbers, packed.
#[cube]
fn pack(low: f32, high: f32, #[comptime] dtype: &'static str) -> u32 {
    match comptime!(dtype) {
        "f16" => pack_f16(low, high),
        _ => pack_bf16(low, high),
    }
}

/// Multiplies the rows of the output by what their sums were multiplied by.
#[cube]
fn rescale<R: Size>(
    sums: Vector<f32, R>,
    upper: f32,
    lower: f32,
    #[comptime] first: usize,
    #[comptime] used: usize,
) -> Vector<f32, R> {
    let mut scaled = Vector::<f32, R>::empty();
    #[unroll]
    for i in 0..used {
        let factor = if comptime!((i / 2) % 2 == 0) { upper } else { lower };
        let at = comptime!(first + i);
        scaled.insert(at, sums.extract(at) * factor);
    }
    scaled
}

/// A place in a ring.
#[derive(CubeType, Clone, Copy)]
struct Slot {
    stage: u32,
    phase: u32,
}

#[cube]
fn advance(slot: &mut Slot, #[comptime] stages: u32) {
    slot.stage += 1;
    if slot.stage == stages {
        slot.stage = 0u32;
        slot.phase ^= 1;
    }
}

/// Waits for both tiles, and then, without a branch, has the tensor cores multiply queries and keys,
/// and the last weights and values, makes weights of the scores meanwhile, and gives both back.
#[cube]
fn step<I: Float, M: Numeric, R: Size, P: Size>(
    sums: Vector<f32, R>,
    weights: Vector<u32, P>,
    q_tile: u64,
    k_tile: u32,
    v_tile: u32,
    k_empty: u32,
    v_empty: u32,
    mask: &[M],
    bias: &[I],
    state: &mut RowState,
    sequence: &Sequence,
    rules: &Rules,
    place: &Place,
    first_key: u32,
    #[comptime] masked: bool,
    #[comptime] blueprint: WgmmaForwardBlueprint,
    #[comptime] options: Options,
) -> (Vector<f32, R>, Vector<u32, P>) {
    let leads = UNIT_POS % 128 == 0;
    let both = wgmma_overlapped::<R, P>(
        sums,
        weights,
        q_tile,
        tile_descriptor(k_tile, true),
        tile_descriptor(v_tile, false),
        comptime!(blueprint.scores()),
        comptime!(blueprint.weights()),
    );
    if leads {
        barrier_arrive(k_empty);
    }
    let tile_kv = comptime!(blueprint.tile_kv);
    let ruled = apply_rules::<I, M, R>(
        both, mask, bias, sequence, rules, place, first_key, masked, tile_kv, options,
    );
    let carried = weigh::<R>(ruled, state, sequence, rules, place, first_key, blueprint, options);
    let (first, used) = comptime!((blueprint.score_registers(), blueprint.out_registers()));
    // Packed only then: the tensor cores still read the registers of the last weights.
    let settled = wgmma_settle::<R>(carried, comptime!(first + used));
    if leads {
        barrier_arrive(v_empty);
    }
    let sums = rescale::<R>(settled, state.rescale_upper, state.rescale_lower, first, used);
    (sums, pack_weights::<R, P>(settled, blueprint))
}

/// The forward pass; see [`attention_forward_portable_kernel`] for what it computes. The scale has to
/// be positive.
///
/// [`attention_forward_portable_kernel`]: super::forward::attention_forward_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_forward_wgmma_kernel<I: Float, M: Numeric, R: Size, P: Size>(
    q: &TensorMap<u32, Tiled>,
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    mask: &[M],
    bias: &[I],
    starts: &[u32],
    out: &mut [I],
    lse: &mut [f32],
    rules: Rules,
    out_strides: RowStrides,
    tiles: u32,
    work_items: u32,
    #[comptime] blueprint: WgmmaForwardBlueprint,
    #[comptime] options: Options,
    #[define(I)] _element: ElemType,
    #[define(M)] _mask_type: ElemType,
    #[define(R)] _registers: usize,
    #[define(P)] _packed: usize,
) {
    let stages = comptime!(blueprint.stages as u32);
    let (tile_q, tile_kv) = comptime!((TILE_Q as u32, blueprint.tile_kv as u32));
    let (q_bytes, kv_bytes) = comptime!((blueprint.q_bytes() as u32, blueprint.kv_bytes() as u32));
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let q_at = shared_address::<u32>(memory.as_slice());
    let k_ring = q_at + q_bytes;
    let v_ring = k_ring + comptime!(blueprint.stages as u32 * blueprint.kv_bytes() as u32);
    let q_full = v_ring + comptime!(blueprint.stages as u32 * blueprint.kv_bytes() as u32);
    let q_empty = q_full + 8;
    let k_full = q_empty + 8;
    let k_empty = k_full + comptime!(8 * blueprint.stages as u32);
    let v_full = k_empty + comptime!(8 * blueprint.stages as u32);
    let v_empty = v_full + comptime!(8 * blueprint.stages as u32);
    let unit = UNIT_POS;
    if unit == 0 {
        barrier_init(q_full, 1u32);
        barrier_init(q_empty, 2u32);
        #[unroll]
        for stage in 0..stages {
            barrier_init(k_full + comptime!(8 * stage), 1u32);
            barrier_init(k_empty + comptime!(8 * stage), 2u32);
            barrier_init(v_full + comptime!(8 * stage), 1u32);
            barrier_init(v_empty + comptime!(8 * stage), 2u32);
        }
        barrier_init_fence();
    }
    sync_cube();

    let mut index = CUBE_POS_X;
    let mut q_phase = 0u32;
    if unit < 128 {
        // 1. Produce. Values are fetched one tile behind keys, as they are needed.
        release_registers(24u32);
        if unit == 0 {
            let q_map = tensor_map_address::<u32, Tiled>(q);
            let k_map = tensor_map_address::<u32, Tiled>(k);
            let v_map = tensor_map_address::<u32, Tiled>(v);
            let mut k_slot = Slot { stage: 0u32, phase: 0u32 };
            let mut v_slot = Slot { stage: 0u32, phase: 0u32 };
            while index < work_items {
                let work = work_at(index, tiles, rules.sizes.heads_q);
                let sequence = sequence_of(starts, &rules, work.batch, work.head, options);
                let mut tensor_batch = work.batch;
                if comptime!(options.packed) {
                    tensor_batch = 0u32;
                }
                let head_kv = work.head / rules.sizes.group;
                if work.first_row < sequence.seq_q {
                    barrier_wait(q_empty, load::<u32>(q_phase) ^ 1);
                    barrier_expect(q_full, q_bytes);
                    load_tile(
                        q_at,
                        q_map,
                        sequence.first_q + work.first_row,
                        work.head,
                        load::<u32>(tensor_batch),
                        q_full,
                        TILE_Q,
                        TILE_Q,
                        comptime!(blueprint.blocks()),
                    );
                    q_phase ^= 1;
                    let end = min(work.first_row + tile_q, sequence.seq_q);
                    let keys = keys_of(&sequence, &rules, work.first_row, end, options);
                    let first = keys.0 / tile_kv;
                    let last = keys.1.div_ceil(tile_kv);
                    // One round more than tiles: the first has no values, the last no keys.
                    if first < last {
                        for tile in first..last + 1 {
                            if tile < last {
                                barrier_wait(
                                    k_empty + load::<u32>(k_slot.stage) * 8,
                                    load::<u32>(k_slot.phase) ^ 1,
                                );
                                let barrier = k_full + load::<u32>(k_slot.stage) * 8;
                                barrier_expect(barrier, kv_bytes);
                                load_tile(
                                    k_ring + load::<u32>(k_slot.stage) * kv_bytes,
                                    k_map,
                                    sequence.first_kv + tile * tile_kv,
                                    head_kv,
                                    load::<u32>(tensor_batch),
                                    barrier,
                                    comptime!(blueprint.tile_kv),
                                    comptime!(blueprint.tile_kv),
                                    comptime!(blueprint.blocks()),
                                );
                                advance(&mut k_slot, stages);
                            }
                            if tile > first {
                                barrier_wait(
                                    v_empty + load::<u32>(v_slot.stage) * 8,
                                    load::<u32>(v_slot.phase) ^ 1,
                                );
                                let barrier = v_full + load::<u32>(v_slot.stage) * 8;
                                barrier_expect(barrier, kv_bytes);
                                load_tile(
                                    v_ring + load::<u32>(v_slot.stage) * kv_bytes,
                                    v_map,
                                    sequence.first_kv + (tile - 1) * tile_kv,
                                    head_kv,
                                    load::<u32>(tensor_batch),
                                    barrier,
                                    comptime!(blueprint.tile_kv),
                                    64usize,
                                    comptime!(blueprint.blocks()),
                                );
                                advance(&mut v_slot, stages);
                            }
                        }
                    }
                }
                index += CUBE_COUNT_X;
            }
        }
    } else {
        // 2. Multiply and weigh.
        acquire_registers(240u32);
        let group = unit / 128 - 1;
        let lane = unit % 128;
        let quad = lane % 4;
        let q_tile = tile_descriptor(q_at + group * comptime!(CHUNK_BYTES as u32), true);
        let exponent = if comptime!(options.softcap || options.bias) {
            comptime!(LOG2_E as f32).runtime()
        } else {
            rules.numbers.scale * comptime!(LOG2_E as f32)
        };
        let mut k_slot = Slot { stage: 0u32, phase: 0u32 };
        let mut v_slot = Slot { stage: 0u32, phase: 0u32 };
        while index < work_items {
            let work = work_at(index, tiles, rules.sizes.heads_q);
            let sequence = sequence_of(starts, &rules, work.batch, work.head, options);
            if work.first_row < sequence.seq_q {
                let end = min(work.first_row + tile_q, sequence.seq_q);
                let keys = keys_of(&sequence, &rules, work.first_row, end, options);
                let first = keys.0 / tile_kv;
                let last = keys.1.div_ceil(tile_kv);
                let group_row = work.first_row + group * 64;
                let row = group_row + lane / 32 * 16 + lane % 32 / 4;
                let place = Place { row, quad, exponent };
                // Keys that all queries of the group see need no check.
                let mut all_from = 0u32;
                let mut all_to = sequence.seq_kv;
                if comptime!(options.right) {
                    let until =
                        i32::cast_from(group_row) + sequence.diagonal + rules.numbers.right + 1;
                    all_to = u32::cast_from(max(min(until, i32::cast_from(sequence.seq_kv)), 0i32));
                }
                if comptime!(options.left) {
                    let from =
                        i32::cast_from(group_row) + 63 + sequence.diagonal - rules.numbers.left;
                    all_from = u32::cast_from(max(from, 0i32));
                }

                let mut state = RowState {
                    peak_upper: UNSEEN.runtime(),
                    peak_lower: UNSEEN.runtime(),
                    total_upper: 0.0f32,
                    total_lower: 0.0f32,
                    rescale_upper: 0.0f32,
                    rescale_lower: 0.0f32,
                };
                let mut sums = Vector::<f32, R>::new(0.0f32);
                barrier_wait(q_full, load::<u32>(q_phase));
                if first < last {
                    // The first tile of keys has no weights to multiply values with.
                    let k_at = load::<u32>(k_slot.stage);
                    barrier_wait(k_full + k_at * 8, load::<u32>(k_slot.phase));
                    let scores = wgmma_product::<R>(
                        q_tile,
                        tile_descriptor(k_ring + k_at * kv_bytes, true),
                        comptime!(blueprint.scores()),
                    );
                    if lane == 0 {
                        barrier_arrive(k_empty + k_at * 8);
                    }
                    advance(&mut k_slot, stages);
                    let ruled = apply_rules::<I, M, R>(
                        scores,
                        mask,
                        bias,
                        &sequence,
                        &rules,
                        &place,
                        first * tile_kv,
                        true,
                        comptime!(blueprint.tile_kv),
                        options,
                    );
                    let weighed = weigh::<R>(
                        ruled,
                        &mut state,
                        &sequence,
                        &rules,
                        &place,
                        first * tile_kv,
                        blueprint,
                        options,
                    );
                    let mut weights = pack_weights::<R, P>(weighed, blueprint);
                    for tile in first + 1..last {
                        let k_at = load::<u32>(k_slot.stage);
                        let v_at = load::<u32>(v_slot.stage);
                        barrier_wait(k_full + k_at * 8, load::<u32>(k_slot.phase));
                        barrier_wait(v_full + v_at * 8, load::<u32>(v_slot.phase));
                        let first_key = tile * tile_kv;
                        let checked = first_key < all_from || first_key + tile_kv > all_to;
                        if comptime!(options.mask) || checked {
                            let stepped = step::<I, M, R, P>(
                                sums,
                                weights,
                                q_tile,
                                k_ring + k_at * kv_bytes,
                                v_ring + v_at * kv_bytes,
                                k_empty + k_at * 8,
                                v_empty + v_at * 8,
                                mask,
                                bias,
                                &mut state,
                                &sequence,
                                &rules,
                                &place,
                                first_key,
                                true,
                                blueprint,
                                options,
                            );
                            sums = stepped.0;
                            weights = stepped.1;
                        } else {
                            let stepped = step::<I, M, R, P>(
                                sums,
                                weights,
                                q_tile,
                                k_ring + k_at * kv_bytes,
                                v_ring + v_at * kv_bytes,
                                k_empty + k_at * 8,
                                v_empty + v_at * 8,
                                mask,
                                bias,
                                &mut state,
                                &sequence,
                                &rules,
                                &place,
                                first_key,
                                false,
                                blueprint,
                                options,
                            );
                            sums = stepped.0;
                            weights = stepped.1;
                        }
                        advance(&mut k_slot, stages);
                        advance(&mut v_slot, stages);
                    }
                    let v_at = load::<u32>(v_slot.stage);
                    barrier_wait(v_full + v_at * 8, load::<u32>(v_slot.phase));
                    sums = wgmma_weights::<R, P>(
                        sums,
                        weights,
                        tile_descriptor(v_ring + v_at * kv_bytes, false),
                        comptime!(blueprint.weights()),
                    );

                    if lane == 0 {
                        barrier_arrive(v_empty + v_at * 8);
                    }
                    advance(&mut v_slot, stages);
                }
                // Products with the queries are done.
                if lane == 0 {
                    barrier_arrive(q_empty);
                }
                q_phase ^= 1;

                // 3. Finish and write.
                let upper = quad_sum(state.total_upper);
                let lower = quad_sum(state.total_lower);
                let upper_factor = select(upper == 0.0f32, 0.0f32, rules.numbers.kept / upper);
                let lower_factor = select(lower == 0.0f32, 0.0f32, rules.numbers.kept / lower);
                let out_origin = origin(&out_strides, work.batch, work.head, sequence.first_q);
                let base = output_address::<I>(out);
                #[unroll]
                for pair in 0..comptime!(blueprint.head_dim / 4) {
                    let i = comptime!(2 * pair);
                    let at = row + comptime!(8 * (pair % 2) as u32);
                    let factor = if comptime!(pair % 2 == 0) { upper_factor } else { lower_factor };
                    let register = comptime!(blueprint.score_registers() + i);
                    let low = sums.extract(register) * factor;
                    let high = sums.extract(comptime!(register + 1)) * factor;
                    let word = pack(low, high, comptime!(blueprint.dtype));
                    if at < sequence.seq_q {
                        let column = comptime!((i / 4 * 8) as u32) + 2 * quad;
                        store_word(base, out_origin + at * out_strides.row + column, word);
                    }
                }
                if quad == 0 {
                    let lse_origin = origin_of_row_values(&sequence, &rules, options);
                    let to_natural = comptime!(LN_2 as f32);
                    if row < sequence.seq_q {
                        lse[(lse_origin + row) as usize] =
                            state.peak_upper * exponent * to_natural + upper.ln();
                    }
                    if row + 8 < sequence.seq_q {
                        lse[(lse_origin + row + 8) as usize] =
                            state.peak_lower * exponent * to_natural + lower.ln();
                    }
                }
            }
            index += CUBE_COUNT_X;
        }
    }
}
