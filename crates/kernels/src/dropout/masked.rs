//! Dropout by a mask that lies in memory, as Burn's own draws one.

use super::problem::OP;
use crate::{
    KernelError, ahead,
    buffer::Buffer,
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
};
use cubecl::prelude::*;

/// What dropout leaves of a tensor, as a tensor.
#[derive(Clone, Debug)]
pub struct KeptElements {
    /// A factor for each element, 0 where it is left out and 1 elsewhere, in the type of the tensor.
    pub mask: Buffer,
    /// What elements that stay are multiplied by.
    pub scale: f32,
}

/// `residual + mask scale x`, a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn masked_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    mask: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    scale: f32,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let kept = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS])
        * Vector::<f32, N>::cast_from(mask[ABSOLUTE_POS])
        * Vector::new(scale);
    y[ABSOLUTE_POS] = Vector::cast_from(kept + Vector::<f32, N>::cast_from(residual[ABSOLUTE_POS]));
}

/// `residual + mask scale x`. All tensors have one type and as many elements, which lie in the same order. Computed in
/// f32 and rounded once.
///
/// # Errors
///
/// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16, and [`KernelError::InvalidProblem`] when a
/// tensor does not go with x.
pub fn add_masked(
    client: &Client,
    x: &Buffer,
    kept: &KeptElements,
    residual: &Buffer,
) -> Result<Buffer, KernelError> {
    let problem = ElementwiseProblem::new(OP, x)?;
    problem.check_operand(OP, "mask", &kept.mask)?;
    problem.check_operand(OP, "residual", residual)?;
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let blueprint = ElementwiseBlueprint::plan(&problem, client);
    let vector_size = blueprint.vector_size;
    let (count, dim) = blueprint.cubes(problem.elements, client);
    // SAFETY: all hold as many elements, a multiple of the vector size; the kernel stops units past y's end.
    ahead::launch(client, |client| unsafe {
        masked_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            x.arg(vector_size),
            kept.mask.arg(vector_size),
            residual.arg(vector_size),
            y.arg(vector_size),
            kept.scale,
            problem.dtype,
        )
    });
    Ok(y)
}
