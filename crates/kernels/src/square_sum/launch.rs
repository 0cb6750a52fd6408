use super::{PLACES, SquareSumBlueprint, blueprint::UNITS, forward::square_sum_kernel};
use crate::{KernelError, buffer::Buffer};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};

const OP: &str = "square_sum";

/// `sums` with the squares of `x` added, in the same memory where nobody else holds it.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where `sums` are not [`PLACES`] numbers of f32;
/// [`KernelError::Unsupported`] for an `x` that is not f32, f16 or bf16 or is beyond 32-bit indices.
pub fn square_sum(client: &Client, sums: Buffer, x: &Buffer) -> Result<Buffer, KernelError> {
    const F32: ElemType = ElemType::Float(FloatKind::F32);
    if (sums.elements, sums.dtype) != (PLACES, F32) {
        return Err(KernelError::InvalidProblem {
            op: OP,
            argument: "sums",
            expected: format!("{PLACES} elements of {F32:?}"),
            actual: format!("{} elements of {:?}", sums.elements, sums.dtype),
        });
    }
    let unsupported = |reason| Err(KernelError::Unsupported { op: OP, reason });
    if !matches!(x.dtype, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16)) {
        return unsupported(format!("{:?}; it takes f32, f16 and bf16", x.dtype));
    }
    let SquareSumBlueprint { vector_size, cubes } = SquareSumBlueprint::plan(x, client);
    let vectors = x.elements / vector_size;
    if u32::try_from(vectors + PLACES * UNITS as usize).is_err() {
        return unsupported(format!("{} elements", x.elements));
    }
    if cubes == 0 {
        return Ok(sums);
    }
    // Asked before a copy of the handle is made for the launch. In new memory every place is written.
    let new = (!sums.handle.can_mut()).then(|| Buffer::empty(client, PLACES, F32));
    let cubes = if new.is_some() { PLACES as u32 } else { cubes };
    const SUMS: usize = 1;
    // SAFETY: x holds `elements` elements, a multiple of the vector size, whose indices and one step
    // beyond fit 32 bits; the kernel stops at the last vector. There are at most as many cubes as places.
    unsafe {
        square_sum_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            x.arg(vector_size),
            sums.arg(1),
            match &new {
                Some(new) => new.arg(1),
                None => BufferArg::alias(SUMS, PLACES),
            },
            vectors as u32,
            x.dtype,
        );
    }
    Ok(new.unwrap_or(sums))
}
