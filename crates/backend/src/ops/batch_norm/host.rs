//! The primitives by a backend's own operations: for the CPU, and for what no kernel serves.
//!
//! The steps are those of the kernels, and so is the precision: types of 16 bits are computed in f32 and rounded once.

use super::{Gradients, Inputs, Output, Running, Saved, Settings};
use crate::tensors::{cast, wide};
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{DType, Shape},
};

#[cfg(feature = "flex")]
impl super::BatchNormPrimitives for burn::backend::Flex {
    fn batch_norm_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        forward(inputs, settings)
    }

    fn batch_norm_backward(
        saved: Saved<Self>,
        dy: FloatTensor<Self>,
        settings: Settings,
        wants_residual: bool,
    ) -> Gradients<Self> {
        backward(saved, dy, settings, wants_residual)
    }

    fn batch_norm_running(
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        before: Running<Self>,
        momentum: f64,
    ) -> Running<Self> {
        running([mean, variance], before, momentum)
    }
}

pub(super) fn forward<B: Backend>(inputs: Inputs<B>, settings: Settings) -> Output<B> {
    let Inputs { x, gamma, beta, residual } = inputs;
    let (shape, dtype) = (x.shape(), x.dtype());
    let rows = channels_of::<B>(x);
    let mean = B::float_mean_dim(rows.clone(), 1);
    let distance = B::float_sub(rows, mean.clone());
    let variance = B::float_mean_dim(B::float_mul(distance.clone(), distance.clone()), 1);
    let rstd = rstd::<B>(variance.clone(), settings.epsilon);
    let scale = B::float_mul(rstd, column_of::<B>(gamma));
    let mut y = B::float_add(B::float_mul(distance, scale), column_of::<B>(beta));
    if let Some(residual) = residual.into_option() {
        y = B::float_add(y, channels_of::<B>(residual));
    }
    if settings.relu {
        y = B::relu(y);
    }
    let flat = |column: FloatTensor<B>| {
        let channels = column.shape()[0];
        B::float_reshape(column, Shape::new([channels]))
    };
    Output { y: images_of::<B>(y, shape, dtype), mean: flat(mean), variance: flat(variance) }
}

pub(super) fn backward<B: Backend>(
    saved: Saved<B>,
    dy: FloatTensor<B>,
    settings: Settings,
    wants_residual: bool,
) -> Gradients<B> {
    let Saved { x, gamma, mean, variance, y } = saved;
    let (shape, dtype, parameter) = (x.shape(), x.dtype(), gamma.dtype());
    let channels = gamma.shape();
    let rows = channels_of::<B>(x);
    let count = rows.shape()[1] as f64;
    let mut g = channels_of::<B>(dy);
    if let Some(y) = y.into_option() {
        g = B::relu_backward(channels_of::<B>(y), g);
    }
    let rstd = rstd::<B>(column_of::<B>(variance), settings.epsilon);
    let distance = B::float_sub(rows, column_of::<B>(mean));
    let normalized = B::float_mul(distance, rstd.clone());
    let dbeta = B::float_sum_dim(g.clone(), 1);
    let dgamma = B::float_sum_dim(B::float_mul(g.clone(), normalized.clone()), 1);
    let mean_of = |sum: &FloatTensor<B>| B::float_div_scalar(sum.clone(), count.into());
    let projected = B::float_mul(normalized, mean_of(&dgamma));
    let difference = B::float_sub(B::float_sub(g.clone(), mean_of(&dbeta)), projected);
    let scale = B::float_mul(rstd, column_of::<B>(gamma));
    let dx = B::float_mul(difference, scale);
    let flat = |column| cast::<B>(B::float_reshape(column, channels.clone()), parameter);
    let dresidual =
        (settings.relu && wants_residual).then(|| images_of::<B>(g, shape.clone(), dtype));
    Gradients {
        dx: images_of::<B>(dx, shape, dtype),
        dgamma: flat(dgamma),
        dbeta: flat(dbeta),
        dresidual: dresidual.into(),
    }
}

pub(super) fn running<B: Backend>(
    batch: [FloatTensor<B>; 2],
    before: Running<B>,
    momentum: f64,
) -> Running<B> {
    let [mean, variance] = batch;
    let updated = |before: FloatTensor<B>, batch| {
        let dtype = before.dtype();
        let kept = B::float_mul_scalar(wide::<B>(before), (1.0 - momentum).into());
        let new = B::float_mul_scalar(wide::<B>(batch), momentum.into());
        cast::<B>(B::float_add(kept, new), dtype)
    };
    Running { mean: updated(before.mean, mean), variance: updated(before.variance, variance) }
}

fn rstd<B: Backend>(variance: FloatTensor<B>, epsilon: f64) -> FloatTensor<B> {
    B::float_recip(B::float_sqrt(B::float_add_scalar(variance, epsilon.into())))
}

/// `[batch, channels, ..]` as `[channels, rows]`, in f32 or f64.
fn channels_of<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let turned = B::float_swap_dims(wide::<B>(x), 0, 1);
    let channels = turned.shape()[0];
    let rows = turned.shape().num_elements() / channels.max(1);
    B::float_reshape(turned, Shape::new([channels, rows]))
}

/// The reverse of [`channels_of`].
fn images_of<B: Backend>(rows: FloatTensor<B>, shape: Shape, dtype: DType) -> FloatTensor<B> {
    let mut turned = shape;
    turned.swap(0, 1);
    cast::<B>(B::float_swap_dims(B::float_reshape(rows, turned), 0, 1), dtype)
}

/// One number a channel, to go with [`channels_of`].
fn column_of<B: Backend>(numbers: FloatTensor<B>) -> FloatTensor<B> {
    let channels = numbers.shape()[0];
    B::float_reshape(wide::<B>(numbers), Shape::new([channels, 1]))
}
