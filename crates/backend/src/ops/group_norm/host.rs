//! The primitives by a backend's own operations: for the CPU, and for what no kernel serves.
//!
//! The steps are those of the kernels, and so is the precision: types of 16 bits are computed in f32 and rounded once.

use super::{Gradients, Inputs, Output, Saved, Settings};
use crate::tensors::{cast, wide};
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::Shape,
};

#[cfg(feature = "flex")]
impl super::GroupNormPrimitives for burn::backend::Flex {
    fn group_norm_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        forward(inputs, settings)
    }

    fn group_norm_backward(
        saved: Saved<Self>,
        dy: FloatTensor<Self>,
        settings: Settings,
    ) -> Gradients<Self> {
        backward(saved, dy, settings)
    }
}

pub(super) fn forward<B: Backend>(inputs: Inputs<B>, settings: Settings) -> Output<B> {
    let Inputs { x, gamma, beta } = inputs;
    let (shape, dtype) = (x.shape(), x.dtype());
    let sizes = Sizes::of(&shape, settings.groups);
    let rows = sizes.groups_of::<B>(x);
    let mean = B::float_mean_dim(rows.clone(), 2);
    let distance = B::float_sub(rows, mean.clone());
    let variance = B::float_mean_dim(B::float_mul(distance.clone(), distance.clone()), 2);
    let deviation = B::float_sqrt(B::float_add_scalar(variance, settings.epsilon.into()));
    let rstd = B::float_recip(deviation);
    let mut y = B::float_mul(distance, rstd.clone());
    if let (Some(gamma), Some(beta)) = (gamma.into_option(), beta.into_option()) {
        let scaled = B::float_mul(sizes.channels_of::<B>(y), sizes.of_channel::<B>(gamma));
        y = B::float_add(scaled, sizes.of_channel::<B>(beta));
    }
    let statistic = |numbers| B::float_reshape(numbers, Shape::new([sizes.samples, sizes.groups]));
    Output {
        y: cast::<B>(B::float_reshape(y, shape), dtype),
        mean: statistic(mean),
        rstd: statistic(rstd),
    }
}

pub(super) fn backward<B: Backend>(
    saved: Saved<B>,
    dy: FloatTensor<B>,
    settings: Settings,
) -> Gradients<B> {
    let Saved { x, gamma, mean, rstd } = saved;
    let (shape, dtype) = (x.shape(), x.dtype());
    let sizes = Sizes::of(&shape, settings.groups);
    let of_group = |numbers: FloatTensor<B>| {
        B::float_reshape(wide::<B>(numbers), Shape::new([sizes.samples, sizes.groups, 1]))
    };
    let (mean, rstd) = (of_group(mean), of_group(rstd));
    let distance = B::float_sub(sizes.groups_of::<B>(x), mean);
    let normalized = B::float_mul(distance, rstd.clone());
    let dy = sizes.channels_of::<B>(wide::<B>(dy));
    let (mut g, mut parameters) = (dy.clone(), None);
    if let Some(gamma) = gamma.into_option() {
        let of = (gamma.shape(), gamma.dtype());
        let products = B::float_mul(dy.clone(), sizes.channels_of::<B>(normalized.clone()));
        // Over pixels, and then samples.
        let sum = |terms| {
            let sum = B::float_sum_dim(B::float_sum_dim(terms, 2), 0);
            cast::<B>(B::float_reshape(sum, of.0.clone()), of.1)
        };
        parameters = Some([sum(products), sum(dy)]);
        g = B::float_mul(g, sizes.of_channel::<B>(gamma));
    }
    let g = sizes.groups_of::<B>(g);
    let plain = B::float_mean_dim(g.clone(), 2);
    let weighted = B::float_mean_dim(B::float_mul(g.clone(), normalized.clone()), 2);
    let of_mean = B::float_add(plain, B::float_mul(normalized, weighted));
    let dx = B::float_mul(B::float_sub(g, of_mean), rstd);
    let [dgamma, dbeta] = match parameters {
        Some(both) => both.map(Some),
        None => [None, None],
    };
    Gradients {
        dx: cast::<B>(B::float_reshape(dx, shape), dtype),
        dgamma: dgamma.into(),
        dbeta: dbeta.into(),
    }
}

/// Of a `[batch, channels, ..]`.
struct Sizes {
    samples: usize,
    channels: usize,
    groups: usize,
    pixels: usize,
}

impl Sizes {
    fn of(shape: &Shape, groups: usize) -> Self {
        let (samples, channels) = (shape[0], shape[1]);
        let pixels = shape[2..].iter().product();
        Self { samples, channels, groups, pixels }
    }

    /// A row for each group, in f32 or f64.
    fn groups_of<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let count = self.channels / self.groups * self.pixels;
        B::float_reshape(wide::<B>(x), Shape::new([self.samples, self.groups, count]))
    }

    /// A row for each channel.
    fn channels_of<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_reshape(x, Shape::new([self.samples, self.channels, self.pixels]))
    }

    /// One number a channel, to go with [`channels_of`](Self::channels_of).
    fn of_channel<B: Backend>(&self, numbers: FloatTensor<B>) -> FloatTensor<B> {
        B::float_reshape(wide::<B>(numbers), Shape::new([1, self.channels, 1]))
    }
}
