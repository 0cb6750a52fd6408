//! What a backend has to be able to do: one step of gradient descent with momentum.
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
    /// What is kept of the velocity; not negative.
    pub momentum: f64,
    /// What of the gradient is kept out of the velocity, after the first step.
    pub dampening: f64,
    /// Whether the step looks ahead by the new velocity.
    pub nesterov: bool,
    /// What of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// The learning rate.
    pub rate: f64,
    /// Steps up to this one and with it, those included that a gate took back; from 1. [`usize::MAX`]
    /// where the velocity is known to be one, however many there were.
    pub time: usize,
}

/// A parameter and its velocity after a step.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Updated<B: Backend> {
    /// The parameter, in its type.
    pub parameter: FloatTensor<B>,
    /// The velocity, in f32.
    pub velocity: FloatTensor<B>,
}

/// The operation under an optimizer's step. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait SgdPrimitives: Backend {
    /// The parameter and its velocity after a step. `draw` tells updates with the same seed apart; the rest
    /// are the numbers of a [`Step`], one by one, as they are for AdamW.
    #[fusion(meta = updated, id = "blackburn::sgd_step")]
    fn sgd_step(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        velocity: FloatTensor<Self>,
        together: FloatTensor<Self>,
        #[extension_type] gate: Gate<Self>,
        #[extension_type] chance: Chance<Self>,
        draw: u32,
        momentum: f64,
        dampening: f64,
        nesterov: bool,
        weight_decay: f64,
        rate: f64,
        time: usize,
    ) -> Updated<Self>;
}

#[cfg(feature = "gpu")]
fn updated(
    parameter: &TensorSpec,
    _gradient: &TensorSpec,
    velocity: &TensorSpec,
    _together: &TensorSpec,
    _gate: &GateMetadata,
    _chance: &ChanceMetadata,
    _draw: &u32,
    _momentum: &f64,
    _dampening: &f64,
    _nesterov: &bool,
    _weight_decay: &f64,
    _rate: &f64,
    _time: &usize,
) -> UpdatedMetadata {
    UpdatedMetadata { parameter: parameter.clone(), velocity: velocity.clone() }
}
