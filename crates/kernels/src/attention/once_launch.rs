//! Launches of the backward pass that computes each pair's products once.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionProblem, AttentionResult,
    call::{Call, device_strides},
    once::{OnceBlueprint, SIDE},
    once_backward::attention_backward_once_wgmma_kernel,
    once_wide::attention_backward_once_wide_wgmma_kernel,
    pipeline::BLOCK,
    problem::unsupported,
    query_sums::{
        COLUMNS as DQ_COLUMNS, UNITS as DQ_UNITS, WIDTH as SUMS_WIDTH, attention_dq_kernel,
        tiles_of_head,
    },
    tensor_core::{Tensor, ptx_type, row_terms, terms_of_row},
    wgmma_launch::tensor_map,
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, F32},
};
use cubecl::prelude::*;

/// What a cube holds at once of the tensors that come in, and of dS, the most first: powers of two. Four tiles of
/// dS let a warpgroup be three tiles ahead of another one, two let it be one ahead.
const HELD: [(usize, usize); 4] = [(4, 4), (4, 2), (2, 4), (2, 2)];

fn kernel_of(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
) -> Result<OnceBlueprint, KernelError> {
    let (dtype, head_dim) = (ptx_type(call)?, call.problem.head_dim);
    // Two share the keys of a wide head.
    let groups = (blueprint.tile_kv / SIDE).max(2);
    let terms = terms_of_row(call.problem);
    let device = DeviceProfile::of(call.client);
    HELD.into_iter()
        .map(|(stages, gradients)| OnceBlueprint {
            dtype,
            head_dim,
            groups,
            stages,
            gradients,
            terms,
        })
        .find(|kernel| kernel.shared_bytes() <= device.shared_bytes)
        .ok_or_else(|| unsupported(format!("{} bytes of shared memory", device.shared_bytes)))
}

/// Elements of the sums of dq.
pub(super) fn sums_elements(problem: &AttentionProblem) -> usize {
    let sequences = problem.packed.map(|_| problem.batch);
    let tiles = tiles_of_head(problem.rows_q(), sequences);
    problem.tensor_batch() * problem.heads_q * tiles * SIDE * problem.head_dim
}

/// The backward pass of a kernel that adds to sums of dq: it is launched with the terms of rows and with the sums,
/// which are zero then.
pub(super) fn with_query_sums(
    call: &Call<'_>,
    result: &AttentionResult<'_>,
    dq: &Buffer,
    launch: impl FnOnce(&Buffer, &Buffer) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let problem = call.problem;
    let sums = Buffer::empty(call.client, sums_elements(problem), F32);
    let terms = row_terms(call, result, Some(&sums))?;
    launch(&terms, &sums)?;
    let tiles = problem.seq_q.div_ceil(SIDE);
    call.for_batches([tiles, problem.heads_q, problem.batch], |cubes, first| {
        // SAFETY: the sums and dq were allocated for the problem, and the kernel stops rows at the ends of
        // sequences.
        ahead::launch(call.client, |client| unsafe {
            attention_dq_kernel::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_1d(DQ_UNITS),
                sums.arg(SUMS_WIDTH),
                call.rules(first),
                dq.arg(DQ_COLUMNS),
                device_strides(problem.out()),
                problem.head_dim,
                call.types(),
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
    let (problem, kernel) = (call.problem, kernel_of(call, blueprint)?);
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
                let [k_map, v_map, q_map, dout_map] = [
                    tensor_map(call, &k, BLOCK)?,
                    tensor_map(call, &v, BLOCK)?,
                    tensor_map(call, &q, BLOCK)?,
                    tensor_map(call, &dout, BLOCK)?,
                ];
                let strides = device_strides(problem.kv_gradients());
                let units = CubeDim::new_1d(kernel.units());
                if kernel.shares_keys() {
                    attention_backward_once_wide_wgmma_kernel::launch_unchecked(
                        client,
                        cubes.clone(),
                        units,
                        k_map,
                        v_map,
                        q_map,
                        dout_map,
                        call.rules(first),
                        terms.arg(1),
                        sums.arg(1),
                        dk.arg(1),
                        dv.arg(1),
                        strides,
                        kernel,
                        call.types(),
                    );
                } else {
                    attention_backward_once_wgmma_kernel::launch_unchecked(
                        client,
                        cubes.clone(),
                        units,
                        k_map,
                        v_map,
                        q_map,
                        dout_map,
                        call.rules(first),
                        terms.arg(1),
                        sums.arg(1),
                        dk.arg(1),
                        dv.arg(1),
                        strides,
                        kernel,
                        call.types(),
                        kernel.width(),
                    );
                }
                Ok(())
            })?;
            Ok(())
        })
    })
}
