//! The backward pass on the tensor cores of Ampere and later: one kernel for tiles of queries and for
//! tiles of keys.
//!
//! A cube's rows of one side stay in shared memory, 16 for each of its warps. All units copy tiles of
//! the other side's rows there, one ahead where there is room. [`pairs`](super::pairs) tells what is computed. Sums of
//! two gradients of heads above 128 do not fit the registers, so each has a launch of its own.

use super::{
    mma_plan::{MOST_OWN_COLUMNS, MOVING, mma_bytes, rows_bytes},
    mma_tiles::{HeadRows, copy_rows, head_rows, left_position, right_position, weighed_position},
    pairs::{GradientRows, is_checked, open_keys, pair_gradients, pair_tile, store, tiles_of},
    rules::{Heads, Rules, Side, Strides, origin, score_exponent},
    softmax::pack_registers,
};
use crate::{
    Pass,
    ptx::{
        ROW_BYTES,
        copy::{copies_commit, copies_wait_all},
        global_address,
        mma::{MmaProduct, MmaWeights, element_bytes, mma_product, mma_products, mma_weights},
        shared_address,
    },
};
use cubecl::prelude::*;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaBackwardBlueprint {
    /// PTX type of the tensors and of the weights: `bf16`, `f16` or `tf32`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    pub(crate) warps: usize,
    /// Pairs of tiles that are held at once of those that come in: one or two.
    pub(crate) pairs: usize,
    pub(crate) gives: Gives,
}

/// Which gradients of the rows that stay a launch gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Gives {
    /// dq or dk.
    First,
    /// dv.
    Second,
    /// dk and dv.
    Both,
}

impl Gives {
    /// What the launches give that the gradients of a side take.
    pub(crate) fn of_launches(side: Side, head_dim: usize) -> &'static [Self] {
        match side {
            Side::Queries => &[Self::First],
            Side::Keys if head_dim <= MOST_OWN_COLUMNS => &[Self::Both],
            Side::Keys => &[Self::First, Self::Second],
        }
    }
}

impl MmaBackwardBlueprint {
    pub(crate) fn units(self) -> u32 {
        32 * self.warps as u32
    }

    /// Rows that stay.
    fn fixed(self) -> usize {
        16 * self.warps
    }

    /// Bytes of a row.
    fn row_bytes(self) -> usize {
        self.head_dim * element_bytes(self.dtype)
    }

    fn bytes(self, rows: usize) -> usize {
        rows_bytes(self.row_bytes(), rows)
    }

    /// What stays, and pairs of tiles that come in.
    pub(crate) fn shared_bytes(self) -> usize {
        mma_bytes(Pass::Backward, self.row_bytes(), self.fixed(), MOVING, self.pairs)
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
        let packed = MOVING / 8 * element_bytes(self.dtype);
        [(self.head_dim / 2).next_power_of_two().max(MOVING), packed]
    }
}

/// Starts copies of a tile of each tensor that comes in.
#[cube]
fn copy_pair(
    at: u32,
    first: &HeadRows,
    second: &HeadRows,
    row: u32,
    #[comptime] blueprint: MmaBackwardBlueprint,
) {
    let (units, head_dim) = comptime!((blueprint.units(), blueprint.head_dim));
    let element = comptime!(element_bytes(blueprint.dtype));
    let (rows, bytes) = comptime!((MOVING as u32, blueprint.bytes(MOVING) as u32));
    copy_rows(at, first, row, UNIT_POS, rows, head_dim, element, units);
    copy_rows(at + bytes, second, row, UNIT_POS, rows, head_dim, element, units);
}

/// dq to `first_out`, or dk to it and dv to `second_out`, as far as the launch gives them; see
/// [`attention_backward_kv_portable_kernel`] for what they are. Cubes: tiles of rows along x, heads of
/// that side along y, sequences along z. The scale has to be positive.
///
/// [`attention_backward_kv_portable_kernel`]: super::backward::attention_backward_kv_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_mma_kernel<I: Float, M: Numeric, R: Size, P: Size>(
    first_fixed: &Heads<I>,
    second_fixed: &Heads<I>,
    first_moving: &Heads<I>,
    second_moving: &Heads<I>,
    rules: &Rules<I, M>,
    terms: &[f32],
    first_out: &mut [I],
    second_out: &mut [I],
    out_strides: Strides,
    #[comptime] side: Side,
    #[comptime] blueprint: MmaBackwardBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R, P)] _widths: [usize; 2],
) {
    let (units, head_dim) = comptime!((blueprint.units(), blueprint.head_dim));
    let element = comptime!(element_bytes(blueprint.dtype));
    let fixed = comptime!(blueprint.fixed() as u32);
    let fixed_bytes = comptime!(blueprint.bytes(blueprint.fixed()) as u32);
    let moving_bytes = comptime!(blueprint.bytes(MOVING) as u32);
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let fixed_at = shared_address::<u32>(memory.as_slice());
    let ring = fixed_at + 2 * fixed_bytes;

    let (first_row, batch) = (CUBE_POS_X * fixed, rules.batch_of(CUBE_POS_Z));
    let group = rules.sizes.group;
    let (first_head, members) = match comptime!(side) {
        Side::Queries => (CUBE_POS_Y, 1u32.runtime()),
        Side::Keys => (CUBE_POS_Y * group, group),
    };
    let own = rules.sequence(batch, first_head);
    let (start, end, moving_start, moving_end) = match comptime!(side) {
        Side::Queries => (own.first_q, own.seq_q, own.first_kv, own.seq_kv),
        Side::Keys => (own.first_kv, own.seq_kv, own.first_q, own.seq_q),
    };
    if first_row < end {
        let tiles = tiles_of(&own, first_row, fixed, side);
        let tiles_of_member = tiles.1 - min(tiles.0, tiles.1);
        let count = tiles_of_member * members;
        // A cube without tiles finds the next one's head, too.
        let of_member = max(tiles_of_member, 1);
        let memory = global_address::<I>(&first_fixed.memory);
        let first_rows = head_rows(memory, &first_fixed.strides, batch, CUBE_POS_Y, start, end);
        let memory = global_address::<I>(&second_fixed.memory);
        let second_rows = head_rows(memory, &second_fixed.strides, batch, CUBE_POS_Y, start, end);
        copy_rows(fixed_at, &first_rows, first_row, UNIT_POS, fixed, head_dim, element, units);
        copy_rows(
            fixed_at + fixed_bytes,
            &second_rows,
            first_row,
            UNIT_POS,
            fixed,
            head_dim,
            element,
            units,
        );
        let first_memory = global_address::<I>(&first_moving.memory);
        let second_memory = global_address::<I>(&second_moving.memory);

        let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
        let quad = lane % 4;
        let warp_row = first_row + warp * 16;
        let row = warp_row + lane / 4;
        let (left_row, left_chunk) = left_position(lane, warp * 16);
        let (right_row, right_chunk) = right_position(lane);
        let (weighed_row, weighed_chunk) = weighed_position(lane, comptime!(blueprint.dtype));
        let exponent = score_exponent(rules);
        let mut first_sums = Vector::<f32, R>::new(0.0f32);
        let mut second_sums = Vector::<f32, R>::new(0.0f32);
        // One round more than tiles: each copies the next tile and computes the last one.
        for round in 0..count + 1 {
            copies_wait_all();
            // Everyone's copies are there, and everyone has read the pair that is overwritten next.
            sync_cube();
            let head = match comptime!(side) {
                Side::Queries => CUBE_POS_Y / group,
                Side::Keys => first_head + round / of_member,
            };
            let next = (tiles.0 + round % of_member) * comptime!(MOVING as u32);
            let (start, end) = (moving_start, moving_end);
            let first_source =
                head_rows(first_memory, &first_moving.strides, batch, head, start, end);
            let second_source =
                head_rows(second_memory, &second_moving.strides, batch, head, start, end);
            if comptime!(blueprint.pairs == 2) {
                if round < count {
                    let at = ring + (round & 1) * (2 * moving_bytes);
                    copy_pair(at, &first_source, &second_source, next, blueprint);
                }
                copies_commit();
            }
            if round > 0 {
                let index = round - 1;
                let first_at = match comptime!(blueprint.pairs) {
                    2 => ring + (index & 1) * (2 * moving_bytes),
                    _ => ring,
                };
                let second_at = first_at + moving_bytes;
                let head = first_head + index / of_member;
                let sequence = rules.sequence(batch, head);
                let first_column = (tiles.0 + index % of_member) * comptime!(MOVING as u32);
                let tile =
                    pair_tile::<I, M>(sequence, row, first_column, quad, exponent, side, false);
                let products = if comptime!(blueprint.gives == Gives::Second) {
                    mma_product::<R>(
                        fixed_at + left_row,
                        left_chunk,
                        first_at + right_row,
                        right_chunk,
                        comptime!(blueprint.products()),
                    )
                } else {
                    mma_products::<R>(
                        fixed_at + left_row,
                        first_at + right_row,
                        fixed_at + fixed_bytes + left_row,
                        second_at + right_row,
                        left_chunk,
                        right_chunk,
                        comptime!(blueprint.products()),
                    )
                };
                let open = open_keys(&tile.sequence, warp_row, first_column, 16u32, side);
                let checked = is_checked(&tile.sequence, warp_row, first_column, open, 16u32, side);
                let made = pair_gradients::<I, M, R>(products, terms, &tile, checked, false);
                let dtype = comptime!(blueprint.dtype);
                if comptime!(blueprint.gives != Gives::First) {
                    second_sums = mma_weights::<R, P>(
                        second_sums,
                        pack_registers::<R, P>(made, 0usize, 32usize, dtype),
                        second_at + weighed_row,
                        weighed_chunk,
                        comptime!(blueprint.sums()),
                    );
                }
                if comptime!(blueprint.gives != Gives::Second) {
                    first_sums = mma_weights::<R, P>(
                        first_sums,
                        pack_registers::<R, P>(made, 32usize, 32usize, dtype),
                        first_at + weighed_row,
                        weighed_chunk,
                        comptime!(blueprint.sums()),
                    );
                }
            }
            if comptime!(blueprint.pairs == 1) {
                // Everyone has read the only pair.
                sync_cube();
                if round < count {
                    copy_pair(ring, &first_source, &second_source, next, blueprint);
                }
                copies_commit();
            }
        }
        let origin = origin(&out_strides, batch, CUBE_POS_Y, start);
        let rows = GradientRows { origin, stride: out_strides.row, row, end, quad };
        let dtype = comptime!(blueprint.dtype);
        if comptime!(blueprint.gives != Gives::Second) {
            let scale = rules.numbers.scale;
            store::<I, R>(first_sums, 0usize, first_out, &rows, scale, head_dim, dtype);
        }
        if comptime!(blueprint.gives != Gives::First) {
            store::<I, R>(second_sums, 0usize, second_out, &rows, 1.0f32, head_dim, dtype);
        }
    }
}
