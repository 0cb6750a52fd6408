use super::{
    MOST_TENSORS, PLACES, SquareSumBlueprint,
    blueprint::UNITS,
    forward::{CountsLaunch, square_sum_kernel},
};
use crate::{KernelError, buffer::Buffer};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};

const OP: &str = "square_sum";

/// `sums` with the squares of all tensors added, in the same memory where nobody else holds it.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where `sums` are not [`PLACES`] numbers of f32, or the tensors are none,
/// more than [`MOST_TENSORS`] or of different types; [`KernelError::Unsupported`] for one that is not f32,
/// f16 or bf16 or is beyond 32-bit indices.
pub fn square_sum(
    client: &Client,
    sums: Buffer,
    tensors: &[Buffer],
) -> Result<Buffer, KernelError> {
    const F32: ElemType = ElemType::Float(FloatKind::F32);
    let invalid = |argument, expected: String, actual: String| {
        Err(KernelError::InvalidProblem { op: OP, argument, expected, actual })
    };
    if (sums.elements, sums.dtype) != (PLACES, F32) {
        let actual = format!("{} elements of {:?}", sums.elements, sums.dtype);
        return invalid("sums", format!("{PLACES} elements of {F32:?}"), actual);
    }
    let types: Vec<ElemType> = tensors.iter().map(|x| x.dtype).collect();
    let dtype = match types[..] {
        [first, ..] if types.len() <= MOST_TENSORS && types.iter().all(|other| *other == first) => {
            first
        }
        _ => {
            let expected = format!("1 to {MOST_TENSORS} of one type");
            return invalid("tensors", expected, format!("{types:?}"));
        }
    };
    let unsupported = |reason| Err(KernelError::Unsupported { op: OP, reason });
    if !matches!(dtype, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16)) {
        return unsupported(format!("{dtype:?}; it takes f32, f16 and bf16"));
    }
    let SquareSumBlueprint { vector_size, cubes } = SquareSumBlueprint::plan(tensors, client);
    let most = tensors.iter().map(|x| x.elements).max().unwrap_or(0);
    if u32::try_from(most / vector_size + PLACES * UNITS as usize).is_err() {
        return unsupported(format!("{most} elements"));
    }
    if cubes == 0 {
        return Ok(sums);
    }
    // Asked before a copy of the handle is made for the launch. In new memory every place is written.
    let new = (!sums.handle.can_mut()).then(|| Buffer::empty(client, PLACES, F32));
    let cubes = if new.is_some() { PLACES as u32 } else { cubes };
    // What is not there is stood in for by the first, of which nothing is read then.
    let x = |at: usize| tensors.get(at).unwrap_or(&tensors[0]).arg(vector_size);
    let vectors = |at: usize| tensors.get(at).map_or(0, |x| (x.elements / vector_size) as u32);
    // SAFETY: the tensors hold `elements` elements, a multiple of the vector size, whose indices and one
    // step beyond fit 32 bits; the kernel stops at the last vectors. There are at most as many cubes as
    // places.
    unsafe {
        square_sum_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            x(0),
            x(1),
            x(2),
            x(3),
            x(4),
            x(5),
            x(6),
            x(7),
            sums.arg(1),
            match &new {
                Some(new) => new.arg(1),
                None => BufferArg::alias(MOST_TENSORS, PLACES),
            },
            CountsLaunch::new(
                vectors(0),
                vectors(1),
                vectors(2),
                vectors(3),
                vectors(4),
                vectors(5),
                vectors(6),
                vectors(7),
            ),
            dtype,
        );
    }
    Ok(new.unwrap_or(sums))
}
