//! Numbers given to the elements of a tensor that a mask tells.

use crate::{
    declined::unsupported,
    stream::number,
    tensors::{Input, Tensors, known_output, register_cube_tensor, take_cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{
    kernel::{MaskFillStrategy, mask_fill},
    tensor::CubeTensor,
};
use burn_ir::{BaseOperationIr, MaskFillOpIr, OperationIr, ScalarIr, TensorIr};
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

/// Dimensions of tensors that are served.
pub(super) const MOST_DIMS: usize = 4;

impl MaskFill {
    /// What `operation` fills, if it fills a tensor with a number and kernels read such masks.
    pub(super) fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::BaseFloat(BaseOperationIr::MaskFill(op)) = operation else { return None };
        let MaskFillOpIr { tensor, mask, value: ScalarIr::UInt(value), out } = op else {
            return None;
        };
        let dims = tensor.shape.num_dims();
        let is_served = dims <= MOST_DIMS
            && mask.shape.num_dims() == dims
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

/// The same memory as one row.
fn in_a_row(tensor: CubeTensor) -> CubeTensor {
    let elements = tensor.meta.shape().num_elements();
    CubeTensor { meta: Box::new(Metadata::new([elements], [1])), ..tensor }
}
