//! Launches of the portable family.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionOutput, AttentionResult,
    backward::{
        DELTA_UNITS, InputsLaunch, RowValuesLaunch, attention_backward_kv_portable_kernel,
        attention_backward_q_portable_kernel, attention_delta_kernel,
    },
    call::{Call, heads},
    forward::attention_forward_portable_kernel,
    tile::{PortableBlueprint, UNITS},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32},
};
use cubecl::prelude::*;

fn kernel_of(call: &Call<'_>, blueprint: &AttentionBlueprint) -> PortableBlueprint {
    PortableBlueprint {
        unit_tile: blueprint.tile_q as u32 / UNITS,
        head_dim: call.problem.head_dim as u32,
    }
}

/// The forward pass.
pub(super) fn forward(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let (problem, kernel) = (call.problem, kernel_of(call, blueprint));
    let tiles = problem.seq_q.div_ceil(kernel.side() as usize);
    call.for_batches([tiles, problem.heads_q, problem.batch], |cubes, first| {
        // SAFETY: the inputs hold the spans of the problem and the outputs were allocated for it;
        // the kernel stops rows, keys and columns at their ends.
        ahead::launch(call.client, |client| unsafe {
            attention_forward_portable_kernel::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_2d(UNITS, UNITS),
                call.q(),
                call.k(),
                call.v(),
                call.rules(first),
                heads(&output.out, problem.out()),
                output.lse.arg(1),
                kernel,
                call.types(),
            )
        });
        Ok(())
    })
}

fn delta(call: &Call<'_>, result: &AttentionResult<'_>) -> Result<Buffer, KernelError> {
    let problem = call.problem;
    let delta = Buffer::empty(call.client, problem.query_elements(), F32);
    let tiles = problem.rows_q().div_ceil(DELTA_UNITS as usize);
    call.for_batches([tiles, problem.heads_q, problem.tensor_batch()], |cubes, first| {
        // SAFETY: as in `forward`; the result was checked.
        ahead::launch(call.client, |client| unsafe {
            attention_delta_kernel::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_1d(DELTA_UNITS),
                heads(result.out, problem.out()),
                heads(result.dout, result.dout_strides),
                delta.arg(1),
                problem.rows_q() as u32,
                problem.heads_q as u32,
                problem.head_dim as u32,
                first as u32,
                problem.dtype,
            )
        });
        Ok(())
    })?;
    Ok(delta)
}

/// The backward pass.
pub(super) fn backward(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    result: &AttentionResult<'_>,
    gradients: &AttentionGradients,
) -> Result<(), KernelError> {
    let (problem, kernel) = (call.problem, kernel_of(call, blueprint));
    let AttentionGradients { dq, dk, dv, dbias } = gradients;
    let delta = delta(call, result)?;
    let values = || RowValuesLaunch { lse: result.lse.arg(1), delta: delta.arg(1) };
    let dim = CubeDim::new_2d(UNITS, UNITS);
    let side = kernel.side() as usize;
    let tiles = problem.seq_kv.div_ceil(side);
    call.for_batches([tiles, problem.heads_kv, problem.batch], |cubes, first| {
        // SAFETY: as in `forward`; the result was checked, and the gradients were allocated for the
        // problem.
        ahead::launch(call.client, |client| unsafe {
            attention_backward_kv_portable_kernel::launch_unchecked(
                client,
                cubes.clone(),
                dim,
                inputs(call, result),
                call.rules(first),
                values(),
                heads(dk, problem.kv_gradients()),
                dv.arg(1),
                kernel,
                call.types(),
            )
        });
        Ok(())
    })?;
    let unused = Buffer::empty(call.client, 1, F32);
    let tiles = problem.seq_q.div_ceil(side);
    call.for_batches([tiles, problem.heads_q, problem.batch], |cubes, first| {
        // SAFETY: as above.
        ahead::launch(call.client, |client| unsafe {
            attention_backward_q_portable_kernel::launch_unchecked(
                client,
                cubes.clone(),
                dim,
                inputs(call, result),
                call.rules(first),
                values(),
                heads(dq, problem.out()),
                dbias.as_ref().unwrap_or(&unused).arg(1),
                dbias.is_some(),
                kernel,
                call.types(),
            )
        });
        Ok(())
    })
}

fn inputs<I: Float>(call: &Call<'_>, result: &AttentionResult<'_>) -> InputsLaunch<I> {
    let dout = heads(result.dout, result.dout_strides);
    InputsLaunch { q: call.q(), k: call.k(), v: call.v(), dout }
}
