use super::element::{
    swiglu_backward_kernel, swiglu_backward_watched_kernel, swiglu_forward_kernel,
    swiglu_forward_watched_kernel,
};
use crate::{
    KernelError, ahead,
    buffer::Buffer,
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
    functions::Functions,
    magnitude::Magnitudes,
};
use cubecl::{CubeCount, CubeDim, client::Client};

const FORWARD: &str = "swiglu_forward";
const BACKWARD: &str = "swiglu_backward";

/// y = silu(gate) up.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `up` differs from `gate` in length or dtype;
/// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16.
pub fn swiglu_forward(client: &Client, gate: &Buffer, up: &Buffer) -> Result<Buffer, KernelError> {
    let Call { problem, blueprint, functions } = Call::new(client, FORWARD, gate, &[("up", up)])?;
    let vector_size = blueprint.vector_size;
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let (count, dim) = blueprint.cubes(problem.elements, client);
    // SAFETY: all hold `problem.elements` elements, a multiple of the vector size; the kernel stops units
    // past y's end.
    ahead::launch(client, |client| unsafe {
        swiglu_forward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            gate.arg(vector_size),
            up.arg(vector_size),
            y.arg(vector_size),
            functions,
            problem.dtype,
        )
    });
    Ok(y)
}

/// As [`swiglu_forward`], with the magnitudes of y, which is not empty.
///
/// # Errors
///
/// As [`swiglu_forward`], and [`KernelError::Unsupported`] without elements.
pub fn swiglu_forward_watched(
    client: &Client,
    gate: &Buffer,
    up: &Buffer,
) -> Result<(Buffer, Magnitudes), KernelError> {
    let call = Call::new(client, FORWARD, gate, &[("up", up)])?;
    let (count, dim) = call.watched_cubes(client, FORWARD)?;
    let Call { problem, blueprint, functions } = call;
    let vector_size = blueprint.vector_size;
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    let magnitudes = Magnitudes::of_cubes(client, count);
    // SAFETY: as in `swiglu_forward`; each cube writes its part of the magnitudes.
    ahead::launch(client, |client| unsafe {
        swiglu_forward_watched_kernel::launch_unchecked(
            client,
            CubeCount::Static(count as u32, 1, 1),
            dim,
            vector_size,
            gate.arg(vector_size),
            up.arg(vector_size),
            y.arg(vector_size),
            magnitudes.partials.arg(1),
            functions,
            blueprint.units_per_cube,
            problem.dtype,
        )
    });
    Ok((y, magnitudes))
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
    let call = Call::new(client, BACKWARD, gate, &[("up", up), ("dy", dy)])?;
    let gradients = call.gradients(client);
    let Call { problem, blueprint, functions } = call;
    if problem.elements == 0 {
        return Ok(gradients);
    }
    let SwigluGradients { dgate, dup } = &gradients;
    let vector_size = blueprint.vector_size;
    let (count, dim) = blueprint.cubes(problem.elements, client);
    // SAFETY: as in `swiglu_forward`; dy's length was checked too.
    ahead::launch(client, |client| unsafe {
        swiglu_backward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            gate.arg(vector_size),
            up.arg(vector_size),
            dy.arg(vector_size),
            dgate.arg(vector_size),
            dup.arg(vector_size),
            functions,
            problem.dtype,
        )
    });
    Ok(gradients)
}

/// As [`swiglu_backward`], with the magnitudes of dgate and of dup, which are not empty.
///
/// # Errors
///
/// As [`swiglu_backward`], and [`KernelError::Unsupported`] without elements.
pub fn swiglu_backward_watched(
    client: &Client,
    gate: &Buffer,
    up: &Buffer,
    dy: &Buffer,
) -> Result<(SwigluGradients, [Magnitudes; 2]), KernelError> {
    let call = Call::new(client, BACKWARD, gate, &[("up", up), ("dy", dy)])?;
    let (count, dim) = call.watched_cubes(client, BACKWARD)?;
    let gradients = call.gradients(client);
    let Call { problem, blueprint, functions } = call;
    let SwigluGradients { dgate, dup } = &gradients;
    let vector_size = blueprint.vector_size;
    let magnitudes = [(); 2].map(|()| Magnitudes::of_cubes(client, count));
    let [of_gate, of_up] = &magnitudes;
    // SAFETY: as in `swiglu_backward`; each cube writes its part of the magnitudes.
    ahead::launch(client, |client| unsafe {
        swiglu_backward_watched_kernel::launch_unchecked(
            client,
            CubeCount::Static(count as u32, 1, 1),
            dim,
            vector_size,
            gate.arg(vector_size),
            up.arg(vector_size),
            dy.arg(vector_size),
            dgate.arg(vector_size),
            dup.arg(vector_size),
            of_gate.partials.arg(1),
            of_up.partials.arg(1),
            functions,
            blueprint.units_per_cube,
            problem.dtype,
        )
    });
    Ok((gradients, magnitudes))
}

/// What is launched, and how.
struct Call {
    problem: ElementwiseProblem,
    blueprint: ElementwiseBlueprint,
    functions: Functions,
}

impl Call {
    /// Refuses `operands` that are not as the gate is.
    fn new(
        client: &Client,
        op: &'static str,
        gate: &Buffer,
        operands: &[(&'static str, &Buffer)],
    ) -> Result<Self, KernelError> {
        let problem = ElementwiseProblem::new(op, gate)?;
        for (argument, operand) in operands {
            problem.check_operand(op, argument, operand)?;
        }
        let blueprint = ElementwiseBlueprint::plan(&problem, client);
        Ok(Self { problem, blueprint, functions: Functions::of(problem.dtype, client) })
    }

    /// Cubes of a kernel that leaves magnitudes, along x. Every one has a vector.
    fn watched_cubes(
        &self,
        client: &Client,
        op: &'static str,
    ) -> Result<(usize, CubeDim), KernelError> {
        let vectors = self.problem.elements / self.blueprint.vector_size;
        if vectors == 0 {
            return Err(KernelError::unsupported(op, "magnitudes of nothing"));
        }
        let units = self.blueprint.units_per_cube;
        let cubes = vectors.div_ceil(units as usize).min(Magnitudes::most_cubes(client));
        Ok((cubes, CubeDim::new_1d(units)))
    }

    fn gradients(&self, client: &Client) -> SwigluGradients {
        let ElementwiseProblem { elements, dtype } = self.problem;
        let [dgate, dup] = [(); 2].map(|()| Buffer::empty(client, elements, dtype));
        SwigluGradients { dgate, dup }
    }
}
