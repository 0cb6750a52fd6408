//! A step of gradient descent with momentum on one parameter, as one operation of Burn's stream. The
//! provider `BlackburnSgd` takes the operations of up to 16 parameters by one launch.
//!
//! It takes no part in differentiation, and exists on GPUs only: [`serves`] says where. What it computes
//! stands in `blackburn_kernels::sgd`. Memory of parameter and velocity is used again where nobody else
//! holds it.

#[cfg(feature = "gpu")]
mod cube;
#[cfg(feature = "gpu")]
mod kind;
#[cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]
mod primitives;

#[cfg(feature = "gpu")]
pub(crate) use kind::Sgd;
#[cfg(feature = "gpu")]
pub use primitives::UpdatedMetadata;
pub use primitives::{SgdPrimitives, Step, Updated};

use super::{
    Together,
    gate::{Draw, Taken, chance_of, gate_of, is_stepped},
};
use burn::{backend::Dispatch, tensor::Tensor};

/// A parameter and what belongs to it, all of one shape.
#[derive(Clone, Debug)]
pub struct Tensors<const D: usize> {
    /// In f32, f16 or bf16.
    pub parameter: Tensor<D>,
    /// In f32, f16 or bf16.
    pub gradient: Tensor<D>,
    /// In f32; what it holds in the first step that is taken does not matter.
    pub velocity: Tensor<D>,
}

/// A parameter and its velocity after a step, in the types of those before it.
#[derive(Clone, Debug)]
pub struct Stepped<const D: usize> {
    /// The parameter.
    pub parameter: Tensor<D>,
    /// The velocity.
    pub velocity: Tensor<D>,
}

/// Whether [`step`] takes `tensors`: they are on a GPU (or a software device that passes for one), of
/// the types and shapes that [`Tensors`] lists, and of fewer than 2^32 elements by a margin.
pub fn serves<const D: usize>(tensors: &Tensors<D>) -> bool {
    let Tensors { parameter, gradient, velocity } = tensors;
    is_stepped(parameter, gradient, &[velocity])
}

/// The parameter and its velocity after `step`. A parameter in f32 is rounded to the nearest value, with
/// a draw or without. Steps that share `together` are taken by few launches.
///
/// # Panics
///
/// On tensors that [`serves`] refuses, numbers out of the ranges that [`Step`] gives, a gate whose
/// readings are not one f32 each, or a seed that is not two integers of 32 bits.
pub fn step<const D: usize>(
    tensors: Tensors<D>,
    step: Step,
    gate: Option<Taken>,
    draw: Option<Draw>,
    together: &Together,
) -> Stepped<D> {
    const OP: &str = "sgd";
    assert!(
        serves(&tensors),
        "{OP}: argument `tensors`: expected tensors of one shape on a GPU, the parameter and its \
         gradient in f32, f16 or bf16, the velocity in f32, got {:?}",
        [&tensors.parameter, &tensors.gradient, &tensors.velocity].map(|tensor| (
            tensor.device(),
            tensor.dtype(),
            tensor.dims()
        ))
    );
    // Here, since the stream would find out only when nobody knows any more who asked.
    #[cfg(feature = "gpu")]
    cube::check(step);
    let together = together.on(&tensors.parameter.device()).into_dispatch();
    let number = draw.as_ref().map_or(0, |draw| draw.number);
    let (gate, chance) = (gate_of(OP, gate), chance_of(OP, draw));
    let Tensors { parameter, gradient, velocity } = tensors;
    let [parameter, gradient, velocity] =
        [parameter, gradient, velocity].map(Tensor::into_dispatch);
    let Step { momentum, dampening, nesterov, weight_decay, rate, time } = step;
    let updated = <Dispatch as SgdPrimitives>::sgd_step(
        parameter,
        gradient,
        velocity,
        together,
        gate,
        chance,
        number,
        momentum,
        dampening,
        nesterov,
        weight_decay,
        rate,
        time,
    );
    Stepped {
        parameter: Tensor::from_dispatch(updated.parameter),
        velocity: Tensor::from_dispatch(updated.velocity),
    }
}
