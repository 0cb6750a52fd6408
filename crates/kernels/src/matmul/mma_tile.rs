//! The last step of the `mma` family's kernels: from a warp's sums to its part of a tile of the output.

use super::{
    bias_tile::element_bytes,
    epilogue::{EpilogueTensors, Outputs, factor},
    ring::{Fragments, MmaBlueprint},
    store::{Finish, fragment_of, store_outputs},
    work::{Extent, Work},
};
use cubecl::prelude::*;

/// Finishes the warp's sums with the bias of the tile at `bias_at` in shared memory, and writes them.
#[cube]
pub(super) fn write_part<O: Float, S: Numeric, W: Size, R: Size>(
    sums: Vector<f32, R>,
    outputs: &mut Outputs<Vector<S, W>>,
    epilogue: &EpilogueTensors<O>,
    extent: &Extent,
    work: &Work,
    fragments: &Fragments,
    bias_at: u32,
    #[comptime] blueprint: MmaBlueprint,
) {
    let operands = comptime!(blueprint.operands);
    let half = comptime!(blueprint.store.half());
    let bias_at = bias_at + fragments.column * comptime!(element_bytes(half));
    let finish = Finish { bias_at, scale: factor(epilogue), beta: epilogue.beta };
    #[unroll]
    for i in 0..comptime!(operands.m16) {
        let place = fragment_of(
            work,
            extent,
            work.row + fragments.row + comptime!(16 * i as u32) + fragments.lane / 4,
            work.column + fragments.column,
            fragments.lane % 4,
            comptime!(epilogue.steps.interleaved),
        );
        let (first, columns) = comptime!((i * operands.n16 * 8, 16 * operands.n16));
        let store = comptime!(blueprint.store);
        store_outputs::<O, S, W, R>(
            outputs, sums, epilogue, &place, &finish, first, columns, store,
        );
    }
}
