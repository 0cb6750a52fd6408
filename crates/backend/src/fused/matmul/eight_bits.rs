//! Products of marked memory, in 8 bits: what `fp8::linear` computes, in unmodified modules.
//!
//! | product | marked | rounded to the format of |
//! |---|---|---|
//! | `x W` | W as it lies | both forward; x is marked then |
//! | `dy W^T` | W, transposed | dy backward, W forward |
//! | `x^T dy` | x, transposed, an input | x forward, dy backward |
//!
//! Each of x, W and dy is read by two of the three. The first that reads it casts it, in both layouts by one pass,
//! and the other one finds the codes with the memory, as do further layers with the same input.

use super::product::OP;
use crate::{
    declined::unsupported,
    ops::fp8_linear::{
        Promotion, Recipe, Rounding,
        cast_once::{CastKey, Copies, Operand as LayerOperand},
        codes::{self, Codes},
        marked::{self, Mark, Role},
    },
    tensors::Input,
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    matmul::{Epilogue, MatmulOutput, MatmulProblem, Operand},
    quantize::Layouts,
};
use cubecl::std::tensor::{TensorHandle, into_contiguous};

/// One of a linear layer's three products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerProduct {
    Forward,
    InputGradient,
    WeightGradient,
}

impl LayerProduct {
    fn operands(self) -> [LayerOperand; 2] {
        match self {
            Self::Forward => [LayerOperand::Input, LayerOperand::Weight],
            Self::InputGradient => [LayerOperand::OutputGradient, LayerOperand::Weight],
            Self::WeightGradient => [LayerOperand::Input, LayerOperand::OutputGradient],
        }
    }
}

/// The product, with `epilogue`, if an operand's mark asks for 8 bits.
///
/// # Errors
///
/// [`KernelError`] where it asks for them and they cannot be had: nothing was done then.
pub(super) fn multiply(
    lhs: &Input,
    rhs: &Input,
    problem: &MatmulProblem,
    epilogue: &Epilogue,
) -> Result<Option<MatmulOutput>, KernelError> {
    let [lhs_mark, rhs_mark] = [lhs, rhs].map(|input| marked::get(&input.handle));
    let Some((kind, recipe)) = asked_for(lhs_mark, rhs_mark, problem) else { return Ok(None) };
    if problem.batch != [1, 1] {
        return Err(unsupported(OP, "batches of products in 8 bits; a linear layer is one"));
    }
    // First, so that there is room for codes.
    marked::release();
    let (forward, backward) = (recipe.forward_rounding(), recipe.backward_rounding());
    let [of_lhs, of_rhs] = kind.operands();
    let rounding = |operand| match operand {
        LayerOperand::Input | LayerOperand::Weight => forward,
        LayerOperand::OutputGradient => backward,
    };
    let promoted = match kind {
        LayerProduct::Forward => recipe.promotion == Promotion::Always,
        _ => recipe.promotion != Promotion::Never,
    };
    let MatmulProblem { m, n, k, .. } = *problem;
    // Codes lie along what is summed over: the right operand's as columns.
    let turned_rhs = Operand {
        row_stride: problem.rhs.column_stride,
        column_stride: problem.rhs.row_stride,
        ..problem.rhs
    };
    let lhs_codes =
        in_codes(lhs, problem.lhs_span(), &problem.lhs, [m, k], (of_lhs, rounding(of_lhs)))?;
    let rhs_codes =
        in_codes(rhs, problem.rhs_span(), &turned_rhs, [n, k], (of_rhs, rounding(of_rhs)))?;
    let codes = [&lhs_codes, &rhs_codes];
    let output = codes::multiply(&lhs.client, codes, epilogue.clone(), problem.out, promoted)?;
    if kind == LayerProduct::Forward {
        marked::set_input(&lhs.handle, recipe);
    }
    Ok(Some(output))
}

fn asked_for(
    lhs: Option<Mark>,
    rhs: Option<Mark>,
    problem: &MatmulProblem,
) -> Option<(LayerProduct, Recipe)> {
    let is_transposed = |operand: &Operand| operand.row_stride == 1 && operand.column_stride != 1;
    match (lhs, rhs) {
        (_, Some(Mark { recipe, role: Role::Weight })) => {
            let is_gradient = is_transposed(&problem.rhs);
            Some((
                if is_gradient { LayerProduct::InputGradient } else { LayerProduct::Forward },
                recipe,
            ))
        }
        (Some(Mark { recipe, role: Role::Input }), _) if is_transposed(&problem.lhs) => {
            Some((LayerProduct::WeightGradient, recipe))
        }
        _ => None,
    }
}

/// The matrix of `rows` by `columns` behind `input`, which lies as `operand` says in `span` elements, with
/// codes along its rows: those that are kept, or else new ones, which are kept then.
fn in_codes(
    input: &Input,
    span: usize,
    operand: &Operand,
    [rows, columns]: [usize; 2],
    (role, rounding): (LayerOperand, Rounding),
) -> Result<Codes, KernelError> {
    let (pitch, stored, across) = if operand.column_stride == 1 {
        (operand.row_stride, [rows, columns], false)
    } else if operand.row_stride == 1 {
        (operand.column_stride, [columns, rows], true)
    } else {
        return Err(unsupported(OP, "a matrix in 8 bits whose elements are apart both ways"));
    };
    let (layouts, copies, turned) = match codes::may_be_turned(&input.client, rounding.scaling) {
        true => (Layouts::Rows, Copies::Rows, across),
        false if across => (Layouts::Both, Copies::Transposed, false),
        false => (Layouts::Both, Copies::Rows, false),
    };
    let values = input.buffer(span);
    let key = CastKey { stored, pitch, dtype: values.dtype, rounding };
    let quantized = match marked::kept_cast(&input.handle, &key, copies) {
        Some(kept) => kept,
        None => {
            let values = dense(input, values, stored, pitch);
            let known = marked::take_magnitudes(&values.handle, values.elements);
            let cast =
                codes::quantize(&input.client, &values, stored, rounding, layouts, known.as_ref())?;
            marked::keep_cast(&input.handle, key, role, cast.clone());
            cast
        }
    };
    let scaled = match copies {
        Copies::Rows => quantized.rows,
        Copies::Transposed => quantized.transposed,
    };
    match scaled {
        Some(scaled) => Ok(Codes { scaled, rows, columns, turned }),
        None => unreachable!("the layout was asked for"),
    }
}

/// The matrix without what is between its rows.
fn dense(input: &Input, values: Buffer, [rows, columns]: [usize; 2], pitch: usize) -> Buffer {
    if pitch == columns || rows == 1 {
        return values;
    }
    let strided = TensorHandle::new(values.handle, [rows, columns], [pitch, 1], values.dtype);
    let copy = into_contiguous(&input.client, strided.binding(), values.dtype);
    Buffer { handle: copy.handle, elements: rows * columns, dtype: values.dtype }
}
