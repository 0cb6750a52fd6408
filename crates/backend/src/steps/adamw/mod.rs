//! A step of AdamW on one parameter, as one operation of Burn's stream, where element by element it takes
//! some fifteen. The provider `BlackburnAdamw` takes the operations of up to 16 parameters by one launch.
//!
//! It takes no part in differentiation, and exists on GPUs only: [`serves`] says where. What it computes
//! stands in `blackburn_kernels::adamw`. Memory of parameter and moments is used again where nobody else
//! holds it.

#[cfg(feature = "gpu")]
mod cube;
#[cfg(feature = "gpu")]
mod kind;
#[cfg(feature = "gpu")]
mod plain;
#[cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]
mod primitives;
#[cfg(feature = "gpu")]
pub(crate) use kind::Adamw;
#[cfg(feature = "gpu")]
pub(crate) use plain::{PlainSearch, PlainSteps};
#[cfg(feature = "gpu")]
pub use primitives::UpdatedMetadata;
pub use primitives::{AdamwPrimitives, Step, Updated};

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
    /// The first moment, in f32.
    pub first: Tensor<D>,
    /// The second moment, in f32.
    pub second: Tensor<D>,
}

/// A parameter and its moments after a step, in the types of those before it.
#[derive(Clone, Debug)]
pub struct Stepped<const D: usize> {
    /// The parameter.
    pub parameter: Tensor<D>,
    /// The first moment.
    pub first: Tensor<D>,
    /// The second moment.
    pub second: Tensor<D>,
}

/// Whether [`step`] takes `tensors`: they are on a GPU (or a software device that passes for one), of
/// the types and shapes that [`Tensors`] lists, and of fewer than 2^32 elements by a margin.
pub fn serves<const D: usize>(tensors: &Tensors<D>) -> bool {
    let Tensors { parameter, gradient, first, second } = tensors;
    is_stepped(parameter, gradient, &[first, second])
}

/// The parameter and its moments after `step`. A parameter in f32 is rounded to the nearest value, with
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
    const OP: &str = "adamw";
    assert!(
        serves(&tensors),
        "{OP}: argument `tensors`: expected tensors of one shape on a GPU, the parameter and its \
         gradient in f32, f16 or bf16, the moments in f32, got {:?}",
        [&tensors.parameter, &tensors.gradient, &tensors.first, &tensors.second].map(|tensor| (
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
    let Tensors { parameter, gradient, first, second } = tensors;
    let [parameter, gradient, first, second] =
        [parameter, gradient, first, second].map(Tensor::into_dispatch);
    let Step { beta_1, beta_2, epsilon, weight_decay, rate, time } = step;
    let updated = <Dispatch as AdamwPrimitives>::adamw_step(
        parameter,
        gradient,
        first,
        second,
        together,
        gate,
        chance,
        number,
        beta_1,
        beta_2,
        epsilon,
        weight_decay,
        rate,
        time,
    );
    Stepped {
        parameter: Tensor::from_dispatch(updated.parameter),
        first: Tensor::from_dispatch(updated.first),
        second: Tensor::from_dispatch(updated.second),
    }
}
