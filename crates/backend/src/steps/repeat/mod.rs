//! A step that repeats the last one, in one operation of Burn's stream.
//!
//! Burn's optimizers hand over one parameter at a time, and the stream looks at each: that takes the host tens of
//! microseconds a parameter. Where a pass is replayed, a step differs from the one before in two numbers alone, the
//! learning rate and the number of the step: its tensors lie where they lay. So a [`Watch`] takes note of the memory
//! that a step has read and written, and [`repeat`] does the same again: the sums of squares, what clips the
//! gradients, and the update of all parameters with their copies. It has the same bits, since it launches the same
//! kernels in the same order.
//!
//! What is overwritten has to be nobody else's: Burn's tensors are values, and a clone of a parameter would change.
#![cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]

#[cfg(feature = "gpu")]
mod known;

#[cfg(feature = "gpu")]
pub(super) use known::{Noted, is_watched, tell};

use crate::{
    ops::{
        loss_scale::{Measure, Measured},
        square_sum::Batches,
    },
    tensors::Together,
};
#[cfg(feature = "gpu")]
use crate::{
    ops::{
        loss_scale::{MeasureMetadata, one},
        written,
    },
    tensors::{Location, contiguous_buffer, zeros},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::{
    KernelError,
    loss_scale::loss_scale_measure,
    square_sum::{PLACES, square_sum},
    step::Gate,
};
#[cfg(feature = "gpu")]
use burn::backend::fusion::custom::TensorSpec;
use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor},
    tensor::{Device, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;
#[cfg(feature = "gpu")]
use burn_std::{DType, Shape};
#[cfg(feature = "gpu")]
use known::All;
use std::fmt;
#[cfg(feature = "gpu")]
use std::sync::{Arc, Mutex, PoisonError};

/// Takes note of steps and of sums of squares from here on.
#[derive(Debug)]
pub struct Watch {
    #[cfg(feature = "gpu")]
    entry: known::WatchEntry,
    sums: Batches,
}

impl Watch {
    /// Of the steps that share `together` on `device`; none where there are no such steps.
    pub fn begin(together: &Together, device: &Device) -> Option<Self> {
        #[cfg(feature = "gpu")]
        return known::WatchEntry::watched(&together.on(device))
            .map(|entry| Self { entry, sums: Batches::default() });
        #[cfg(not(feature = "gpu"))]
        None
    }

    /// What [`SquareSum::noted`](crate::square_sum::SquareSum::noted) is to be told.
    pub fn sums(&self) -> &Batches {
        &self.sums
    }

    /// The steps, if there were `count` in all, and each can be repeated: a kernel took it, nothing was rounded by
    /// chance, its gradient was read where it lies, and the parameter has one copy, which the step wrote, too. What
    /// was asked for has to be [handed over](crate::graph::hand_over) before.
    pub fn end(self, count: usize) -> Option<Repeated> {
        #[cfg(feature = "gpu")]
        {
            let steps = self.entry.take().into_iter().collect::<Option<Vec<_>>>()?;
            let sums = self.sums.take()?;
            let stepped: usize = steps.iter().map(|steps| steps.count()).sum();
            let summed: usize = sums.iter().map(Vec::len).sum();
            let all = ([stepped, summed] == [count; 2]).then_some(All { sums, steps })?;
            Some(Repeated { all: Arc::new(Mutex::new(all)) })
        }
        #[cfg(not(feature = "gpu"))]
        None
    }
}

/// Steps that can be repeated.
#[derive(Clone)]
pub struct Repeated {
    #[cfg(feature = "gpu")]
    all: Arc<Mutex<All>>,
    /// Without a GPU backend nobody makes one.
    #[cfg(not(feature = "gpu"))]
    _all: (),
}

impl fmt::Debug for Repeated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repeated").finish_non_exhaustive()
    }
}

/// The operation under [`repeat`]. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait RepeatPrimitives: Backend {
    /// Takes `steps` again at another rate, with gradients clipped to the norm `largest`.
    #[fusion(meta = measured)]
    fn repeat_steps(
        taken: FloatTensor<Self>,
        skipped: FloatTensor<Self>,
        steps: Repeated,
        rate: f64,
        largest: f32,
    ) -> Measure<Self>;
}

#[cfg(feature = "gpu")]
fn measured(
    taken: &TensorSpec,
    _skipped: &TensorSpec,
    _steps: &Repeated,
    _rate: &f64,
    _largest: &f32,
) -> MeasureMetadata {
    MeasureMetadata { norm: taken.clone(), finite: taken.clone(), factor: taken.clone() }
}

#[cfg(feature = "gpu")]
impl RepeatPrimitives for CubeBackend {
    fn repeat_steps(
        taken: FloatTensor<Self>,
        skipped: FloatTensor<Self>,
        steps: Repeated,
        rate: f64,
        largest: f32,
    ) -> Measure<Self> {
        // Weights have other numbers from here on.
        written::forget_all();
        let place = Location::of(&taken);
        let mut all = steps.all.lock().unwrap_or_else(PoisonError::into_inner);
        let All { sums: batches, steps } = &mut *all;
        let again = || {
            let none = contiguous_buffer(zeros(&place, Shape::new([PLACES]), DType::F32));
            let sums = batches
                .iter()
                .try_fold(none, |sums, tensors| square_sum(&place.client, sums, tensors))?;
            let measured = loss_scale_measure(&place.client, &sums, None, largest)?;
            let gate = largest.is_finite().then(|| Gate {
                taken: contiguous_buffer(taken),
                skipped: contiguous_buffer(skipped),
                factor: measured.factor.clone(),
            });
            steps.iter_mut().try_for_each(|steps| steps.repeat(rate, gate.as_ref()))?;
            Ok::<_, KernelError>(measured)
        };
        let measured = again().unwrap_or_else(|error| panic!("{error}"));
        let [norm, finite, factor] =
            [measured.norm, measured.finite, measured.factor].map(|buffer| one(&place, buffer));
        Measure { norm, finite, factor }
    }
}

/// Takes `steps` again, each with the next number, at the learning rate `rate`, by what the memory of the gradients
/// holds by now, clipped to the joint norm `largest`. Nothing is clipped where that is infinite. `taken` is 1, and
/// `skipped` 0, one f32 each on the device.
///
/// What waits in the stream and reads or writes the same memory has to be handed over before, and this before what
/// comes behind.
///
/// # Panics
///
/// When `largest` is not positive.
pub fn repeat(
    steps: &Repeated,
    taken: Tensor<1>,
    skipped: Tensor<1>,
    rate: f64,
    largest: f32,
) -> Measured {
    assert!(largest > 0.0, "repeat: argument `largest`: expected a positive number, got {largest}");
    let Measure { norm, finite, factor } = <Dispatch as RepeatPrimitives>::repeat_steps(
        taken.into_dispatch(),
        skipped.into_dispatch(),
        steps.clone(),
        rate,
        largest,
    );
    let [norm, finite, factor] = [norm, finite, factor].map(Tensor::from_dispatch);
    Measured { norm, finite, factor }
}
