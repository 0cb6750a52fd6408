//! Launches of the tensor-core family.

use super::{
    AttentionBlueprint, AttentionOutput,
    launch::{Launch, rows},
    pipeline::{UNITS, WgmmaForwardBlueprint},
    problem::{Rows, unsupported},
    wgmma_forward::attention_forward_wgmma_kernel,
};
use crate::{DeviceProfile, KernelError, buffer::Buffer};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// What TMA's memory is aligned to, in bytes.
const ALIGNMENT: u64 = 16;
/// Elements of a row that are fetched together: 128 bytes.
const BLOCK: usize = 64;
/// The most tiles of keys that hide latency.
const MOST_STAGES: usize = 4;

/// The forward pass on Hopper.
pub(super) fn forward(
    launch: &Launch<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let (problem, inputs) = (launch.problem, launch.inputs);
    let device = DeviceProfile::of(launch.client);
    let dtype = match problem.dtype {
        ElemType::Float(FloatKind::BF16) => "bf16",
        ElemType::Float(FloatKind::F16) => "f16",
        other => return Err(unsupported(format!("{other:?} on tensor cores"))),
    };
    for buffer in [inputs.q, inputs.k, inputs.v] {
        let offset = buffer.handle.offset_start.unwrap_or(0);
        if !offset.is_multiple_of(ALIGNMENT) {
            return Err(unsupported(format!("memory that begins at byte {offset}")));
        }
    }
    let with_stages = |stages| WgmmaForwardBlueprint {
        dtype,
        head_dim: problem.head_dim,
        tile_kv: blueprint.tile_kv,
        stages,
    };
    let kernel = (2..=MOST_STAGES)
        .rev()
        .map(with_stages)
        .find(|kernel| kernel.shared_bytes() <= device.shared_bytes)
        .ok_or_else(|| unsupported(format!("{} bytes of shared memory", device.shared_bytes)))?;
    let tiles = problem.seq_q.div_ceil(blueprint.tile_q);
    let work_items = tiles * problem.heads_q * problem.batch;
    let Ok(items) = u32::try_from(work_items) else {
        return Err(unsupported(format!("{work_items} tiles of queries")));
    };
    let cubes = items.min(device.multiprocessors as u32);
    let map = |buffer: &Buffer, rows: Rows, heads: usize, seq: usize, box_rows: usize| {
        let shape = [problem.tensor_batch(), heads, seq, problem.head_dim];
        let strides = [rows.batch, rows.head, rows.row, 1];
        // A dimension of size 1 is never stepped over, but its distance has to be aligned.
        let dense = [heads * seq * problem.head_dim, seq * problem.head_dim, problem.head_dim, 1];
        let stride = |dim: usize| if shape[dim] == 1 { dense[dim] } else { strides[dim] };
        let strides: Vec<usize> = (0..4).map(stride).collect();
        // SAFETY: shape and strides stay within the problem's checked span.
        let tensor = unsafe {
            TensorArg::from_raw_parts(buffer.handle.clone(), strides.into(), shape.to_vec().into())
        };
        let tile = vec![1, 1, box_rows, BLOCK];
        TensorMapArg::new(TiledArgs { tile_size: tile.into() }, tensor, problem.dtype)
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256)
    };
    let [heads, heads_kv] = [problem.heads_q, problem.heads_kv];
    let [rows_q, rows_kv] = [problem.rows_q(), problem.rows_kv()];
    let (mask, mask_dtype) = launch.mask();
    let [registers, packed] = kernel.widths();
    // SAFETY: the tensor maps describe memory that the inputs were checked to have, and the outputs
    // were allocated for the problem; the kernel writes rows below the ends of sequences alone.
    unsafe {
        attention_forward_wgmma_kernel::launch_unchecked(
            launch.client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            map(inputs.q, problem.q, heads, rows_q, blueprint.tile_q),
            map(inputs.k, problem.k, heads_kv, rows_kv, blueprint.tile_kv),
            // Chunks of 64 keys are what the second product steps through.
            map(inputs.v, problem.v, heads_kv, rows_kv, BLOCK),
            mask,
            launch.bias(),
            launch.starts(),
            output.out.arg(1),
            output.lse.arg(1),
            launch.rules(),
            rows(problem.out()),
            tiles as u32,
            items,
            kernel,
            launch.options,
            problem.dtype,
            mask_dtype,
            registers,
            packed,
        );
    }
    Ok(())
}
