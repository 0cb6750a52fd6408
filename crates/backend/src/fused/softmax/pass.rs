use super::{
    OP, backward::Backward, forward::Forward, gradient::Gradient, probabilities::Probabilities,
};
use crate::{
    declined::unsupported,
    fused::random::Random,
    stream::{Done, Replacement},
    tensors::{
        Location, RowLayout, TensorRows, Tensors, contiguous_buffer, cube_tensor,
        register_cube_tensor, register_zeros,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    dropout::KeptElements,
    softmax::{RowMask, SoftmaxOutputs, SoftmaxProblem, masked_softmax_rows},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::kernel::cast;
use burn_ir::TensorIr;
use serde::{Deserialize, Serialize};

/// What replaces operations of softmax.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum SoftmaxPass {
    Forward(Forward),
    Backward(Backward),
    Probabilities(Probabilities),
    /// The mask of dropout behind the probabilities.
    Mask(Random),
    Gradient(Gradient),
}

impl Replacement for SoftmaxPass {
    const NAME: &'static str = "BlackburnSoftmax";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Forward(pass) => pass.launch(tensors),
            Self::Backward(pass) => pass.launch(tensors),
            Self::Probabilities(pass) => pass.launch(tensors),
            Self::Mask(mask) => return mask.launch(tensors),
            Self::Gradient(pass) => pass.launch(tensors),
        }?;
        Ok(Done::All)
    }
}

/// The problem of a pass that reads `rows` and writes such rows in the type `out`.
pub(super) fn problem_of(rows: &TensorRows, out: DType) -> Result<SoftmaxProblem, KernelError> {
    let problem = SoftmaxProblem {
        rows: rows.rows,
        classes: rows.columns,
        row_stride: rows.stride,
        dtype: rows.span().dtype,
        out: dtype_to_elem_type(out),
    };
    problem.validate()?;
    Ok(problem)
}

/// What a pass that reads each element once makes: what is asked for of it.
pub(super) struct RowOutputs<'a> {
    pub(super) y: &'a TensorIr,
    pub(super) shifted: Option<&'a TensorIr>,
    pub(super) exp: Option<&'a TensorIr>,
    /// The largest element of each row.
    pub(super) peak: Option<&'a TensorIr>,
    /// The sum of each row's exponentials.
    pub(super) sum: Option<&'a TensorIr>,
}

/// How rows are passed over.
#[derive(Clone, Copy, Default)]
pub(super) struct Passes<'a> {
    /// Elements that are taken for a number.
    pub(super) mask: Option<(&'a RowMask, f32)>,
    /// What dropout leaves of y.
    pub(super) kept: Option<&'a KeptElements>,
    /// Logarithms of softmax are made.
    pub(super) logarithms: bool,
}

impl RowOutputs<'_> {
    /// Makes softmax of rows `x`, or its logarithms.
    pub(super) fn launch(
        &self,
        context: &mut Tensors,
        problem: &SoftmaxProblem,
        x: &TensorRows,
        passes: Passes<'_>,
    ) -> Result<(), KernelError> {
        let Passes { mask, kept, logarithms } = passes;
        let Self { y, shifted, exp, peak, sum } = *self;
        let layout = x.layout();
        let outputs =
            SoftmaxOutputs { logarithms, shifted: shifted.is_some(), exponentials: exp.is_some() };
        let made = masked_softmax_rows(&layout.client, problem, outputs, &x.span(), mask, kept)?;
        for (out, buffer) in
            [(Some(y), Some(made.y)), (shifted, made.shifted), (exp, made.exponentials)]
        {
            if let (Some(out), Some(buffer)) = (out, buffer) {
                register_cube_tensor(context, out, layout.rows(buffer.handle, y.dtype), OP)?;
            }
        }
        for (out, buffer) in [(peak, &made.peak), (sum, &made.sum)] {
            if let Some(out) = out {
                register_numbers(context, out, &layout, buffer)?;
            }
        }
        Ok(())
    }
}

/// The targets in `tensor`, one for each row.
pub(super) fn targets_of(
    tensors: &Tensors,
    tensor: &TensorIr,
    layout: &RowLayout,
) -> Result<Buffer, KernelError> {
    let shape = tensors.tensors.get(&tensor.id).map(|known| &known.shape);
    if !shape.is_some_and(|shape| layout.is_of_rows(shape)) {
        return Err(unsupported(OP, "targets that are not one for each row"));
    }
    numbers(tensors, tensor, DType::I32)
}

/// The numbers in `tensor`, one for each row, in the type that the kernels take them.
pub(super) fn numbers(
    context: &Tensors,
    tensor: &TensorIr,
    dtype: DType,
) -> Result<Buffer, KernelError> {
    Ok(contiguous_buffer(cast(cube_tensor(context, tensor, OP)?, dtype)))
}

/// What a pass forward makes of rows without elements, or of no rows: `elements` like them, the sum of
/// each, and its `maxima`, which rows without elements do not have.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where those are asked for; nothing is made then.
pub(super) fn make_of_nothing<const N: usize>(
    context: &mut Tensors,
    place: &Location,
    elements: [Option<&TensorIr>; N],
    sum: Option<&TensorIr>,
    maxima: [Option<&TensorIr>; 2],
) -> Result<(), KernelError> {
    let is_empty = |out: &&TensorIr| {
        let known = context.tensors.get(&out.id);
        known.is_some_and(|known| known.shape.num_elements() == 0)
    };
    if !maxima.iter().flatten().all(is_empty) {
        return Err(unsupported(OP, "rows without elements"));
    }
    for out in elements.into_iter().chain([sum]).chain(maxima).flatten() {
        register_zeros(context, out, place, OP)?;
    }
    Ok(())
}

/// Makes `buffer`, a number for each row, what `out` stands for.
pub(super) fn register_numbers(
    context: &mut Tensors,
    out: &TensorIr,
    layout: &RowLayout,
    buffer: &Buffer,
) -> Result<(), KernelError> {
    let numbers = layout.numbers(buffer.handle.clone(), DType::F32);
    register_cube_tensor(context, out, cast(numbers, out.dtype), OP)
}
