//! How the backward pass that computes each pair's products once is compiled, and how a cube divides its
//! shared memory.
//!
//! Five products a pair of tiles, where [`pairs`](super::pairs) has seven:
//!
//! | product | left operand | right operand | where |
//! |---|---|---|---|
//! | `S^T = k q^T` | k in shared memory | q | 64 keys of each warpgroup, 64 queries |
//! | `dP^T = v dout^T` | v in shared memory | dout | the same |
//! | `dv += P^T dout` | registers | dout | the same keys |
//! | `dk += dS^T q` | registers | q | the same keys |
//! | `dq += dS k` | dS in shared memory | k | 64 queries, all keys of the cube |
//!
//! The last product sums over the keys of all warpgroups. Each of them writes its part of dS to shared memory,
//! and they multiply it in turn, one a tile, a tile later: the others have most likely written theirs by then.
//! The product is added to sums in global memory ([`query_sums`](super::query_sums)), because cubes of other
//! keys add to the same queries. Who comes first is nobody's choice, so dq is a sum in another order each time:
//! it may differ by roundings of f32, before its one rounding to 16 bits. dk and dv have the same bits each time.
//!
//! At the speed of the tensor cores (4096 operations a cycle of a multiprocessor) a pair takes `5 * 2 *
//! head_dim / 4096` cycles: 0.16 for heads of 64, 0.31 for those of 128. Its exponential takes 1/16 = 0.06,
//! the dozen instructions beside it 0.1. One warpgroup's products so hide another's exponentials, for which
//! three are better than two. Three have 160 registers each: enough for heads of 64. Two have 232, and start to
//! multiply weights while they compute their gradients. Sums of dq take `4 * head_dim` bytes for each query and tile
//! of keys: at that speed 13 bytes a cycle of a multiprocessor with two warpgroups, 9 with three, whatever the head.
//!
//! Sums of dv and dk of 64 keys of a head above 128 do not fit the registers of a warpgroup. There two warpgroups share
//! 64 keys ([`once_wide`](super::once_wide)), and each has half of the columns of dv, dk and dq.
//!
//! Sources: Shah et al., "FlashAttention-3" (2024), section 3 and appendix B.

use super::{
    mma_plan::MOST_OWN_COLUMNS,
    pipeline::{CHUNK_BYTES, UNITS_OF_GROUP},
    rules::Options,
};
use crate::ptx::{
    ROW_BYTES,
    wgmma::{WgmmaProduct, WgmmaWeights},
    wgmma_sums::WgmmaAcross,
};

/// Queries of a tile, and keys of a warpgroup.
pub(super) const SIDE: usize = 64;
/// Bytes of one term of a tile's queries.
pub(super) const TERM_BYTES: usize = 4 * SIDE;
/// Bytes of the weights of a tile: 32 numbers of each unit of a warpgroup.
const WEIGHT_BYTES: usize = 4 * SIDE * SIDE;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OnceBlueprint {
    /// PTX type of the tensors, of the weights and of their gradients: `bf16` or `f16`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    /// Warpgroups that multiply: 2 or 3, each with 64 keys, or 2 that share them.
    pub(crate) groups: usize,
    /// Tiles of q, and of dout, that are held at once.
    pub(crate) stages: usize,
    /// Tiles of dS that are held at once.
    pub(crate) gradients: usize,
    /// Terms of a query: delta and shift, with a bias also the logarithm.
    pub(crate) terms: usize,
}

/// Where everything lies, in bytes from the beginning of shared memory. v lies behind k.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Pairs of tiles of q and of dout.
    pub(super) ring: usize,
    /// Tiles of dS, rows of 64 queries for each key.
    pub(super) gradients: usize,
    /// Weights that one warpgroup hands to the other where they share keys.
    pub(super) weights: usize,
    /// Terms of the ring's queries.
    pub(super) terms: usize,
    /// The barrier of k and v, then those that tell of each stage that it is full, and that it is empty, the same of
    /// dS, and the one that tells that weights are there.
    pub(super) barriers: usize,
    pub(super) end: usize,
}

impl OnceBlueprint {
    /// Units of a cube: a warpgroup that fetches, and those that multiply.
    pub(crate) fn units(self) -> u32 {
        (self.groups as u32 + 1) * UNITS_OF_GROUP
    }

    /// Registers of a unit that multiplies, and of one that fetches. Those that multiply wait until they have
    /// theirs, for ever if that is more than a launch gives.
    pub(super) fn registers(self) -> (u32, u32) {
        if self.groups == 2 { (232, 40) } else { (160, 32) }
    }

    /// Whether the warpgroups share keys.
    pub(super) fn shares_keys(self) -> bool {
        self.head_dim > MOST_OWN_COLUMNS
    }

    /// Keys of a cube.
    pub(super) fn keys(self) -> usize {
        if self.shares_keys() { SIDE } else { self.groups * SIDE }
    }

    /// Blocks of 64 elements of a row; the last may be filled up with zeros.
    pub(super) fn blocks(self) -> usize {
        self.head_dim.div_ceil(64)
    }

    /// Bytes of a tile of 64 rows in shared memory.
    pub(super) fn tile_bytes(self) -> usize {
        self.blocks() * CHUNK_BYTES
    }

    /// Bytes of a tile of dS.
    pub(super) fn gradient_bytes(self) -> usize {
        self.keys() / SIDE * CHUNK_BYTES
    }

    /// Bytes of the terms of a tile.
    pub(super) fn terms_bytes(self) -> usize {
        self.terms * TERM_BYTES
    }

    pub(super) fn layout(self) -> Layout {
        let shares = usize::from(self.shares_keys());
        let ring = 2 * self.keys() / SIDE * self.tile_bytes();
        let gradients = ring + 2 * self.stages * self.tile_bytes();
        let weights = gradients + self.gradients * self.gradient_bytes();
        let terms = weights + shares * WEIGHT_BYTES;
        let barriers = terms + self.stages * self.terms_bytes();
        let end = barriers + 8 * (1 + 2 * self.stages + 2 * self.gradients + shares);
        Layout { ring, gradients, weights, terms, barriers, end }
    }

    pub(crate) fn shared_bytes(self) -> usize {
        self.layout().end
    }

    /// S and dP of a warpgroup.
    pub(super) fn products(self) -> WgmmaProduct {
        WgmmaProduct {
            n: SIDE,
            dtype: self.dtype,
            k: self.head_dim,
            lhs_block_bytes: CHUNK_BYTES,
            rhs_block_bytes: CHUNK_BYTES,
            first: 0,
        }
    }

    /// So many columns of dv, and behind them of dk.
    pub(super) fn sums(self, columns: usize) -> [WgmmaWeights; 2] {
        [0, columns / 2].map(|first| WgmmaWeights {
            n: columns,
            dtype: self.dtype,
            k: SIDE,
            rows_bytes: self.tile_bytes(),
            first,
        })
    }

    /// Whether weights are packed, and multiplied, before their gradients are known: if there are registers for
    /// both, which slopes of bounded scores take, and in wide heads what tells which weights are dropped.
    pub(super) fn weighs_early(self, options: Options) -> bool {
        self.groups == 2 && !options.softcap && !(options.dropout && self.head_dim > 64)
    }

    /// So many columns of dq of a tile.
    pub(super) fn queries(self, columns: usize) -> WgmmaAcross {
        WgmmaAcross { n: columns, dtype: self.dtype, k: self.keys(), rows_bytes: self.tile_bytes() }
    }

    /// Registers of a vector that holds the sums of dv and dk.
    pub(crate) fn width(self) -> usize {
        self.head_dim.next_power_of_two()
    }
}

// A row of dS is one of the rows that the tensor cores read.
const _: () = assert!(2 * SIDE == ROW_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warpgroups_share_the_registers_that_a_launch_gives() {
        for groups in [2, 3] {
            let kernel = OnceBlueprint {
                dtype: "bf16",
                head_dim: 64,
                groups,
                stages: 2,
                gradients: 2,
                terms: 2,
            };
            let (multiplying, fetching) = kernel.registers();
            // A launch gives each unit as many of a multiprocessor's 64 Ki as there are, a multiple of 8.
            let given = (groups as u32 + 1) * ((1 << 16) / kernel.units() / 8 * 8);
            assert!(groups as u32 * multiplying + fetching <= given, "{groups} warpgroups");
            assert!([multiplying, fetching].iter().all(|count| count.is_multiple_of(8)));
        }
    }

    #[test]
    fn tiles_begin_where_the_swizzle_does() {
        for (head_dim, groups) in [(64, 2), (64, 3), (96, 2), (128, 2), (192, 2), (256, 2)] {
            let kernel = OnceBlueprint {
                dtype: "bf16",
                head_dim,
                groups,
                stages: 2,
                gradients: 2,
                terms: if head_dim > 128 { 2 } else { 3 },
            };
            let Layout { ring, gradients, weights, terms, barriers, end } = kernel.layout();
            assert!([ring, gradients, weights, terms].iter().all(|at| at.is_multiple_of(1024)));
            assert!(barriers.is_multiple_of(8) && end <= 232_448, "{kernel:?}: {end}");
        }
    }
}
