//! Launches of the `wgmma` family.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionOutput, AttentionResult,
    call::{Call, device_strides, heads},
    pipeline::{BACKWARD_UNITS, BLOCK, TmaForwardBlueprint, WgmmaBackwardBlueprint},
    problem::unsupported,
    tensor_core::{Tensor, halves, ptx_type, row_terms},
    wgmma_backward::attention_backward_wgmma_kernel,
    wgmma_forward::attention_forward_wgmma_kernel,
};
use crate::{DeviceProfile, KernelError, ahead};
use cubecl::prelude::*;

/// The most tiles that hide latency.
const MOST_STAGES: usize = 4;
/// Rows of a tile of either side of the backward pass.
const BACKWARD_TILE: usize = 128;

/// The most stages that fit.
fn with_most_stages<K: Copy>(
    device: DeviceProfile,
    most: usize,
    kernel: impl Fn(usize) -> K,
    shared_bytes: impl Fn(K) -> usize,
) -> Result<K, KernelError> {
    (2..=most)
        .rev()
        .map(kernel)
        .find(|kernel| shared_bytes(*kernel) <= device.shared_bytes)
        .ok_or_else(|| unsupported(format!("{} bytes of shared memory", device.shared_bytes)))
}

/// How TMA finds boxes of so many rows by one block.
pub(super) fn tensor_map(
    call: &Call<'_>,
    tensor: &Tensor<'_>,
    box_rows: usize,
) -> Result<TensorMapArg<Tiled>, KernelError> {
    let problem = call.problem;
    let shape = [problem.tensor_batch(), tensor.heads, tensor.seq, problem.head_dim];
    let strides = tensor.fetched_strides(call)?;
    // SAFETY: shape and strides stay within the problem's checked span.
    let tensor = unsafe {
        TensorArg::from_raw_parts(
            tensor.buffer.argument(),
            strides.to_vec().into(),
            shape.to_vec().into(),
        )
    };
    let tile = vec![1, 1, box_rows, BLOCK];
    Ok(TensorMapArg::new(TiledArgs { tile_size: tile.into() }, tensor, problem.dtype)
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(TensorMapPrefetch::B256))
}

/// How the forward pass's queries are divided among cubes.
pub(super) struct QueryTiles {
    /// Tiles of a head.
    pub(super) tiles: u32,
    /// Tiles of all heads and sequences.
    pub(super) items: u32,
    /// A cube for each multiprocessor, if there are tiles for it.
    pub(super) cubes: CubeCount,
}

pub(super) fn query_tiles(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    device: DeviceProfile,
) -> Result<QueryTiles, KernelError> {
    let problem = call.problem;
    let tiles = problem.seq_q.div_ceil(blueprint.tile_q);
    let work_items = tiles * problem.heads_q * problem.batch;
    let Ok(items) = u32::try_from(work_items) else {
        return Err(unsupported(format!("{work_items} tiles of queries")));
    };
    let cubes = CubeCount::Static(items.min(device.multiprocessors as u32), 1, 1);
    Ok(QueryTiles { tiles: tiles as u32, items, cubes })
}

/// How the kernel of the forward pass is compiled whose queries come in by so many rows, with as many stages as fit, up to
/// `most`.
pub(super) fn forward_kernel(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    device: DeviceProfile,
    rows_q: usize,
    most: usize,
    shared_bytes: impl Fn(TmaForwardBlueprint) -> usize,
) -> Result<TmaForwardBlueprint, KernelError> {
    let dtype = ptx_type(call)?;
    let (head_dim, tile_kv) = (call.problem.head_dim, blueprint.tile_kv);
    let groups = rows_q / 64;
    // On an H200 turns save up to 8 % with a causal window, and without one they cost up to 2 %.
    let takes_turns = groups == 2 && call.problem.window.right.is_some();
    let polynomials = AttentionBlueprint::takes_polynomials(call.problem.dtype, device);
    let kernel = |stages| TmaForwardBlueprint {
        dtype,
        head_dim,
        groups,
        tile_kv,
        stages,
        takes_turns,
        polynomials,
    };
    with_most_stages(device, most, kernel, shared_bytes)
}

/// The forward pass.
pub(super) fn forward(
    call: &Call<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let problem = call.problem;
    let device = DeviceProfile::of(call.client);
    let shared_bytes = TmaForwardBlueprint::shared_bytes;
    let kernel =
        forward_kernel(call, blueprint, device, blueprint.tile_q, MOST_STAGES, shared_bytes)?;
    let QueryTiles { tiles, items, cubes } = query_tiles(call, blueprint, device)?;
    let [q, k, v] = Tensor::inputs(call);
    // SAFETY: the tensor maps describe memory that the inputs were checked to have, and the outputs
    // were allocated for the problem; the kernel writes rows below the ends of sequences alone.
    ahead::launch(call.client, |client| unsafe {
        attention_forward_wgmma_kernel::launch_unchecked(
            client,
            cubes.clone(),
            CubeDim::new_1d(kernel.units()),
            tensor_map(call, &q, kernel.rows_q())?,
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
            kernel.widths(),
        );
        Ok(())
    })?;
    Ok(())
}

/// The backward pass that computes each pair's products twice, but for the gradient of a bias.
pub(super) fn backward(
    call: &Call<'_>,
    result: &AttentionResult<'_>,
    gradients: &AttentionGradients,
) -> Result<(), KernelError> {
    let problem = call.problem;
    let (dtype, head_dim) = (ptx_type(call)?, problem.head_dim);
    let kernel = with_most_stages(
        DeviceProfile::of(call.client),
        MOST_STAGES,
        |stages| WgmmaBackwardBlueprint { dtype, head_dim, stages },
        WgmmaBackwardBlueprint::shared_bytes,
    )?;
    let terms = row_terms(call, result, None)?;
    for half in halves(call, result, gradients) {
        let tiles = half.seq.div_ceil(BACKWARD_TILE);
        call.for_batches([tiles, half.fixed[0].heads, problem.batch], |cubes, first| {
            // SAFETY: as in `forward`; the result was checked, and the gradients were allocated for the
            // problem.
            ahead::launch(call.client, |client| unsafe {
                attention_backward_wgmma_kernel::launch_unchecked(
                    client,
                    cubes.clone(),
                    CubeDim::new_1d(BACKWARD_UNITS),
                    tensor_map(call, &half.fixed[0], BLOCK)?,
                    tensor_map(call, &half.fixed[1], BLOCK)?,
                    tensor_map(call, &half.moving[0], BLOCK)?,
                    tensor_map(call, &half.moving[1], BLOCK)?,
                    call.rules(first),
                    terms.arg(1),
                    half.outs[0].arg(1),
                    half.outs[1].arg(1),
                    device_strides(half.out_strides),
                    half.side,
                    kernel,
                    call.types(),
                    kernel.widths(),
                );
                Ok(())
            })?;
            Ok(())
        })?;
    }
    Ok(())
}
