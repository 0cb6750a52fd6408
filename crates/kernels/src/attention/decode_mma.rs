//! Attention of a few queries over many keys on the tensor cores of Ampere and later, whose keys are divided among
//! cubes as the portable kernel's are (`decode.rs`).
//!
//! Reading keys and values takes the time, and what is computed beside it has to stay hidden: in 16 bits a
//! multiply-add of each number for each query does not. So a tile has 16 rows, queries of the heads that share a head
//! of keys, and of fewer the rest is zero.
//!
//! 1. All units copy the queries to shared memory.
//! 2. Each warp has tiles of keys and values of its own, every fourth one of the split, and copies them some ahead. It
//!    waits for its own copies and for no other warp.
//! 3. Scores, weights and weighted values as in the forward pass (`mma_forward.rs`).
//! 4. The warps meet once, at the end, and merge what they found.

use super::{
    decode::{Parts, Splits, keys_of_split, placed},
    decode_plan::{KeyRing, MMA_ROWS, MMA_WARPS},
    mma_tiles::{
        chunk_position, copy_rows, head_rows, left_position, right_position, weighed_position,
    },
    rules::{Heads, Rules, Sequence, origin, score_exponent},
    softmax::{
        LEAST, Queries, UNSEEN, pack_registers, quad_sum, queries_at, rescale, unseen, weigh,
        with_first,
    },
};
use crate::ptx::{
    ROW_BYTES,
    copy::{copies_commit, copies_wait, copy_16_bytes},
    global_address, load,
    mma::{MmaProduct, MmaWeights, mma_product, mma_weights},
    shared_address,
};
use cubecl::prelude::{Sequence as Elements, *};
use std::f64::consts::LN_2;

/// Numbers between rows of what warps leave for each other, besides their own: rows that follow each other lie in
/// different banks.
const GAP: usize = 8;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaDecodeBlueprint {
    /// PTX type of q, k, v and of the weights: `bf16` or `f16`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    pub(crate) ring: KeyRing,
    /// Whether the position is a number on the device.
    pub(crate) is_placed: bool,
}

impl MmaDecodeBlueprint {
    pub(crate) const UNITS: u32 = 32 * MMA_WARPS as u32;

    fn row_bytes(self) -> usize {
        2 * self.head_dim
    }

    pub(crate) fn shared_bytes(self) -> usize {
        self.ring.shared_bytes(self.row_bytes())
    }

    fn tile_bytes(self) -> usize {
        self.ring.tile_bytes(self.row_bytes())
    }

    /// Where the first warp's tiles begin: behind the queries.
    fn ring_at(self) -> usize {
        self.row_bytes().div_ceil(ROW_BYTES) * MMA_ROWS * ROW_BYTES
    }

    fn scores(self) -> MmaProduct {
        MmaProduct {
            n: self.ring.keys,
            k: self.head_dim,
            dtype: self.dtype,
            lhs_block_bytes: MMA_ROWS * ROW_BYTES,
            rhs_block_bytes: self.ring.keys * ROW_BYTES,
        }
    }

    fn weights(self) -> MmaWeights {
        MmaWeights {
            n: self.head_dim,
            k: self.ring.keys,
            dtype: self.dtype,
            block_bytes: self.ring.keys * ROW_BYTES,
        }
    }

    /// Registers of a vector that holds scores or outputs, and of one of packed weights.
    pub(crate) fn widths(self) -> [usize; 2] {
        let most = self.ring.keys.max(self.head_dim) / 2;
        [most.next_power_of_two(), self.ring.keys / 4]
    }

    /// Numbers from one row of what a warp leaves to the next.
    fn pitch(self) -> usize {
        self.head_dim + GAP
    }
}

/// What a split of the keys gives each query: see [`Parts`]. Cubes and rows are those of
/// [`attention_decode_kernel`](super::decode::attention_decode_kernel), a tile has 16 rows. The scale has to be positive.
#[cube(launch_unchecked)]
pub(crate) fn attention_decode_mma_kernel<I: Float, M: Numeric, R: Size, P: Size>(
    q: &Heads<I>,
    k: &Heads<I>,
    v: &Heads<I>,
    rules: &Rules<I, M>,
    position: &[i32],
    parts: &mut Parts<Const<4>>,
    splits: Splits,
    #[comptime] blueprint: MmaDecodeBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R, P)] _widths: [usize; 2],
) {
    let head_dim = comptime!(blueprint.head_dim);
    let (keys, stages) = comptime!((blueprint.ring.keys as u32, blueprint.ring.stages as u32));
    let (rows, warps) = comptime!((MMA_ROWS as u32, MMA_WARPS as u32));
    let tile_bytes = comptime!(blueprint.tile_bytes() as u32);
    let mut memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let mut statistics = Shared::<[f32]>::new_slice(comptime!(2 * MMA_ROWS * MMA_WARPS));
    let q_at = shared_address::<u32>(memory.as_slice());

    let sizes = &rules.sizes;
    let all_rows = sizes.group * sizes.seq_q;
    let tiles = all_rows.div_ceil(rows);
    let head_kv = CUBE_POS_Y / tiles;
    let first_row = CUBE_POS_Y % tiles * rows;
    let there = min(all_rows - first_row, rows);
    let batch = rules.batch_of(CUBE_POS_Z);
    let sequence = placed::<I, M>(rules, batch, position, splits, comptime!(blueprint.is_placed));
    let (first, end) = keys_of_split(&sequence, splits);
    let (warp, lane) = (plane_shuffle(UNIT_POS / 32, 0u32), UNIT_POS % 32);

    if first < end {
        // 1. Queries. The first of the warps' copies are of the same group.
        copy_queries(q, q_at, batch, head_kv * sizes.group, first_row, rules, blueprint);
        let at = q_at
            + comptime!(blueprint.ring_at() as u32)
            + warp * comptime!(blueprint.ring.stages as u32 * 2 * blueprint.tile_bytes() as u32);
        let k_rows =
            head_rows(global_address::<I>(&k.memory), &k.strides, batch, head_kv, 0u32, end);
        let v_rows =
            head_rows(global_address::<I>(&v.memory), &v.strides, batch, head_kv, 0u32, end);
        let mut fetched = first + warp * keys;
        #[unroll]
        for stage in 0..comptime!(stages - 1) {
            let to = at + comptime!(stage * 2 * blueprint.tile_bytes() as u32);
            if fetched < end {
                copy_rows(to, &k_rows, fetched, lane, keys, head_dim, 2usize, 32u32);
                copy_rows(to + tile_bytes, &v_rows, fetched, lane, keys, head_dim, 2usize, 32u32);
            }
            copies_commit();
            fetched += comptime!(warps * keys);
        }
        copies_wait(comptime!(stages - 2));
        sync_cube();

        let (q_row, q_chunk) = left_position(lane, 0u32);
        let (k_row, k_chunk) = right_position(lane);
        let (v_row, v_chunk) = weighed_position(lane, comptime!(blueprint.dtype));
        let row = first_row + lane / 4;
        let upper = keys_of_row(&sequence, row, end);
        let lower = keys_of_row(&sequence, row + 8, end);
        let queries = queries_at::<I, M>(
            sequence,
            row,
            lane % 4,
            score_exponent(rules),
            comptime!(blueprint.ring.keys),
            comptime!(blueprint.dtype),
        );
        let mut state = unseen();
        let mut sums = Vector::<f32, R>::new(0.0f32);
        let mut tile = first + warp * keys;
        let mut stage = 0u32;
        while tile < end {
            // 2. Also, the warp has read the tile that is overwritten next.
            copies_wait(comptime!(stages - 2));
            sync_plane();
            let next = select(stage == 0, comptime!(stages - 1).runtime(), stage - 1);
            if fetched < end {
                let to = at + next * (2 * tile_bytes);
                copy_rows(to, &k_rows, fetched, lane, keys, head_dim, 2usize, 32u32);
                copy_rows(to + tile_bytes, &v_rows, fetched, lane, keys, head_dim, 2usize, 32u32);
            }
            copies_commit();
            fetched += comptime!(warps * keys);

            // 3.
            let here = at + stage * (2 * tile_bytes);
            let product = mma_product::<R>(
                q_at + q_row,
                q_chunk,
                here + k_row,
                k_chunk,
                comptime!(blueprint.scores()),
            );
            let ruled = visible_scores::<I, M, R>(product, &queries, tile, upper, lower);
            let weighed = weigh::<I, M, R>(ruled, &mut state, &queries, tile);
            let weights = pack_registers::<R, P>(
                weighed,
                0usize,
                comptime!(blueprint.ring.keys / 2),
                comptime!(blueprint.dtype),
            );
            sums = rescale::<R>(
                sums,
                state.rescale_upper,
                state.rescale_lower,
                0usize,
                comptime!(blueprint.head_dim / 2),
            );
            sums = mma_weights::<R, P>(
                sums,
                weights,
                here + tile_bytes + v_row,
                v_chunk,
                comptime!(blueprint.weights()),
            );
            tile += comptime!(warps * keys);
            stage = select(stage == comptime!(stages - 1), 0u32, stage + 1);
        }

        // 4. Nobody copies to or reads from the tiles any more.
        sync_cube();
        let quad = lane % 4;
        let totals = (quad_sum(state.total_upper), quad_sum(state.total_lower));
        // Weights are powers of two; what splits leave each other counts in powers of e.
        let to_scores = queries.exponent * comptime!(LN_2 as f32);
        let pitch = comptime!(blueprint.pitch() as u32);
        let ring = comptime!((blueprint.ring_at() / 4) as u32);
        #[unroll]
        for half in 0..2u32 {
            let in_tile = lane / 4 + 8 * half;
            if in_tile < there {
                let own = ring + (warp * rows + in_tile) * pitch + 2 * quad;
                #[unroll]
                for pair in 0..comptime!(blueprint.head_dim / 8) {
                    let register = comptime!(4 * pair + 2 * half as usize);
                    let at = (own + comptime!(8 * pair as u32)) as usize;
                    memory[at] = u32::reinterpret(sums.extract(register));
                    memory[at + 1] = u32::reinterpret(sums.extract(comptime!(register + 1)));
                }
                if quad == 0 {
                    let (peak, total) = if comptime!(half == 0) {
                        (state.peak_upper, totals.0)
                    } else {
                        (state.peak_lower, totals.1)
                    };
                    let at = warp * rows + in_tile;
                    statistics[at as usize] = select(peak == LEAST, peak, peak * to_scores);
                    statistics[(comptime!(warps * rows) + at) as usize] = total;
                }
            }
        }
        sync_cube();
        let vectors = comptime!(blueprint.head_dim as u32 / 4);
        let of_head = (batch * sizes.heads_q + head_kv * sizes.group) * sizes.seq_q + first_row;
        let mut index = UNIT_POS;
        while index < there * vectors {
            let (row, column) = (index / vectors, index % vectors);
            let mut most = statistics[row as usize];
            #[unroll]
            for other in 1..warps {
                most = max(most, statistics[(comptime!(other * rows) + row) as usize]);
            }
            let mut total = 0.0f32;
            let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for other in 0..warps {
                let of_warp = comptime!(other * rows) + row;
                let factor = (statistics[of_warp as usize] - most).exp();
                total += statistics[(comptime!(warps * rows) + of_warp) as usize] * factor;
                #[unroll]
                for i in 0..4usize {
                    let at = ring + of_warp * pitch + 4 * column + comptime!(i as u32);
                    let number = f32::reinterpret(memory[at as usize]);
                    sum.insert(i, sum.extract(i) + number * factor);
                }
            }
            let at = (of_head + row) * splits.count + CUBE_POS_X;
            parts.sums[(at * vectors + column) as usize] = sum;
            if column == 0 {
                parts.most[at as usize] = most;
                parts.total[at as usize] = total;
            }
            index += comptime!(MmaDecodeBlueprint::UNITS);
        }
    }
}

/// Starts copies of a tile's queries, of all units of the cube. Rows that are not there become zero, and nobody asks
/// for what they find.
#[cube]
fn copy_queries<I: Float, M: Numeric>(
    q: &Heads<I>,
    destination: u32,
    batch: u32,
    first_head: u32,
    first_row: u32,
    rules: &Rules<I, M>,
    #[comptime] blueprint: MmaDecodeBlueprint,
) {
    let sizes = &rules.sizes;
    let chunks = comptime!(blueprint.row_bytes() as u32 / 16);
    let memory = global_address::<I>(&q.memory);
    let mut index = UNIT_POS;
    while index < comptime!(MMA_ROWS as u32 * blueprint.row_bytes() as u32 / 16) {
        let (in_tile, chunk) = (index / chunks, index % chunks);
        let row = first_row + in_tile;
        let mut bytes = 0u32;
        let mut from = memory;
        if row < sizes.group * sizes.seq_q {
            bytes = 16u32.runtime();
            let head = first_head + row / sizes.seq_q;
            let element = origin(&q.strides, batch, head, row % sizes.seq_q) + 8 * chunk;
            from += u64::cast_from(element) * 2;
        }
        let at = destination + chunk_position(in_tile, chunk, comptime!(MMA_ROWS as u32));
        copy_16_bytes(at, load::<u64>(from), load::<u32>(bytes));
        index += comptime!(MmaDecodeBlueprint::UNITS);
    }
}

/// Keys before `end` that a row's query sees: the first and the one after the last.
#[cube]
fn keys_of_row<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    row: u32,
    end: u32,
) -> (u32, u32) {
    let query = row % sequence.seq_q;
    let seen = sequence.keys_of(query, query + 1);
    (seen.0, min(seen.1, end))
}

/// Scores of a tile of keys, bounded, and what is not seen where a row does not see the key.
#[cube]
fn visible_scores<I: Float, M: Numeric, R: Size>(
    scores: Vector<f32, R>,
    queries: &Queries<'_, I, M>,
    first_key: u32,
    upper: (u32, u32),
    lower: (u32, u32),
) -> Vector<f32, R> {
    let rules = queries.sequence.rules;
    let count = comptime!(queries.tile_kv / 2);
    let mut ruled = Elements::<f32>::new();
    #[unroll]
    for i in 0..count {
        let key = first_key + comptime!((i / 4 * 8 + i % 2) as u32) + 2 * queries.quad;
        let (from, to) = if comptime!((i / 2) % 2 == 0) { upper } else { lower };
        let mut score = scores.extract(i);
        if comptime!(rules.options.softcap) {
            score = rules.bounded_score(score);
        }
        ruled.push(select(key >= from && key < to, score, UNSEEN));
    }
    with_first::<R>(scores, ruled, count)
}
