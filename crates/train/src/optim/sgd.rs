//! Gradient descent with momentum whose step can be taken back by the device, and which trains 16-bit
//! parameters.
//!
//! With gradient `g`, rate `lr`, decay `wd`, momentum `mu` and dampening `d`:
//!
//! ```text
//! g = g + wd p
//! v = g                        in the first step that is taken
//! v = mu v + (1 - d) g         in those after it
//! p = p - lr v                 or, by Nesterov,  p = p - lr (g + mu v)
//! ```
//!
//! Velocity and update are computed in f32 whatever the types of parameter and gradient. On GPUs one
//! kernel computes all of a step of up to 16 parameters; elsewhere Burn's operations do, element by element,
//! and so they do without momentum, where a step is a sum that Burn fuses by itself.

use super::{
    gate::{Reading, StepGate},
    in_two_groups,
    repeat_count::RepeatCount,
    skipped::{Skipped, SkippedCounts},
    stochastic::{Draws, stored_as},
};
use blackburn_backend::steps::{Together, sgd};
use burn::{
    module::Module,
    optim::{
        LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource, join_path,
    },
    tensor::{DType, Device, FloatDType, Tensor},
};
use burn_pack::Scalar;

/// Gradient descent with momentum in two groups: parameters of two or more dimensions decay, biases and
/// normalization gains do not, unless they are asked to.
///
/// The numbers mean what they mean to PyTorch's `torch.optim.SGD`.
///
/// ```
/// use blackburn_train::optim::SgdGroups;
/// use burn::{nn::LinearConfig, tensor::Device};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(3, 2).init(&device);
/// let optimizer = SgdGroups { nesterov: true, ..SgdGroups::default() }.init(&model, &device);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdGroups {
    /// What is kept of the velocity in each step, from 0. With 0 there is no velocity.
    pub momentum: f64,
    /// What of the gradient is kept out of the velocity, after the first step.
    pub dampening: f64,
    /// Steps by the gradient and the velocity after this step, rather than by the velocity alone.
    pub nesterov: bool,
    /// What of a parameter is added to its gradient.
    pub weight_decay: f64,
    /// Whether parameters of fewer than two dimensions decay, too.
    pub decays_vectors: bool,
    /// Rounds parameters of 16 bits up or down by chance instead of to the nearest value, so that
    /// small updates count in the mean. Parameters in f32 are not rounded.
    pub stochastic_rounding: bool,
}

impl Default for SgdGroups {
    /// Momentum 0.9 and weight decay 1e-4, those of residual networks (He et al., "Deep Residual
    /// Learning for Image Recognition", arXiv:1512.03385, section 3.4), without dampening.
    fn default() -> Self {
        Self {
            momentum: 0.9,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 1e-4,
            decays_vectors: false,
            stochastic_rounding: false,
        }
    }
}

impl SgdGroups {
    /// An optimizer for `model`, whose state loads onto `device`.
    ///
    /// # Panics
    ///
    /// On a momentum that is negative, and on numbers that are not finite.
    pub fn init<M: Module>(&self, model: &M, device: &Device) -> ModuleOptimizer {
        self.build(model, device, None)
    }

    /// The same, which leaves parameters and velocities alone in steps whose gradients overflowed: give
    /// it [`GradScaler::gate`](crate::scaler::GradScaler::gate).
    ///
    /// # Panics
    ///
    /// As [`init`](Self::init).
    pub fn init_gated<M: Module>(
        &self,
        model: &M,
        device: &Device,
        gate: &StepGate,
    ) -> ModuleOptimizer {
        self.build(model, device, Some(gate))
    }

    fn build<M: Module>(
        &self,
        model: &M,
        device: &Device,
        gate: Option<&StepGate>,
    ) -> ModuleOptimizer {
        let Self { momentum, dampening, weight_decay, .. } = *self;
        for (argument, number, least) in [
            ("momentum", momentum, 0.0),
            ("dampening", dampening, f64::MIN),
            ("weight_decay", weight_decay, f64::MIN),
        ] {
            assert!(
                number.is_finite() && number >= least,
                "sgd: argument `{argument}`: expected a finite number{}, got {number}",
                if least == 0.0 { " from 0" } else { "" }
            );
        }
        // One of each for all groups, whose steps share a launch then.
        let (draws, counts) = (Draws::default(), SkippedCounts::default());
        let together = gate.map(StepGate::together).unwrap_or_default();
        let sgd = |weight_decay: f64| Sgd {
            momentum,
            dampening,
            nesterov: self.nesterov,
            weight_decay,
            rounds_stochastically: self.stochastic_rounding,
            gate: gate.cloned(),
            draws: draws.clone(),
            together: together.clone(),
            counts: counts.clone(),
        };
        let of_vectors = if self.decays_vectors { weight_decay } else { 0.0 };
        in_two_groups(model, device, sgd(weight_decay), sgd(of_vectors))
    }
}

/// One group's gradient descent; [`SgdGroups`] makes them.
///
/// Sources: Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in
/// deep learning", ICML 2013; the documentation of `torch.optim.SGD`.
#[derive(Clone, Debug)]
pub struct Sgd {
    momentum: f64,
    dampening: f64,
    nesterov: bool,
    weight_decay: f64,
    rounds_stochastically: bool,
    /// Set by a loss scaler.
    gate: Option<StepGate>,
    /// What the kernel rounds by, where it rounds by chance.
    draws: Draws,
    /// What the kernel's steps are taken together by.
    together: Together,
    /// What the gate took back of each parameter's steps.
    counts: SkippedCounts,
}

/// What one parameter's steps leave for the next.
///
/// Its records are those of Burn's `Sgd`, with the number of steps beside the velocity, without those that a
/// gate took back, so that each loads what the other saved.
#[derive(Clone, Debug)]
pub struct SgdState<const D: usize> {
    /// In f32; none without momentum.
    pub velocity: Option<Tensor<D>>,
    /// Steps since there is a velocity up to the last one that the optimizer was asked for, those included that a
    /// gate took back; counted from [`UNCOUNTED`](Self::UNCOUNTED) on after records that do not tell.
    pub time: usize,
    /// How many of them it took back.
    pub skipped: Skipped,
    /// How often that last one was repeated.
    pub repeats: RepeatCount,
}

impl<const D: usize> SgdState<D> {
    /// More steps than a gate takes back.
    pub const UNCOUNTED: usize = 1 << 30;
}

/// Names of Burn's records, and of what is added to them.
const MOMENTUM: &str = "momentum";
const VELOCITY: &str = "velocity";
const TIME: &str = "time";

impl<const D: usize> RecordState for SgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(velocity) = &self.velocity {
            out.push_tensor(&join_path(prefix, MOMENTUM), VELOCITY, velocity.clone().into_data());
        }
        let taken = self.repeats.after(self.time).saturating_sub(self.skipped.read());
        out.push_scalar(prefix, TIME, Scalar::from(taken));
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        // Burn keeps velocities in the gradient's type.
        let velocity = src
            .take_tensor(&join_path(prefix, MOMENTUM), VELOCITY)
            .map(|data| Tensor::from_data(data, (device, DType::F32)));
        let time = src.take_scalar(prefix, TIME).and_then(|time| usize::try_from(time).ok());
        let time = time.unwrap_or(Self::UNCOUNTED);
        let (skipped, repeats) = Default::default();
        Some(Self { velocity, time, skipped, repeats })
    }
}

impl Sgd {
    /// The step as one operation.
    fn by_kernel<const D: usize>(
        &self,
        lr: LearningRate,
        time: usize,
        tensors: sgd::Tensors<D>,
        open: Option<Reading>,
    ) -> sgd::Stepped<D> {
        let stored: FloatDType = tensors.parameter.dtype().into();
        let draw = (self.rounds_stochastically && stored != FloatDType::F32)
            .then(|| self.draws.next(time, &tensors.parameter.device()));
        let step = sgd::Step {
            momentum: self.momentum,
            dampening: self.dampening,
            nesterov: self.nesterov,
            weight_decay: self.weight_decay,
            rate: lr,
            time: self.counted(time),
        };
        sgd::step(tensors, step, open.map(Into::into), draw, &self.together)
    }

    /// The steps by which the first one is told. Without dampening a velocity of zero says as much, and
    /// says it of parameters, too, that join after the gate has taken steps back.
    fn counted(&self, time: usize) -> usize {
        if self.dampening == 0.0 { usize::MAX } else { time }
    }

    /// The step as Burn's operations.
    fn by_operations<const D: usize>(
        &self,
        lr: LearningRate,
        time: usize,
        [old, gradient]: [Tensor<D>; 2],
        old_velocity: Option<Tensor<D>>,
        open: Option<Reading>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        let stored: FloatDType = old.dtype().into();
        let shape = old.dims();
        let parameter = old.clone().cast(FloatDType::F32);
        let mut gradient = gradient.cast(FloatDType::F32);
        if let Some(open) = &open {
            gradient = gradient * open.factor.clone().reshape([1; D]);
        }
        if self.weight_decay != 0.0 {
            gradient = gradient + parameter.clone().mul_scalar(self.weight_decay);
        }
        let velocity = old_velocity.clone().map(|velocity| {
            let kept = velocity.mul_scalar(self.momentum);
            let later = kept + gradient.clone().mul_scalar(1.0 - self.dampening);
            let time = self.counted(time);
            match &open {
                None if time == 1 => gradient.clone(),
                None => later,
                Some(open) => {
                    let steps = open.skipped.clone().neg().add_scalar(time as f64);
                    let is_first = steps.lower_equal_elem(1.0).reshape([1; D]).expand(shape);
                    later.mask_where(is_first, gradient.clone())
                }
            }
        });
        let direction = match &velocity {
            None => gradient,
            Some(velocity) if self.nesterov => {
                gradient + velocity.clone().mul_scalar(self.momentum)
            }
            Some(velocity) => velocity.clone(),
        };
        let updated = parameter - direction.mul_scalar(lr);
        let updated = stored_as(updated, stored, self.rounds_stochastically);
        let Some(open) = open else { return (updated, velocity) };
        // Chosen rather than multiplied by 0, which leaves what is no number.
        let is_closed = open.taken.equal_elem(0.0).reshape([1; D]).expand(shape);
        let velocity =
            velocity.zip(old_velocity).map(|(new, old)| new.mask_where(is_closed.clone(), old));
        (updated.mask_where(is_closed, old), velocity)
    }
}

impl Optimizer for Sgd {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let (velocity, time, skipped) = match state {
            Some(SgdState { velocity: Some(velocity), time, skipped, repeats }) => {
                (Some(velocity), repeats.after(time), skipped)
            }
            // The first step, or the first one with momentum.
            _ => (None, 0, Skipped::default()),
        };
        let velocity = (self.momentum != 0.0).then(|| {
            velocity.unwrap_or_else(|| Tensor::zeros(grad.dims(), (&grad.device(), DType::F32)))
        });
        let gate = self.gate.as_ref();
        let (time, open, skipped) = match velocity {
            Some(_) => self.counts.next(time, skipped, gate),
            // No step is told from another.
            None => (1, gate.and_then(StepGate::read), skipped),
        };
        let (parameter, velocity) = match velocity {
            Some(velocity) => {
                let tensors = sgd::Tensors { parameter: tensor, gradient: grad, velocity };
                if sgd::serves(&tensors) {
                    let stepped = self.by_kernel(lr, time, tensors, open);
                    (stepped.parameter, Some(stepped.velocity))
                } else {
                    let sgd::Tensors { parameter, gradient, velocity } = tensors;
                    self.by_operations(lr, time, [parameter, gradient], Some(velocity), open)
                }
            }
            None => self.by_operations(lr, time, [tensor, grad], None, open),
        };
        let repeats = gate.map(StepGate::repeats).unwrap_or_default();
        (parameter, Some(SgdState { velocity, time, skipped, repeats }))
    }

    fn to_device<const D: usize>(mut state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.velocity = state.velocity.map(|velocity| velocity.to_device(device));
        state.skipped = state.skipped.to_device(device);
        state
    }
}

#[cfg(test)]
mod tests;
