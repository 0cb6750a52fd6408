//! The backward pass on the tensor cores of Ampere and later: one kernel for tiles of queries and for
//! tiles of keys.
//!
//! A cube's rows of one side stay in shared memory, 16 for each of its warps. All units copy tiles of
//! the other side's rows there, one ahead. [`pairs`](super::pairs) tells what is computed.

use super::{
    mma_tiles::{Rows, copy_rows, left_position, right_position},
    pairs::{MOVING, Place, is_checked, pair_gradients, store, tiles_of},
    pipeline::Side,
    rules::{
        Options, RowStrides, Rules, all_rows, batch_of, origin, origin_of_row_values,
        score_exponent, seeds_of, sequence_of,
    },
    softmax::{kept_bits, pack_registers},
};
use crate::ptx::{
    ROW_BYTES,
    copy::{copies_commit, copies_wait_all},
    global_address,
    mma::{MmaProduct, MmaWeights, mma_products, mma_weights},
    shared_address,
};
use cubecl::prelude::*;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaBackwardBlueprint {
    /// PTX type of the tensors and of the weights: `bf16` or `f16`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 128.
    pub(crate) head_dim: usize,
    pub(crate) warps: usize,
}

impl MmaBackwardBlueprint {
    pub(crate) fn units(self) -> u32 {
        32 * self.warps as u32
    }

    /// Rows that stay.
    fn fixed(self) -> usize {
        16 * self.warps
    }

    fn bytes(self, rows: usize) -> usize {
        self.head_dim.div_ceil(64) * rows * ROW_BYTES
    }

    /// What stays, and two pairs of tiles that come in.
    pub(crate) fn shared_bytes(self) -> usize {
        2 * self.bytes(self.fixed()) + 4 * self.bytes(MOVING)
    }

    fn products(self) -> MmaProduct {
        MmaProduct {
            n: MOVING,
            k: self.head_dim,
            dtype: self.dtype,
            lhs_block_bytes: self.fixed() * ROW_BYTES,
            rhs_block_bytes: MOVING * ROW_BYTES,
        }
    }

    fn sums(self) -> MmaWeights {
        MmaWeights {
            n: self.head_dim,
            k: MOVING,
            dtype: self.dtype,
            block_bytes: MOVING * ROW_BYTES,
        }
    }

    /// Registers of a vector that holds both products or a sum, and of one of packed weights.
    pub(crate) fn widths(self) -> [usize; 2] {
        [(self.head_dim / 2).next_power_of_two().max(MOVING), MOVING / 4]
    }
}

/// Where the tensors lie of which rows stay, and of which they come in.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct TensorStrides {
    pub(crate) first: RowStrides,
    pub(crate) second: RowStrides,
}

/// dq to `first_out`, or dk to it and dv to `second_out`; see
/// [`attention_backward_kv_portable_kernel`] for what they are. Cubes: tiles of rows along x, heads of
/// that side along y, sequences along z. The scale has to be positive.
///
/// [`attention_backward_kv_portable_kernel`]: super::backward::attention_backward_kv_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_mma_kernel<I: Float, M: Numeric, R: Size, P: Size>(
    first_fixed: &[I],
    second_fixed: &[I],
    first_moving: &[I],
    second_moving: &[I],
    mask: &[M],
    bias: &[I],
    starts: &[u32],
    terms: &[f32],
    first_out: &mut [I],
    second_out: &mut [I],
    rules: Rules,
    fixed_strides: TensorStrides,
    moving_strides: TensorStrides,
    out_strides: RowStrides,
    #[comptime] side: Side,
    #[comptime] blueprint: MmaBackwardBlueprint,
    #[comptime] options: Options,
    #[define(I)] _element: ElemType,
    #[define(M)] _mask_type: ElemType,
    #[define(R)] _registers: usize,
    #[define(P)] _packed: usize,
) {
    let (units, head_dim) = comptime!((blueprint.units(), blueprint.head_dim));
    let fixed = comptime!(blueprint.fixed() as u32);
    let fixed_bytes = comptime!(blueprint.bytes(blueprint.fixed()) as u32);
    let moving_bytes = comptime!(blueprint.bytes(MOVING) as u32);
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let fixed_at = shared_address::<u32>(memory.as_slice());
    let ring = fixed_at + 2 * fixed_bytes;

    let (first_row, batch) = (CUBE_POS_X * fixed, batch_of(CUBE_POS_Z, &rules));
    let group = rules.sizes.group;
    let (first_head, members) = match comptime!(side) {
        Side::Queries => (CUBE_POS_Y, 1u32.runtime()),
        Side::Keys => (CUBE_POS_Y * group, group),
    };
    let own = sequence_of(starts, &rules, batch, first_head, options);
    let (start, end, moving_start, moving_end) = match comptime!(side) {
        Side::Queries => (own.first_q, own.seq_q, own.first_kv, own.seq_kv),
        Side::Keys => (own.first_kv, own.seq_kv, own.first_q, own.seq_q),
    };
    if first_row < end {
        let tiles = tiles_of(&own, &rules, first_row, fixed, side, options);
        let of_member = tiles.1 - min(tiles.0, tiles.1);
        let count = of_member * members;
        let first_rows = Rows {
            memory: global_address::<I>(first_fixed),
            origin: origin(&fixed_strides.first, batch, CUBE_POS_Y, start),
            stride: fixed_strides.first.row,
            end,
        };
        let second_rows = Rows {
            memory: global_address::<I>(second_fixed),
            origin: origin(&fixed_strides.second, batch, CUBE_POS_Y, start),
            stride: fixed_strides.second.row,
            end,
        };
        copy_rows(fixed_at, &first_rows, first_row, fixed, head_dim, units);
        copy_rows(fixed_at + fixed_bytes, &second_rows, first_row, fixed, head_dim, units);
        let first_memory = global_address::<I>(first_moving);
        let second_memory = global_address::<I>(second_moving);

        let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
        let quad = lane % 4;
        let warp_row = first_row + warp * 16;
        let row = warp_row + lane / 4;
        let (left_row, left_chunk) = left_position(lane, warp * 16);
        let (right_row, right_chunk) = right_position(lane, true);
        let (weighed_row, weighed_chunk) = right_position(lane, false);
        let exponent = score_exponent(&rules, options);
        let mut first_sums = Vector::<f32, R>::new(0.0f32);
        let mut second_sums = Vector::<f32, R>::new(0.0f32);
        // One round more than tiles: each copies the next tile and computes the last one.
        for round in 0..count + 1 {
            copies_wait_all();
            // Everyone's copies are there, and everyone has read the pair that is overwritten next.
            sync_cube();
            if round < count {
                let at = ring + (round & 1) * (2 * moving_bytes);
                let head = match comptime!(side) {
                    Side::Queries => CUBE_POS_Y / group,
                    Side::Keys => first_head + round / of_member,
                };
                let from = (tiles.0 + round % of_member) * comptime!(MOVING as u32);
                let first_source = Rows {
                    memory: first_memory,
                    origin: origin(&moving_strides.first, batch, head, moving_start),
                    stride: moving_strides.first.row,
                    end: moving_end,
                };
                let second_source = Rows {
                    memory: second_memory,
                    origin: origin(&moving_strides.second, batch, head, moving_start),
                    stride: moving_strides.second.row,
                    end: moving_end,
                };
                let rows = comptime!(MOVING as u32);
                copy_rows(at, &first_source, from, rows, head_dim, units);
                copy_rows(at + moving_bytes, &second_source, from, rows, head_dim, units);
            }
            copies_commit();
            if round > 0 {
                let index = round - 1;
                let first_at = ring + (index & 1) * (2 * moving_bytes);
                let second_at = first_at + moving_bytes;
                let head = first_head + index / of_member;
                let sequence = sequence_of(starts, &rules, batch, head, options);
                let first_column = (tiles.0 + index % of_member) * comptime!(MOVING as u32);
                let deltas = origin_of_row_values(&sequence, &rules, options);
                let rows = all_rows(&rules, options);
                // Before the products, which take the registers that the generator needs.
                let mut kept = 0u32;
                if comptime!(options.dropout) {
                    let (seeds, threshold) = (seeds_of(&sequence, &rules), rules.numbers.threshold);
                    kept = kept_bits(row, first_column + 2 * quad, threshold, &seeds, side);
                }
                let place = Place { row, first_column, quad, deltas, rows, exponent, kept };
                let products = mma_products::<R>(
                    fixed_at + left_row,
                    first_at + right_row,
                    fixed_at + fixed_bytes + left_row,
                    second_at + right_row,
                    left_chunk,
                    right_chunk,
                    comptime!(blueprint.products()),
                );
                let checked =
                    is_checked(&sequence, &rules, warp_row, first_column, 16u32, side, options);
                let made = if comptime!(options.mask || options.dropout) || checked {
                    pair_gradients::<I, M, R>(
                        products, mask, bias, terms, &sequence, &rules, &place, true, side, options,
                    )
                } else {
                    pair_gradients::<I, M, R>(
                        products, mask, bias, terms, &sequence, &rules, &place, false, side,
                        options,
                    )
                };
                let dtype = comptime!(blueprint.dtype);
                if comptime!(side == Side::Keys) {
                    second_sums = mma_weights::<R, P>(
                        second_sums,
                        pack_registers::<R, P>(made, 0usize, 32usize, dtype),
                        second_at + weighed_row,
                        weighed_chunk,
                        comptime!(blueprint.sums()),
                    );
                }
                first_sums = mma_weights::<R, P>(
                    first_sums,
                    pack_registers::<R, P>(made, 32usize, 32usize, dtype),
                    first_at + weighed_row,
                    weighed_chunk,
                    comptime!(blueprint.sums()),
                );
            }
        }
        let out_origin = origin(&out_strides, batch, CUBE_POS_Y, start);
        let (stride, scale) = (out_strides.row, rules.numbers.scale);
        let dtype = comptime!(blueprint.dtype);
        store::<I, R>(
            first_sums, first_out, out_origin, stride, row, end, quad, scale, head_dim, dtype,
        );
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
                head_dim,
                dtype,
            );
        }
    }
}
