//! How attention of few queries over many keys is planned: in how many parts the keys of a head are divided.

use super::{
    AttentionBlueprint, AttentionProblem, blueprint::is_half, decode::MOST_ROWS,
    decode::MOST_SHARED_BYTES, mma_plan::rows_bytes,
};
use crate::{DeviceProfile, Family, FamilyOp};

/// Keys of a split at least.
pub(super) const SPLIT_KEYS: usize = 128;
/// Cubes of the portable kernel that a multiprocessor gets where there are keys enough: about twice what it holds at
/// once, so that it is not idle for long at the end. An estimate.
const PORTABLE_CUBES: usize = 8;

/// Rows of a tile of the tensor cores.
pub(super) const MMA_ROWS: usize = 16;
/// Warps of a cube, of which each has tiles of keys of its own.
pub(super) const MMA_WARPS: usize = 4;
/// Shared memory that the device keeps of each cube's.
const RESERVED_BYTES: usize = 1024;
/// How full the last cubes have to make the device, in percent, for no more splits to be tried.
const FULL_PERCENT: usize = 90;
/// Numbers of splits that are tried.
const MOST_TRIED: usize = 16;

/// Tiles of keys and values on their way to the warps of a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyRing {
    /// Keys of a tile.
    pub(crate) keys: usize,
    /// Tiles of each warp.
    pub(crate) stages: usize,
}

impl KeyRing {
    /// Tiles of 8 KiB of keys and values, where rows have up to 256 bytes. Two cubes to a multiprocessor if each then has
    /// three tiles a warp, else one; and how many it is.
    fn of(row_bytes: usize, shared_bytes: usize) -> Option<(Self, usize)> {
        let keys = if row_bytes <= 128 { 32 } else { 16 };
        let fits = |stages, cubes: usize| {
            let ring = Self { keys, stages };
            let all = cubes * (ring.shared_bytes(row_bytes) + RESERVED_BYTES);
            (all <= shared_bytes + RESERVED_BYTES).then_some((ring, cubes))
        };
        [(4, 2), (3, 2), (4, 1), (3, 1), (2, 1)]
            .into_iter()
            .find_map(|(stages, cubes)| fits(stages, cubes))
    }

    /// Of a tile of keys, or of values.
    pub(crate) fn tile_bytes(self, row_bytes: usize) -> usize {
        rows_bytes(row_bytes, self.keys)
    }

    /// The queries, and the tiles of all warps.
    pub(crate) fn shared_bytes(self, row_bytes: usize) -> usize {
        let tiles = 2 * MMA_WARPS * self.stages;
        rows_bytes(row_bytes, MMA_ROWS) + tiles * self.tile_bytes(row_bytes)
    }
}

impl AttentionBlueprint {
    /// Whether plans that divide keys serve the problem's options.
    pub(super) fn may_split(problem: &AttentionProblem) -> bool {
        let AttentionProblem { mask, bias, dropout, packed, .. } = problem;
        mask.is_none() && bias.is_none() && dropout.is_none() && packed.is_none()
    }

    /// The plans that divide keys among cubes and serve the problem, the one expected to be fastest first.
    pub(super) fn splitting(problem: &AttentionProblem, device: DeviceProfile) -> Vec<Self> {
        if !Self::may_split(problem) {
            return Vec::new();
        }
        let portable = (device.shared_bytes >= MOST_SHARED_BYTES)
            .then(|| Self::splitting_portably(problem, device));
        let on_tensor_cores = Self::splitting_on_tensor_cores(problem, device);
        on_tensor_cores.into_iter().chain(portable).collect()
    }

    /// Rows of queries that share keys, and tiles of so many of all heads of keys.
    fn split_tiles(problem: &AttentionProblem, most_rows: usize) -> (usize, usize) {
        let rows = problem.heads_q / problem.heads_kv * problem.seq_q;
        let tile_q = rows.next_power_of_two().min(most_rows);
        (tile_q, problem.batch * problem.heads_kv * rows.div_ceil(tile_q))
    }

    /// As many splits as keep the device busy, of so many keys at least that merging costs little beside reading them.
    fn splitting_portably(problem: &AttentionProblem, device: DeviceProfile) -> Self {
        let (tile_q, tiles) = Self::split_tiles(problem, MOST_ROWS as usize);
        let splits = (device.multiprocessors * PORTABLE_CUBES).div_ceil(tiles);
        let tile_kv = problem.seq_kv.div_ceil(splits).next_multiple_of(64).max(SPLIT_KEYS);
        Self::split_by(Family::Portable, tile_q, tile_kv)
    }

    /// The ring of a plan by the tensor cores of Ampere and later, if it serves the problem; and cubes to a multiprocessor.
    pub(super) fn key_ring(
        problem: &AttentionProblem,
        device: DeviceProfile,
    ) -> Option<(KeyRing, usize)> {
        let serves = is_half(problem.dtype) && Self::has_whole_chunks(problem);
        serves.then(|| KeyRing::of(problem.head_dim * problem.dtype.size(), device.shared_bytes))?
    }

    /// As few splits as make all cubes run at once and the device full.
    fn splitting_on_tensor_cores(
        problem: &AttentionProblem,
        device: DeviceProfile,
    ) -> Option<Self> {
        let is_there = device.compute_capability.is_some_and(|capability| capability >= 80)
            && device.is_offered(FamilyOp::Attention, Family::Mma);
        let (_, cubes) = is_there.then(|| Self::key_ring(problem, device))??;
        let (_, tiles) = Self::split_tiles(problem, MMA_ROWS);
        let splits = full_splits(tiles, device.multiprocessors * cubes);
        let tile_kv = problem.seq_kv.div_ceil(splits).max(SPLIT_KEYS);
        Some(Self::split_by(Family::Mma, MMA_ROWS, tile_kv))
    }

    fn split_by(family: Family, tile_q: usize, tile_kv: usize) -> Self {
        Self { family, tile_q, tile_kv, atomic: false, split: true, maps_mask: false }
    }
}

/// The fewest splits of each of the tiles whose cubes nearly fill the last round of `slots` cubes at once, or those that
/// fill it best.
fn full_splits(tiles: usize, slots: usize) -> usize {
    let least = (slots / tiles).max(1);
    let fill = |splits: usize| {
        let cubes = splits * tiles;
        cubes * 100 / cubes.next_multiple_of(slots.max(1))
    };
    let tried = least..least + MOST_TRIED;
    let full = tried.clone().find(|splits| fill(*splits) >= FULL_PERCENT);
    full.or_else(|| tried.rev().max_by_key(|splits| fill(*splits))).unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubes_fill_the_device() {
        for (tiles, slots, splits) in [
            // One round, all but full.
            (64, 264, 4),
            (1, 264, 264),
            (264, 264, 1),
            // A round that one split would leave at three quarters, and one that it would leave at half.
            (200, 264, 5),
            (300, 264, 4),
            (5000, 264, 1),
        ] {
            assert_eq!(full_splits(tiles, slots), splits, "{tiles} tiles, {slots} cubes at once");
        }
    }

    #[test]
    fn rings_fit_two_cubes_where_they_can() {
        const HOPPER: usize = 232_448;
        for (row_bytes, shared_bytes, expected) in [
            (256, HOPPER, Some((16, 3, 2))),
            (128, HOPPER, Some((32, 3, 2))),
            (512, HOPPER, Some((16, 3, 1))),
            (256, 101_376, Some((16, 2, 1))),
            (512, 101_376, None),
        ] {
            let ring = KeyRing::of(row_bytes, shared_bytes);
            let found = ring.map(|(KeyRing { keys, stages }, cubes)| (keys, stages, cubes));
            assert_eq!(found, expected, "rows of {row_bytes} bytes in {shared_bytes}");
        }
    }
}
