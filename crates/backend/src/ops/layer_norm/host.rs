//! The primitives by a backend's own operations: for the CPU, and for what no kernel serves.
//!
//! The steps are those of the kernels, and so is the precision: types of 16 bits are computed in f32
//! and rounded once.

use super::{Gradients, Inputs, Norm, Output, Saved, Settings, Wanted};
use crate::{
    ops::dropout::DropoutPrimitives,
    tensors::{Optional, cast, wide},
};
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{DType, Shape},
};

#[cfg(feature = "flex")]
impl super::LayerNormPrimitives for burn::backend::Flex {
    fn layer_norm_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        forward(inputs, settings)
    }

    fn layer_norm_backward(
        saved: Saved<Self>,
        dy: FloatTensor<Self>,
        dsum: Optional<Self>,
        settings: Settings,
        wanted: Wanted,
    ) -> Gradients<Self> {
        backward(saved, dy, dsum, settings, wanted)
    }
}

pub(super) fn forward<B: DropoutPrimitives>(inputs: Inputs<B>, settings: Settings) -> Output<B> {
    let Inputs { x, residual, residual_bias, gamma, beta } = inputs;
    let (shape, dtype) = (x.shape(), x.dtype());
    let added = |residual| match residual_bias {
        Optional::Present(bias) => with_bias::<B>(wide::<B>(residual), bias),
        Optional::Absent => residual,
    };
    let sum = residual.into_option().map(|residual| match settings.dropout {
        Some(dropout) => {
            let residual = cast::<B>(added(residual), dtype);
            B::dropped(residual, Optional::Present(x.clone()), dropout)
        }
        None => cast::<B>(B::float_add(wide::<B>(x.clone()), wide::<B>(added(residual))), dtype),
    });
    let x = as_rows::<B>(wide::<B>(sum.clone().unwrap_or(x)), gamma.shape()[0]);
    let [rows, width] = x.shape().dims();
    if rows * width == 0 {
        let (device, wide) = (x.device(), x.dtype());
        let zeros = |shape: Shape, dtype: DType| B::float_zeros(shape, &device, dtype.into());
        let statistic = || zeros(Shape::new([rows]), wide);
        let mean = (settings.norm == Norm::Layer).then(statistic);
        return Output {
            y: zeros(shape, dtype),
            sum: sum.into(),
            mean: mean.into(),
            rstd: statistic(),
        };
    }
    let (mean, distance) = match settings.norm {
        Norm::Layer => {
            let mean = B::float_mean_dim(x.clone(), 1);
            (Some(mean.clone()), B::float_sub(x, mean))
        }
        Norm::Rms => (None, x),
    };
    let variance = B::float_mean_dim(B::float_mul(distance.clone(), distance.clone()), 1);
    let deviation = B::float_sqrt(B::float_add_scalar(variance, settings.epsilon.into()));
    let rstd = B::float_recip(deviation);
    let mut y = B::float_mul(B::float_mul(distance, rstd.clone()), row_of::<B>(gamma));
    if let Optional::Present(beta) = beta {
        y = B::float_add(y, row_of::<B>(beta));
    }
    let statistic = |tensor| B::float_reshape(tensor, Shape::new([rows]));
    Output {
        y: B::float_reshape(cast::<B>(y, dtype), shape),
        sum: sum.into(),
        mean: mean.map(statistic).into(),
        rstd: statistic(rstd),
    }
}

pub(super) fn backward<B: DropoutPrimitives>(
    saved: Saved<B>,
    dy: FloatTensor<B>,
    dsum: Optional<B>,
    settings: Settings,
    wanted: Wanted,
) -> Gradients<B> {
    let Saved { x, gamma, mean, rstd } = saved;
    let (shape, dtype, parameter) = (x.shape(), x.dtype(), gamma.dtype());
    let width = gamma.shape()[0];
    let [x, dy] = [x, dy].map(|tensor| as_rows::<B>(wide::<B>(tensor), width));
    let [rows, _] = x.shape().dims();
    if rows * width == 0 {
        let zeros = |like: &FloatTensor<B>, shape: Shape, dtype: DType| {
            B::float_zeros(shape, &like.device(), dtype.into())
        };
        let of_parameter = || zeros(&gamma, gamma.shape(), parameter);
        let of_rows = || zeros(&x, shape.clone(), dtype);
        return Gradients {
            dx: of_rows(),
            dresidual: settings.dropout.map(|_| of_rows()).into(),
            dgamma: of_parameter(),
            dbeta: wanted.beta.then(of_parameter).into(),
            dbias: wanted.residual_bias.then(of_parameter).into(),
        };
    }
    let column = |tensor| B::float_reshape(tensor, Shape::new([rows, 1]));
    let rstd = column(rstd);
    let is_layer = matches!(mean, Optional::Present(_));
    let distance = match mean {
        Optional::Present(mean) => B::float_sub(x, column(mean)),
        Optional::Absent => x,
    };
    let normal = B::float_mul(distance, rstd.clone());
    let of_columns = |terms| {
        let sum = B::float_reshape(B::float_sum_dim(terms, 0), Shape::new([width]));
        cast::<B>(sum, parameter)
    };
    let dbeta = wanted.beta.then(|| of_columns(dy.clone()));
    let dgamma = of_columns(B::float_mul(dy.clone(), normal.clone()));
    let product = B::float_mul(dy, row_of::<B>(gamma));
    let weighted = B::float_mean_dim(B::float_mul(product.clone(), normal.clone()), 1);
    let mut dx = B::float_sub(product.clone(), B::float_mul(normal, weighted));
    if is_layer {
        dx = B::float_sub(dx, B::float_mean_dim(product, 1));
    }
    dx = B::float_mul(dx, rstd);
    if let Optional::Present(dsum) = dsum {
        dx = B::float_add(dx, as_rows::<B>(wide::<B>(dsum), width));
    }
    let dx = B::float_reshape(cast::<B>(dx, dtype), shape);
    let dropped = |dropout| B::dropped(dx.clone(), Optional::Absent, dropout);
    let dresidual = settings.dropout.map(dropped);
    let dbias = wanted.residual_bias.then(|| {
        let dresidual = dresidual.as_ref().unwrap_or(&dx).clone();
        of_columns(as_rows::<B>(wide::<B>(dresidual), width))
    });
    Gradients { dx, dresidual: dresidual.into(), dgamma, dbeta: dbeta.into(), dbias: dbias.into() }
}

/// `[rows, width]`.
fn as_rows<B: Backend>(tensor: FloatTensor<B>, width: usize) -> FloatTensor<B> {
    let shape = tensor.shape();
    let rows = shape.iter().rev().skip(1).product();
    B::float_reshape(tensor, Shape::new([rows, width]))
}

/// The rows of a tensor with a bias added to each.
fn with_bias<B: Backend>(tensor: FloatTensor<B>, bias: FloatTensor<B>) -> FloatTensor<B> {
    let (shape, width) = (tensor.shape(), bias.shape()[0]);
    let sum = B::float_add(as_rows::<B>(tensor, width), row_of::<B>(bias));
    B::float_reshape(sum, shape)
}

/// A parameter as a row, in the type that is computed in.
fn row_of<B: Backend>(parameter: FloatTensor<B>) -> FloatTensor<B> {
    let width = parameter.shape()[0];
    B::float_reshape(wide::<B>(parameter), Shape::new([1, width]))
}
