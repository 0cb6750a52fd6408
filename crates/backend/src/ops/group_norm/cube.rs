//! The primitives on GPUs.

use super::{Gradients, GroupNormPrimitives, Inputs, Output, Saved, Settings, host};
use crate::{
    declined::served,
    tensors::{Images, contiguous_buffer, contiguous_tensor},
};
use blackburn_kernels::{
    KernelError,
    group_norm::{
        Affine, Form, GroupNormGradients, GroupNormInputs, GroupNormOutput, GroupNormSaved,
        group_norm_backward, group_norm_forward,
    },
};
use burn::{
    backend::{TensorMetadata, tensor::FloatTensor},
    tensor::{DType, Shape},
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::CubeBackend;

const NAME: &str = "group_norm";

impl GroupNormPrimitives for CubeBackend {
    fn group_norm_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        match served(NAME, forward(inputs.clone(), settings)) {
            Some(output) => output,
            None => host::forward(inputs, settings),
        }
    }

    fn group_norm_backward(
        saved: Saved<Self>,
        dy: FloatTensor<Self>,
        settings: Settings,
    ) -> Gradients<Self> {
        match served(NAME, backward(saved.clone(), dy.clone(), settings)) {
            Some(gradients) => gradients,
            None => host::backward(saved, dy, settings),
        }
    }
}

fn forward(
    inputs: Inputs<CubeBackend>,
    settings: Settings,
) -> Result<Output<CubeBackend>, KernelError> {
    let Inputs { x, gamma, beta } = inputs;
    let client = x.client.clone();
    let images = Images::of(x.clone());
    let mut problem = images.problem(settings.groups);
    problem.epsilon = settings.epsilon;
    let affine = gamma.into_option().zip(beta.into_option()).map(|(gamma, beta)| {
        problem.parameter = dtype_to_elem_type(gamma.dtype);
        Affine { gamma: contiguous_buffer(gamma), beta: contiguous_buffer(beta) }
    });
    let inputs = GroupNormInputs { x: images.buffer(), affine };
    let GroupNormOutput { y, mean, rstd } = group_norm_forward(&client, &problem, &inputs)?;
    let statistic = |buffer| {
        let shape = Shape::new([problem.samples, problem.groups]);
        contiguous_tensor(&x, buffer, shape, DType::F32)
    };
    Ok(Output { y: images.like(y), mean: statistic(mean), rstd: statistic(rstd) })
}

fn backward(
    saved: Saved<CubeBackend>,
    dy: FloatTensor<CubeBackend>,
    settings: Settings,
) -> Result<Gradients<CubeBackend>, KernelError> {
    let Saved { x, gamma, mean, rstd } = saved;
    let client = x.client.clone();
    let images = Images::of(x);
    let dy = images.in_order(dy);
    let mut problem = images.problem(settings.groups);
    problem.dy_stride = dy.stride();
    let gamma = gamma.into_option();
    if let Some(gamma) = &gamma {
        problem.parameter = dtype_to_elem_type(gamma.dtype);
    }
    let saved = GroupNormSaved {
        x: images.buffer(),
        form: Form::Input,
        mean: Some(contiguous_buffer(mean)),
        rstd: contiguous_buffer(rstd),
        gamma: gamma.clone().map(contiguous_buffer),
    };
    let made = group_norm_backward(&client, &problem, &saved, &dy.buffer(), gamma.is_some())?;
    let GroupNormGradients { dx, parameters } = made;
    let [dgamma, dbeta] = match (gamma, parameters) {
        (Some(gamma), Some(parameters)) => parameters
            .map(|buffer| Some(contiguous_tensor(&gamma, buffer, gamma.shape(), gamma.dtype))),
        _ => [None, None],
    };
    Ok(Gradients { dx: images.like(dx), dgamma: dgamma.into(), dbeta: dbeta.into() })
}
