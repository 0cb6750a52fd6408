//! The primitives on GPUs.

use super::{AtOnce, CrossEntropyPrimitives, Output, Reduced, Reduction, Settings, host};
use crate::{
    declined::tell_once,
    tensors::{Optional, TensorRows, contiguous_buffer, contiguous_tensor},
};
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
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

impl CrossEntropyPrimitives for CubeBackend {
    fn cross_entropy_forward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
    ) -> Output<Self> {
        let logits = TensorRows::of(logits);
        let problem = problem(&logits, settings);
        let (span, logits) = (logits.span(), logits.tensor);
        if is_declined(&problem) {
            return host::forward::<Self>(logits, targets, settings);
        }
        let targets = contiguous_buffer(targets);
        let output =
            cross_entropy::cross_entropy_forward(&logits.client, &problem, &span, &targets)
                .unwrap_or_else(|error| panic!("{error}"));
        Output { loss: numbers(&logits, output.loss), lse: numbers(&logits, output.lse) }
    }

    fn cross_entropy_reduce(
        loss: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> Reduced<Self> {
        // Of each row, the loss is all that is read.
        let shape = Shape::new([loss.shape()[0], 1]);
        let problem = problem_of(&shape, 1, DType::F32, settings);
        if loss.dtype != DType::F32 || is_declined(&problem) {
            return host::reduce::<Self>(loss, targets, settings, reduction);
        }
        let like = loss.clone();
        let (loss, targets) = (contiguous_buffer(loss), contiguous_buffer(targets));
        let reduced = cross_entropy::cross_entropy_reduce(
            &like.client,
            &problem,
            of(reduction),
            &loss,
            &targets,
        )
        .unwrap_or_else(|error| panic!("{error}"));
        Reduced { loss: numbers(&like, reduced.loss), factor: numbers(&like, reduced.factor) }
    }

    fn cross_entropy_at_once(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> AtOnce<Self> {
        let logits = TensorRows::of(logits);
        let problem = problem(&logits, settings);
        if is_declined(&problem) {
            return host::at_once::<Self>(logits.tensor, targets, settings, reduction);
        }
        let targets = contiguous_buffer(targets);
        let (layout, dtype) = (logits.layout(), logits.tensor.dtype);
        let both = cross_entropy::cross_entropy_at_once(
            &layout.client,
            &problem,
            of(reduction),
            logits.into_span(),
            &targets,
        )
        .unwrap_or_else(|error| panic!("{error}"));
        let dlogits = layout.rows(both.dlogits.handle, dtype);
        AtOnce { loss: numbers(&dlogits, both.loss), dlogits }
    }

    fn cross_entropy_rescale(
        dlogits: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let rows = TensorRows::of(dlogits);
        let problem = problem(&rows, PLAIN);
        if is_declined(&problem) || !rows.tensor.handle.can_mut() {
            return host::rescale::<Self>(rows.tensor, grad);
        }
        let grad = contiguous_buffer(grad);
        let (layout, dtype) = (rows.layout(), rows.tensor.dtype);
        let dlogits =
            cross_entropy::cross_entropy_rescale(&layout.client, &problem, rows.into_span(), &grad)
                .unwrap_or_else(|error| panic!("{error}"));
        layout.rows(dlogits.handle, dtype)
    }

    fn cross_entropy_backward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        factor: Optional<Self>,
        settings: Settings,
    ) -> FloatTensor<Self> {
        let logits = TensorRows::of(logits);
        let problem = problem(&logits, settings);
        if is_declined(&problem) {
            let logits = logits.tensor;
            return host::backward::<Self>(logits, targets, lse, grad, factor, settings);
        }
        let [lse, grad] = [lse, grad].map(contiguous_buffer);
        let targets = contiguous_buffer(targets);
        let factor = factor.into_option().map(contiguous_buffer);
        let (layout, dtype) = (logits.layout(), logits.tensor.dtype);
        let dlogits = cross_entropy::cross_entropy_backward(
            &layout.client,
            &problem,
            logits.into_span(),
            &targets,
            &lse,
            &grad,
            factor.as_ref(),
        )
        .unwrap_or_else(|error| panic!("{error}"));
        layout.rows(dlogits.handle, dtype)
    }
}

/// Settings of a problem that is about the layout alone.
const PLAIN: Settings = Settings { ignore_index: None, smoothing: 0.0 };

fn of(reduction: Reduction) -> cross_entropy::Reduction {
    match reduction {
        Reduction::Mean => cross_entropy::Reduction::Mean,
        Reduction::Sum | Reduction::None => cross_entropy::Reduction::Sum,
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

fn problem(logits: &TensorRows, settings: Settings) -> CrossEntropyProblem {
    problem_of(&logits.tensor.shape(), logits.stride, logits.tensor.dtype, settings)
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

/// A tensor of f32, on the device of `model`.
fn numbers(model: &CubeTensor, buffer: Buffer) -> CubeTensor {
    let shape = Shape::new([buffer.elements]);
    contiguous_tensor(model, buffer, shape, DType::F32)
}
