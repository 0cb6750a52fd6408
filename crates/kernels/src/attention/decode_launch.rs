//! Launches of attention whose keys are divided among cubes.

use super::{
    AttentionBlueprint, AttentionInputs, AttentionOutput, AttentionProblem,
    call::{Call, device_strides},
    decode::{
        DecodeBlueprint, MOST_ROWS, PartsLaunch, SplitsLaunch, VectorsLaunch,
        attention_decode_kernel,
    },
    decode_merge::attention_merge_kernel,
    problem::{HeadStrides, OP, invalid, unsupported},
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, F32},
    device::{plane_units, widest_vector},
    plan::tell_plan,
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind, UIntKind, VectorSize},
    prelude::*,
};

/// Attention of new tokens over a cache that holds them and all before them, by plans that divide keys among cubes.
///
/// `problem.seq_kv` is the cache's capacity. `position`, on the device, is where the first query stands: one 32-bit
/// integer for all sequences, or one for each. Query i sees keys up to `position + i` if the window says so, and no
/// query sees keys from `position + seq_q` on, whose memory is not read. Beyond the capacity there are no keys.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the problem is nonsense or a tensor is not what it says;
/// [`KernelError::Unsupported`] with a mask, a bias, dropout or packed sequences, and beyond 32-bit indices.
pub fn attention_decode(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &AttentionInputs<'_>,
    position: &Buffer,
) -> Result<AttentionOutput, KernelError> {
    problem.validate()?;
    let Some(plan) = AttentionBlueprint::splitting(problem, DeviceProfile::of(client)) else {
        return Err(unsupported(
            "keys divided among cubes with a mask, a bias, dropout or packed sequences".into(),
        ));
    };
    tell_plan(OP, problem, &plan, format_args!("the position is on the device"));
    attention_decode_with(client, problem, &plan, inputs, position)
}

/// As [`attention_decode`], by a plan of the caller's, which has to be one that
/// [splits](AttentionBlueprint::split).
///
/// # Errors
///
/// As [`attention_decode`].
pub fn attention_decode_with(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: &AttentionBlueprint,
    inputs: &AttentionInputs<'_>,
    position: &Buffer,
) -> Result<AttentionOutput, KernelError> {
    let call = Call::new(client, problem, inputs)?;
    check_position(OP, position, problem.batch)?;
    let output = AttentionOutput::empty(client, problem);
    forward(&call, blueprint, Some(position), &output)?;
    Ok(output)
}

/// Refuses what is no position for so many sequences.
pub(super) fn check_position(
    op: &'static str,
    position: &Buffer,
    batch: usize,
) -> Result<(), KernelError> {
    let is_int =
        matches!(position.dtype, ElemType::UInt(UIntKind::U32) | ElemType::Int(IntKind::I32));
    if is_int && (position.elements == 1 || position.elements == batch) {
        return Ok(());
    }
    Err(position.mismatch(op, "position", format!("1 or {batch} integers of 32 bits")))
}

/// The forward pass. Without a position the last query stands at the last key.
pub(super) fn forward(
    call: &Call<'_>,
    plan: &AttentionBlueprint,
    position: Option<&Buffer>,
    output: &AttentionOutput,
) -> Result<(), KernelError> {
    let (problem, client) = (call.problem, call.client);
    if !AttentionBlueprint::may_split(problem) {
        return Err(unsupported(format!("{plan} for these options")));
    }
    let rows = plan.tile_q.next_power_of_two().min(MOST_ROWS as usize);
    if plan.tile_kv == 0 {
        return Err(invalid("tile_kv", "at least 1".into(), plan.tile_kv));
    }
    let size = vector_size(call);
    let of_row = [problem.head_dim / size, size].map(|count| count as u32);
    let plane = plane_units(client);
    let kernel =
        DecodeBlueprint::new(rows as u32, of_row, problem.dtype, position.is_some(), plane);
    let shared_bytes = kernel.shared_bytes(size);
    if shared_bytes > client.properties().hardware.max_shared_memory_size {
        return Err(unsupported(format!("{plan} with {shared_bytes} bytes of shared memory")));
    }
    let count = problem.seq_kv.div_ceil(plan.tile_kv);
    let found = problem.query_elements() * count;
    if u32::try_from(found * problem.head_dim).is_err() {
        return Err(unsupported(format!("{count} splits of {} queries", problem.query_elements())));
    }
    let memory = Memory::empty(client, found, problem.head_dim);
    let splits = || SplitsLaunch {
        count: count as u32,
        keys: plan.tile_kv as u32,
        position_step: position.map_or(0, |position| u32::from(position.elements > 1)),
    };
    // What is not read has the keys in its place, whose types make no difference.
    let position = || position.unwrap_or(call.inputs.q).arg(1);
    let dim = CubeDim::new_1d(kernel.units());
    let group_rows = problem.heads_q / problem.heads_kv * problem.seq_q;
    let tiles = problem.heads_kv * group_rows.div_ceil(rows);
    call.for_batches([count, tiles, problem.batch], |cubes, first| {
        // SAFETY: the inputs hold the spans of the problem, in whole vectors, and the parts were allocated for it;
        // the kernel stops rows and keys at their ends, wherever the position is.
        ahead::launch(client, |client| unsafe {
            attention_decode_kernel::launch_unchecked(
                client,
                cubes.clone(),
                dim,
                size,
                vectors(call.inputs.q, problem.q, size),
                vectors(call.inputs.k, problem.k, size),
                vectors(call.inputs.v, problem.v, size),
                call.rules(first),
                position(),
                memory.parts(size),
                splits(),
                kernel,
                call.types(),
            )
        });
        Ok(())
    })?;
    let queries = problem.heads_q * problem.seq_q;
    call.for_batches([queries, 1, problem.batch], |cubes, first| {
        // SAFETY: as above; the output was allocated for the problem. Splits that wrote nothing are not read.
        ahead::launch(client, |client| unsafe {
            attention_merge_kernel::launch_unchecked(
                client,
                cubes.clone(),
                dim,
                size,
                memory.parts(size),
                call.rules(first),
                position(),
                vectors(&output.out, problem.out(), size),
                output.lse.arg(1),
                splits(),
                kernel,
                call.types(),
            )
        });
        Ok(())
    })
}

/// Where splits leave what they found.
struct Memory {
    sums: Buffer,
    most: Buffer,
    total: Buffer,
}

impl Memory {
    fn empty(client: &Client, found: usize, head_dim: usize) -> Self {
        let empty = |elements| Buffer::empty(client, elements, F32);
        Self { sums: empty(found * head_dim), most: empty(found), total: empty(found) }
    }

    fn parts<N: Size>(&self, size: VectorSize) -> PartsLaunch<N> {
        PartsLaunch { sums: self.sums.arg(size), most: self.most.arg(1), total: self.total.arg(1) }
    }
}

/// The widest vectors that rows, strides and the beginnings of q, k and v divide into.
fn vector_size(call: &Call<'_>) -> VectorSize {
    let (problem, inputs) = (call.problem, call.inputs);
    let bytes = problem.dtype.size();
    let heads = [problem.heads_q, problem.heads_kv, problem.heads_kv];
    let rows = [problem.seq_q, problem.seq_kv, problem.seq_kv];
    let strides = [problem.q, problem.k, problem.v];
    widest_vector(call.client, bytes, |size| {
        let are_whole = |((strides, heads), seq): ((HeadStrides, usize), usize)| {
            steps(strides, [problem.batch, heads, seq]).into_iter().all(|s| s.is_multiple_of(size))
        };
        let begins_whole =
            |buffer: &Buffer| buffer.offset_bytes().is_multiple_of((size * bytes) as u64);
        problem.head_dim.is_multiple_of(size)
            && strides.into_iter().zip(heads).zip(rows).all(are_whole)
            && [inputs.q, inputs.k, inputs.v].into_iter().all(begins_whole)
    })
}

/// The strides that are stepped by.
pub(super) fn steps(
    HeadStrides { batch, head, row }: HeadStrides,
    sizes: [usize; 3],
) -> [usize; 3] {
    let mut steps = [batch, head, row];
    steps.iter_mut().zip(sizes).for_each(|(step, size)| *step *= usize::from(size > 1));
    steps
}

/// A tensor of heads as an argument of vectors, which divide the strides that are stepped by.
pub(super) fn vectors<I: Float, N: Size>(
    memory: &Buffer,
    HeadStrides { batch, head, row }: HeadStrides,
    size: VectorSize,
) -> VectorsLaunch<I, N> {
    let [batch, head, row] = [batch, head, row].map(|stride| stride / size);
    let elements = memory.elements / size * size;
    VectorsLaunch {
        // SAFETY: the memory has these elements, which are whole vectors: all that the spans of rows have.
        memory: unsafe { BufferArg::from_raw_parts(memory.argument(), elements) },
        strides: device_strides(HeadStrides { batch, head, row }),
    }
}
