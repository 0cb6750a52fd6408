//! The forward pass on the tensor cores of Ampere and later: a cube for each tile of queries of a
//! head, 16 queries for each of its warps.
//!
//! 1. All units copy the queries to shared memory, and a tile of keys and one of values at a time,
//!    one pair ahead.
//! 2. Each warp multiplies its queries with the keys, makes weights of the scores, which stay in
//!    registers, and multiplies them with the values (Dao, "FlashAttention-2", 2023).
//! 3. It divides by the sums of the weights and writes.

use super::{
    mma_plan::{mma_bytes, rows_bytes},
    mma_tiles::{copy_rows, head_rows, left_position, right_position, weighed_position},
    rules::{Heads, Rules, keys_of_all, score_exponent},
    softmax::{apply_rules, pack_registers, queries_at, rescale, unseen, weigh, write_rows},
};
use crate::{
    Pass,
    ptx::{
        ROW_BYTES,
        copy::{copies_commit, copies_wait_all},
        global_address,
        mma::{MmaProduct, MmaWeights, element_bytes, mma_product, mma_weights},
        shared_address,
    },
};
use cubecl::prelude::*;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaForwardBlueprint {
    /// PTX type of q, k, v and of the weights: `bf16`, `f16` or `tf32`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    pub(crate) warps: usize,
    /// Keys of a tile, a multiple of 64 or 32.
    pub(crate) tile_kv: usize,
}

impl MmaForwardBlueprint {
    pub(crate) fn units(self) -> u32 {
        32 * self.warps as u32
    }

    fn tile_q(self) -> usize {
        16 * self.warps
    }

    /// Bytes of a row.
    fn row_bytes(self) -> usize {
        self.head_dim * element_bytes(self.dtype)
    }

    fn bytes(self, rows: usize) -> usize {
        rows_bytes(self.row_bytes(), rows)
    }

    /// Queries, and two pairs of keys and values.
    pub(crate) fn shared_bytes(self) -> usize {
        mma_bytes(Pass::Forward, self.row_bytes(), self.tile_q(), self.tile_kv, 2)
    }

    fn scores(self) -> MmaProduct {
        MmaProduct {
            n: self.tile_kv,
            k: self.head_dim,
            dtype: self.dtype,
            lhs_block_bytes: self.tile_q() * ROW_BYTES,
            rhs_block_bytes: self.tile_kv * ROW_BYTES,
        }
    }

    fn weights(self) -> MmaWeights {
        MmaWeights {
            n: self.head_dim,
            k: self.tile_kv,
            dtype: self.dtype,
            block_bytes: self.tile_kv * ROW_BYTES,
        }
    }

    /// Registers of a vector that holds scores or outputs, and of one of packed weights.
    pub(crate) fn widths(self) -> [usize; 2] {
        let most = self.tile_kv.max(self.head_dim) / 2;
        [most.next_power_of_two(), self.tile_kv / 8 * element_bytes(self.dtype)]
    }
}

/// The forward pass; see [`attention_forward_portable_kernel`] for what it computes. The scale has to
/// be positive. Cubes: tiles of queries along x, heads along y, sequences along z.
///
/// [`attention_forward_portable_kernel`]: super::forward::attention_forward_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_forward_mma_kernel<I: Float, M: Numeric, R: Size, P: Size>(
    q: &Heads<I>,
    k: &Heads<I>,
    v: &Heads<I>,
    rules: &Rules<I, M>,
    out: &mut Heads<I>,
    lse: &mut [f32],
    tiles: u32,
    #[comptime] blueprint: MmaForwardBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R, P)] _widths: [usize; 2],
) {
    let (tile_q, tile_kv) = comptime!((blueprint.tile_q() as u32, blueprint.tile_kv as u32));
    let kv_bytes = comptime!(blueprint.bytes(blueprint.tile_kv) as u32);
    let (units, head_dim) = comptime!((blueprint.units(), blueprint.head_dim));
    let element = comptime!(element_bytes(blueprint.dtype));
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let q_at = shared_address::<u32>(memory.as_slice());
    let ring = q_at + comptime!(blueprint.bytes(blueprint.tile_q()) as u32);

    let (head, batch) = (CUBE_POS_Y, rules.batch_of(CUBE_POS_Z));
    let sequence = rules.sequence(batch, head);
    // The last queries first: they may see the most keys.
    let first_row = (tiles - 1 - CUBE_POS_X) * tile_q;
    if first_row < sequence.seq_q {
        let keys = sequence.keys_of(first_row, min(first_row + tile_q, sequence.seq_q));
        let (first, last) = (keys.0 / tile_kv, keys.1.div_ceil(tile_kv));
        let head_kv = head / rules.sizes.group;
        let (first_q, first_kv) = (sequence.first_q, sequence.first_kv);
        let (seq_q, seq_kv) = (sequence.seq_q, sequence.seq_kv);
        let q_memory = global_address::<I>(&q.memory);
        let q_rows = head_rows(q_memory, &q.strides, batch, head, first_q, seq_q);
        let k_memory = global_address::<I>(&k.memory);
        let k_rows = head_rows(k_memory, &k.strides, batch, head_kv, first_kv, seq_kv);
        let v_memory = global_address::<I>(&v.memory);
        let v_rows = head_rows(v_memory, &v.strides, batch, head_kv, first_kv, seq_kv);
        copy_rows(q_at, &q_rows, first_row, UNIT_POS, tile_q, head_dim, element, units);
        if first < last {
            copy_rows(ring, &k_rows, first * tile_kv, UNIT_POS, tile_kv, head_dim, element, units);
            copy_rows(
                ring + kv_bytes,
                &v_rows,
                first * tile_kv,
                UNIT_POS,
                tile_kv,
                head_dim,
                element,
                units,
            );
        }
        copies_commit();

        let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
        let warp_row = first_row + warp * 16;
        let (q_row, q_chunk) = left_position(lane, warp * 16);
        let (k_row, k_chunk) = right_position(lane);
        let (v_row, v_chunk) = weighed_position(lane, comptime!(blueprint.dtype));
        let exponent = score_exponent(rules);
        let queries = queries_at::<I, M>(
            sequence,
            warp_row + lane / 4,
            lane % 4,
            exponent,
            comptime!(blueprint.tile_kv),
            comptime!(blueprint.dtype),
        );
        let (all_from, all_to) = keys_of_all(&queries.sequence, warp_row, 16u32);
        let mut state = unseen();
        let mut sums = Vector::<f32, R>::new(0.0f32);
        for tile in first..last {
            copies_wait_all();
            // Everyone's copies are there, and everyone has read the pair that is overwritten next.
            sync_cube();
            let at = ring + ((tile - first) & 1) * (2 * kv_bytes);
            if tile + 1 < last {
                let next = ring + ((tile + 1 - first) & 1) * (2 * kv_bytes);
                let row = (tile + 1) * tile_kv;
                copy_rows(next, &k_rows, row, UNIT_POS, tile_kv, head_dim, element, units);
                copy_rows(
                    next + kv_bytes,
                    &v_rows,
                    row,
                    UNIT_POS,
                    tile_kv,
                    head_dim,
                    element,
                    units,
                );
            }
            copies_commit();
            let scores = mma_product::<R>(
                q_at + q_row,
                q_chunk,
                at + k_row,
                k_chunk,
                comptime!(blueprint.scores()),
            );
            let first_key = tile * tile_kv;
            let is_checked = first_key < all_from || first_key + tile_kv > all_to;
            let ruled = apply_rules::<I, M, R>(scores, &queries, first_key, is_checked);
            let weighed = weigh::<I, M, R>(ruled, &mut state, &queries, first_key);
            let weights = pack_registers::<R, P>(
                weighed,
                0usize,
                comptime!(blueprint.tile_kv / 2),
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
                at + kv_bytes + v_row,
                v_chunk,
                comptime!(blueprint.weights()),
            );
        }
        write_rows::<I, M, R>(sums, 0usize, &state, &queries, out, lse, head_dim);
    }
}
