//! Launches of the `wgmma` family, and what those of all tensor cores share.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionOutput, AttentionResult,
    launch::{F32, Launch, rows},
    pipeline::{
        BACKWARD_UNITS, FORWARD_UNITS, Side, WgmmaBackwardBlueprint, WgmmaForwardBlueprint,
    },
    problem::{Rows, unsupported},
    row_terms::{
        ROWS as TERMS_ROWS, UNITS as TERMS_UNITS, WIDTH as TERMS_WIDTH, attention_row_terms_kernel,
    },
    wgmma_backward::attention_backward_wgmma_kernel,
    wgmma_forward::attention_forward_wgmma_kernel,
};
use crate::{DeviceProfile, KernelError, buffer::Buffer};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// What TMA's memory is aligned to, in bytes.
const ALIGNMENT: usize = 16;
/// Elements of a row that are fetched together: 128 bytes.
const BLOCK: usize = 64;
/// The most tiles that hide latency.
const MOST_STAGES: usize = 4;
/// Rows of a tile of either side of the backward pass.
const BACKWARD_TILE: usize = 128;

/// What the instructions call the type.
pub(super) fn ptx_type(launch: &Launch<'_>) -> Result<&'static str, KernelError> {
    match launch.problem.dtype {
        ElemType::Float(FloatKind::BF16) => Ok("bf16"),
        ElemType::Float(FloatKind::F16) => Ok("f16"),
        other => Err(unsupported(format!("{other:?} on tensor cores"))),
    }
}

/// The most stages that fit.
fn with_most_stages<K: Copy>(
    device: DeviceProfile,
    kernel: impl Fn(usize) -> K,
    shared_bytes: impl Fn(K) -> usize,
) -> Result<K, KernelError> {
    (2..=MOST_STAGES)
        .rev()
        .map(kernel)
        .find(|kernel| shared_bytes(*kernel) <= device.shared_bytes)
        .ok_or_else(|| unsupported(format!("{} bytes of shared memory", device.shared_bytes)))
}

/// A tensor of rows of `head_dim`.
pub(super) struct Tensor<'a> {
    pub(super) buffer: &'a Buffer,
    pub(super) rows: Rows,
    pub(super) heads: usize,
    seq: usize,
}

impl<'a> Tensor<'a> {
    pub(super) fn of_queries(launch: &Launch<'_>, buffer: &'a Buffer, rows: Rows) -> Self {
        Self { buffer, rows, heads: launch.problem.heads_q, seq: launch.problem.rows_q() }
    }

    pub(super) fn of_keys(launch: &Launch<'_>, buffer: &'a Buffer, rows: Rows) -> Self {
        Self { buffer, rows, heads: launch.problem.heads_kv, seq: launch.problem.rows_kv() }
    }

    /// The distances of sequences, heads and rows, where 16 bytes at a time can be fetched.
    pub(super) fn fetched_strides(&self, launch: &Launch<'_>) -> Result<[usize; 4], KernelError> {
        let problem = launch.problem;
        let shape = [problem.tensor_batch(), self.heads, self.seq];
        let strides = [self.rows.batch, self.rows.head, self.rows.row];
        // A dimension of size 1 is never stepped over, but its distance has to be aligned.
        let row = problem.head_dim;
        let dense = [self.heads * self.seq * row, self.seq * row, row];
        let stride = |dim: usize| if shape[dim] == 1 { dense[dim] } else { strides[dim] };
        let strides = [stride(0), stride(1), stride(2), 1];
        let offset = self.buffer.handle.offset_start.unwrap_or(0);
        let is_aligned = |stride: &usize| {
            *stride > 0 && (stride * problem.dtype.size()).is_multiple_of(ALIGNMENT)
        };
        if !offset.is_multiple_of(ALIGNMENT as u64) || !strides[..3].iter().all(is_aligned) {
            let reason = format!("strides {strides:?} from byte {offset} on tensor cores");
            return Err(unsupported(reason));
        }
        Ok(strides)
    }

    /// How TMA finds boxes of so many rows by one block.
    fn map(
        &self,
        launch: &Launch<'_>,
        box_rows: usize,
    ) -> Result<TensorMapArg<Tiled>, KernelError> {
        let problem = launch.problem;
        let shape = [problem.tensor_batch(), self.heads, self.seq, problem.head_dim];
        let strides = self.fetched_strides(launch)?;
        // SAFETY: shape and strides stay within the problem's checked span.
        let tensor = unsafe {
            TensorArg::from_raw_parts(
                self.buffer.handle.clone(),
                strides.to_vec().into(),
                shape.to_vec().into(),
            )
        };
        let tile = vec![1, 1, box_rows, BLOCK];
        Ok(TensorMapArg::new(TiledArgs { tile_size: tile.into() }, tensor, problem.dtype)
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256))
    }
}

/// The forward pass on Hopper.
pub(super) fn forward(
    launch: &Launch<'_>,
    blueprint: &AttentionBlueprint,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let (problem, inputs) = (launch.problem, launch.inputs);
    let device = DeviceProfile::of(launch.client);
    let dtype = ptx_type(launch)?;
    let (head_dim, tile_kv) = (problem.head_dim, blueprint.tile_kv);
    let kernel = with_most_stages(
        device,
        |stages| WgmmaForwardBlueprint { dtype, head_dim, tile_kv, stages },
        WgmmaForwardBlueprint::shared_bytes,
    )?;
    let tiles = problem.seq_q.div_ceil(blueprint.tile_q);
    let work_items = tiles * problem.heads_q * problem.batch;
    let Ok(items) = u32::try_from(work_items) else {
        return Err(unsupported(format!("{work_items} tiles of queries")));
    };
    let cubes = items.min(device.multiprocessors as u32);
    let q = Tensor::of_queries(launch, inputs.q, problem.q).map(launch, blueprint.tile_q)?;
    let k = Tensor::of_keys(launch, inputs.k, problem.k).map(launch, tile_kv)?;
    // Chunks of 64 keys are what the second product steps through.
    let v = Tensor::of_keys(launch, inputs.v, problem.v).map(launch, BLOCK)?;
    let (mask, mask_dtype) = launch.mask();
    let [registers, packed] = kernel.widths();
    // SAFETY: the tensor maps describe memory that the inputs were checked to have, and the outputs
    // were allocated for the problem; the kernel writes rows below the ends of sequences alone.
    unsafe {
        attention_forward_wgmma_kernel::launch_unchecked(
            launch.client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(FORWARD_UNITS),
            q,
            k,
            v,
            mask,
            launch.bias(),
            launch.starts(),
            output.out.arg(1),
            output.lse.arg(1),
            launch.rules(0),
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

/// The terms of rows that the backward passes read: two for each, three with a bias.
pub(super) fn row_terms(
    launch: &Launch<'_>,
    result: &AttentionResult<'_>,
) -> Result<Buffer, KernelError> {
    let problem = launch.problem;
    Tensor::of_queries(launch, result.out, problem.out()).fetched_strides(launch)?;
    Tensor::of_queries(launch, result.dout, result.dout_rows).fetched_strides(launch)?;
    let apart = launch.options.bias;
    let of_row = if apart { 3 } else { 2 };
    let terms = Buffer::empty(launch.client, of_row * problem.query_elements(), F32);
    let tiles = problem.rows_q().div_ceil(TERMS_ROWS as usize);
    let batches = problem.tensor_batch();
    launch.for_batches([tiles, problem.heads_q, batches], |cubes, first| {
        // SAFETY: the result was checked, rows begin at multiples of 16 bytes, and the terms were allocated
        // for the problem.
        unsafe {
            attention_row_terms_kernel::launch_unchecked(
                launch.client,
                cubes,
                CubeDim::new_1d(TERMS_UNITS),
                result.out.arg(TERMS_WIDTH),
                result.dout.arg(TERMS_WIDTH),
                result.lse.arg(1),
                terms.arg(1),
                problem.rows_q() as u32,
                problem.heads_q as u32,
                problem.head_dim as u32,
                first as u32,
                batches as u32,
                rows(problem.out()),
                rows(result.dout_rows),
                apart,
                problem.dtype,
                TERMS_WIDTH,
            );
        }
        Ok(())
    })?;
    Ok(terms)
}

/// The backward pass on Hopper, without the gradient of a bias.
pub(super) fn backward(
    launch: &Launch<'_>,
    result: &AttentionResult<'_>,
    gradients: &AttentionGradients,
) -> Result<(), KernelError> {
    let problem = launch.problem;
    let device = DeviceProfile::of(launch.client);
    let (dtype, head_dim) = (ptx_type(launch)?, problem.head_dim);
    let kernel = with_most_stages(
        device,
        |stages| WgmmaBackwardBlueprint { dtype, head_dim, stages },
        WgmmaBackwardBlueprint::shared_bytes,
    )?;
    let terms = row_terms(launch, result)?;
    let Backward { q, k, v, dout } = Backward::new(launch, result);
    let of_keys = [&k, &v, &q, &dout];
    let of_queries = [&q, &dout, &k, &v];
    let call =
        |side, tensors: [&Tensor<'_>; 4], outs: [&Buffer; 2], out_rows, seq: usize, heads| {
            let [registers, packed] = kernel.widths();
            let tiles = seq.div_ceil(BACKWARD_TILE);
            launch.for_batches([tiles, heads, problem.batch], |cubes, first| {
                let [first_fixed, second_fixed, first_moving, second_moving] =
                    tensors.map(|tensor| tensor.map(launch, BLOCK));
                let (mask, mask_dtype) = launch.mask();
                // SAFETY: as in `forward`; the result was checked, and the gradients were allocated for the
                // problem.
                unsafe {
                    attention_backward_wgmma_kernel::launch_unchecked(
                        launch.client,
                        cubes,
                        CubeDim::new_1d(BACKWARD_UNITS),
                        first_fixed?,
                        second_fixed?,
                        first_moving?,
                        second_moving?,
                        mask,
                        launch.bias(),
                        launch.starts(),
                        terms.arg(1),
                        outs[0].arg(1),
                        outs[1].arg(1),
                        launch.rules(first),
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
    let kv_rows = problem.kv_gradients();
    call(Side::Keys, of_keys, [dk, dv], kv_rows, problem.seq_kv, problem.heads_kv)?;
    call(Side::Queries, of_queries, [dq, dq], problem.out(), problem.seq_q, problem.heads_q)
}

/// What the backward pass multiplies.
pub(super) struct Backward<'a> {
    pub(super) q: Tensor<'a>,
    pub(super) k: Tensor<'a>,
    pub(super) v: Tensor<'a>,
    pub(super) dout: Tensor<'a>,
}

impl<'a> Backward<'a> {
    pub(super) fn new(launch: &Launch<'a>, result: &AttentionResult<'a>) -> Self {
        let (problem, inputs) = (launch.problem, launch.inputs);
        Self {
            q: Tensor::of_queries(launch, inputs.q, problem.q),
            k: Tensor::of_keys(launch, inputs.k, problem.k),
            v: Tensor::of_keys(launch, inputs.v, problem.v),
            dout: Tensor::of_queries(launch, result.dout, result.dout_rows),
        }
    }
}
