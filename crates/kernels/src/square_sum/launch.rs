use super::{
    MOST_TENSORS, PLACES, SquareSumBlueprint,
    blueprint::{UNITS, vectors},
    forward::{Part, PartLaunch, square_sum_kernel},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32, Rows, check_float},
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};

const OP: &str = "square_sum";

/// Types of tensors that are served.
const SERVED: [FloatKind; 3] = [FloatKind::F32, FloatKind::F16, FloatKind::BF16];

/// `sums` with the squares of all tensors added, in the same memory where nobody else holds it. Tensors of
/// one type take a launch for every [`MOST_TENSORS`], those with something between their rows apart.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where `sums` are not [`PLACES`] numbers of f32, or rows are not within
/// their memory; [`KernelError::Unsupported`] for a tensor that is not f32, f16 or bf16 or is beyond 32-bit
/// indices.
pub fn square_sum(client: &Client, sums: Buffer, tensors: &[Rows]) -> Result<Buffer, KernelError> {
    sums.check(OP, "sums", PLACES, F32)?;
    for rows in tensors {
        check_float(OP, "tensors", rows.buffer.dtype)?;
        if rows.span() > rows.buffer.elements || rows.pitch < rows.columns && rows.rows > 1 {
            let expected = "rows one after another, within their memory";
            return Err(KernelError::invalid(OP, "tensors", expected, format!("{rows:?}")));
        }
        // A cube's share of one tensor goes beyond the end by less.
        if u32::try_from(rows.rows * rows.pitch + (1 << 24)).is_err() {
            let reason = format!("{} rows of {} elements", rows.rows, rows.columns);
            return Err(KernelError::Unsupported { op: OP, reason });
        }
    }
    let mut sums = sums;
    for kind in SERVED {
        let dtype = ElemType::Float(kind);
        for is_contiguous in [true, false] {
            let alike: Vec<Rows> = tensors
                .iter()
                .filter(|rows| rows.buffer.dtype == dtype && rows.elements() > 0)
                .filter(|rows| rows.is_contiguous() == is_contiguous)
                .cloned()
                .collect();
            for some in alike.chunks(most_tensors(client)) {
                sums = launch(client, sums, some, dtype);
            }
        }
    }
    Ok(sums)
}

/// Tensors that a launch has room for, beside sums and numbers.
fn most_tensors(client: &Client) -> usize {
    /// Sums before and after, and CubeCL's own.
    const OTHERS: usize = 4;
    let most = client.properties().hardware.max_bindings as usize;
    most.saturating_sub(OTHERS).clamp(1, MOST_TENSORS)
}

/// Adds tensors of one type, which are not empty.
fn launch(client: &Client, sums: Buffer, tensors: &[Rows], dtype: ElemType) -> Buffer {
    let blueprint = SquareSumBlueprint::plan(tensors, dtype, client);
    if !blueprint.is_counted_in_32_bits() && tensors.len() > 1 {
        let (some, others) = tensors.split_at(tensors.len() / 2);
        let sums = launch(client, sums, some, dtype);
        return launch(client, sums, others, dtype);
    }
    let SquareSumBlueprint { vector_size, by_rows, share, cubes } = blueprint;
    let end = cubes.iter().sum::<usize>() as u32;
    // A few kernels serve all numbers of tensors: what is not there has no cubes, and the first stands in.
    let count = tensors.len().next_power_of_two().min(most_tensors(client));
    let parts = || -> SequenceArg<Part> {
        let mut end = 0;
        let there = tensors.iter().zip(&cubes).map(|(rows, cubes)| {
            end += *cubes as u32;
            let columns = if by_rows { rows.columns } else { rows.elements() };
            PartLaunch::new(
                end,
                vectors(rows, vector_size) as u32,
                columns.div_ceil(vector_size) as u32,
                ((columns - 1) % vector_size + 1) as u32,
                (rows.pitch / vector_size) as u32,
            )
        });
        let mut parts: SequenceArg<Part> = there.collect();
        for _ in tensors.len()..count {
            parts.push(PartLaunch::new(end, 0, 1, 1, 0));
        }
        parts
    };
    // Asked before a copy of the handle is made for the launch. In new memory every place is written.
    let new = (!sums.handle.can_mut()).then(|| Buffer::empty(client, PLACES, sums.dtype));
    let all_cubes = if new.is_some() { PLACES as u32 } else { end };
    // SAFETY: `square_sum` has seen that the tensors hold their rows and that indices and a cube's share
    // beyond fit 32 bits, and the plan that memory goes on to the end of each row's last vector; the kernel
    // stops there. There are at most as many cubes as places.
    ahead::launch(client, |client| unsafe {
        square_sum_kernel::launch_unchecked(
            client,
            CubeCount::Static(all_cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            (0..count).map(|at| tensors.get(at).unwrap_or(&tensors[0]).arg()).collect(),
            sums.arg(1),
            match &new {
                Some(new) => new.arg(1),
                None => BufferArg::alias(count, PLACES),
            },
            parts(),
            share as u32,
            by_rows,
            dtype,
        )
    });
    new.unwrap_or(sums)
}
