//! The primitives on GPUs.

use super::{Gradients, Inputs, LayerNormPrimitives, Norm, Output, Saved, Settings, Wanted, host};
use crate::{
    declined::served,
    ops::{dropout::Dropout, fp8_linear::magnitudes},
    tensors::{Optional, contiguous_buffer, contiguous_tensor},
};
use blackburn_kernels::{
    buffer::Buffer,
    layer_norm::{
        self as kernels, LayerNormInputs, LayerNormSaved, LayerNormWanted, layer_norm_backward,
        layer_norm_forward,
    },
};
use burn::{
    backend::{TensorMetadata, tensor::FloatTensor},
    tensor::{DType, Shape},
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

const NAME: &str = "layer_norm";

impl LayerNormPrimitives for CubeBackend {
    fn layer_norm_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        let x = inputs.x.clone();
        let buffers = LayerNormInputs {
            x: contiguous_buffer(inputs.x.clone()),
            residual: buffer(&inputs.residual),
            residual_bias: buffer(&inputs.residual_bias),
            dropout: settings.dropout.map(Dropout::mask),
            gamma: contiguous_buffer(inputs.gamma.clone()),
            beta: buffer(&inputs.beta),
            watched: magnitudes::are_wanted(),
        };
        let norm = kernel_norm(settings.norm);
        served(NAME, layer_norm_forward(&x.client, norm, &buffers, settings.epsilon)).map_or_else(
            || host::forward(inputs, settings),
            |output| {
                magnitudes::keep(&output.y, output.magnitudes);
                Output {
                    sum: output.sum.map(|sum| like(&x, sum)).into(),
                    mean: output.mean.map(|mean| statistic(&x, mean)).into(),
                    rstd: statistic(&x, output.rstd),
                    y: like(&x, output.y),
                }
            },
        )
    }

    fn layer_norm_backward(
        saved: Saved<Self>,
        dy: FloatTensor<Self>,
        dsum: Optional<Self>,
        settings: Settings,
        wanted: Wanted,
    ) -> Gradients<Self> {
        let (x, gamma) = (saved.x.clone(), saved.gamma.clone());
        let buffers = LayerNormSaved {
            x: contiguous_buffer(saved.x.clone()),
            gamma: contiguous_buffer(saved.gamma.clone()),
            mean: buffer(&saved.mean),
            rstd: contiguous_buffer(saved.rstd.clone()),
            dropout: settings.dropout.map(Dropout::mask),
        };
        let Wanted { beta, residual_bias } = wanted;
        let gradients = layer_norm_backward(
            &x.client,
            kernel_norm(settings.norm),
            &buffers,
            &contiguous_buffer(dy.clone()),
            buffer(&dsum).as_ref(),
            LayerNormWanted { beta, residual_bias, watched: magnitudes::are_wanted() },
        );
        served(NAME, gradients).map_or_else(
            || host::backward(saved, dy, dsum, settings, wanted),
            |gradients| {
                let of_residual = gradients.dresidual.as_ref().unwrap_or(&gradients.dx);
                magnitudes::keep(of_residual, gradients.magnitudes);
                Gradients {
                    dx: like(&x, gradients.dx),
                    dresidual: gradients.dresidual.map(|dresidual| like(&x, dresidual)).into(),
                    dgamma: like(&gamma, gradients.dgamma),
                    dbeta: gradients.dbeta.map(|dbeta| like(&gamma, dbeta)).into(),
                    dbias: gradients.dbias.map(|dbias| like(&gamma, dbias)).into(),
                }
            },
        )
    }
}

fn kernel_norm(norm: Norm) -> kernels::Norm {
    match norm {
        Norm::Layer => kernels::Norm::Layer,
        Norm::Rms => kernels::Norm::Rms,
    }
}

fn buffer(tensor: &Optional<CubeBackend>) -> Option<Buffer> {
    tensor.clone().into_option().map(contiguous_buffer)
}

/// A contiguous tensor in the shape and the type of `model`.
fn like(model: &CubeTensor, buffer: Buffer) -> CubeTensor {
    contiguous_tensor(model, buffer, model.shape(), model.dtype)
}

/// One f32 a row.
fn statistic(model: &CubeTensor, buffer: Buffer) -> CubeTensor {
    let shape = Shape::new([buffer.elements]);
    contiguous_tensor(model, buffer, shape, DType::F32)
}
