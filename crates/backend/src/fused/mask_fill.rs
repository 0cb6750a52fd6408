//! Masks of elements that are at most a number, and numbers given to elements that a mask tells.

use crate::{
    declined::unsupported,
    stream::number,
    tensors::{Input, Tensors, known_output, register_cube_tensor, take_cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_backend::{cubecl::dtype_to_elem_type, ops::FloatTensorOps};
use burn_cubecl::{
    CubeBackend,
    kernel::{MaskFillStrategy, mask_fill},
    tensor::CubeTensor,
};
use burn_ir::{
    BaseOperationIr, MaskFillOpIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorIr,
};
use burn_std::{BoolStore, DType, Metadata};
use cubecl::prelude::InputScalar;
use serde::{Deserialize, Serialize};

/// Elements that are given a number where a mask says so.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MaskFill {
    /// What is masked.
    pub(super) input: TensorIr,
    pub(super) mask: TensorIr,
    /// Where the number is.
    value: u64,
    /// What comes of it.
    pub(super) out: TensorIr,
}

impl MaskFill {
    /// What `operation` fills, if it fills a tensor with a number and kernels know such masks.
    pub(super) fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::BaseFloat(BaseOperationIr::MaskFill(op)) = operation else { return None };
        let MaskFillOpIr { tensor, mask, value: ScalarIr::UInt(value), out } = op else {
            return None;
        };
        let is_served = mask.shape.num_dims() == tensor.shape.num_dims()
            && matches!(mask.dtype, DType::Bool(BoolStore::U8 | BoolStore::U32));
        is_served.then(|| Self {
            input: tensor.clone(),
            mask: mask.clone(),
            value: *value,
            out: out.clone(),
        })
    }

    /// The number, where the stream tells it.
    pub(super) fn number(&self, context: &Tensors) -> Option<f64> {
        number(context, self.value)
    }

    /// Runs Burn's kernel through memory, of a tensor and a mask whose elements lie in the same order. Burn would run it in
    /// the order of dimensions, which takes some twenty times as long of images whose channels are innermost.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where they lie otherwise; nothing is changed then.
    pub(super) fn launch(
        &self,
        context: &mut Tensors,
        op: &'static str,
    ) -> Result<(), KernelError> {
        let number = self.number(context);
        let number = number.ok_or_else(|| unsupported(op, "a mask's number is unknown"))?;
        known_output(context, &self.out, op)?;
        let input = Input::of(context, &self.input, op)?;
        if !input.lies_as(&Input::of(context, &self.mask, op)?) {
            return Err(unsupported(op, "a mask that lies otherwise than what it masks"));
        }
        // It holds the memory, too, and the kernel writes there only where nobody else does.
        drop(input);
        let input = take_cube_tensor(context, &self.input, op)?;
        let mask = take_cube_tensor(context, &self.mask, op)?;
        let meta = input.meta.clone();
        let number = InputScalar::new(number, dtype_to_elem_type(input.dtype));
        let strategy =
            if input.can_mut() { MaskFillStrategy::Inplace } else { MaskFillStrategy::Readonly };
        let dtype = mask.dtype;
        let filled = mask_fill(in_a_row(input), in_a_row(mask), number, strategy, dtype);
        register_cube_tensor(context, &self.out, CubeTensor { meta, ..filled }, op)
    }
}

/// Which elements are at most a number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AtMost {
    input: TensorIr,
    /// Where the number is.
    value: u64,
    /// The mask.
    out: TensorIr,
}

impl AtMost {
    /// What `operation` compares, if it compares a tensor with a number so.
    pub(super) fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::NumericFloat(_, NumericOperationIr::LowerEqualElem(op)) = operation else {
            return None;
        };
        let ScalarOpIr { lhs, rhs: ScalarIr::UInt(value), out } = op else { return None };
        Some(Self { input: lhs.clone(), value: *value, out: out.clone() })
    }

    /// Runs Burn's kernel through memory, of a tensor that has no gaps: the mask lies as the tensor does. Burn's would lie in
    /// the order of dimensions, as [`MaskFill::launch`] tells.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where it has gaps; nothing is changed then.
    pub(super) fn launch(
        &self,
        context: &mut Tensors,
        op: &'static str,
    ) -> Result<(), KernelError> {
        let number = number(context, self.value)
            .ok_or_else(|| unsupported(op, "a number to compare with that is unknown"))?;
        known_output(context, &self.out, op)?;
        if !Input::of(context, &self.input, op)?.is_dense() {
            return Err(unsupported(op, "a comparison of a tensor with gaps"));
        }
        let input = take_cube_tensor(context, &self.input, op)?;
        let meta = input.meta.clone();
        let stored = self.out.dtype.into();
        let mask = CubeBackend::float_lower_equal_elem(in_a_row(input), number.into(), stored);
        register_cube_tensor(context, &self.out, CubeTensor { meta, ..mask }, op)
    }
}

/// The same memory as one row.
fn in_a_row(tensor: CubeTensor) -> CubeTensor {
    let elements = tensor.meta.shape().num_elements();
    CubeTensor { meta: Box::new(Metadata::new([elements], [1])), ..tensor }
}
