//! Launches of the portable family.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionOutput, AttentionResult,
    backward::{
        DELTA_UNITS, attention_backward_kv_portable_kernel, attention_backward_q_portable_kernel,
        attention_delta_kernel,
    },
    forward::attention_forward_portable_kernel,
    launch::{F32, Launch, rows},
    tile::{PortableBlueprint, UNITS},
};
use crate::{KernelError, buffer::Buffer};
use cubecl::prelude::*;

fn kernel_of(launch: &Launch<'_>, blueprint: &AttentionBlueprint) -> PortableBlueprint {
    PortableBlueprint {
        unit_tile: blueprint.tile_q as u32 / UNITS,
        head_dim: launch.problem.head_dim as u32,
    }
}

/// The forward pass.
pub(super) fn forward(
    launch: &Launch<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let (problem, kernel) = (launch.problem, kernel_of(launch, blueprint));
    let tiles = problem.seq_q.div_ceil(kernel.side() as usize);
    launch.for_batches([tiles, problem.heads_q, problem.batch], |cubes, first| {
        let (mask, mask_dtype) = launch.mask();
        // SAFETY: the inputs hold the spans of the problem and the outputs were allocated for it;
        // the kernel stops rows, keys and columns at their ends.
        unsafe {
            attention_forward_portable_kernel::launch_unchecked(
                launch.client,
                cubes,
                CubeDim::new_2d(UNITS, UNITS),
                launch.inputs.q.arg(1),
                launch.inputs.k.arg(1),
                launch.inputs.v.arg(1),
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
                kernel,
                launch.options,
                problem.dtype,
                mask_dtype,
            );
        }
        Ok(())
    })
}

fn delta(launch: &Launch<'_>, result: &AttentionResult<'_>) -> Result<Buffer, KernelError> {
    let problem = launch.problem;
    let delta = Buffer::empty(launch.client, problem.query_elements(), F32);
    let tiles = problem.rows_q().div_ceil(DELTA_UNITS as usize);
    launch.for_batches([tiles, problem.heads_q, problem.tensor_batch()], |cubes, first| {
        // SAFETY: as in `forward`; the result was checked.
        unsafe {
            attention_delta_kernel::launch_unchecked(
                launch.client,
                cubes,
                CubeDim::new_1d(DELTA_UNITS),
                result.out.arg(1),
                result.dout.arg(1),
                delta.arg(1),
                problem.rows_q() as u32,
                problem.heads_q as u32,
                problem.head_dim as u32,
                first as u32,
                rows(problem.out()),
                rows(result.dout_rows),
                problem.dtype,
            );
        }
        Ok(())
    })?;
    Ok(delta)
}

/// The backward pass.
pub(super) fn backward(
    launch: &Launch<'_>,
    blueprint: &AttentionBlueprint,
    result: &AttentionResult<'_>,
    gradients: &AttentionGradients,
) -> Result<(), KernelError> {
    let (problem, kernel) = (launch.problem, kernel_of(launch, blueprint));
    let delta = delta(launch, result)?;
    let side = kernel.side() as usize;
    let tiles = problem.seq_kv.div_ceil(side);
    launch.for_batches([tiles, problem.heads_kv, problem.batch], |cubes, first| {
        let (mask, mask_dtype) = launch.mask();
        // SAFETY: as in `forward`; the result was checked, and the gradients were allocated for the
        // problem.
        unsafe {
            attention_backward_kv_portable_kernel::launch_unchecked(
                launch.client,
                cubes,
                CubeDim::new_2d(UNITS, UNITS),
                launch.inputs.q.arg(1),
                launch.inputs.k.arg(1),
                launch.inputs.v.arg(1),
                result.dout.arg(1),
                mask,
                launch.bias(),
                launch.starts(),
                result.lse.arg(1),
                delta.arg(1),
                gradients.dk.arg(1),
                gradients.dv.arg(1),
                launch.rules(first),
                rows(problem.q),
                rows(problem.k),
                rows(problem.v),
                rows(result.dout_rows),
                rows(problem.kv_gradients()),
                kernel,
                launch.options,
                problem.dtype,
                mask_dtype,
            );
        }
        Ok(())
    })?;
    let unused = Buffer::empty(launch.client, 1, F32);
    let tiles = problem.seq_q.div_ceil(side);
    launch.for_batches([tiles, problem.heads_q, problem.batch], |cubes, first| {
        let (mask, mask_dtype) = launch.mask();
        // SAFETY: as above.
        unsafe {
            attention_backward_q_portable_kernel::launch_unchecked(
                launch.client,
                cubes,
                CubeDim::new_2d(UNITS, UNITS),
                launch.inputs.q.arg(1),
                launch.inputs.k.arg(1),
                launch.inputs.v.arg(1),
                result.dout.arg(1),
                mask,
                launch.bias(),
                launch.starts(),
                result.lse.arg(1),
                delta.arg(1),
                gradients.dq.arg(1),
                gradients.dbias.as_ref().unwrap_or(&unused).arg(1),
                launch.rules(first),
                rows(problem.q),
                rows(problem.k),
                rows(problem.v),
                rows(result.dout_rows),
                rows(problem.out()),
                gradients.dbias.is_some(),
                kernel,
                launch.options,
                problem.dtype,
                mask_dtype,
            );
        }
        Ok(())
    })
}
