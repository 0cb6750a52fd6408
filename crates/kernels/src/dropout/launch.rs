use super::{DropoutProblem, forward::dropout_kernel};
use crate::{KernelError, buffer::Buffer};
use cubecl::{calculate_cube_count_elemwise, client::Client, prelude::*};

/// `residual + dropout(x)`, or without a residual `dropout(x)`.
///
/// # Errors
///
/// As [`DropoutProblem::validate`], and [`KernelError::InvalidProblem`] when a buffer does not go with the
/// problem.
pub fn dropout(
    client: &Client,
    problem: &DropoutProblem,
    x: &Buffer,
    residual: Option<&Buffer>,
) -> Result<Buffer, KernelError> {
    const UNITS: u32 = 256;
    problem.validate()?;
    problem.check("x", x)?;
    if let Some(residual) = residual {
        problem.check("residual", residual)?;
    }
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let vector_size = client
        .io_optimized_vector_sizes(problem.dtype.size())
        .filter(|size| *size <= 8 && problem.elements.is_multiple_of(*size))
        .max()
        .unwrap_or(1);
    let dim = CubeDim::new_1d(UNITS.min(client.properties().hardware.max_units_per_cube));
    // SAFETY: all hold `problem.elements` elements, a multiple of the vector size; the kernel stops units
    // past y's end. Without a residual none is compiled in, and x stands in for it.
    unsafe {
        dropout_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, problem.elements / vector_size, dim),
            dim,
            vector_size,
            x.arg(vector_size),
            residual.unwrap_or(x).arg(vector_size),
            y.arg(vector_size),
            problem.seed as u32,
            (problem.seed >> 32) as u32,
            problem.threshold(),
            problem.scale(),
            residual.is_some(),
            problem.dtype,
        );
    }
    Ok(y)
}
