//! Launches of attention whose keys are divided among cubes.

use super::{
    AttentionBlueprint, AttentionInputs, AttentionOutput, AttentionProblem,
    call::{Call, device_strides},
    decode::{
        DecodeBlueprint, MOST_ROWS, PartsLaunch, SplitsLaunch, VectorsLaunch,
        attention_decode_kernel,
    },
    decode_merge::attention_merge_kernel,
    decode_plan::SPLIT_KEYS,
    problem::{HeadStrides, OP, invalid, unsupported},
};
#[cfg(feature = "cuda")]
use super::{
    decode_mma::{MmaDecodeBlueprint, attention_decode_mma_kernel},
    decode_plan::MMA_ROWS,
    tensor_core::{Tensor, ptx_type},
};
use crate::{
    DeviceProfile, Family, KernelError, ahead,
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
    let plans = AttentionBlueprint::splitting(problem, DeviceProfile::of(client));
    let Some(plan) = plans.first() else {
        return Err(unsupported(
            "keys divided among cubes with a mask, a bias, dropout or packed sequences".into(),
        ));
    };
    tell_plan(OP, problem, plan, format_args!("the position is on the device"));
    attention_decode_with(client, problem, plan, inputs, position)
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
    if plan.tile_kv == 0 {
        return Err(invalid("tile_kv", "at least 1".into(), plan.tile_kv));
    }
    let count = problem.seq_kv.div_ceil(plan.tile_kv);
    let found = problem.query_elements() * count;
    if u32::try_from(found * problem.head_dim).is_err() {
        return Err(unsupported(format!("{count} splits of {} queries", problem.query_elements())));
    }
    let split = Split {
        call,
        plan,
        position,
        count,
        memory: Memory::empty(client, found, problem.head_dim),
    };
    match plan.family {
        Family::Portable => split.portable()?,
        #[cfg(feature = "cuda")]
        Family::Mma => split.mma()?,
        other => return Err(unsupported(format!("keys divided among cubes by {other:?}"))),
    }
    split.merge(output)
}

/// A call whose keys are divided among cubes.
struct Split<'a> {
    call: &'a Call<'a>,
    plan: &'a AttentionBlueprint,
    position: Option<&'a Buffer>,
    /// Splits of a head.
    count: usize,
    memory: Memory,
}

impl Split<'_> {
    fn splits(&self) -> SplitsLaunch {
        SplitsLaunch {
            count: self.count as u32,
            least_keys: self.plan.tile_kv.min(SPLIT_KEYS) as u32,
            position_step: self.position.map_or(0, |position| u32::from(position.elements > 1)),
        }
    }

    /// What is not read has the keys in its place, whose types make no difference.
    fn position(&self) -> &Buffer {
        self.position.unwrap_or(self.call.inputs.q)
    }

    /// Splits, tiles of so many rows, and sequences.
    fn cubes(&self, rows: usize) -> [usize; 3] {
        let problem = self.call.problem;
        let group_rows = problem.heads_q / problem.heads_kv * problem.seq_q;
        [self.count, problem.heads_kv * group_rows.div_ceil(rows), problem.batch]
    }

    /// How the portable kernel is compiled, and the one that merges, and the size of their vectors.
    fn portable_kernel(&self) -> (DecodeBlueprint, VectorSize) {
        let Self { call, plan, position, .. } = self;
        let problem = call.problem;
        let rows = plan.tile_q.next_power_of_two().min(MOST_ROWS as usize);
        let size = vector_size(call);
        let of_row = [problem.head_dim / size, size].map(|count| count as u32);
        let plane = plane_units(call.client);
        let dtype = problem.dtype;
        (DecodeBlueprint::new(rows as u32, of_row, dtype, position.is_some(), plane), size)
    }

    fn portable(&self) -> Result<(), KernelError> {
        let Self { call, plan, .. } = self;
        let (problem, client) = (call.problem, call.client);
        let (kernel, size) = self.portable_kernel();
        let shared_bytes = kernel.shared_bytes(size);
        if shared_bytes > client.properties().hardware.max_shared_memory_size {
            return Err(unsupported(format!("{plan} with {shared_bytes} bytes of shared memory")));
        }
        call.for_batches(self.cubes(kernel.rows as usize), |cubes, first| {
            // SAFETY: the inputs hold the spans of the problem, in whole vectors, and the parts were allocated for it;
            // the kernel stops rows and keys at their ends, wherever the position is.
            ahead::launch(client, |client| unsafe {
                attention_decode_kernel::launch_unchecked(
                    client,
                    cubes.clone(),
                    CubeDim::new_1d(kernel.units()),
                    size,
                    vectors(call.inputs.q, problem.q, size),
                    vectors(call.inputs.k, problem.k, size),
                    vectors(call.inputs.v, problem.v, size),
                    call.rules(first),
                    self.position().arg(1),
                    self.memory.parts(size),
                    self.splits(),
                    kernel,
                    call.types(),
                )
            });
            Ok(())
        })
    }

    #[cfg(feature = "cuda")]
    fn mma(&self) -> Result<(), KernelError> {
        let Self { call, plan, .. } = self;
        let device = DeviceProfile::of(call.client);
        for tensor in Tensor::inputs(call) {
            tensor.fetched_strides(call)?;
        }
        let Some((ring, _)) = AttentionBlueprint::key_ring(call.problem, device) else {
            return Err(unsupported(format!("{plan} for this problem and device")));
        };
        let kernel = MmaDecodeBlueprint {
            dtype: ptx_type(call)?,
            head_dim: call.problem.head_dim,
            ring,
            is_placed: self.position.is_some(),
        };
        call.for_batches(self.cubes(MMA_ROWS), |cubes, first| {
            // SAFETY: as of the portable kernel; rows begin at multiples of 16 bytes.
            ahead::launch(call.client, |client| unsafe {
                attention_decode_mma_kernel::launch_unchecked(
                    client,
                    cubes.clone(),
                    CubeDim::new_1d(MmaDecodeBlueprint::UNITS),
                    call.q(),
                    call.k(),
                    call.v(),
                    call.rules(first),
                    self.position().arg(1),
                    self.memory.parts(4),
                    self.splits(),
                    kernel,
                    call.types(),
                    kernel.widths(),
                )
            });
            Ok(())
        })
    }

    fn merge(&self, output: &AttentionOutput) -> Result<(), KernelError> {
        let (call, problem) = (self.call, self.call.problem);
        let (kernel, size) = self.portable_kernel();
        let queries = problem.heads_q * problem.seq_q;
        call.for_batches([queries, 1, problem.batch], |cubes, first| {
            // SAFETY: the parts and the output were allocated for the problem. Splits that wrote nothing are not read.
            ahead::launch(call.client, |client| unsafe {
                attention_merge_kernel::launch_unchecked(
                    client,
                    cubes.clone(),
                    CubeDim::new_1d(kernel.units()),
                    size,
                    self.memory.parts(size),
                    call.rules(first),
                    self.position().arg(1),
                    vectors(&output.out, problem.out(), size),
                    output.lse.arg(1),
                    self.splits(),
                    kernel,
                    call.types(),
                )
            });
            Ok(())
        })
    }
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
