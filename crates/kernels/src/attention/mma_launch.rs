//! Launches of the `mma` family.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionOutput, AttentionResult,
    launch::{Launch, rows},
    mma_backward::{MmaBackwardBlueprint, TensorStridesLaunch, attention_backward_mma_kernel},
    mma_forward::{MmaForwardBlueprint, attention_forward_mma_kernel},
    pipeline::Side,
    tensor_core::{Backward, Tensor, ptx_type, row_terms},
};
use crate::{KernelError, buffer::Buffer};
use cubecl::prelude::*;

/// Rows of a warp.
const WARP_ROWS: usize = 16;

/// The forward pass.
pub(super) fn forward(
    launch: &Launch<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let (problem, inputs) = (launch.problem, launch.inputs);
    Tensor::of_queries(launch, inputs.q, problem.q).fetched_strides(launch)?;
    Tensor::of_keys(launch, inputs.k, problem.k).fetched_strides(launch)?;
    Tensor::of_keys(launch, inputs.v, problem.v).fetched_strides(launch)?;
    let kernel = MmaForwardBlueprint {
        dtype: ptx_type(launch)?,
        head_dim: problem.head_dim,
        warps: blueprint.tile_q / WARP_ROWS,
        tile_kv: blueprint.tile_kv,
    };
    let tiles = problem.seq_q.div_ceil(blueprint.tile_q);
    let [registers, packed] = kernel.widths();
    launch.for_batches([tiles, problem.heads_q, problem.batch], |cubes, first| {
        let (mask, mask_dtype) = launch.mask();
        // SAFETY: the inputs hold the spans of the problem, rows begin at multiples of 16 bytes, and the
        // outputs were allocated for the problem; the kernel stops rows and keys at their ends.
        unsafe {
            attention_forward_mma_kernel::launch_unchecked(
                launch.client,
                cubes,
                CubeDim::new_1d(kernel.units()),
                inputs.q.arg(1),
                inputs.k.arg(1),
                inputs.v.arg(1),
                mask,
                launch.bias(),
                launch.starts(),
                output.out.arg(1),
                output.lse.arg(1),
                launch.rules(first),
                rows(problem.q),
                rows(problem.k),
                rows(problem.v),
                rows(problem.out()),
                tiles as u32,
                kernel,
                launch.options,
                problem.dtype,
                mask_dtype,
                registers,
                packed,
            );
        }
        Ok(())
    })
}

/// The backward pass, without the gradient of a bias.
pub(super) fn backward(
    launch: &Launch<'_>,
    blueprint: &AttentionBlueprint,
    result: &AttentionResult<'_>,
    gradients: &AttentionGradients,
) -> Result<(), KernelError> {
    let problem = launch.problem;
    let kernel = MmaBackwardBlueprint {
        dtype: ptx_type(launch)?,
        head_dim: problem.head_dim,
        warps: blueprint.tile_q / WARP_ROWS,
    };
    let terms = row_terms(launch, result)?;
    let Backward { q, k, v, dout } = Backward::new(launch, result);
    for tensor in [&q, &k, &v] {
        tensor.fetched_strides(launch)?;
    }
    let call = |side: Side,
                fixed: [&Tensor<'_>; 2],
                moving: [&Tensor<'_>; 2],
                outs: [&Buffer; 2],
                out_rows| {
        let strides = |[first, second]: [&Tensor<'_>; 2]| {
            TensorStridesLaunch::new(rows(first.rows), rows(second.rows))
        };
        let seq = match side {
            Side::Queries => problem.seq_q,
            Side::Keys => problem.seq_kv,
        };
        let tiles = seq.div_ceil(blueprint.tile_q);
        let [registers, packed] = kernel.widths();
        launch.for_batches([tiles, fixed[0].heads, problem.batch], |cubes, first| {
            let (mask, mask_dtype) = launch.mask();
            // SAFETY: as in `forward`; the result was checked, and the gradients were allocated for the
            // problem.
            unsafe {
                attention_backward_mma_kernel::launch_unchecked(
                    launch.client,
                    cubes,
                    CubeDim::new_1d(kernel.units()),
                    fixed[0].buffer.arg(1),
                    fixed[1].buffer.arg(1),
                    moving[0].buffer.arg(1),
                    moving[1].buffer.arg(1),
                    mask,
                    launch.bias(),
                    launch.starts(),
                    terms.arg(1),
                    outs[0].arg(1),
                    outs[1].arg(1),
                    launch.rules(first),
                    strides(fixed),
                    strides(moving),
                    rows(out_rows),
                    side,
                    kernel,
                    launch.options,
                    problem.dtype,
                    mask_dtype,
                    registers,
                    packed,
                );
            }
            Ok(())
        })
    };
    let AttentionGradients { dq, dk, dv, .. } = gradients;
    call(Side::Keys, [&k, &v], [&q, &dout], [dk, dv], problem.kv_gradients())?;
    call(Side::Queries, [&q, &dout], [&k, &v], [dq, dq], problem.out())
}
