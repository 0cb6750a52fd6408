use super::{DropoutMask, DropoutProblem, forward::dropout_kernel, problem::OP};
use crate::{
    KernelError, ahead,
    buffer::Buffer,
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
};
use cubecl::client::Client;

/// `residual + dropout(x)`, or without a residual `dropout(x)`. With a key, two words, the seed is combined with
/// what it holds when the kernel runs.
///
/// # Errors
///
/// As [`DropoutProblem::validate`], and [`KernelError::InvalidProblem`] when a buffer does not go with the
/// problem, or the key is not two words.
pub fn dropout(
    client: &Client,
    problem: &DropoutProblem,
    x: &Buffer,
    residual: Option<&Buffer>,
    key: Option<&Buffer>,
) -> Result<Buffer, KernelError> {
    /// Elements of a unit: a call of the generator, or four, whose words stay in registers.
    const WIDEST: usize = 8;
    problem.validate()?;
    problem.check("x", x)?;
    if let Some(residual) = residual {
        problem.check("residual", residual)?;
    }
    let mask = problem.mask(key);
    mask.validate(OP)?;
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let spread = ElementwiseProblem { elements: problem.elements, dtype: problem.dtype };
    let blueprint = ElementwiseBlueprint::plan(&spread, client).narrowed(WIDEST);
    let vector_size = blueprint.vector_size;
    let (count, dim) = blueprint.cubes(problem.elements, client);
    let mask = || DropoutMask::argument(Some(&mask), x, client);
    // SAFETY: all hold `problem.elements` elements, a multiple of the vector size; the kernel stops units
    // past y's end. The key has two words. Without a residual or a key none is compiled in, and x stands in
    // for it.
    ahead::launch(client, |client| unsafe {
        dropout_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            x.arg(vector_size),
            residual.unwrap_or(x).arg(vector_size),
            y.arg(vector_size),
            mask().0,
            residual.is_some(),
            mask().1,
            problem.dtype,
        )
    });
    Ok(y)
}
