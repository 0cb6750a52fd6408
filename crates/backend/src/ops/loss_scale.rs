//! What a loss scaler computes of single numbers on the device, in one launch each: the norm of gradients
//! with what they are to be multiplied by, and the scale of the next step.
//!
//! They take no part in differentiation, and exist on GPUs only. The equations stand in
//! `blackburn_kernels::loss_scale`.
#![cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]

use crate::tensors::Optional;
#[cfg(feature = "gpu")]
use crate::tensors::{Location, OptionalMetadata, contiguous_buffer, tensor_of_rows};
#[cfg(feature = "gpu")]
use blackburn_kernels::{
    buffer::Buffer,
    loss_scale::{self, ScalerRules, loss_scale_measure, loss_scale_update},
};
#[cfg(feature = "gpu")]
use burn::backend::fusion::custom::TensorSpec;
use burn::{
    backend::{Backend, Dispatch, ExtensionType, backend_extension, tensor::FloatTensor},
    tensor::{DType, Device, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
#[cfg(feature = "gpu")]
use burn_std::Shape;

/// What is known of all gradients together, one f32 each.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Measure<B: Backend> {
    /// The norm of the gradients without the scale.
    pub norm: FloatTensor<B>,
    /// 1 if all gradients are finite, else 0.
    pub finite: FloatTensor<B>,
    /// The factor that undoes the scale and clips the gradients.
    pub factor: FloatTensor<B>,
}

/// A scaler's numbers, one f32 each.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Counts<B: Backend> {
    /// What losses are multiplied by.
    pub scale: FloatTensor<B>,
    /// Finite steps since the scale last changed.
    pub clean: FloatTensor<B>,
    /// Steps that were not finite.
    pub skipped: FloatTensor<B>,
    /// Steps that were not finite, one after another up to the last step.
    pub in_a_row: FloatTensor<B>,
}

/// The rules by which a scaler changes its scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// What the scale is multiplied by after `interval` finite steps.
    pub growth: f32,
    /// What it is multiplied by after one that was not.
    pub backoff: f32,
    /// Finite steps, one after another, before the scale grows.
    pub interval: u32,
    /// The scale never falls below.
    pub least: f32,
    /// The scale never grows beyond.
    pub largest: f32,
}

/// The operations under it. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait LossScalePrimitives: Backend {
    /// What gradients come to whose squares `sums` adds up to, clipped to the norm `largest`. They were
    /// multiplied by `scale`, one f32, if there is one.
    #[fusion(meta = measured)]
    fn measure_gradients(
        sums: FloatTensor<Self>,
        #[extension_type] scale: Optional<Self>,
        largest: f32,
    ) -> Measure<Self>;

    /// A scaler's numbers after a step.
    #[fusion(meta = updated)]
    fn update_scale(
        finite: FloatTensor<Self>,
        #[extension_type] old: Counts<Self>,
        rules: Rules,
    ) -> Counts<Self>;
}

#[cfg(feature = "gpu")]
fn measured(_sums: &TensorSpec, _scale: &OptionalMetadata, _largest: &f32) -> MeasureMetadata {
    let one = || TensorSpec::new(Shape::new([1]), DType::F32);
    MeasureMetadata { norm: one(), finite: one(), factor: one() }
}

#[cfg(feature = "gpu")]
fn updated(finite: &TensorSpec, _old: &CountsMetadata, _rules: &Rules) -> CountsMetadata {
    let one = || finite.clone();
    CountsMetadata { scale: one(), clean: one(), skipped: one(), in_a_row: one() }
}

#[cfg(feature = "gpu")]
impl LossScalePrimitives for CubeBackend {
    fn measure_gradients(
        sums: FloatTensor<Self>,
        scale: Optional<Self>,
        largest: f32,
    ) -> Measure<Self> {
        let place = Location::of(&sums);
        let scale = scale.into_option().map(contiguous_buffer);
        let sums = contiguous_buffer(sums);
        let loss_scale::Measured { norm, finite, factor } =
            loss_scale_measure(&place.client, &sums, scale.as_ref(), largest)
                .unwrap_or_else(|error| panic!("{error}"));
        let [norm, finite, factor] = [norm, finite, factor].map(|buffer| one(&place, buffer));
        Measure { norm, finite, factor }
    }

    fn update_scale(finite: FloatTensor<Self>, old: Counts<Self>, rules: Rules) -> Counts<Self> {
        let place = Location::of(&finite);
        let Counts { scale, clean, skipped, in_a_row } = old;
        let old = loss_scale::Scaler {
            scale: contiguous_buffer(scale),
            clean: contiguous_buffer(clean),
            skipped: contiguous_buffer(skipped),
            in_a_row: contiguous_buffer(in_a_row),
        };
        let Rules { growth, backoff, interval, least, largest } = rules;
        let rules = ScalerRules { growth, backoff, interval, least, largest };
        let new = loss_scale_update(&place.client, &rules, &contiguous_buffer(finite), &old)
            .unwrap_or_else(|error| panic!("{error}"));
        Counts {
            scale: one(&place, new.scale),
            clean: one(&place, new.clean),
            skipped: one(&place, new.skipped),
            in_a_row: one(&place, new.in_a_row),
        }
    }
}

/// A tensor of one f32.
#[cfg(feature = "gpu")]
pub(crate) fn one(place: &Location, buffer: Buffer) -> CubeTensor {
    tensor_of_rows(place, Shape::new([1]), buffer.into(), DType::F32)
}

/// What is known of all gradients together, one f32 each on the device.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The norm of the gradients without the scale.
    pub norm: Tensor<1>,
    /// 1 if the norm with the scale is a finite number, else 0.
    pub finite: Tensor<1>,
    /// The factor of the gradients: one over the scale, and where they are finite, what clips them.
    pub factor: Tensor<1>,
}

/// [`SquareSum::measured`](crate::ops::square_sum::SquareSum::measured), of its sums.
pub(crate) fn measure(sums: Tensor<1>, scale: Option<Tensor<1>>, largest: f32) -> Measured {
    assert!(
        largest > 0.0,
        "loss_scale: argument `largest`: expected a positive number, got {largest}"
    );
    let scale = scale.inspect(|scale| check("scale", scale)).map(Tensor::into_dispatch);
    let Measure { norm, finite, factor } = <Dispatch as LossScalePrimitives>::measure_gradients(
        sums.into_dispatch(),
        scale.into(),
        largest,
    );
    let [norm, finite, factor] = [norm, finite, factor].map(Tensor::from_dispatch);
    Measured { norm, finite, factor }
}

/// A scaler's numbers, one f32 each on the device.
#[derive(Clone, Debug)]
pub struct State {
    /// What losses are multiplied by.
    pub scale: Tensor<1>,
    /// Finite steps since the scale last changed.
    pub clean: Tensor<1>,
    /// Steps that were not finite.
    pub skipped: Tensor<1>,
    /// Steps that were not finite, one after another up to the last step.
    pub in_a_row: Tensor<1>,
}

/// Whether [`update`] works on `device`: it is a GPU, or a software device that passes for one.
pub fn serves(device: &Device) -> bool {
    crate::tensors::is_gpu(device)
}

/// The scaler's numbers after a step whose gradients were `finite`, 1 or 0.
///
/// # Panics
///
/// On a device that [`serves`] refuses, and where a tensor is not one f32.
pub fn update(rules: Rules, finite: Tensor<1>, old: State) -> State {
    assert!(
        serves(&finite.device()),
        "loss_scale: argument `finite`: expected a tensor on a GPU, got one on {:?}",
        finite.device()
    );
    let State { scale, clean, skipped, in_a_row } = old;
    for (argument, tensor) in [
        ("finite", &finite),
        ("scale", &scale),
        ("clean", &clean),
        ("skipped", &skipped),
        ("in_a_row", &in_a_row),
    ] {
        check(argument, tensor);
    }
    let [finite, scale, clean, skipped, in_a_row] =
        [finite, scale, clean, skipped, in_a_row].map(Tensor::into_dispatch);
    let old = Counts { scale, clean, skipped, in_a_row };
    let new = <Dispatch as LossScalePrimitives>::update_scale(finite, old, rules);
    State {
        scale: Tensor::from_dispatch(new.scale),
        clean: Tensor::from_dispatch(new.clean),
        skipped: Tensor::from_dispatch(new.skipped),
        in_a_row: Tensor::from_dispatch(new.in_a_row),
    }
}

fn check(argument: &str, tensor: &Tensor<1>) {
    assert!(
        (tensor.dtype(), tensor.dims()) == (DType::F32, [1]),
        "loss_scale: argument `{argument}`: expected one f32, got {:?} of {:?}",
        tensor.dims(),
        tensor.dtype()
    );
}
