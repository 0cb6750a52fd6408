use cubecl::prelude::*;

/// How a copy by TMA names the shared memory that it writes to. A cube's own has the same addresses in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TmaTarget {
    /// As that of a cluster, which every version of PTX knows.
    Cluster,
    /// As the cube's own, from PTX 8.6 on. On Blackwell's workstations a copy to a cluster's is a call of the driver.
    Cube,
    /// As the cube's own, counted by a barrier of either cube of a pair.
    CubeOfPair,
}

impl TmaTarget {
    /// The instruction that copies tiles of so many dimensions.
    fn tile_copy(self, dimensions: usize) -> String {
        let (target, group) = match self {
            Self::Cluster => ("cluster", ""),
            Self::Cube => ("cta", ""),
            Self::CubeOfPair => ("cluster", ".cta_group::2"),
        };
        format!(
            "cp.async.bulk.tensor.{dimensions}d.shared::{target}.global.tile.mbarrier::complete_tx::bytes{group}"
        )
    }
}

/// Has TMA copy the tile at (x, y), x along memory, to `destination`; `barrier` counts its bytes.
/// What lies beyond the tensor becomes zero.
#[cube]
pub(crate) fn tma_tile(destination: u32, map: u64, x: u32, y: u32, barrier: u32) {
    tma_tile_to(destination, map, x, y, barrier, comptime!(TmaTarget::Cluster));
}

/// As [`tma_tile`], of matrix (inner, outer) of a batch.
#[cube]
pub(crate) fn tma_batched_tile(
    destination: u32,
    map: u64,
    x: u32,
    y: u32,
    inner: u32,
    outer: u32,
    barrier: u32,
) {
    let target = comptime!(TmaTarget::Cluster);
    tma_batched_tile_to(destination, map, x, y, inner, outer, barrier, target);
}

/// As [`tma_tile`], with the destination named so.
#[cube]
pub(crate) fn tma_tile_to(
    destination: u32,
    map: u64,
    x: u32,
    y: u32,
    barrier: u32,
    #[comptime] target: TmaTarget,
) {
    gpu_asm!(
        "{copy} [{d}], [{m}, {{{x}, {y}}}], [{b}];",
        copy = const target.tile_copy(2),
        d = in(_) destination, m = in(_) map, x = in(_) x, y = in(_) y, b = in(_) barrier
    );
}

/// As [`tma_batched_tile`], with the destination named so.
#[cube]
pub(crate) fn tma_batched_tile_to(
    destination: u32,
    map: u64,
    x: u32,
    y: u32,
    inner: u32,
    outer: u32,
    barrier: u32,
    #[comptime] target: TmaTarget,
) {
    gpu_asm!(
        "{copy} [{d}], [{m}, {{{x}, {y}, {i}, {o}}}], [{b}];",
        copy = const target.tile_copy(4),
        d = in(_) destination, m = in(_) map, x = in(_) x, y = in(_) y, i = in(_) inner,
        o = in(_) outer, b = in(_) barrier
    );
}

/// Has TMA copy channels of a column of pixels to `destination`, from `channel` of the pixel at (column, row,
/// image) on; `barrier` counts its bytes. Pixels follow each other as the map's box and strides say, and each is
/// read `offset_column` and `offset_row` away: where a tap meets it. What lies outside of the images becomes zero.
#[cube]
pub(crate) fn tma_im2col(
    destination: u32,
    map: u64,
    channel: u32,
    column: u32,
    row: u32,
    image: u32,
    offset_column: u16,
    offset_row: u16,
    barrier: u32,
) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}, {}, {}}}], [{}], {{{}, {}}};",
        in(_) destination, in(_) map, in(_) channel, in(_) column, in(_) row, in(_) image,
        in(_) barrier, in(_) offset_column, in(_) offset_row
    );
}

/// Starts a copy of `bytes`, at most 16, from global to shared memory; the rest of the 16 becomes
/// zero. Both addresses are multiples of 16.
#[cube]
pub(crate) fn copy_16_bytes(destination: u32, source: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{}], [{}], 16, {};",
        in(_) destination, in(_) source, in(_) bytes
    );
}

/// Starts a copy of `bytes`, at most 4, from global to shared memory; the rest of the 4 becomes
/// zero. Both addresses are multiples of 4.
#[cube]
pub(crate) fn copy_4_bytes(destination: u32, source: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.ca.shared.global [{}], [{}], 4, {};",
        in(_) destination, in(_) source, in(_) bytes
    );
}

/// Closes a group of copies.
#[cube]
pub(crate) fn copies_commit() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until at most `pending` of this unit's groups are under way.
#[cube]
pub(crate) fn copies_wait(#[comptime] pending: u32) {
    gpu_asm!("{wait}", wait = const format!("cp.async.wait_group {pending};"));
}

/// Waits for all of this unit's copies.
#[cube]
pub(crate) fn copies_wait_all() {
    gpu_asm!("cp.async.wait_all;");
}
