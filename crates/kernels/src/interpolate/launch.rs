use super::{InterpolateBlueprint, InterpolateProblem, backward::interpolate_backward_kernel};
use crate::{KernelError, ahead, buffer::Buffer};
use cubecl::client::Client;

/// The gradient of x given that of y: dx, `[images, rows, columns, channels]` of x, contiguous.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the problem contradicts itself or dy does not hold it;
/// [`KernelError::Unsupported`] for other dtypes than f32, f16 and bf16, empty tensors, tensors of 2^31 elements and
/// more, tensors that do not begin at a multiple of 16 bytes, and sizes whose positions take more than 31 bits.
pub fn interpolate_backward(
    client: &Client,
    problem: &InterpolateProblem,
    dy: &Buffer,
) -> Result<Buffer, KernelError> {
    problem.validate()?;
    problem.check_dy(dy)?;
    let InterpolateBlueprint { plan, filters } = InterpolateBlueprint::plan(problem, client);
    let (count, dim) = plan.cubes(client);
    let lines =
        || [0, 1].map(|dim| problem.positions(dim).launch(problem.input[dim], problem.output[dim]));
    let dx = Buffer::empty(client, problem.inputs(), problem.dtype);
    // SAFETY: dy holds the problem's pixels, whose channels and, where there are more, stride are multiples of the
    // vector size, with indices of 32 bits as `validate` has seen. Outputs that are read are below their number. dx
    // has a vector for each unit, behind which the kernel stops.
    ahead::launch(client, |client| unsafe {
        let [rows, columns] = lines();
        interpolate_backward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            plan.vector_size,
            dy.arg_read_in_part(),
            dx.arg(plan.vector_size),
            plan.spread(),
            rows,
            columns,
            filters,
            problem.dtype,
        )
    });
    Ok(dx)
}
