//! The primitives on GPUs.

use super::{CrossEntropyPrimitives, Factor, Output, Reduced, Reduction, Settings, host};
use crate::declined::tell_once;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    cross_entropy::{self, CrossEntropyProblem},
};
use burn::{
    backend::{
        TensorMetadata,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape},
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use burn_std::Metadata;

impl CrossEntropyPrimitives for CubeBackend {
    fn cross_entropy_forward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
    ) -> Output<Self> {
        let logits = with_near_rows(logits);
        let problem = problem(&logits, settings);
        if is_declined(&problem) {
            return host::forward::<Self>(logits, targets, settings);
        }
        let targets = whole(into_contiguous(targets));
        let output = cross_entropy::cross_entropy_forward(
            &logits.client,
            &problem,
            &span(&logits),
            &targets,
        )
        .unwrap_or_else(|error| panic!("{error}"));
        Output { loss: numbers(&logits, output.loss), lse: numbers(&logits, output.lse) }
    }

    fn cross_entropy_reduce(
        loss: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> Reduced<Self> {
        let reduce = match reduction {
            Reduction::Mean => cross_entropy::Reduction::Mean,
            Reduction::Sum | Reduction::None => cross_entropy::Reduction::Sum,
        };
        // Of each row, the loss is all that is read.
        let shape = Shape::new([loss.shape()[0], 1]);
        let problem = problem_of(&shape, 1, DType::F32, settings);
        if loss.dtype != DType::F32 || is_declined(&problem) {
            return host::reduce::<Self>(loss, targets, settings, reduction);
        }
        let like = loss.clone();
        let (loss, targets) = (whole(into_contiguous(loss)), whole(into_contiguous(targets)));
        let reduced =
            cross_entropy::cross_entropy_reduce(&like.client, &problem, reduce, &loss, &targets)
                .unwrap_or_else(|error| panic!("{error}"));
        Reduced { loss: numbers(&like, reduced.loss), factor: numbers(&like, reduced.factor) }
    }

    fn cross_entropy_backward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        factor: Factor<Self>,
        settings: Settings,
    ) -> FloatTensor<Self> {
        let logits = with_near_rows(logits);
        let problem = problem(&logits, settings);
        if is_declined(&problem) {
            return host::backward::<Self>(logits, targets, lse, grad, factor, settings);
        }
        let [lse, grad] = [lse, grad].map(|tensor| whole(into_contiguous(tensor)));
        let targets = whole(into_contiguous(targets));
        let factor = match factor {
            Factor::Absent => None,
            Factor::Present(factor) => Some(whole(into_contiguous(factor))),
        };
        let (client, device, dtype) = (logits.client.clone(), logits.device.clone(), logits.dtype);
        let meta = Metadata::new(logits.shape(), [problem.row_stride, 1]);
        // The tensor is let go of: where it was the last to hold its memory, the kernel writes there.
        let logits = {
            let buffer = span(&logits);
            drop(logits);
            buffer
        };
        let dlogits = cross_entropy::cross_entropy_backward(
            &client,
            &problem,
            logits,
            &targets,
            &lse,
            &grad,
            factor.as_ref(),
        )
        .unwrap_or_else(|error| panic!("{error}"));
        CubeTensor::new(client, dlogits.handle, meta, device, dtype)
    }
}

/// Whether no kernel serves the problem, which is told once. What is wrong with it is for the kernel to
/// say.
fn is_declined(problem: &CrossEntropyProblem) -> bool {
    match problem.validate() {
        Err(reason @ KernelError::Unsupported { .. }) => {
            tell_once("BlackburnCrossEntropy", &reason);
            true
        }
        _ => false,
    }
}

/// The tensor, copied unless classes lie side by side and rows one behind the other, with no more between
/// them than CUDA's runtime leaves to align them.
fn with_near_rows(logits: CubeTensor) -> CubeTensor {
    const ALIGNED_BYTES: usize = 512;
    let (shape, strides) = (logits.shape(), logits.meta.strides());
    let are_side_by_side = shape[1] == 1 || strides[1] == 1;
    let between = strides[0].checked_sub(shape[1]);
    let are_near = between.is_some_and(|gap| gap * logits.dtype.size() < ALIGNED_BYTES);
    if are_side_by_side && (shape[0] == 1 || are_near) && !logits.meta.is_tiled() {
        logits
    } else {
        into_contiguous(logits)
    }
}

fn problem(logits: &CubeTensor, settings: Settings) -> CrossEntropyProblem {
    let shape = logits.shape();
    let row_stride = if shape[0] == 1 { shape[1] } else { logits.meta.strides()[0] };
    problem_of(&shape, row_stride, logits.dtype, settings)
}

fn problem_of(
    shape: &Shape,
    row_stride: usize,
    dtype: DType,
    settings: Settings,
) -> CrossEntropyProblem {
    CrossEntropyProblem {
        rows: shape[0],
        classes: shape[1],
        row_stride,
        dtype: dtype_to_elem_type(dtype),
        ignore_index: settings.ignore_index,
        smoothing: settings.smoothing as f32,
    }
}

/// The memory that the logits span.
fn span(logits: &CubeTensor) -> Buffer {
    let shape = logits.shape();
    let before = (shape[0] - 1) * logits.meta.strides()[0];
    Buffer {
        handle: logits.handle.clone(),
        elements: before + shape[1],
        dtype: dtype_to_elem_type(logits.dtype),
    }
}

/// The memory of a contiguous tensor.
fn whole(tensor: CubeTensor) -> Buffer {
    let elements = tensor.shape().num_elements();
    Buffer { elements, dtype: dtype_to_elem_type(tensor.dtype), handle: tensor.handle }
}

/// A tensor of f32, on the device of `model`.
fn numbers(model: &CubeTensor, buffer: Buffer) -> CubeTensor {
    let (client, device) = (model.client.clone(), model.device.clone());
    let shape = Shape::new([buffer.elements]);
    CubeTensor::new_contiguous(client, device, shape, buffer.handle, DType::F32)
}
