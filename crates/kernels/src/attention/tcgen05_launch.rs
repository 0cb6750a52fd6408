//! Launches of the `tcgen05` family.

use super::{
    AttentionBlueprint, AttentionOutput,
    call::{Call, heads},
    pipeline::{BLOCK, TILE_Q, TmaForwardBlueprint},
    tcgen05_forward::{UNITS, attention_forward_tcgen05_kernel},
    tensor_core::Tensor,
    wgmma_launch::{QueryTiles, forward_kernel, query_tiles, tensor_map},
};
use crate::{DeviceProfile, KernelError};
use cubecl::prelude::*;

/// The most tiles of keys and values that hide latency.
const MOST_STAGES: usize = 8;

/// The forward pass.
pub(super) fn forward(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let problem = call.problem;
    let device = DeviceProfile::of(call.client);
    let shared_bytes = TmaForwardBlueprint::tcgen05_bytes;
    let kernel = forward_kernel(call, blueprint, device, MOST_STAGES, shared_bytes)?;
    let QueryTiles { tiles, items, cubes } = query_tiles(call, blueprint, device)?;
    let [q, k, v] = Tensor::inputs(call);
    // SAFETY: the tensor maps describe memory that the inputs were checked to have, and the outputs
    // were allocated for the problem; the kernel writes rows below the ends of sequences alone.
    unsafe {
        attention_forward_tcgen05_kernel::launch_unchecked(
            call.client,
            cubes,
            CubeDim::new_1d(UNITS),
            tensor_map(call, &q, TILE_Q)?,
            tensor_map(call, &k, kernel.tile_kv)?,
            // Chunks of 64 keys are what the second product steps through.
            tensor_map(call, &v, BLOCK)?,
            call.rules(0),
            heads(&output.out, problem.out()),
            output.lse.arg(1),
            tiles,
            items,
            kernel,
            call.types(),
            [kernel.score_registers(), kernel.score_registers() / 2],
        );
    }
    Ok(())
}
