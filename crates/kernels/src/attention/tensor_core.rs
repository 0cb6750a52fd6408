//! What the launches of both families of tensor cores share.

use super::{
    AttentionGradients, AttentionProblem, AttentionResult, Dropout,
    call::{Call, device_strides, heads, options},
    problem::{HeadStrides, unsupported},
    query_sums::WIDTH as SUMS_WIDTH,
    row_terms::{ROWS as TERMS_ROWS, UNITS as TERMS_UNITS, attention_row_terms_kernel},
    rules::{HeadsLaunch, Side},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32},
    device::ALIGNMENT_BYTES,
    ptx::mma::TF32,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// What the instructions call the type.
pub(super) fn ptx_type(call: &Call<'_>) -> Result<&'static str, KernelError> {
    match call.problem.dtype {
        ElemType::Float(FloatKind::BF16) => Ok("bf16"),
        ElemType::Float(FloatKind::F16) => Ok("f16"),
        ElemType::Float(FloatKind::F32) if call.problem.is_tf32() => Ok(TF32),
        other => Err(unsupported(format!("{other:?} on tensor cores"))),
    }
}

/// A tensor of rows of `head_dim`.
#[derive(Clone, Copy)]
pub(super) struct Tensor<'a> {
    pub(super) buffer: &'a Buffer,
    strides: HeadStrides,
    pub(super) heads: usize,
    pub(super) seq: usize,
}

impl<'a> Tensor<'a> {
    /// q, k and v.
    pub(super) fn inputs(call: &Call<'a>) -> [Self; 3] {
        let (problem, inputs) = (call.problem, call.inputs);
        [
            Self::of_queries(call, inputs.q, problem.q),
            Self::of_keys(call, inputs.k, problem.k),
            Self::of_keys(call, inputs.v, problem.v),
        ]
    }

    pub(super) fn of_queries(call: &Call<'_>, buffer: &'a Buffer, strides: HeadStrides) -> Self {
        Self { buffer, strides, heads: call.problem.heads_q, seq: call.problem.rows_q() }
    }

    fn of_keys(call: &Call<'_>, buffer: &'a Buffer, strides: HeadStrides) -> Self {
        Self { buffer, strides, heads: call.problem.heads_kv, seq: call.problem.rows_kv() }
    }

    pub(super) fn arg<I: Float>(&self) -> HeadsLaunch<I> {
        heads(self.buffer, self.strides)
    }

    /// The distances of sequences, heads and rows, where 16 bytes at a time can be fetched.
    pub(super) fn fetched_strides(&self, call: &Call<'_>) -> Result<[usize; 4], KernelError> {
        let problem = call.problem;
        let shape = [problem.tensor_batch(), self.heads, self.seq];
        let strides = [self.strides.batch, self.strides.head, self.strides.row];
        // A dimension of size 1 is never stepped over, but its distance has to be aligned.
        let row = problem.head_dim;
        let dense = [self.heads * self.seq * row, self.seq * row, row];
        let stride = |dim: usize| if shape[dim] == 1 { dense[dim] } else { strides[dim] };
        let strides = [stride(0), stride(1), stride(2), 1];
        let offset = self.buffer.offset_bytes();
        let is_aligned = |stride: &usize| {
            *stride > 0 && (stride * problem.dtype.size()).is_multiple_of(ALIGNMENT_BYTES)
        };
        if !offset.is_multiple_of(ALIGNMENT_BYTES as u64) || !strides[..3].iter().all(is_aligned) {
            let reason = format!("strides {strides:?} from byte {offset} on tensor cores");
            return Err(unsupported(reason));
        }
        Ok(strides)
    }
}

/// How many terms of a row the backward passes read: two, three with a bias.
pub(super) fn terms_of_row(problem: &AttentionProblem) -> usize {
    if options(problem).bias { 3 } else { 2 }
}

/// The terms of rows that the backward passes read. Where sums of dq are given, they become zero.
pub(super) fn row_terms(
    call: &Call<'_>,
    result: &AttentionResult<'_>,
    query_sums: Option<&Buffer>,
) -> Result<Buffer, KernelError> {
    let problem = call.problem;
    Tensor::of_queries(call, result.out, problem.out()).fetched_strides(call)?;
    Tensor::of_queries(call, result.dout, result.dout_strides).fetched_strides(call)?;
    let apart = options(problem).bias;
    let dropout = problem.dropout.unwrap_or(Dropout::NONE);
    let terms = Buffer::empty(call.client, terms_of_row(problem) * problem.query_elements(), F32);
    let tiles = problem.rows_q().div_ceil(TERMS_ROWS as usize);
    let batches = problem.tensor_batch();
    let no_sums = Buffer { elements: SUMS_WIDTH, ..terms.clone() };
    let zeros = query_sums.map_or(0, |sums| sums.elements / SUMS_WIDTH);
    let share = zeros.div_ceil(tiles * problem.heads_q * batches);
    let width = ALIGNMENT_BYTES / problem.dtype.size();
    call.for_batches([tiles, problem.heads_q, batches], |cubes, first| {
        // SAFETY: the result was checked, rows begin at multiples of 16 bytes, and the terms were allocated
        // for the problem.
        ahead::launch(call.client, |client| unsafe {
            attention_row_terms_kernel::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_1d(TERMS_UNITS),
                result.out.arg(width),
                result.dout.arg(width),
                result.lse.arg(1),
                terms.arg(1),
                query_sums.unwrap_or(&no_sums).arg(SUMS_WIDTH),
                zeros as u32,
                share as u32,
                problem.rows_q() as u32,
                problem.heads_q as u32,
                problem.head_dim as u32,
                dropout.share_kept() as f32,
                -dropout.share_kept().log2() as f32,
                first as u32,
                batches as u32,
                device_strides(problem.out()),
                device_strides(result.dout_strides),
                apart,
                problem.dtype,
                width,
            )
        });
        Ok(())
    })?;
    Ok(terms)
}

/// One of the two launches of the backward pass.
pub(super) struct Half<'a> {
    /// Of which rows the gradients are.
    pub(super) side: Side,
    /// The tensors of which rows stay with a cube.
    pub(super) fixed: [Tensor<'a>; 2],
    /// The tensors of which rows come in, tile by tile.
    pub(super) moving: [Tensor<'a>; 2],
    /// Rows of the gradients in a sequence.
    pub(super) seq: usize,
    /// The gradients; of queries there is but one.
    pub(super) outs: [&'a Buffer; 2],
    pub(super) out_strides: HeadStrides,
}

/// The launch that gives dk and dv, and the one that gives dq.
pub(super) fn halves<'a>(
    call: &Call<'a>,
    result: &AttentionResult<'a>,
    gradients: &'a AttentionGradients,
) -> [Half<'a>; 2] {
    let problem = call.problem;
    let AttentionGradients { dq, dk, dv, .. } = gradients;
    let [q, k, v] = Tensor::inputs(call);
    let dout = Tensor::of_queries(call, result.dout, result.dout_strides);
    let (of_queries, of_keys) = ([q, dout], [k, v]);
    [
        Half {
            side: Side::Keys,
            fixed: of_keys,
            moving: of_queries,
            seq: problem.seq_kv,
            outs: [dk, dv],
            out_strides: problem.kv_gradients(),
        },
        Half {
            side: Side::Queries,
            fixed: of_queries,
            moving: of_keys,
            seq: problem.seq_q,
            outs: [dq, dq],
            out_strides: problem.out(),
        },
    ]
}
