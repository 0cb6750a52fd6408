//! The provider that takes the gradient of resized images: `burn::nn::interpolate`, and
//! `burn::tensor::module::interpolate`.
//!
//! It is an operation of its own in the stream. Burn's GPU kernels have it for the nearest pixel alone, and panic
//! for the other modes. The gradient is read as it lies where its channels or its pixels follow each other, and what
//! comes out lies as it does.

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation},
    tensors::{Images, Tensors, consume, cube_tensor, known_output, register_cube_tensor},
};
use blackburn_kernels::{
    KernelError,
    interpolate::{InterpolateProblem, Mode, interpolate_backward},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_ir::{InterpolateModeIr, ModuleOperationIr, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "interpolate";

/// The gradient of resized images on the kernel, or as Burn has it where that declines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct InterpolateGradient {
    mode: InterpolateModeIr,
    align_corners: bool,
    /// Known for its shape, and for how it lies.
    x: TensorIr,
    dy: TensorIr,
    dx: TensorIr,
}

impl SingleOperation for InterpolateGradient {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::Module(ModuleOperationIr::InterpolateBackward(op)) = operation else {
            return None;
        };
        let is_served = matches!(op.x.dtype, DType::F32 | DType::F16 | DType::BF16)
            && mode(&op.options.mode).is_some();
        is_served.then(|| Self {
            mode: op.options.mode.clone(),
            align_corners: op.options.align_corners,
            x: op.x.clone(),
            dy: op.grad.clone(),
            dx: op.out.clone(),
        })
    }
}

/// What the kernel calls a mode. It has none of Lanczos, whose gradient Burn has nowhere either.
fn mode(mode: &InterpolateModeIr) -> Option<Mode> {
    match mode {
        InterpolateModeIr::Nearest => Some(Mode::Nearest),
        InterpolateModeIr::NearestExact => Some(Mode::NearestExact),
        InterpolateModeIr::Bilinear => Some(Mode::Linear),
        InterpolateModeIr::Bicubic => Some(Mode::Cubic),
        InterpolateModeIr::Lanczos3 => None,
    }
}

impl Replacement for InterpolateGradient {
    const NAME: &'static str = "BlackburnInterpolate";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Self { mode: asked, align_corners, x, dy, dx } = self;
        let mode = mode(asked).ok_or_else(|| unsupported(OP, "Lanczos"))?;
        let shape = known_output(tensors, dx, OP)?.shape.clone();
        let images = match Images::in_place_of(cube_tensor(tensors, dy, OP)?) {
            Some(images) => images,
            // A gradient that is one number for all lies in no order: x tells which is wanted.
            None => {
                let order = Images::of(cube_tensor(tensors, x, OP)?);
                order.in_order(cube_tensor(tensors, dy, OP)?)
            }
        };
        let ([_, _, height, width], Some([count, rows, columns, channels])) =
            (&shape[..], images.sizes())
        else {
            return Err(unsupported(OP, "a tensor of another rank than 4"));
        };
        let problem = InterpolateProblem {
            images: count,
            channels,
            input: [*height, *width],
            output: [rows, columns],
            mode,
            align_corners: *align_corners,
            dy_stride: images.pitch(),
            dtype: dtype_to_elem_type(dx.dtype),
        };
        let made = interpolate_backward(images.client(), &problem, &images.buffer())?;
        register_cube_tensor(tensors, dx, images.shaped(made, shape, dx.dtype), OP)?;
        consume(tensors, x);
        consume(tensors, dy);
        Ok(Done::All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::{
        InterpolateBackwardOpIr, InterpolateOptionsIr,
        TensorStatus::{NotInit, ReadOnly},
    };

    fn gradient(mode: InterpolateModeIr, dtype: DType) -> OperationIr {
        let of = |tensor: TensorIr| TensorIr { dtype, ..tensor };
        OperationIr::Module(ModuleOperationIr::InterpolateBackward(InterpolateBackwardOpIr {
            x: of(tensor(1, [2, 4, 8, 8], ReadOnly)),
            grad: of(tensor(2, [2, 4, 16, 12], ReadOnly)),
            output_size: [16, 12],
            options: InterpolateOptionsIr { mode, align_corners: false },
            out: of(tensor(3, [2, 4, 8, 8], NotInit)),
        }))
    }

    #[test]
    fn a_gradient_is_taken_alone_in_every_mode_but_lanczos() {
        use InterpolateModeIr::{Bicubic, Bilinear, Lanczos3, Nearest, NearestExact};

        let taken = |mode, dtype| {
            let search = SingleSearch::<InterpolateGradient>::default();
            Fuser::after(search, &[gradient(mode, dtype)]).claims()
        };
        for mode in [Nearest, NearestExact, Bilinear, Bicubic] {
            assert_eq!(taken(mode.clone(), DType::BF16), Some(1));
            assert_eq!(taken(mode, DType::F64), None);
        }
        assert_eq!(taken(Lanczos3, DType::F32), None);
    }

    #[test]
    fn options_are_kept() {
        let operation = gradient(InterpolateModeIr::Bicubic, DType::F32);
        let found = InterpolateGradient::of(&operation, &()).unwrap();
        assert_eq!((found.mode, found.align_corners), (InterpolateModeIr::Bicubic, false));
        assert_eq!((found.dy.shape[2], found.dx.shape[2]), (16, 8));
    }
}
