//! The provider that takes pools of one and two dimensions, by maxima and by averages, adaptive ones too, and their
//! gradients.
//!
//! Each is an operation of its own in the stream, as `burn::nn` and autodiff emit them. Images are read as they lie
//! where their channels or their pixels follow each other, and results lie as the images do, so that the next
//! convolution reads them in place. A pool of one dimension is one of images of height 1.

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation},
    tensors::{Images, Tensors, consume, cube_tensor, known_output, register_cube_tensor},
};
use blackburn_kernels::{
    KernelError,
    pool::{
        PoolProblem, PoolWindow, Windows, average_pool, average_pool_backward, max_pool,
        max_pool_backward,
    },
};
use burn_backend::{DType, Shape, cubecl::dtype_to_elem_type};
use burn_ir::{ModuleOperationIr, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "pool";

/// A pool or the gradient of one on the kernels, or as Burn has it where those decline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pool {
    what: What,
    /// `None` for adaptive windows.
    window: Option<FoundWindow>,
    /// What forward reads; backward knows its shape alone.
    x: TensorIr,
    out: TensorIr,
}

/// What is computed, and the tensors that only this has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum What {
    Max { indices: Option<TensorIr> },
    MaxGradient { dy: TensorIr, indices: TensorIr },
    Average { include_padding: bool },
    AverageGradient { dy: TensorIr, include_padding: bool },
}

/// A window as Burn's operations have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FoundWindow {
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

/// Numbers of one dimension or of two, as those of images. `other` is what an image of height 1 has for rows.
trait Pair {
    fn pair(&self, other: usize) -> [usize; 2];
}

impl Pair for usize {
    fn pair(&self, other: usize) -> [usize; 2] {
        [other, *self]
    }
}

impl Pair for [usize; 2] {
    fn pair(&self, _other: usize) -> [usize; 2] {
        *self
    }
}

fn window<P: Pair>(kernel: &P, stride: &P, padding: &P, dilation: &P) -> Option<FoundWindow> {
    Some(FoundWindow {
        kernel: kernel.pair(1),
        stride: stride.pair(1),
        padding: padding.pair(0),
        dilation: dilation.pair(1),
    })
}

impl SingleOperation for Pool {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        use ModuleOperationIr as Module;

        let OperationIr::Module(operation) = operation else { return None };
        macro_rules! max {
            ($op:ident, $what:expr) => {{
                let window = window(&$op.kernel_size, &$op.stride, &$op.padding, &$op.dilation);
                ($what, window, &$op.x, &$op.out)
            }};
        }
        macro_rules! average {
            ($op:ident, $dilation:expr, $what:expr) => {{
                let window = window(&$op.kernel_size, &$op.stride, &$op.padding, &$dilation);
                ($what, window, &$op.x, &$op.out)
            }};
        }
        let found = |indices: &TensorIr| What::Max { indices: Some(indices.clone()) };
        let by_index = |dy: &TensorIr, indices: &TensorIr| What::MaxGradient {
            dy: dy.clone(),
            indices: indices.clone(),
        };
        let mean = |include_padding: bool| What::Average { include_padding };
        let in_shares = |dy: &TensorIr, include_padding: bool| What::AverageGradient {
            dy: dy.clone(),
            include_padding,
        };
        let (what, window, x, out) = match operation {
            Module::MaxPool1d(op) => max!(op, What::Max { indices: None }),
            Module::MaxPool2d(op) => max!(op, What::Max { indices: None }),
            Module::MaxPool1dWithIndices(op) => max!(op, found(&op.out_indices)),
            Module::MaxPool2dWithIndices(op) => max!(op, found(&op.out_indices)),
            Module::MaxPool1dWithIndicesBackward(op) => max!(op, by_index(&op.grad, &op.indices)),
            Module::MaxPool2dWithIndicesBackward(op) => max!(op, by_index(&op.grad, &op.indices)),
            Module::AvgPool1d(op) => average!(op, 1, mean(op.count_include_pad)),
            Module::AvgPool2d(op) => average!(op, [1; 2], mean(op.count_include_pad)),
            Module::AvgPool1dBackward(op) => {
                average!(op, 1, in_shares(&op.grad, op.count_include_pad))
            }
            Module::AvgPool2dBackward(op) => {
                average!(op, [1; 2], in_shares(&op.grad, op.count_include_pad))
            }
            Module::AdaptiveAvgPool1d(op) => (mean(false), None, &op.x, &op.out),
            Module::AdaptiveAvgPool2d(op) => (mean(false), None, &op.x, &op.out),
            Module::AdaptiveAvgPool1dBackward(op) => {
                (in_shares(&op.grad, false), None, &op.x, &op.out)
            }
            Module::AdaptiveAvgPool2dBackward(op) => {
                (in_shares(&op.grad, false), None, &op.x, &op.out)
            }
            _ => return None,
        };
        let served = matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16)
            && what.indices().is_none_or(|indices| indices.dtype == DType::I32);
        served.then(|| Self { what, window, x: x.clone(), out: out.clone() })
    }
}

impl What {
    fn indices(&self) -> Option<&TensorIr> {
        match self {
            Self::Max { indices } => indices.as_ref(),
            Self::MaxGradient { indices, .. } => Some(indices),
            Self::Average { .. } | Self::AverageGradient { .. } => None,
        }
    }
}

impl Replacement for Pool {
    const NAME: &'static str = "BlackburnPool";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Self { what, x, out, .. } = self;
        let shape = known_output(tensors, out, OP)?.shape.clone();
        match what {
            What::Max { indices } => {
                let images = Images::of(cube_tensor(tensors, x, OP)?);
                let problem = self.forward(&images, &shape)?;
                let client = images.client();
                let pooled = max_pool(client, &problem, &images.buffer(), indices.is_some())?;
                if let (Some(indices), Some(made)) = (indices, pooled.indices) {
                    let made = images.shaped(made, shape.clone(), indices.dtype);
                    register_cube_tensor(tensors, indices, made, OP)?;
                }
                let y = images.shaped(pooled.y, shape, out.dtype);
                register_cube_tensor(tensors, out, y, OP)?;
            }
            What::Average { include_padding } => {
                let images = Images::of(cube_tensor(tensors, x, OP)?);
                let problem = self.forward(&images, &shape)?;
                let y =
                    average_pool(images.client(), &problem, &images.buffer(), *include_padding)?;
                register_cube_tensor(tensors, out, images.shaped(y, shape, out.dtype), OP)?;
            }
            What::MaxGradient { dy, indices } => {
                // The gradient may come from anywhere, and the indices lie as x did.
                let indices = Images::of(cube_tensor(tensors, indices, OP)?);
                let dy = indices.in_order(cube_tensor(tensors, dy, OP)?);
                let problem = self.backward(&dy, &shape)?;
                let buffer = dy.buffer();
                let dx = max_pool_backward(dy.client(), &problem, &buffer, &indices.contiguous())?;
                register_cube_tensor(tensors, out, dy.shaped(dx, shape, out.dtype), OP)?;
            }
            What::AverageGradient { dy, include_padding } => {
                // A gradient that is one number for all lies in no order: x tells which is wanted.
                let order = Images::of(cube_tensor(tensors, x, OP)?);
                let dy = order.in_order(cube_tensor(tensors, dy, OP)?);
                let problem = self.backward(&dy, &shape)?;
                let buffer = dy.buffer();
                let dx = average_pool_backward(dy.client(), &problem, &buffer, *include_padding)?;
                register_cube_tensor(tensors, out, dy.shaped(dx, shape, out.dtype), OP)?;
            }
        }
        match what {
            What::Max { .. } | What::Average { .. } => {}
            What::MaxGradient { dy, indices } => {
                consume(tensors, dy);
                consume(tensors, indices);
            }
            What::AverageGradient { dy, .. } => consume(tensors, dy),
        }
        consume(tensors, x);
        Ok(Done::All)
    }
}

impl Pool {
    /// What a pool of these images to that shape asks.
    fn forward(&self, x: &Images, shape: &Shape) -> Result<PoolProblem, KernelError> {
        let sizes = sizes_of(x)?;
        let output = pixels_of(shape)?;
        Ok(PoolProblem { x_stride: x.pitch(), ..self.problem(sizes, [sizes[1], sizes[2]], output) })
    }

    /// What the gradient of images of that shape asks.
    fn backward(&self, dy: &Images, shape: &Shape) -> Result<PoolProblem, KernelError> {
        let sizes = sizes_of(dy)?;
        let input = pixels_of(shape)?;
        Ok(PoolProblem {
            dy_stride: dy.pitch(),
            ..self.problem(sizes, input, [sizes[1], sizes[2]])
        })
    }

    fn problem(
        &self,
        [images, _, _, channels]: [usize; 4],
        input: [usize; 2],
        output: [usize; 2],
    ) -> PoolProblem {
        let walking = |FoundWindow { kernel, stride, padding, dilation }| {
            Windows::Walking(PoolWindow { kernel, stride, padding, dilation })
        };
        PoolProblem {
            images,
            channels,
            input,
            output,
            windows: self.window.map_or(Windows::Adaptive, walking),
            x_stride: channels,
            dy_stride: channels,
            dtype: dtype_to_elem_type(self.x.dtype),
        }
    }
}

fn sizes_of(images: &Images) -> Result<[usize; 4], KernelError> {
    images.sizes().ok_or_else(|| unsupported(OP, "a tensor of another rank than 3 or 4"))
}

/// Rows and columns.
fn pixels_of(shape: &Shape) -> Result<[usize; 2], KernelError> {
    match shape[..] {
        [_, _, width] => Ok([1, width]),
        [_, _, height, width] => Ok([height, width]),
        _ => Err(unsupported(OP, "a tensor of another rank than 3 or 4")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::{
        AdaptiveAvgPool2dOpIr, AvgPool1dBackwardOpIr, MaxPool2dWithIndicesOpIr,
        TensorStatus::{NotInit, ReadOnly},
    };

    fn with_indices(dtype: DType) -> OperationIr {
        OperationIr::Module(ModuleOperationIr::MaxPool2dWithIndices(MaxPool2dWithIndicesOpIr {
            x: tensor(1, [2, 4, 8, 8], ReadOnly),
            kernel_size: [3, 2],
            stride: [2, 1],
            padding: [1, 0],
            dilation: [1, 2],
            ceil_mode: true,
            out: tensor(2, [2, 4, 4, 6], NotInit),
            out_indices: TensorIr { dtype, ..tensor(3, [2, 4, 4, 6], NotInit) },
        }))
    }

    #[test]
    fn a_pool_is_taken_alone_with_indices_of_32_bits() {
        let taken =
            |operation| Fuser::after(SingleSearch::<Pool>::default(), &[operation]).claims();
        assert_eq!(taken(with_indices(DType::I32)), Some(1));
        assert_eq!(taken(with_indices(DType::I64)), None);
        let found = Pool::of(&with_indices(DType::I32), &()).unwrap();
        let expected =
            FoundWindow { kernel: [3, 2], stride: [2, 1], padding: [1, 0], dilation: [1, 2] };
        assert_eq!(found.window, Some(expected));
    }

    #[test]
    fn one_dimension_is_the_width_of_images() {
        let gradient = ModuleOperationIr::AvgPool1dBackward(AvgPool1dBackwardOpIr {
            x: tensor(1, [2, 4, 8], ReadOnly),
            grad: tensor(2, [2, 4, 3], ReadOnly),
            kernel_size: 3,
            stride: 2,
            padding: 1,
            count_include_pad: true,
            ceil_mode: false,
            out: tensor(3, [2, 4, 8], NotInit),
        });
        let found = Pool::of(&OperationIr::Module(gradient), &()).unwrap();
        let expected =
            FoundWindow { kernel: [1, 3], stride: [1, 2], padding: [0, 1], dilation: [1, 1] };
        assert_eq!(found.window, Some(expected));
        assert!(matches!(found.what, What::AverageGradient { include_padding: true, .. }));
        assert_eq!(pixels_of(&Shape::new([2, 4, 8])).unwrap(), [1, 8]);
    }

    #[test]
    fn adaptive_windows_have_no_numbers_of_their_own() {
        let operation = ModuleOperationIr::AdaptiveAvgPool2d(AdaptiveAvgPool2dOpIr {
            x: tensor(1, [2, 4, 8, 8], ReadOnly),
            output_size: [3, 3],
            out: tensor(2, [2, 4, 3, 3], NotInit),
        });
        let found = Pool::of(&OperationIr::Module(operation), &()).unwrap();
        assert_eq!(found.window, None);
        let problem = found.problem([2, 8, 8, 4], [8, 8], [3, 3]);
        assert_eq!(problem.windows, Windows::Adaptive);
    }
}
