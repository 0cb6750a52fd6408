use super::{
    GeluBlueprint, GeluProblem, backward::gelu_backward_kernel, forward::gelu_forward_kernel,
};
use crate::{KernelError, buffer::Buffer};
use cubecl::{calculate_cube_count_elemwise, client::Client, prelude::*};

/// y = gelu(x).
///
/// # Errors
///
/// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16.
pub fn gelu_forward(client: &Client, x: &Buffer) -> Result<Buffer, KernelError> {
    let problem = GeluProblem::new("gelu_forward", x)?;
    let y = Buffer::empty(client, x.elements, x.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let (blueprint, count, dim) = plan(&problem, client);
    // SAFETY: x and y hold `problem.elements` elements, a multiple of the vector size; the kernel
    // stops units past y's end.
    unsafe {
        gelu_forward_kernel::launch_unchecked(
            client,
            count,
            dim,
            blueprint.vector_size,
            x.arg(blueprint.vector_size),
            y.arg(blueprint.vector_size),
            problem.dtype,
        );
    }
    Ok(y)
}

/// dx = dy gelu'(x).
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `dy` differs from `x` in length or dtype;
/// [`KernelError::Unsupported`] as for [`gelu_forward`].
pub fn gelu_backward(client: &Client, x: &Buffer, dy: &Buffer) -> Result<Buffer, KernelError> {
    let problem = GeluProblem::new("gelu_backward", x)?;
    problem.check_operand("gelu_backward", "dy", dy)?;
    let dx = Buffer::empty(client, x.elements, x.dtype);
    if problem.elements == 0 {
        return Ok(dx);
    }
    let (blueprint, count, dim) = plan(&problem, client);
    // SAFETY: as in `gelu_forward`; dy's length was checked.
    unsafe {
        gelu_backward_kernel::launch_unchecked(
            client,
            count,
            dim,
            blueprint.vector_size,
            x.arg(blueprint.vector_size),
            dy.arg(blueprint.vector_size),
            dx.arg(blueprint.vector_size),
            problem.dtype,
        );
    }
    Ok(dx)
}

fn plan(problem: &GeluProblem, client: &Client) -> (GeluBlueprint, CubeCount, CubeDim) {
    let blueprint = GeluBlueprint::plan(problem, client);
    let dim = CubeDim::new_1d(blueprint.units_per_cube);
    let count =
        calculate_cube_count_elemwise(client, problem.elements / blueprint.vector_size, dim);
    (blueprint, count, dim)
}
