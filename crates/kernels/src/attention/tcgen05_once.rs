//! How the backward pass on the tensor cores of Blackwell's data-center GPUs is compiled, and how a cube divides its
//! memories.
//!
//! A cube has 128 keys, and tiles of 128 queries come in. The five products of a pair of tiles are those of
//! [`once`](super::once), each of 128 rows:
//!
//! | product | left operand | right operand | sums in tensor memory |
//! |---|---|---|---|
//! | `S^T = k q^T` | k in shared memory | q | scores |
//! | `dP^T = v dout^T` | v in shared memory | dout | products |
//! | `dv += P^T dout` | `P^T` in tensor memory, over the scores | dout | dv |
//! | `dk += dS^T q` | `dS^T` in tensor memory, over the products | q | dk |
//! | `dq = dS k` | dS in shared memory | k | dq |
//!
//! Left operands in tensor memory spare shared memory, whose reads would take twice as long as the products: 128
//! rows and 128 columns of 16 elements are 8 KiB, at 128 bytes a cycle, for 32 cycles of the tensor cores. `dS^T` is
//! written to both, because the last product needs it across its keys.
//!
//! All sums of heads above 64 take 640 columns, of 512 that there are. dq then takes the place of the products, which
//! have to wait until it was read. The order of the work is that of `FlashAttention-4`: the scores of a tile are
//! multiplied before the sums of the tile before, so that their exponentials are made meanwhile.

use super::{
    once::{SIDE, TERM_BYTES},
    pipeline::RingTiles,
    rules::Options,
};
use crate::ptx::{
    ROW_BYTES,
    tcgen05::{COLUMNS, ROWS},
    wgmma::{WgmmaOperands, WgmmaProduct, WgmmaWeights},
};

/// Tiles of queries whose terms are held at once, a power of two.
pub(super) const TERM_STAGES: usize = 2;
/// Tiles of q and dout that are held at once, at least: the scores of a tile are multiplied before q of the tile before
/// is given back.
const LEAST_STAGES: usize = 3;
/// Where the sums of scores and of their gradients begin in tensor memory. Those of dv follow.
pub(super) const SCORES: u32 = 0;
pub(super) const PRODUCTS: u32 = ROWS as u32;
pub(super) const DV: u32 = 2 * ROWS as u32;
/// Bytes from 64 columns of a tile's rows to the next ones.
pub(super) const CHUNK_BYTES: usize = ROWS * ROW_BYTES;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tcgen05BackwardBlueprint {
    /// PTX type of the tensors, of the weights and of their gradients: `bf16` or `f16`.
    pub(crate) dtype: &'static str,
    /// A multiple of 16, at most 128.
    pub(crate) head_dim: usize,
    /// Tiles that are held at once, of q and of dout in turns.
    pub(crate) stages: usize,
    /// Terms of a query: delta and shift, with a bias also the logarithm.
    pub(crate) terms: usize,
}

/// Where everything lies, in bytes from the beginning of shared memory. v lies behind k.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Tiles of q and of dout.
    pub(super) ring: usize,
    /// `dS^T`: rows of 64 queries for each key, then those of the other 64.
    pub(super) gradients: usize,
    /// Terms of 64 queries, then those of the other 64.
    pub(super) terms: usize,
    pub(super) barriers: usize,
    /// Where the address of tensor memory lies.
    pub(super) tensor: usize,
    pub(super) end: usize,
}

impl Tcgen05BackwardBlueprint {
    /// The kernel with the most stages of up to `most` that fit so many bytes of shared memory.
    pub(super) fn fitting(self, most: usize, shared_bytes: usize) -> Option<Self> {
        let stages = (LEAST_STAGES..=most).rev().map(|stages| Self { stages, ..self });
        stages.into_iter().find(|kernel| kernel.shared_bytes() <= shared_bytes)
    }

    /// The kernel with the fewest stages.
    pub(super) fn smallest(dtype: &'static str, head_dim: usize, terms: usize) -> Self {
        Self { dtype, head_dim, stages: LEAST_STAGES, terms }
    }

    pub(super) fn ring(self) -> RingTiles {
        // The last block of 64 elements may be filled up with zeros.
        RingTiles { stages: self.stages, rows: ROWS, blocks: self.head_dim.div_ceil(64) }
    }

    /// Bytes of the terms of a tile's queries.
    pub(super) fn terms_bytes(self) -> usize {
        ROWS / SIDE * self.terms * TERM_BYTES
    }

    pub(super) fn layout(self) -> Layout {
        let tile_bytes = self.ring().bytes() as usize;
        let ring = 2 * tile_bytes;
        let gradients = ring + self.stages * tile_bytes;
        let terms = gradients + ROWS / SIDE * CHUNK_BYTES;
        let barriers = terms + TERM_STAGES * self.terms_bytes();
        // Two for each tile of the ring and of terms; see `Places` for the others.
        let tensor = barriers + 8 * (2 * self.stages + 2 * TERM_STAGES + 8);
        Layout { ring, gradients, terms, barriers, tensor, end: tensor + 16 }
    }

    pub(crate) fn shared_bytes(self) -> usize {
        self.layout().end
    }

    /// S and dP.
    pub(super) fn products(self) -> WgmmaProduct {
        WgmmaProduct {
            n: ROWS,
            dtype: self.dtype,
            k: self.head_dim,
            lhs_block_bytes: CHUNK_BYTES,
            rhs_block_bytes: CHUNK_BYTES,
            first: 0,
        }
    }

    /// dv and dk.
    pub(super) fn sums(self) -> WgmmaWeights {
        WgmmaWeights {
            n: self.head_dim,
            dtype: self.dtype,
            k: ROWS,
            rows_bytes: SIDE * ROW_BYTES,
            first: 0,
        }
    }

    /// dq, of 64 keys.
    pub(super) fn queries(self) -> WgmmaOperands {
        WgmmaOperands {
            n: self.head_dim,
            lhs: self.dtype,
            rhs: self.dtype,
            lhs_k_major: false,
            rhs_k_major: false,
        }
    }

    /// Whether all of a tile's weights are made, and may be multiplied, before the first gradients of weights: if there
    /// are registers for them, which words of dropout take.
    pub(super) fn weighs_early(self, options: Options) -> bool {
        !options.dropout
    }

    /// Columns of tensor memory that sums of rows of heads are read by.
    fn columns(self) -> u32 {
        self.head_dim.next_power_of_two() as u32
    }

    /// Where the sums of dk begin.
    pub(super) fn dk(self) -> u32 {
        DV + self.columns()
    }

    /// Whether dq has columns of its own.
    pub(super) fn is_apart(self) -> bool {
        DV + 3 * self.columns() <= COLUMNS as u32
    }

    /// Where dq begins.
    pub(super) fn dq(self) -> u32 {
        if self.is_apart() { self.dk() + self.columns() } else { PRODUCTS }
    }

    /// Registers of a vector that holds the sums of a row of each unit.
    pub(crate) fn width(self) -> usize {
        self.columns() as usize / 2
    }
}

#[cfg(test)]
mod tests {
    use super::{super::blueprint::tcgen05_bytes, *};
    use crate::Pass;

    /// Shared memory of a cube on `sm_100`.
    const SHARED_BYTES: usize = 232_448;

    #[test]
    fn every_head_has_a_kernel_that_fits() {
        for head_dim in (16..=128).step_by(16) {
            for count in [2, 3] {
                let least = Tcgen05BackwardBlueprint::smallest("bf16", head_dim, count);
                assert!(least.shared_bytes() <= tcgen05_bytes(Pass::Backward, head_dim));
                let kernel = least.fitting(6, SHARED_BYTES).unwrap();
                let Layout { ring, gradients, terms, barriers, tensor, end } = kernel.layout();
                assert!([ring, gradients, terms].iter().all(|at| at.is_multiple_of(1024)));
                assert!(barriers.is_multiple_of(8) && tensor.is_multiple_of(8), "{kernel:?}");
                assert!(end <= SHARED_BYTES, "{kernel:?}: {end}");
            }
        }
        let widest = Tcgen05BackwardBlueprint::smallest("bf16", 128, 2);
        assert_eq!(widest.fitting(6, SHARED_BYTES).map(|kernel| kernel.stages), Some(4));
        assert_eq!(widest.fitting(6, 160 << 10), None);
    }

    #[test]
    fn sums_do_not_meet_in_tensor_memory() {
        let of = |head_dim| Tcgen05BackwardBlueprint::smallest("bf16", head_dim, 2);
        let places = |kernel: Tcgen05BackwardBlueprint| [kernel.dk(), kernel.dq()];
        assert_eq!(places(of(64)), [320, 384]);
        assert_eq!(places(of(128)), [384, PRODUCTS]);
        for head_dim in (16..=128).step_by(16) {
            let kernel = of(head_dim);
            let end = 2 * kernel.width() as u32;
            assert!(kernel.dk() >= DV + end && kernel.dk() + end <= COLUMNS as u32);
            assert!(!kernel.is_apart() || kernel.dq() + end <= COLUMNS as u32);
        }
    }
}
