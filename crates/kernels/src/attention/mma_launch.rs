//! Launches of the `mma` family.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionOutput, AttentionResult,
    call::{Call, device_strides, heads},
    mma_backward::{Gives, MmaBackwardBlueprint, attention_backward_mma_kernel},
    mma_bias::{MmaBiasBlueprint, attention_bias_gradient_mma_kernel},
    mma_forward::{MmaForwardBlueprint, attention_forward_mma_kernel},
    mma_plan::{MOVING, mma_backward_tiles, mma_bias_tiles},
    problem::unsupported,
    tensor_core::{Tensor, halves, ptx_type, row_terms},
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, F32},
};
use cubecl::prelude::*;

/// Rows of a warp.
const WARP_ROWS: usize = 16;
/// Cubes of a multiprocessor that the gradient of a shared bias is divided among, by its sequences.
const BIAS_CUBES: usize = 4;

/// The forward pass.
pub(super) fn forward(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let problem = call.problem;
    for tensor in Tensor::inputs(call) {
        tensor.fetched_strides(call)?;
    }
    let kernel = MmaForwardBlueprint {
        dtype: ptx_type(call)?,
        head_dim: problem.head_dim,
        warps: blueprint.tile_q / WARP_ROWS,
        tile_kv: blueprint.tile_kv,
    };
    let tiles = problem.seq_q.div_ceil(blueprint.tile_q);
    call.for_batches([tiles, problem.heads_q, problem.batch], |cubes, first| {
        // SAFETY: the inputs hold the spans of the problem, rows begin at multiples of 16 bytes, and the
        // outputs were allocated for the problem; the kernel stops rows and keys at their ends.
        ahead::launch(call.client, |client| unsafe {
            attention_forward_mma_kernel::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_1d(kernel.units()),
                call.q(),
                call.k(),
                call.v(),
                call.rules(first),
                heads(&output.out, problem.out()),
                output.lse.arg(1),
                tiles as u32,
                kernel,
                call.types(),
                kernel.widths(),
            )
        });
        Ok(())
    })
}

/// The backward pass, but for the gradient of a bias.
pub(super) fn backward(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    result: &AttentionResult<'_>,
    gradients: &AttentionGradients,
) -> Result<(), KernelError> {
    let problem = call.problem;
    let (dtype, head_dim) = (ptx_type(call)?, problem.head_dim);
    let shared_bytes = DeviceProfile::of(call.client).shared_bytes;
    let Some((_, pairs)) = mma_backward_tiles(head_dim * problem.dtype.size(), shared_bytes) else {
        return Err(unsupported(format!("{shared_bytes} bytes of shared memory")));
    };
    let terms = row_terms(call, result, None)?;
    for tensor in Tensor::inputs(call) {
        tensor.fetched_strides(call)?;
    }
    let halves = halves(call, result, gradients);
    let launches = halves.iter().flat_map(|half| {
        Gives::of_launches(half.side, head_dim).iter().map(move |gives| (half, *gives))
    });
    for (half, gives) in launches {
        let warps = blueprint.tile_q / WARP_ROWS;
        let kernel = MmaBackwardBlueprint { dtype, head_dim, warps, pairs, gives };
        let tiles = half.seq.div_ceil(blueprint.tile_q);
        call.for_batches([tiles, half.fixed[0].heads, problem.batch], |cubes, first| {
            // SAFETY: as in `forward`; the result was checked, and the gradients were allocated for the
            // problem.
            ahead::launch(call.client, |client| unsafe {
                attention_backward_mma_kernel::launch_unchecked(
                    client,
                    cubes.clone(),
                    CubeDim::new_1d(kernel.units()),
                    half.fixed[0].arg(),
                    half.fixed[1].arg(),
                    half.moving[0].arg(),
                    half.moving[1].arg(),
                    call.rules(first),
                    terms.arg(1),
                    half.outs[0].arg(1),
                    half.outs[1].arg(1),
                    device_strides(half.out_strides),
                    half.side,
                    kernel,
                    call.types(),
                    kernel.widths(),
                )
            });
            Ok(())
        })?;
    }
    Ok(())
}

/// The gradient of the bias for every pair, in parts of the sequences that share it: f32,
/// `[parts, heads_q, seq_q, seq_kv]`. The problem has a bias, and a plan of tensor cores serves it.
pub(super) fn bias_gradient(
    call: &Call<'_>,
    result: &AttentionResult<'_>,
) -> Result<Buffer, KernelError> {
    let (call, problem) = (&call.unmapped(), call.problem);
    let device = DeviceProfile::of(call.client);
    let row_bytes = problem.head_dim * problem.dtype.size();
    let Some((warps, stages)) = mma_bias_tiles(row_bytes, device.shared_bytes) else {
        return Err(unsupported(format!("{} bytes of shared memory", device.shared_bytes)));
    };
    let kernel =
        MmaBiasBlueprint { dtype: ptx_type(call)?, head_dim: problem.head_dim, warps, stages };
    let terms = row_terms(call, result, None)?;
    let [q, k, v] = Tensor::inputs(call);
    let dout = Tensor::of_queries(call, result.dout, result.dout_strides);
    for tensor in [q, k, v] {
        tensor.fetched_strides(call)?;
    }
    let key_tiles = problem.seq_kv.div_ceil(MOVING);
    let tiles = problem.seq_q.div_ceil(WARP_ROWS * warps) * key_tiles;
    let cubes = (BIAS_CUBES * device.multiprocessors).div_ceil(tiles * problem.heads_q).max(1);
    let sequences = match problem.bias_batches() {
        1 => problem.batch.div_ceil(cubes),
        _ => 1,
    };
    let parts = problem.batch.div_ceil(sequences);
    let dbias = Buffer::empty(call.client, parts * problem.pairs_of_sequence(), F32);
    call.for_batches([tiles, problem.heads_q, parts], |cubes, first| {
        // SAFETY: as in `backward`; the parts were allocated for the problem, and the kernel stops at their ends.
        ahead::launch(call.client, |client| unsafe {
            attention_bias_gradient_mma_kernel::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_1d(kernel.units()),
                q.arg(),
                dout.arg(),
                k.arg(),
                v.arg(),
                call.rules(first),
                terms.arg(1),
                dbias.arg(1),
                sequences as u32,
                key_tiles as u32,
                kernel,
                call.types(),
                // Registers of both products.
                MOVING,
            )
        });
        Ok(())
    })?;
    Ok(dbias)
}
