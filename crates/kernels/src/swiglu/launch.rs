use super::element::{swiglu_backward_kernel, swiglu_forward_kernel};
use crate::{
    KernelError, ahead,
    buffer::Buffer,
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
    functions::Functions,
};
use cubecl::client::Client;

/// y = silu(gate) up.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `up` differs from `gate` in length or dtype;
/// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16.
pub fn swiglu_forward(client: &Client, gate: &Buffer, up: &Buffer) -> Result<Buffer, KernelError> {
    const OP: &str = "swiglu_forward";
    let problem = ElementwiseProblem::new(OP, gate)?;
    problem.check_operand(OP, "up", up)?;
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let blueprint = ElementwiseBlueprint::plan(&problem, client);
    let (count, dim) = blueprint.cubes(problem.elements, client);
    let functions = Functions::of(problem.dtype, client);
    // SAFETY: all hold `problem.elements` elements, a multiple of the vector size; the kernel stops units
    // past y's end.
    ahead::launch(client, |client| unsafe {
        swiglu_forward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            blueprint.vector_size,
            gate.arg(blueprint.vector_size),
            up.arg(blueprint.vector_size),
            y.arg(blueprint.vector_size),
            functions,
            problem.dtype,
        )
    });
    Ok(y)
}

/// What [`swiglu_backward`] returns.
#[derive(Clone, Debug)]
pub struct SwigluGradients {
    /// The gradient of the gate.
    pub dgate: Buffer,
    /// The gradient of what the gate is multiplied by.
    pub dup: Buffer,
}

/// The gradients of gate and up, in one pass.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `up` or `dy` differs from `gate` in length or dtype;
/// [`KernelError::Unsupported`] as for [`swiglu_forward`].
pub fn swiglu_backward(
    client: &Client,
    gate: &Buffer,
    up: &Buffer,
    dy: &Buffer,
) -> Result<SwigluGradients, KernelError> {
    const OP: &str = "swiglu_backward";
    let problem = ElementwiseProblem::new(OP, gate)?;
    problem.check_operand(OP, "up", up)?;
    problem.check_operand(OP, "dy", dy)?;
    let [dgate, dup] = [(); 2].map(|()| Buffer::empty(client, problem.elements, problem.dtype));
    if problem.elements == 0 {
        return Ok(SwigluGradients { dgate, dup });
    }
    let blueprint = ElementwiseBlueprint::plan(&problem, client);
    let (count, dim) = blueprint.cubes(problem.elements, client);
    let functions = Functions::of(problem.dtype, client);
    // SAFETY: as in `swiglu_forward`; dy's length was checked too.
    ahead::launch(client, |client| unsafe {
        swiglu_backward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            blueprint.vector_size,
            gate.arg(blueprint.vector_size),
            up.arg(blueprint.vector_size),
            dy.arg(blueprint.vector_size),
            dgate.arg(blueprint.vector_size),
            dup.arg(blueprint.vector_size),
            functions,
            problem.dtype,
        )
    });
    Ok(SwigluGradients { dgate, dup })
}
