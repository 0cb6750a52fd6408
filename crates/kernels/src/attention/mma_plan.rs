//! How attention by the tensor cores of Ampere and later is planned: by tiles that fit the shared memory.

use super::{AttentionBlueprint, AttentionProblem, blueprint::is_half};
use crate::{DeviceProfile, Family, Pass, device::ROW_BYTES};

/// Rows of one side that come in at once while gradients of the other's are summed up.
pub(super) const MOVING: usize = 64;
/// Columns of two gradients of a row that the registers of its units hold.
pub(super) const MOST_OWN_COLUMNS: usize = 128;
/// Queries of a tile of the `mma` family, and backward where dq is added up in global memory.
pub(super) const MMA_TILE_Q: usize = 64;
/// The same of TF32, forward, from so many keys for each query on. Copies of keys and values, of twice the bytes, then take
/// their share. On an H200 that is 14 % faster with heads of 64 and 5 % with heads of 128; over 512 keys it is 3 % slower.
const TALL_TILE_Q: usize = 128;
const TALL_KEYS: usize = 1024;

/// Shared memory of `rows` rows of so many bytes, which lie in blocks of 128.
pub(super) const fn rows_bytes(row_bytes: usize, rows: usize) -> usize {
    row_bytes.div_ceil(ROW_BYTES) * rows * ROW_BYTES
}

/// Shared memory of the `mma` family: the rows that stay, of q, or backward of two tensors; and so many pairs of tiles
/// that come in.
pub(super) const fn mma_bytes(
    pass: Pass,
    row_bytes: usize,
    stay: usize,
    moving: usize,
    pairs: usize,
) -> usize {
    let tensors = match pass {
        Pass::Forward => 1,
        Pass::Backward => 2,
    };
    rows_bytes(row_bytes, tensors * stay + 2 * pairs * moving)
}

/// Rows that stay with a cube of the `mma` family's backward pass, and pairs of tiles that come in, so that they fit the
/// shared memory: first as many as are fastest, then what keeps four warps busy, then what fits.
pub(super) fn mma_backward_tiles(row_bytes: usize, shared_bytes: usize) -> Option<(usize, usize)> {
    [(MMA_TILE_Q, 2), (MMA_TILE_Q, 1), (MMA_TILE_Q / 2, 1)].into_iter().find(|(stay, pairs)| {
        mma_bytes(Pass::Backward, row_bytes, *stay, MOVING, *pairs) <= shared_bytes
    })
}

/// Warps of the kernel that gives the gradient of a bias, and sequences of which its tiles are held at once, so that
/// they fit the shared memory.
pub(super) fn mma_bias_tiles(row_bytes: usize, shared_bytes: usize) -> Option<(usize, usize)> {
    [(4, 2), (4, 1), (2, 1)].into_iter().find(|(warps, stages)| {
        stages * 2 * rows_bytes(row_bytes, 16 * warps + MOVING) <= shared_bytes
    })
}

impl AttentionBlueprint {
    /// Whether tensor cores can give the gradient of the problem's bias beside a plan of theirs.
    pub(super) fn mma_gives_bias(problem: &AttentionProblem, device: DeviceProfile) -> bool {
        let row_bytes = problem.head_dim * problem.dtype.size();
        mma_bias_tiles(row_bytes, device.shared_bytes).is_some()
    }

    /// The plan by the instructions of Ampere and later, if they serve the problem and its tiles fit the device. Numbers
    /// of f32 are multiplied as TF32.
    pub(super) fn mma(
        problem: &AttentionProblem,
        pass: Pass,
        device: DeviceProfile,
    ) -> Option<Self> {
        let is_taken = is_half(problem.dtype) || problem.is_tf32();
        if !is_taken || !Self::has_whole_chunks(problem) {
            return None;
        }
        let row_bytes = problem.head_dim * problem.dtype.size();
        let forward = |tile_q, tile_kv| {
            let bytes = mma_bytes(pass, row_bytes, tile_q, tile_kv, 2);
            (bytes <= device.shared_bytes).then_some((tile_q, tile_kv))
        };
        // With a causal window a query sees half of the keys.
        let keys = problem.seq_kv / if problem.window.right.is_some() { 2 } else { 1 };
        let is_tall = problem.is_tf32() && keys >= TALL_KEYS;
        let tall = is_tall.then(|| forward(TALL_TILE_Q, 64)).flatten();
        // Four warps else: several small cubes on a multiprocessor were faster on an H200 than a large one.
        let tiles = match (pass, row_bytes) {
            (Pass::Backward, _) => mma_backward_tiles(row_bytes, device.shared_bytes)
                .map(|(tile_q, _)| (tile_q, MOVING)),
            (Pass::Forward, _) if tall.is_some() => tall,
            (Pass::Forward, ..=128) => forward(MMA_TILE_Q, 128),
            (Pass::Forward, 129..=256) => forward(MMA_TILE_Q, 64),
            (Pass::Forward, _) => forward(MMA_TILE_Q, 32),
        };
        tiles.map(|(tile_q, tile_kv)| Self {
            family: Family::Mma,
            tile_q,
            tile_kv,
            atomic: false,
            split: false,
            maps_mask: false,
        })
    }
}
