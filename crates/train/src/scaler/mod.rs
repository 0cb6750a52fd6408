//! Dynamic loss scaling, on the device.
//!
//! Gradients in f16 below 6e-8 are zero. Multiplying the loss by a scale moves all of them up; a
//! scale that is too large makes some of them infinite, in which case the step is left out and the
//! scale halved. The rules and defaults are those of `PyTorch`'s `GradScaler`: a scale of 2^16,
//! doubled after 2000 steps without an overflow, halved by each.
//!
//! Nothing waits for the device: scale, counts and whether the gradients overflowed live there, and
//! [`AdamWGroups::init_gated`](crate::optim::AdamWGroups::init_gated) makes an optimizer that reads them, and
//! so does [`SgdGroups::init_gated`](crate::optim::SgdGroups::init_gated).
//! Other optimizers ask [`GradScaler::overflowed`], which waits.
//!
//! ```
//! use blackburn_train::{
//!     optim::AdamWGroups,
//!     precision::{Precision, PrecisionPolicy, full_precision},
//!     scaler::GradScalerConfig,
//! };
//! use burn::{nn::LinearConfig, optim::GradientsParams, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let policy = PrecisionPolicy::new(Precision::F16);
//! let mut model = policy.apply(LinearConfig::new(4, 1).init(&device))?;
//! let mut scaler = GradScalerConfig::default().init(&device)?;
//! let mut optimizer = AdamWGroups::default().init_gated(&model, &device, scaler.gate());
//! for _ in 0..3 {
//!     let x = policy.input(Tensor::<2>::ones([3, 4], &device));
//!     let loss = full_precision(model.forward(x)).mean();
//!     let gradients = scaler.scale(loss).backward();
//!     let mut gradients = GradientsParams::from_grads(gradients, &model);
//!     let norm = scaler.unscale_and_clip(&mut gradients, &model, 1.0)?;
//!     model = optimizer.step(1e-3, model, gradients);
//!     scaler.update()?;
//! #   drop(norm);
//! }
//! // The first gradient is 65536, more than f16 has: that step was left out.
//! assert_eq!(scaler.state().scale, 32768.0);
//! assert_eq!(scaler.state().skipped_steps, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2.

mod error;
mod origin;

pub use error::ScalerError;
pub(crate) use origin::Origin;

use crate::{
    clip::{Squares, measured_of},
    optim::{Reading, StepGate},
};
use blackburn_backend::loss_scale::{self, Measured, Rules, State};
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{Device, FloatDType, Tensor},
};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// How a [`GradScaler`] goes about it. The defaults are `PyTorch`'s, with bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradScalerConfig {
    /// The scale to begin with: 65536.
    pub initial_scale: f32,
    /// What the scale is multiplied by after `growth_interval` steps without an overflow: 2.
    pub growth_factor: f32,
    /// What the scale is multiplied by after an overflow: 0.5.
    pub backoff_factor: f32,
    /// Steps without an overflow, one after another, before the scale grows: 2000.
    pub growth_interval: u32,
    /// The scale never falls below: 1. Overflows at this scale are not the scale's doing.
    pub min_scale: f32,
    /// The scale never grows beyond: 2^32, far above what any step takes, far from f32's end.
    pub max_scale: f32,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self {
            initial_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            min_scale: 1.0,
            max_scale: 4_294_967_296.0,
        }
    }
}

/// What a checkpoint keeps of a scaler.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// What losses are multiplied by.
    pub scale: f32,
    /// Steps since the last overflow, or since the scale last grew.
    pub clean_steps: u32,
    /// Steps that were left out, all in all.
    pub skipped_steps: u32,
    /// Of those, how many were the last ones, one after another. More than 30 or so at the least
    /// scale means that the model itself is not finite.
    pub skipped_in_a_row: u32,
}

impl GradScalerConfig {
    /// A scaler whose state lives on `device`.
    ///
    /// # Errors
    ///
    /// When a setting is not finite, out of its range, or the initial scale not between the bounds.
    pub fn init(&self, device: &Device) -> Result<GradScaler, ScalerError> {
        self.check()?;
        let state = ScalerState {
            scale: self.initial_scale,
            clean_steps: 0,
            skipped_steps: 0,
            skipped_in_a_row: 0,
        };
        Ok(GradScaler::new(Some(*self), device, state))
    }

    fn check(&self) -> Result<(), ScalerError> {
        let invalid = |setting, expected: &str, found: f32| ScalerError::InvalidSetting {
            setting,
            expected: expected.to_string(),
            found: found.to_string(),
        };
        let is_positive = |value: f32| value.is_finite() && value > 0.0;
        if !is_positive(self.min_scale) {
            return Err(invalid("min_scale", "a positive number", self.min_scale));
        }
        if !(self.max_scale.is_finite() && self.max_scale >= self.min_scale) {
            return Err(invalid("max_scale", "a number from min_scale up", self.max_scale));
        }
        if !(self.min_scale..=self.max_scale).contains(&self.initial_scale) {
            let bounds = format!("a number from {} to {}", self.min_scale, self.max_scale);
            return Err(invalid("initial_scale", &bounds, self.initial_scale));
        }
        if !(self.growth_factor.is_finite() && self.growth_factor > 1.0) {
            return Err(invalid("growth_factor", "a number above 1", self.growth_factor));
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor < 1.0) {
            return Err(invalid("backoff_factor", "between 0 and 1", self.backoff_factor));
        }
        if self.growth_interval == 0 {
            return Err(invalid("growth_interval", "at least 1", 0.0));
        }
        Ok(())
    }
}

/// Scales losses, unscales gradients, and tells an optimizer to leave a step out. See the
/// [module](self).
#[derive(Debug)]
pub struct GradScaler {
    /// None where nothing is scaled.
    config: Option<GradScalerConfig>,
    gate: StepGate,
    /// One element each, in f32.
    scale: Tensor<1>,
    clean_steps: Tensor<1>,
    /// Without those before it was restored.
    skipped_steps: Tensor<1>,
    skipped_in_a_row: Tensor<1>,
    /// Steps that were left out before it was restored.
    skipped_before: u32,
    /// Whether no step has read it since it was made or restored.
    is_new: bool,
    /// 1, for readers who are to change nothing.
    one: Tensor<1>,
    /// 1 if the gradients of this step were finite, from `unscale` to `update`.
    finite: Option<Tensor<1>>,
}

impl GradScaler {
    /// One that multiplies by 1 and lets every step pass: for precisions that
    /// [need no scaling](crate::precision::Precision::needs_loss_scaling), in a loop that is written once.
    pub fn disabled(device: &Device) -> Self {
        let state =
            ScalerState { scale: 1.0, clean_steps: 0, skipped_steps: 0, skipped_in_a_row: 0 };
        Self::new(None, device, state)
    }

    fn new(config: Option<GradScalerConfig>, device: &Device, state: ScalerState) -> Self {
        let device = device.clone().without_autodiff();
        // Counts are whole numbers that f32 holds up to 2^24.
        let one = |value: f32| Tensor::<1>::from_data([value], &device).cast(FloatDType::F32);
        Self {
            config,
            gate: StepGate::new(),
            scale: one(state.scale),
            clean_steps: one(state.clean_steps as f32),
            skipped_steps: one(0.0),
            skipped_in_a_row: one(state.skipped_in_a_row as f32),
            skipped_before: state.skipped_steps,
            is_new: true,
            one: one(1.0),
            finite: None,
        }
    }

    /// Whether losses are scaled at all.
    pub fn is_enabled(&self) -> bool {
        self.config.is_some()
    }

    /// What an optimizer reads to find out whether to take a step.
    pub fn gate(&self) -> &StepGate {
        &self.gate
    }

    /// What losses are multiplied by, one element on the device.
    pub fn current_scale(&self) -> Tensor<1> {
        self.scale.clone()
    }

    /// The loss to start the backward pass from. It has to be in f32: a loss in f16 overflows at
    /// the first scale already.
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        if self.is_enabled() { scaled(loss, self.scale.clone()) } else { loss }
    }

    /// Divides the gradients of `module` by the scale, once a step, after accumulation and before clipping,
    /// and finds out whether all were finite. Where they were not, the step will not be taken, and
    /// [`nonfinite_gradients`](crate::nonfinite::nonfinite_gradients) tells whose were not.
    ///
    /// # Errors
    ///
    /// When this step's were unscaled already, and when there are none.
    pub fn unscale<M: Module>(
        &mut self,
        gradients: &mut GradientsParams,
        module: &M,
    ) -> Result<(), ScalerError> {
        self.unscale_and_clip(gradients, module, f64::INFINITY).map(drop)
    }

    /// [`unscale`](Self::unscale), and [`clip_global_norm`](crate::clip::clip_global_norm) in the
    /// same pass. Returns the norm of the unscaled gradients, one element on the device.
    ///
    /// # Errors
    ///
    /// As `unscale`.
    ///
    /// # Panics
    ///
    /// When `max_norm` is not positive.
    pub fn unscale_and_clip<M: Module>(
        &mut self,
        gradients: &mut GradientsParams,
        module: &M,
        max_norm: f64,
    ) -> Result<Tensor<1>, ScalerError> {
        self.unscale_sums(gradients, module, max_norm, &Origin::default())
    }

    /// [`unscale_and_clip`](Self::unscale_and_clip) of gradients that have come from other ranks.
    pub(crate) fn unscale_sums<M: Module>(
        &mut self,
        gradients: &mut GradientsParams,
        module: &M,
        max_norm: f64,
        origin: &Origin<'_>,
    ) -> Result<Tensor<1>, ScalerError> {
        let Measured { norm, factor, .. } = self.look_at(gradients, module, max_norm, origin)?;
        if self.is_enabled() || max_norm.is_finite() || origin.factor != 1.0 {
            module.visit(&mut Unscaler { gradients, factor, seen: HashSet::new() });
        }
        let one = self.one.clone();
        let reading = self.finite.clone().map(|taken| self.reading(taken, one));
        self.gate.set(reading);
        Ok(norm)
    }

    /// [`unscale_and_clip`](Self::unscale_and_clip) for optimizers that read the
    /// [gate](Self::gate): gradients stay as they are, and the optimizer's step multiplies them, which
    /// saves a pass over all of them. The norm is that of the unscaled gradients.
    ///
    /// # Errors
    ///
    /// As `unscale`.
    ///
    /// # Panics
    ///
    /// When `max_norm` is not positive.
    pub fn unscale_and_clip_in_step<M: Module>(
        &mut self,
        gradients: &GradientsParams,
        module: &M,
        max_norm: f64,
    ) -> Result<Tensor<1>, ScalerError> {
        self.unscale_sums_in_step(gradients, module, max_norm, &Origin::default())
    }

    /// [`unscale_and_clip_in_step`](Self::unscale_and_clip_in_step) of gradients that have come from other ranks.
    pub(crate) fn unscale_sums_in_step<M: Module>(
        &mut self,
        gradients: &GradientsParams,
        module: &M,
        max_norm: f64,
        origin: &Origin<'_>,
    ) -> Result<Tensor<1>, ScalerError> {
        let Measured { norm, factor, .. } = self.look_at(gradients, module, max_norm, origin)?;
        let is_multiplied = self.is_enabled() || max_norm.is_finite() || origin.factor != 1.0;
        let taken = self.finite.clone().unwrap_or_else(|| self.one.clone());
        let reading = is_multiplied.then(|| self.reading(taken, factor));
        self.gate.set(reading);
        Ok(norm)
    }

    /// The norm of unscaled gradients, and what scaled ones are to be multiplied by.
    fn look_at<M: Module>(
        &mut self,
        gradients: &GradientsParams,
        module: &M,
        max_norm: f64,
        origin: &Origin<'_>,
    ) -> Result<Measured, ScalerError> {
        assert!(
            max_norm > 0.0,
            "GradScaler::unscale_and_clip: argument `max_norm`: expected a positive number, got \
             {max_norm}"
        );
        if self.finite.is_some() {
            return Err(ScalerError::AlreadyUnscaled);
        }
        // Gradients were multiplied by the scale, and by one over the factor that makes means of sums.
        let scale = match origin.factor == 1.0 {
            true => self.is_enabled().then(|| self.scale.clone()),
            false => Some(self.scale.clone().mul_scalar(1.0 / origin.factor)),
        };
        let squares = Squares::of(gradients, module, origin.watch);
        let measured = match origin.apart {
            None => squares.measured(scale, max_norm).ok_or(ScalerError::NoGradients)?,
            Some(group) => {
                let own = squares.total().unwrap_or_else(|| self.one.zeros_like());
                measured_of(group.sum_on_device(own)?, scale, max_norm)
            }
        };
        self.finite = self.is_enabled().then(|| measured.finite.clone());
        Ok(measured)
    }

    /// 1 and 0, one element each, if this lets every step pass: what the device says of whether a step is taken, and of
    /// how many before it were not.
    pub(crate) fn always_taken(&self) -> Option<(Tensor<1>, Tensor<1>)> {
        (!self.is_enabled()).then(|| (self.one.clone(), self.skipped_steps.clone()))
    }

    fn reading(&mut self, taken: Tensor<1>, factor: Tensor<1>) -> Reading {
        let is_first = std::mem::take(&mut self.is_new);
        Reading { taken, skipped: self.skipped_steps.clone(), factor, is_first, number: 0 }
    }

    /// Whether the gradients that were unscaled last overflowed, so that the step has to be left
    /// out. Waits for the device: for optimizers that do not read the [gate](Self::gate).
    pub fn overflowed(&self) -> bool {
        self.finite.as_ref().is_some_and(|finite| read(finite) == 0.0)
    }

    /// Sets the scale of the next step.
    ///
    /// # Errors
    ///
    /// When nothing was unscaled since the last time.
    pub fn update(&mut self) -> Result<(), ScalerError> {
        let Some(config) = &self.config else { return Ok(()) };
        let finite = self.finite.take().ok_or(ScalerError::NothingUnscaled)?;
        if loss_scale::serves(&finite.device()) {
            let rules = Rules {
                growth: config.growth_factor,
                backoff: config.backoff_factor,
                interval: config.growth_interval,
                least: config.min_scale,
                largest: config.max_scale,
            };
            let old = State {
                scale: self.scale.clone(),
                clean: self.clean_steps.clone(),
                skipped: self.skipped_steps.clone(),
                in_a_row: self.skipped_in_a_row.clone(),
            };
            let State { scale, clean, skipped, in_a_row } = loss_scale::update(rules, finite, old);
            self.scale = scale;
            self.clean_steps = clean;
            self.skipped_steps = skipped;
            self.skipped_in_a_row = in_a_row;
            return Ok(());
        }
        let overflow = finite.clone().neg().add_scalar(1.0);
        let clean_steps = self.clean_steps.clone().add_scalar(1.0) * finite.clone();
        let grows = clean_steps.clone().greater_equal_scalar(config.growth_interval).float();
        let grows = grows.cast(FloatDType::F32);
        // Each of the two is 1 where it does not apply.
        let growth = grows.clone().mul_scalar(config.growth_factor - 1.0).add_scalar(1.0);
        let backoff = overflow.clone().mul_scalar(config.backoff_factor - 1.0).add_scalar(1.0);
        self.scale =
            (self.scale.clone() * growth * backoff).clamp(config.min_scale, config.max_scale);
        self.clean_steps = clean_steps * grows.neg().add_scalar(1.0);
        self.skipped_steps = self.skipped_steps.clone() + overflow.clone();
        self.skipped_in_a_row = (self.skipped_in_a_row.clone() + overflow.clone()) * overflow;
        Ok(())
    }

    /// What the scaler has come to: for a checkpoint, or a log. Waits for the device.
    pub fn state(&self) -> ScalerState {
        let all = Tensor::cat(
            vec![
                self.scale.clone(),
                self.clean_steps.clone(),
                self.skipped_steps.clone(),
                self.skipped_in_a_row.clone(),
            ],
            0,
        );
        let numbers: Vec<f32> = all.into_data().iter::<f32>().collect();
        let count = |index: usize| numbers.get(index).copied().unwrap_or_default() as u32;
        ScalerState {
            scale: numbers.first().copied().unwrap_or(1.0),
            clean_steps: count(1),
            skipped_steps: self.skipped_before + count(2),
            skipped_in_a_row: count(3),
        }
    }

    /// Goes on from a checkpoint's state. Optimizers that read the gate still do.
    ///
    /// # Errors
    ///
    /// When no scaler of these settings can be in that state, or this one is disabled and the state
    /// is of one that was not. The scaler is left as it was.
    pub fn restore(&mut self, state: ScalerState) -> Result<(), ScalerError> {
        let foreign = |field, expected: String, found: f32| {
            Err(ScalerError::ForeignState { field, expected, found: found.to_string() })
        };
        let (low, high, interval) = match &self.config {
            Some(config) => (config.min_scale, config.max_scale, config.growth_interval),
            None => (1.0, 1.0, 1),
        };
        if !(low..=high).contains(&state.scale) {
            return foreign("scale", format!("a number from {low} to {high}"), state.scale);
        }
        if state.clean_steps >= interval {
            let expected = format!("less than the growth interval, {interval}");
            return foreign("clean_steps", expected, state.clean_steps as f32);
        }
        if state.skipped_in_a_row > state.skipped_steps {
            let expected = format!("at most skipped_steps, {}", state.skipped_steps);
            return foreign("skipped_in_a_row", expected, state.skipped_in_a_row as f32);
        }
        let gate = self.gate.clone();
        *self = Self::new(self.config, &self.scale.device(), state);
        self.gate = gate;
        Ok(())
    }
}

/// A loss times a scale that is given, as a pass has it which reads nothing else: see
/// [`graph`](crate::graph). [`GradScaler::current_scale`] is the one to give; it is 1 where losses are not
/// scaled.
pub fn scaled(loss: Tensor<1>, scale: Tensor<1>) -> Tensor<1> {
    let scale = match loss.gradient_checkpointing_strategy() {
        Some(strategy) => scale.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => scale,
    };
    loss.mul(scale)
}

fn read(tensor: &Tensor<1>) -> f32 {
    tensor.clone().into_scalar()
}

/// Multiplies gradients, in f32. A parameter in two places is multiplied once.
struct Unscaler<'a> {
    gradients: &'a mut GradientsParams,
    factor: Tensor<1>,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Unscaler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        // In 16 bits what the scale saved would be lost again.
        let unscaled = gradient.cast(FloatDType::F32).mul(self.factor.clone().reshape([1; D]));
        self.gradients.register::<D>(param.id, unscaled);
    }
}

#[cfg(test)]
mod tests;
