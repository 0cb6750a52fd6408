//! What attention is compiled for whose tiles come in by TMA, how its work is divided, and how they come in.

use crate::ptx::{
    ROW_BYTES,
    barrier::{barrier_expect, barrier_wait},
    copy::tma_batched_tile,
    load,
    wgmma::{WgmmaProduct, WgmmaWeights},
};
use cubecl::prelude::*;

/// Units of a cube of the backward pass: two warpgroups that multiply.
pub(crate) const BACKWARD_UNITS: u32 = 2 * UNITS_OF_GROUP;
/// Units of a warpgroup.
pub(super) const UNITS_OF_GROUP: u32 = 128;
/// Queries of half a tile on Blackwell.
pub(crate) const TILE_Q: usize = 128;
/// Elements of a row that are fetched together: 128 bytes.
pub(super) const BLOCK: usize = 64;
/// Bytes of 64 rows of 64 elements.
pub(super) const CHUNK_BYTES: usize = 64 * ROW_BYTES;

/// How a kernel of the forward pass is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TmaForwardBlueprint {
    /// PTX type of q, k, v and of the weights: `bf16` or `f16`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    /// Warpgroups that multiply on Hopper, 64 queries of a tile each; on Blackwell blocks of 64 queries of half a tile.
    pub(crate) groups: usize,
    /// Keys of a tile, a multiple of 64.
    pub(crate) tile_kv: usize,
    /// Tiles of keys, and of values before them, that are held at once; on Blackwell of both together.
    pub(crate) stages: usize,
    /// On Hopper, whether the warpgroups that multiply take turns: one begins its products when the one before it has
    /// all of its own under way.
    pub(crate) takes_turns: bool,
    /// Whether some exponentials are computed by polynomials.
    pub(crate) polynomials: bool,
}

impl TmaForwardBlueprint {
    /// Blocks of 64 elements of a row; the last may be filled up with zeros.
    pub(super) fn blocks(self) -> usize {
        self.head_dim.div_ceil(64)
    }

    /// Queries that come in together.
    pub(super) fn rows_q(self) -> usize {
        64 * self.groups
    }

    /// Units of a cube on Hopper: the producer's warpgroup, and those that multiply.
    pub(super) fn units(self) -> u32 {
        (1 + self.groups as u32) * UNITS_OF_GROUP
    }

    /// Registers of a unit that multiplies on Hopper, of which a multiprocessor has 65,536; one that copies keeps 24.
    pub(super) fn registers(self) -> u32 {
        if self.groups == 2 { 240 } else { 160 }
    }

    /// Whether the next tile's queries come while the last values are multiplied, or once that is done, too. On an H200 the
    /// former saves up to 3 % of causal attention with heads of 64, and costs 1 % with heads of 128.
    pub(super) fn frees_queries_early(self) -> bool {
        !(65..=128).contains(&self.head_dim)
    }

    pub(super) fn q_bytes(self) -> usize {
        self.blocks() * self.rows_q() * ROW_BYTES
    }

    pub(super) fn kv_bytes(self) -> usize {
        self.blocks() * self.tile_kv * ROW_BYTES
    }

    /// Queries, the ring of keys and values, and the barriers: two for each of its stages, two for the queries.
    pub(crate) fn shared_bytes(self) -> usize {
        self.q_bytes() + 2 * self.stages * self.kv_bytes() + 8 * (2 * self.stages + 2)
    }

    /// Of the kernel by `tcgen05`: twice as many queries, one ring, and the barriers: two for each of its tiles, two
    /// for the queries, three for each half of them. Behind them lies where tensor memory begins.
    pub(crate) fn tcgen05_bytes(self) -> usize {
        2 * self.q_bytes() + self.stages * self.kv_bytes() + 8 * (2 * self.stages + 8) + 16
    }

    /// The ring of keys and values of the kernel by `tcgen05`.
    pub(super) fn ring(self) -> RingTiles {
        RingTiles { stages: self.stages, rows: self.tile_kv, blocks: self.blocks() }
    }

    pub(super) fn scores(self) -> WgmmaProduct {
        WgmmaProduct {
            n: self.tile_kv,
            dtype: self.dtype,
            k: self.head_dim,
            lhs_block_bytes: self.rows_q() * ROW_BYTES,
            rhs_block_bytes: self.tile_kv * ROW_BYTES,
            first: 0,
        }
    }

    pub(super) fn weights(self) -> WgmmaWeights {
        WgmmaWeights {
            n: self.head_dim,
            dtype: self.dtype,
            k: self.tile_kv,
            rows_bytes: self.blocks() * CHUNK_BYTES,
            first: self.score_registers(),
        }
    }

    /// Registers of a unit's scores.
    pub(super) fn score_registers(self) -> usize {
        self.tile_kv / 2
    }

    /// Registers of a unit's outputs.
    pub(super) fn out_registers(self) -> usize {
        self.head_dim / 2
    }

    /// Registers of a vector that holds scores and behind them outputs, and of one of packed weights.
    pub(crate) fn widths(self) -> [usize; 2] {
        let both = self.score_registers() + self.out_registers();
        [both.next_power_of_two(), self.score_registers() / 2]
    }
}

/// How a backward kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaBackwardBlueprint {
    /// PTX type of the tensors and of the weights: `bf16` or `f16`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16.
    pub(crate) head_dim: usize,
    /// Tiles of each of the two tensors that come in that are held at once.
    pub(crate) stages: usize,
}

impl WgmmaBackwardBlueprint {
    /// As [`TmaForwardBlueprint::blocks`].
    pub(super) fn blocks(self) -> usize {
        self.head_dim.div_ceil(64)
    }

    /// Bytes of a tile of 64 rows in shared memory.
    pub(super) fn tile_bytes(self) -> usize {
        self.blocks() * CHUNK_BYTES
    }

    /// Two times 128 rows that stay, both rings, and the barriers.
    pub(crate) fn shared_bytes(self) -> usize {
        (4 + 2 * self.stages) * self.tile_bytes() + 8 * (2 * self.stages + 1)
    }

    pub(super) fn products(self) -> WgmmaProduct {
        WgmmaProduct {
            n: 64,
            dtype: self.dtype,
            k: self.head_dim,
            lhs_block_bytes: CHUNK_BYTES,
            rhs_block_bytes: CHUNK_BYTES,
            first: 0,
        }
    }

    pub(super) fn sums(self) -> WgmmaWeights {
        WgmmaWeights {
            n: self.head_dim,
            dtype: self.dtype,
            k: 64,
            rows_bytes: self.tile_bytes(),
            first: 0,
        }
    }

    /// Registers of a vector that holds both products or a sum, and of one of packed weights.
    pub(crate) fn widths(self) -> [usize; 2] {
        [(self.head_dim / 2).next_power_of_two().max(64), 16]
    }
}

/// A tile of queries.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub(super) first_row: u32,
    pub(super) head: u32,
    pub(super) batch: u32,
}

/// Tile `index`: those of a head follow each other, so that cubes at work at the same time share keys
/// and values; the last queries first, because they may see the most keys.
#[cube]
pub(super) fn work_at(index: u32, tiles: u32, heads: u32, #[comptime] tile_q: usize) -> Work {
    let matrix = index / tiles;
    Work {
        first_row: (tiles - 1 - index % tiles) * comptime!(tile_q as u32),
        head: matrix % heads,
        batch: matrix / heads,
    }
}

/// The tile of a cube in its round `round`. Every second round runs backwards, so that no cube has the longest tiles
/// of all rounds.
#[cube]
pub(super) fn index_in(round: u32) -> u32 {
    let first = round * CUBE_COUNT_X;
    let last = first + CUBE_COUNT_X - 1;
    select(round & 1 == 0, first + CUBE_POS_X, last - CUBE_POS_X)
}

/// Has TMA copy 64 by 64 elements for each block of a row and each 64 rows, or all rows at once.
#[cube]
pub(super) fn load_tile(
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

/// A place in a ring.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Slot {
    pub(super) stage: u32,
    pub(super) phase: u32,
}

#[cube]
pub(super) fn advance(slot: &mut Slot, #[comptime] stages: u32) {
    slot.stage += 1;
    if slot.stage == stages {
        slot.stage = 0u32;
        slot.phase ^= 1;
    }
}

/// The place of a cube's tile `index` in a ring of so many, a power of two.
#[cube]
pub(super) fn slot_of(index: u32, #[comptime] held: usize) -> Slot {
    Slot { stage: index % comptime!(held as u32), phase: index / comptime!(held as u32) % 2 }
}

/// A ring of tiles, and their barriers: copied, and given back.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Ring {
    pub(super) tiles: u32,
    pub(super) full: u32,
    pub(super) empty: u32,
}

/// What a ring holds: so many tiles at once, of so many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RingTiles {
    pub(super) stages: usize,
    pub(super) rows: usize,
    pub(super) blocks: usize,
}

impl RingTiles {
    pub(super) fn bytes(self) -> u32 {
        (self.blocks * self.rows * ROW_BYTES) as u32
    }
}

/// Has TMA copy a tile of a head's rows, once there is room for it.
#[cube]
pub(super) fn fetch_tile(
    ring: &Ring,
    slot: &mut Slot,
    map: u64,
    row: u32,
    head: u32,
    batch: u32,
    #[comptime] box_rows: usize,
    #[comptime] tiles: RingTiles,
) {
    let bytes = comptime!(tiles.bytes());
    let stage = load::<u32>(slot.stage);
    barrier_wait(ring.empty + stage * 8, load::<u32>(slot.phase) ^ 1);
    let barrier = ring.full + stage * 8;
    barrier_expect(barrier, bytes);
    let (rows, blocks) = comptime!((tiles.rows, tiles.blocks));
    load_tile(ring.tiles + stage * bytes, map, row, head, batch, barrier, rows, box_rows, blocks);
    advance(slot, comptime!(tiles.stages as u32));
}

/// The next tile of a ring, once it was copied.
#[cube]
pub(super) fn copied_tile(ring: &Ring, slot: &mut Slot, #[comptime] tiles: RingTiles) -> u32 {
    let stage = load::<u32>(slot.stage);
    barrier_wait(ring.full + stage * 8, load::<u32>(slot.phase));
    advance(slot, comptime!(tiles.stages as u32));
    stage
}
