//! The primitives on GPUs.

use super::{BatchNormPrimitives, Gradients, Inputs, Output, Running, Saved, Settings, host};
use crate::{
    declined::served,
    tensors::{Channels, contiguous_buffer, contiguous_tensor},
};
use blackburn_kernels::{
    KernelError,
    batch_norm::{
        BatchNormGradients, BatchNormInputs, BatchNormProblem, BatchNormSaved, RunningStatistics,
        Statistics, batch_norm_apply, batch_norm_backward, batch_norm_running,
        batch_norm_statistics,
    },
    buffer::{Buffer, Rows},
};
use burn::{
    backend::{TensorMetadata, tensor::FloatTensor},
    tensor::{DType, Shape},
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

const NAME: &str = "batch_norm";

/// What the kernels are asked, of a tensor with such parameters.
pub(crate) fn problem(channels: &Channels, parameter: DType, epsilon: f64) -> BatchNormProblem {
    let Rows { buffer, rows, columns, pitch } = &channels.rows;
    let parameter = dtype_to_elem_type(parameter);
    BatchNormProblem {
        row_stride: *pitch,
        ..BatchNormProblem::contiguous(*rows, *columns, buffer.dtype, parameter, epsilon)
    }
}

impl BatchNormPrimitives for CubeBackend {
    fn batch_norm_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        match served(NAME, forward(inputs.clone(), settings)) {
            Some(output) => output,
            None => host::forward(inputs, settings),
        }
    }

    fn batch_norm_backward(
        saved: Saved<Self>,
        dy: FloatTensor<Self>,
        settings: Settings,
        wants_residual: bool,
    ) -> Gradients<Self> {
        match served(NAME, backward(saved.clone(), dy.clone(), settings, wants_residual)) {
            Some(gradients) => gradients,
            None => host::backward(saved, dy, settings, wants_residual),
        }
    }

    fn batch_norm_running(
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        before: Running<Self>,
        momentum: f64,
    ) -> Running<Self> {
        let batch = [&mean, &variance].map(|statistic| contiguous_buffer(statistic.clone()));
        let running = RunningStatistics {
            mean: contiguous_buffer(before.mean.clone()),
            variance: contiguous_buffer(before.variance.clone()),
            kept: (1.0 - momentum) as f32,
            new: momentum as f32,
        };
        let [of_mean, of_variance] = batch;
        let statistics = Statistics { mean: of_mean, variance: of_variance };
        match served(NAME, batch_norm_running(&mean.client, &running, &statistics)) {
            Some([new_mean, new_variance]) => Running {
                mean: like(&before.mean, new_mean),
                variance: like(&before.variance, new_variance),
            },
            None => host::running([mean, variance], before, momentum),
        }
    }
}

fn forward(
    inputs: Inputs<CubeBackend>,
    settings: Settings,
) -> Result<Output<CubeBackend>, KernelError> {
    let Inputs { x, gamma, beta, residual } = inputs;
    let client = x.client.clone();
    let parameter = gamma.dtype;
    let channels = Channels::of(x.clone());
    let problem = problem(&channels, parameter, settings.epsilon);
    let statistics = batch_norm_statistics(&client, &problem, &channels.rows.buffer)?;
    let residual = residual.into_option().map(|residual| Channels::of(residual).contiguous());
    let inputs = BatchNormInputs {
        x: channels.rows.buffer.clone(),
        statistics: statistics.clone(),
        gamma: contiguous_buffer(gamma),
        beta: contiguous_buffer(beta),
        residual,
        relu: settings.relu,
    };
    let y = batch_norm_apply(&client, &problem, &inputs)?;
    let Statistics { mean, variance } = statistics;
    let statistic = |buffer: Buffer| {
        let shape = Shape::new([buffer.elements]);
        contiguous_tensor(&x, buffer, shape, DType::F32)
    };
    Ok(Output { y: channels.images(y), mean: statistic(mean), variance: statistic(variance) })
}

fn backward(
    saved: Saved<CubeBackend>,
    dy: CubeTensor,
    settings: Settings,
    wants_residual: bool,
) -> Result<Gradients<CubeBackend>, KernelError> {
    let Saved { x, gamma, mean, variance, y } = saved;
    let client = x.client.clone();
    let channels = Channels::of(x);
    let of_dy = Channels::of(dy);
    let problem = BatchNormProblem {
        dy_stride: of_dy.rows.pitch,
        ..problem(&channels, gamma.dtype, settings.epsilon)
    };
    let buffers = BatchNormSaved {
        x: channels.rows.buffer.clone(),
        statistics: Statistics {
            mean: contiguous_buffer(mean),
            variance: contiguous_buffer(variance),
        },
        gamma: contiguous_buffer(gamma.clone()),
        y: y.into_option().map(|y| Channels::of(y).contiguous()),
    };
    let made =
        batch_norm_backward(&client, &problem, &buffers, &of_dy.rows.buffer, wants_residual)?;
    let BatchNormGradients { dx, dgamma, dbeta, dresidual } = made;
    Ok(Gradients {
        dx: channels.images(dx),
        dgamma: like(&gamma, dgamma),
        dbeta: like(&gamma, dbeta),
        dresidual: dresidual.map(|buffer| channels.images(buffer)).into(),
    })
}

/// A contiguous tensor in the shape and the type of `model`.
fn like(model: &CubeTensor, buffer: Buffer) -> CubeTensor {
    contiguous_tensor(model, buffer, model.shape(), model.dtype)
}
