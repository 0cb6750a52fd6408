//! Launches of the `tcgen05` family.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionOutput, AttentionResult,
    call::{Call, device_strides, heads},
    once_launch::with_query_sums,
    pipeline::{BLOCK, TILE_Q, TmaForwardBlueprint},
    problem::unsupported,
    tcgen05_backward::{UNITS as BACKWARD_UNITS, attention_backward_tcgen05_kernel},
    tcgen05_forward::{UNITS, attention_forward_tcgen05_kernel},
    tcgen05_once::Tcgen05BackwardBlueprint,
    tensor_core::{Tensor, ptx_type, terms_of_row},
    wgmma_launch::{QueryTiles, forward_kernel, query_tiles, tensor_map},
};
use crate::{DeviceProfile, KernelError, ahead};
use cubecl::prelude::*;

/// The most tiles that hide latency: of keys and values, backward of queries and gradients of outputs.
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
    let kernel = forward_kernel(call, blueprint, device, TILE_Q, MOST_STAGES, shared_bytes)?;
    let QueryTiles { tiles, items, cubes } = query_tiles(call, blueprint, device)?;
    let [q, k, v] = Tensor::inputs(call);
    // SAFETY: the tensor maps describe memory that the inputs were checked to have, and the outputs
    // were allocated for the problem; the kernel writes rows below the ends of sequences alone.
    ahead::launch(call.client, |client| unsafe {
        attention_forward_tcgen05_kernel::launch_unchecked(
            client,
            cubes.clone(),
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
        Ok(())
    })?;
    Ok(())
}

/// The backward pass, but for the gradient of a bias.
pub(super) fn backward(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    result: &AttentionResult<'_>,
    gradients: &AttentionGradients,
) -> Result<(), KernelError> {
    let problem = call.problem;
    let device = DeviceProfile::of(call.client);
    let (dtype, head_dim) = (ptx_type(call)?, problem.head_dim);
    let smallest = Tcgen05BackwardBlueprint::smallest(dtype, head_dim, terms_of_row(problem));
    let kernel = smallest
        .fitting(MOST_STAGES, device.shared_bytes)
        .ok_or_else(|| unsupported(format!("{} bytes of shared memory", device.shared_bytes)))?;
    let AttentionGradients { dq, dk, dv, .. } = gradients;
    let [q, k, v] = Tensor::inputs(call);
    let dout = Tensor::of_queries(call, result.dout, result.dout_strides);
    let tiles = problem.seq_kv.div_ceil(blueprint.tile_kv);
    let grid = [tiles, problem.heads_kv, problem.batch];
    with_query_sums(call, result, dq, |terms, sums| {
        call.for_batches(grid, |cubes, first| {
            // SAFETY: the tensor maps describe memory that the inputs and the result were checked to have; the
            // sums and the gradients were allocated for the problem, and the kernel stops rows at the ends of
            // sequences and tiles at their number.
            ahead::launch(call.client, |client| unsafe {
                attention_backward_tcgen05_kernel::launch_unchecked(
                    client,
                    cubes.clone(),
                    CubeDim::new_1d(BACKWARD_UNITS),
                    tensor_map(call, &k, blueprint.tile_kv)?,
                    tensor_map(call, &v, blueprint.tile_kv)?,
                    tensor_map(call, &q, blueprint.tile_q)?,
                    tensor_map(call, &dout, blueprint.tile_q)?,
                    call.rules(first),
                    terms.arg(1),
                    sums.arg(1),
                    dk.arg(1),
                    dv.arg(1),
                    device_strides(problem.kv_gradients()),
                    kernel,
                    call.types(),
                    kernel.width(),
                );
                Ok(())
            })?;
            Ok(())
        })
    })
}
