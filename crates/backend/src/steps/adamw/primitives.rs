//! What a backend has to be able to do: one step of AdamW.
#![allow(
    clippy::too_many_arguments,
    reason = "numbers are arguments of their own, since structures are hidden from the stream"
)]

use crate::steps::gate::{Chance, Gate};
#[cfg(feature = "gpu")]
use crate::steps::gate::{ChanceMetadata, GateMetadata};
#[cfg(feature = "gpu")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};

/// A step's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Decay of the first moment, from 0 to below 1.
    pub beta_1: f64,
    /// Decay of the second moment, from 0 to below 1.
    pub beta_2: f64,
    /// Keeps the division finite; not negative.
    pub epsilon: f64,
    /// Decoupled weight decay, before the rate.
    pub weight_decay: f64,
    /// The learning rate.
    pub rate: f64,
    /// Steps up to this one and with it, those included that a gate took back; from 1.
    pub time: usize,
}

/// A parameter and its moments after a step.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Updated<B: Backend> {
    /// The parameter, in its type.
    pub parameter: FloatTensor<B>,
    /// The first moment, in f32.
    pub first: FloatTensor<B>,
    /// The second moment, in f32.
    pub second: FloatTensor<B>,
}

/// The operation under an optimizer's step. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait AdamwPrimitives: Backend {
    /// The parameter and its moments after a step. `draw` tells updates with the same seed apart; the rest
    /// are the numbers of a [`Step`], one by one, so that the stream knows of them: plans for many parameters
    /// are kept from step to step, and take what is a number of its own only anew.
    #[fusion(meta = updated, id = "blackburn::adamw_step")]
    fn adamw_step(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        together: FloatTensor<Self>,
        #[extension_type] gate: Gate<Self>,
        #[extension_type] chance: Chance<Self>,
        draw: u32,
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
        weight_decay: f64,
        rate: f64,
        time: usize,
    ) -> Updated<Self>;
}

#[cfg(feature = "gpu")]
fn updated(
    parameter: &TensorSpec,
    _gradient: &TensorSpec,
    first: &TensorSpec,
    second: &TensorSpec,
    _together: &TensorSpec,
    _gate: &GateMetadata,
    _chance: &ChanceMetadata,
    _draw: &u32,
    _beta_1: &f64,
    _beta_2: &f64,
    _epsilon: &f64,
    _weight_decay: &f64,
    _rate: &f64,
    _time: &usize,
) -> UpdatedMetadata {
    UpdatedMetadata { parameter: parameter.clone(), first: first.clone(), second: second.clone() }
}
