//! The kernel of the `tcgen05` family by which a cluster of two cubes shares each tile of 256 rows.
//!
//! 1. Warp 0 of each cube has TMA copy the cube's own half of both operands: 128 rows of the left one, half of the
//!    tile's columns of the right one. The barriers of the first cube count what both copy.
//! 2. Warp 1 of the first cube has the tensor cores of both multiply, and tells both cubes.
//! 3. Each cube reads, finishes and writes its own 128 rows. The first cube is told when both have read them.

use super::{
    epilogue::{EpilogueTensors, Outputs},
    tcgen05::{Tcgen05Blueprint, persistent_tensor_product},
    tcgen05_blocks::{TensorBlocks, tensor_blocks},
    work::{Extent, LastMatrix},
};
use crate::ptx::tcgen05_pair::CUBES;
use cubecl::prelude::*;

/// As [`matmul_tcgen05_kernel`](super::tcgen05::matmul_tcgen05_kernel), by pairs of cubes.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(CUBES as u32))]
pub(super) fn matmul_tcgen05_pair_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    last_matrix: LastMatrix,
    #[comptime] blueprint: Tcgen05Blueprint,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let blocks = tensor_blocks(lhs, rhs, &extent, &last_matrix, blueprint);
    persistent_tensor_product::<TensorBlocks, O, S, W, R>(
        &blocks, epilogue, outputs, &extent, blueprint,
    );
}
