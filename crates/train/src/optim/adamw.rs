//! AdamW whose step can be taken back by the device, and which trains 16-bit parameters.
//!
//! With gradient `g`, rate `lr`, decay `wd`, and `t` the number of the parameter's steps that were taken:
//!
//! ```text
//! m = m + (1 - beta_1) (g - m)                 v = v + (1 - beta_2) (g^2 - v)
//! p = p - lr wd p - lr / (1 - beta_1^t) m / (sqrt(v / (1 - beta_2^t)) + epsilon)
//! ```
//!
//! Moments and the update are computed in f32 whatever the types of parameter and gradient. On GPUs one
//! kernel computes all of a parameter's step; elsewhere Burn's operations do, element by element.

use super::{
    gate::{Reading, StepGate},
    repeat_count::RepeatCount,
    skipped::{Skipped, SkippedCounts},
    stochastic::{Draws, stored_as},
};
use blackburn_backend::steps::{Together, adamw};
use burn::{
    optim::{
        AdamWState as BurnsState, AdaptiveMomentumState, LearningRate, Optimizer, RecordState,
        StateSink, StateSource,
    },
    tensor::{DType, Device, FloatDType, Tensor},
};

/// One group's AdamW; [`AdamWGroups`](super::AdamWGroups) makes them.
///
/// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
#[derive(Clone, Debug)]
pub struct AdamW {
    pub(super) beta_1: f64,
    pub(super) beta_2: f64,
    pub(super) epsilon: f64,
    pub(super) weight_decay: f64,
    pub(super) rounds_stochastically: bool,
    /// Set by a loss scaler.
    pub(super) gate: Option<StepGate>,
    /// What the kernel rounds by, where it rounds by chance.
    pub(super) draws: Draws,
    /// What the kernel's steps are taken together by.
    pub(super) together: Together,
    /// What the gate took back of each parameter's steps.
    pub(super) counts: SkippedCounts,
}

/// What one parameter's steps leave for the next.
///
/// Its records are those of Burn's `AdamW`, with the moments in f32 and without the steps that a gate took
/// back, so that each loads what the other saved.
#[derive(Clone, Debug)]
pub struct AdamWState<const D: usize> {
    /// In f32.
    pub first: Tensor<D>,
    /// In f32.
    pub second: Tensor<D>,
    /// Steps up to the last one that the optimizer was asked for, those included that a gate took back.
    pub time: usize,
    /// How many of them it took back.
    pub skipped: Skipped,
    /// How often that last one was repeated.
    pub repeats: RepeatCount,
}

impl<const D: usize> RecordState for AdamWState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let Self { first, second, time, skipped, repeats } = self.clone();
        let time = repeats.after(time).saturating_sub(skipped.read());
        let momentum =
            AdaptiveMomentumState { time, moment_1: first, moment_2: second, max_moment_2: None };
        BurnsState { momentum }.state_flatten(prefix, out);
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let BurnsState { momentum } = BurnsState::<D>::state_unflatten(prefix, src, device)?;
        let AdaptiveMomentumState { time, moment_1, moment_2, .. } = momentum;
        let [first, second] = [moment_1, moment_2].map(|moment| moment.cast(FloatDType::F32));
        let (skipped, repeats) = Default::default();
        Some(Self { first, second, time, skipped, repeats })
    }
}

/// What a step multiplies by: known to the host, unless the device may take the step back.
enum Factor {
    Host(f64),
    Device(Box<Tensor<1>>),
}

impl Factor {
    fn of<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Host(factor) => tensor.mul_scalar(*factor),
            Self::Device(factor) => tensor.mul(factor.as_ref().clone().reshape([1; D])),
        }
    }
}

/// The factors of the equations above, each 0 where the step is not taken.
struct Factors {
    one_minus_beta_1: Factor,
    one_minus_beta_2: Factor,
    decay: Option<Factor>,
    rate: Factor,
    /// `1 / (1 - beta_2^t)`.
    correction: Factor,
}

impl AdamW {
    fn factors(&self, lr: LearningRate, time: usize, open: Option<Reading>) -> Factors {
        let [one_minus_beta_1, one_minus_beta_2] = [1.0 - self.beta_1, 1.0 - self.beta_2];
        let decay = (self.weight_decay != 0.0).then_some(lr * self.weight_decay);
        let Some(open) = open else {
            let time = i32::try_from(time).unwrap_or(i32::MAX);
            return Factors {
                one_minus_beta_1: Factor::Host(one_minus_beta_1),
                one_minus_beta_2: Factor::Host(one_minus_beta_2),
                decay: decay.map(Factor::Host),
                rate: Factor::Host(lr / (1.0 - self.beta_1.powi(time))),
                correction: Factor::Host(1.0 / (1.0 - self.beta_2.powi(time))),
            };
        };
        // Steps that were not taken do not count. At the least this one does, which keeps the
        // divisions finite where it is not taken either.
        let taken = open.skipped.neg().add_scalar(time as f64).clamp_min(1.0);
        let missing = |beta: f64| {
            let power = taken.clone().mul_scalar(beta.ln()).exp();
            power.neg().add_scalar(1.0)
        };
        let device = |factor| Factor::Device(Box::new(factor));
        let gated = |factor: f64| device(open.taken.clone().mul_scalar(factor));
        Factors {
            one_minus_beta_1: gated(one_minus_beta_1),
            one_minus_beta_2: gated(one_minus_beta_2),
            decay: decay.map(gated),
            rate: device(open.taken.clone().mul_scalar(lr).div(missing(self.beta_1))),
            correction: device(missing(self.beta_2).recip()),
        }
    }

    /// The step as one operation.
    fn by_kernel<const D: usize>(
        &self,
        lr: LearningRate,
        time: usize,
        tensors: adamw::Tensors<D>,
        open: Option<Reading>,
    ) -> adamw::Stepped<D> {
        let step = adamw::Step {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
            rate: lr,
            time,
        };
        let stored: FloatDType = tensors.parameter.dtype().into();
        let draw = (self.rounds_stochastically && stored != FloatDType::F32)
            .then(|| self.draws.next(time, &tensors.parameter.device()));
        adamw::step(tensors, step, open.map(Into::into), draw, &self.together)
    }

    /// The step as Burn's operations.
    fn by_operations<const D: usize>(
        &self,
        lr: LearningRate,
        time: usize,
        tensors: adamw::Tensors<D>,
        open: Option<Reading>,
    ) -> adamw::Stepped<D> {
        let adamw::Tensors { parameter, gradient, first, second } = tensors;
        let stored: FloatDType = parameter.dtype().into();
        let mut gradient = gradient.cast(FloatDType::F32);
        if let Some(Reading { factor, .. }) = &open {
            // What is no number would come through where the step is multiplied by 0.
            let whole = gradient * factor.clone().reshape([1; D]);
            let is_no_number = whole.clone().is_finite().bool_not();
            gradient = whole.mask_fill(is_no_number, 0.0);
        }
        let factors = self.factors(lr, time, open);
        let square = gradient.clone().square();
        let first = first.clone() + factors.one_minus_beta_1.of(gradient - first);
        let second = second.clone() + factors.one_minus_beta_2.of(square - second);
        let deviation = factors.correction.of(second.clone()).sqrt().add_scalar(self.epsilon);
        let mut update = factors.rate.of(first.clone().div(deviation));
        let parameter = parameter.cast(FloatDType::F32);
        if let Some(decay) = &factors.decay {
            update = update + decay.of(parameter.clone());
        }
        let updated = parameter - update;
        let parameter = stored_as(updated, stored, self.rounds_stochastically);
        adamw::Stepped { parameter, first, second }
    }
}

impl Optimizer for AdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let AdamWState { first, second, time, skipped, repeats } = state.unwrap_or_else(|| {
            // Each in memory of its own, which the kernel writes to.
            let zeros = || Tensor::zeros(grad.dims(), (&grad.device(), DType::F32));
            let (skipped, repeats) = Default::default();
            AdamWState { first: zeros(), second: zeros(), time: 0, skipped, repeats }
        });
        let gate = self.gate.as_ref();
        let (time, open, skipped) = self.counts.next(repeats.after(time), skipped, gate);
        let tensors = adamw::Tensors { parameter: tensor, gradient: grad, first, second };
        let adamw::Stepped { parameter, first, second } = if adamw::serves(&tensors) {
            self.by_kernel(lr, time, tensors, open)
        } else {
            self.by_operations(lr, time, tensors, open)
        };
        let repeats = gate.map(StepGate::repeats).unwrap_or_default();
        (parameter, Some(AdamWState { first, second, time, skipped, repeats }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        let AdamWState { first, second, time, skipped, repeats } = state;
        let [first, second] = [first, second].map(|moment| moment.to_device(device));
        AdamWState { first, second, time, skipped: skipped.to_device(device), repeats }
    }
}
