//! The gradient of a bias on the tensor cores of Ampere and later.
//!
//! `ds = p (d dout v^T - delta)` of [`pairs`](super::pairs) is that gradient. A cube computes a tile of it, 64 keys wide,
//! for one head and some sequences. A bias that sequences share is added up over them in registers, so that not every
//! pair of every sequence is written. The kernel goes beside the one that gives dq, dk and dv, whichever that is.

use super::{
    mma_plan::{MOVING, rows_bytes},
    mma_tiles::{HeadRows, copy_rows, head_rows, left_position, right_position},
    pairs::{is_checked, open_keys, pair_gradients, pair_tile, tiles_of},
    rules::{Heads, Rules, Side, score_exponent},
};
use crate::ptx::{
    ROW_BYTES,
    copy::{copies_commit, copies_wait_all},
    global_address,
    mma::{MmaProduct, element_bytes, mma_products},
    shared_address,
};
use cubecl::prelude::*;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaBiasBlueprint {
    /// PTX type of the tensors: `bf16`, `f16` or `tf32`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    /// Each has 16 queries.
    pub(crate) warps: usize,
    /// Sequences of which the tiles are held at once: one or two.
    pub(crate) stages: usize,
}

impl MmaBiasBlueprint {
    pub(crate) fn units(self) -> u32 {
        32 * self.warps as u32
    }

    fn queries(self) -> usize {
        16 * self.warps
    }

    fn bytes(self, rows: usize) -> usize {
        rows_bytes(self.head_dim * element_bytes(self.dtype), rows)
    }

    /// Of a sequence: tiles of q and dout, then of k and v.
    fn stage_bytes(self) -> usize {
        2 * (self.bytes(self.queries()) + self.bytes(MOVING))
    }

    fn products(self) -> MmaProduct {
        MmaProduct {
            n: MOVING,
            k: self.head_dim,
            dtype: self.dtype,
            lhs_block_bytes: self.queries() * ROW_BYTES,
            rhs_block_bytes: MOVING * ROW_BYTES,
        }
    }
}

/// The rows of a head of a tensor, in sequences that follow each other.
#[derive(CubeType, Clone, Copy)]
struct Source {
    /// Of the first sequence.
    rows: HeadRows,
    /// From a sequence to the next one, in elements.
    step: u32,
    /// The first row of the tile.
    first: u32,
}

#[cube]
fn source<I: Float>(tensor: &Heads<I>, sequence: u32, head: u32, first: u32, end: u32) -> Source {
    let memory = global_address::<I>(&tensor.memory);
    let rows = head_rows(memory, &tensor.strides, sequence, head, 0u32, end);
    Source { rows, step: tensor.strides.batch, first }
}

#[cube]
impl Source {
    /// Starts copies of the tile of sequence `index`.
    fn copy(
        &self,
        index: u32,
        destination: u32,
        #[comptime] rows: u32,
        #[comptime] blueprint: MmaBiasBlueprint,
    ) {
        let tile = HeadRows {
            memory: self.rows.memory,
            origin: self.rows.origin + index * self.step,
            stride: self.rows.stride,
            end: self.rows.end,
        };
        let (head_dim, units) = comptime!((blueprint.head_dim, blueprint.units()));
        let element = comptime!(element_bytes(blueprint.dtype));
        copy_rows(destination, &tile, self.first, UNIT_POS, rows, head_dim, element, units);
    }
}

/// What a cube reads of each sequence.
#[derive(CubeType)]
struct Sources {
    q: Source,
    dout: Source,
    k: Source,
    v: Source,
}

#[cube]
impl Sources {
    /// Starts copies of the tiles of sequence `index` to the stage at `destination`.
    fn copy(&self, index: u32, destination: u32, #[comptime] blueprint: MmaBiasBlueprint) {
        let (queries, keys) = comptime!((blueprint.queries() as u32, MOVING as u32));
        let query_bytes = comptime!(blueprint.bytes(blueprint.queries()) as u32);
        let key_bytes = comptime!(blueprint.bytes(MOVING) as u32);
        self.q.copy(index, destination, queries, blueprint);
        self.dout.copy(index, destination + query_bytes, queries, blueprint);
        self.k.copy(index, destination + 2 * query_bytes, keys, blueprint);
        self.v.copy(index, destination + 2 * query_bytes + key_bytes, keys, blueprint);
    }
}

/// The gradient of the bias for every pair, in parts of so many sequences: `[parts, heads_q, seq_q, seq_kv]`. The cap's
/// slope is not in it, since the bias is added behind the cap. Pairs that are not seen get zeros.
///
/// Cubes: tiles of queries by tiles of keys along x, heads of queries along y, parts along z. The scale has to be positive.
#[cube(launch_unchecked)]
pub(crate) fn attention_bias_gradient_mma_kernel<I: Float, M: Numeric, R: Size>(
    q: &Heads<I>,
    dout: &Heads<I>,
    k: &Heads<I>,
    v: &Heads<I>,
    rules: &Rules<I, M>,
    terms: &[f32],
    dbias: &mut [f32],
    sequences_of_part: u32,
    key_tiles: u32,
    #[comptime] blueprint: MmaBiasBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R)] _width: usize,
) {
    let (queries, keys) = comptime!((blueprint.queries() as u32, MOVING as u32));
    let query_bytes = comptime!(blueprint.bytes(blueprint.queries()) as u32);
    let key_bytes = comptime!(blueprint.bytes(MOVING) as u32);
    let stage_bytes = comptime!(blueprint.stage_bytes() as u32);
    let stages = comptime!(blueprint.stages as u32);
    let memory: Shared<[u32]> = Shared::new_aligned_slice(
        comptime!(blueprint.stages * blueprint.stage_bytes() / 4),
        1024usize,
    );
    let stages_at = shared_address::<u32>(memory.as_slice());

    let (head, part) = (CUBE_POS_Y, rules.batch_of(CUBE_POS_Z));
    let head_kv = head / rules.sizes.group;
    let first_sequence = part * sequences_of_part;
    let (first_row, key_tile) = (CUBE_POS_X / key_tiles * queries, CUBE_POS_X % key_tiles);
    let first_column = key_tile * keys;
    let (seq_q, seq_kv) = (rules.sizes.seq_q, rules.sizes.seq_kv);
    let sources = Sources {
        q: source::<I>(q, first_sequence, head, first_row, seq_q),
        dout: source::<I>(dout, first_sequence, head, first_row, seq_q),
        k: source::<I>(k, first_sequence, head_kv, first_column, seq_kv),
        v: source::<I>(v, first_sequence, head_kv, first_column, seq_kv),
    };
    // All sequences have the same window and no map: one tells which tiles are seen.
    let side = comptime!(Side::Queries);
    let seen = tiles_of(&rules.sequence(first_sequence, head), first_row, queries, side);
    let is_seen = key_tile >= seen.0 && key_tile < seen.1;
    let all = min(sequences_of_part, rules.sizes.batch - first_sequence);
    let count = select(is_seen, all, 0u32);

    let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
    let quad = lane % 4;
    let warp_row = first_row + warp * 16;
    let row = warp_row + lane / 4;
    let (left_row, left_chunk) = left_position(lane, warp * 16);
    let (right_row, right_chunk) = right_position(lane);
    let exponent = score_exponent(rules);
    let mut sums = Vector::<f32, R>::new(0.0f32);
    if count > 0 {
        sources.copy(0u32, stages_at, blueprint);
    }
    copies_commit();
    for index in 0..count {
        copies_wait_all();
        // Everyone's copies are there, and everyone has read the stage that is overwritten next.
        sync_cube();
        let next = index + 1;
        if comptime!(stages == 2) {
            if next < count {
                sources.copy(next, stages_at + (next & 1) * stage_bytes, blueprint);
            }
            copies_commit();
        }
        let q_at = stages_at + index % stages * stage_bytes;
        let k_at = q_at + 2 * query_bytes;
        let sequence = rules.sequence(first_sequence + index, head);
        let tile = pair_tile::<I, M>(sequence, row, first_column, quad, exponent, side, false);
        let products = mma_products::<R>(
            q_at + left_row,
            k_at + right_row,
            q_at + query_bytes + left_row,
            k_at + key_bytes + right_row,
            left_chunk,
            right_chunk,
            comptime!(blueprint.products()),
        );
        let open = open_keys(&tile.sequence, warp_row, first_column, 16u32, side);
        let checked = is_checked(&tile.sequence, warp_row, first_column, open, 16u32, side);
        let made = pair_gradients::<I, M, R>(products, terms, &tile, checked, true);
        #[unroll]
        for i in 0..32usize {
            sums.insert(i, sums.extract(i) + made.extract(comptime!(32 + i)));
        }
        if comptime!(stages == 1) {
            // Everyone has read the only stage.
            sync_cube();
            if next < count {
                sources.copy(next, stages_at, blueprint);
            }
            copies_commit();
        }
    }
    let origin = (part * rules.sizes.heads_q + head) * seq_q * seq_kv;
    #[unroll]
    for i in 0..32usize {
        let query = row + comptime!(8 * ((i / 2) % 2) as u32);
        let key = first_column + comptime!((i / 4 * 8 + i % 2) as u32) + 2 * quad;
        if query < seq_q && key < seq_kv {
            dbias[(origin + query * seq_kv + key) as usize] = sums.extract(i);
        }
    }
}
