//! An exponential moving average of a model's weights, for validation and export.
//!
//! After each optimizer step, `average = decay * average + (1 - decay) * weight`, for every parameter
//! that trains. Averages are f32 whatever the parameters' type is (f64 for f64), since at a decay of
//! 0.999 most steps would be rounded away in 16 bits; they stay on the parameters' devices and cost four
//! bytes a parameter. What does not train is not averaged: running statistics, integers and frozen
//! parameters are those of the model that [`Ema::apply`] is given.
//!
//! A parameter with a reparameterization is averaged as it is stored, and the parameters of the
//! reparameterization are averaged beside it.
//!
//! ```
//! use blackburn_train::ema::EmaConfig;
//! use burn::{nn::LinearConfig, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(4, 2).init(&device);
//! let mut ema = EmaConfig { decay: 0.999, warmup: true }.init(&model)?;
//! // for each step: model = optimizer.step(rate, model, gradients);
//! ema.update(&model)?;
//! let averaged = ema.apply(model.clone())?.valid();
//! // Beside the checkpoint of the model:
//! let bytes = ema.to_record(&model)?.into_bytes()?;
//! # use blackburn_train::ema::EmaRecord;
//! # let config = EmaConfig { decay: 0.999, warmup: true };
//! let ema = config.restore(EmaRecord::from_bytes(bytes)?, &model)?;
//! assert_eq!(ema.updates(), 1);
//! # let _ = averaged;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM
//! Journal on Control and Optimization 30 (1992), average the weights with equal shares; the
//! exponential form and its warm-up are those of `TensorFlow`'s `tf.train.ExponentialMovingAverage`.

use crate::path::ModulePath;
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::{DType, FloatDType, Shape, Tensor, container::TensorContainer},
};
use std::collections::{BTreeMap, BTreeSet};

mod record;

pub use record::EmaRecord;

/// Why an average and a model do not go together. Nothing was changed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EmaError {
    /// The decay is not a share.
    #[error("EmaConfig: option `decay`: expected a number of at least 0 and below 1, got {decay}")]
    Decay {
        /// The decay given.
        decay: f64,
    },
    /// There is nothing to average.
    #[error("EmaConfig: argument `model`: expected at least one parameter that trains, got none")]
    Empty,
    /// A parameter that is averaged is not in the model: another model, or one whose parameters got
    /// new identities. Burn's records keep identities; other formats do not.
    #[error(
        "{operation}: argument `model`: expected the model that is averaged, got one without its \
         parameter `{path}` ({id})"
    )]
    Missing {
        /// The method called.
        operation: &'static str,
        /// The parameter's path when it was first averaged.
        path: String,
        /// Its identity.
        id: ParamId,
    },
    /// A parameter changed its shape.
    #[error("{operation}: parameter `{path}`: expected the shape {expected:?}, got {actual:?}")]
    Shape {
        /// The method called.
        operation: &'static str,
        /// The parameter's path in the model.
        path: String,
        /// The average's shape.
        expected: Vec<usize>,
        /// The parameter's.
        actual: Vec<usize>,
    },
    /// The record lacks a parameter that trains.
    #[error(
        "EmaConfig::restore: argument `record`: expected the record of this model's average, got \
         one without the parameter `{path}` ({id})"
    )]
    NotRecorded {
        /// The parameter's path in the model.
        path: String,
        /// Its identity.
        id: ParamId,
    },
}

/// Options of an average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmaConfig {
    /// How much of the average an update keeps: at least 0, below 1. 0.999 averages over about the
    /// last 1000 updates.
    pub decay: f64,
    /// Whether the first updates keep less: update t, counted from 0, keeps
    /// `min(decay, (1 + t) / (10 + t))`, so that the initial weights are soon forgotten.
    pub warmup: bool,
}

impl EmaConfig {
    /// An average that starts as `model`'s weights.
    ///
    /// # Errors
    ///
    /// When the decay is not a share below 1, or nothing in `model` trains.
    pub fn init<M: Module>(&self, model: &M) -> Result<Ema, EmaError> {
        self.validate()?;
        let mut ema = Ema::empty(*self, 0);
        model.visit(&mut Starter { ema: &mut ema, path: ModulePath::default() });
        match ema.entries.is_empty() {
            true => Err(EmaError::Empty),
            false => Ok(ema),
        }
    }

    /// Continues the average in `record`, on the devices of `model`'s parameters.
    ///
    /// Load the model first, from the record that was saved with the average: averages find their
    /// parameters by identity, and a model that was only initialized has others.
    ///
    /// # Errors
    ///
    /// When the decay is not a share below 1, or the record is not of `model`'s average: it names
    /// the first parameter that one of them lacks, or whose shapes differ.
    pub fn restore<M: Module>(&self, record: EmaRecord, model: &M) -> Result<Ema, EmaError> {
        const OPERATION: &str = "EmaConfig::restore";
        self.validate()?;
        let (updates, entries, data) = record.into_parts();
        let mut ema = Ema { entries, ..Ema::empty(*self, updates) };
        let inventory = ema.check(OPERATION, model)?;
        if let Some((id, path)) = inventory.unaveraged.into_iter().next() {
            return Err(EmaError::NotRecorded { path, id });
        }
        model.visit(&mut record::Loader { shadows: &mut ema.shadows, data });
        Ok(ema)
    }

    fn validate(&self) -> Result<(), EmaError> {
        match (0.0..1.0).contains(&self.decay) {
            true => Ok(()),
            false => Err(EmaError::Decay { decay: self.decay }),
        }
    }
}

/// A parameter that is averaged.
#[derive(Clone, Debug)]
struct Entry {
    path: String,
    shape: Shape,
}

/// The average of a model's weights.
#[derive(Debug)]
pub struct Ema {
    config: EmaConfig,
    updates: u64,
    /// The averages, off the autodiff graph.
    shadows: TensorContainer<ParamId>,
    /// What `shadows` holds.
    entries: BTreeMap<ParamId, Entry>,
}

impl Ema {
    fn empty(config: EmaConfig, updates: u64) -> Self {
        Self { config, updates, shadows: TensorContainer::new(), entries: BTreeMap::new() }
    }

    /// How many updates the average has seen.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The share of itself that the average keeps in the next update.
    pub fn next_decay(&self) -> f64 {
        let EmaConfig { decay, warmup } = self.config;
        let updates = self.updates as f64;
        match warmup {
            true => decay.min((1.0 + updates) / (10.0 + updates)),
            false => decay,
        }
    }

    /// Takes `model`'s weights into the average; call it once after each optimizer step. The work is
    /// left to the device, and nothing waits for it.
    ///
    /// A parameter that was frozen when the average began and trains now joins with its value.
    ///
    /// # Errors
    ///
    /// When `model` lacks a parameter that is averaged, or has it in another shape.
    pub fn update<M: Module>(&mut self, model: &M) -> Result<(), EmaError> {
        let inventory = self.check("Ema::update", model)?;
        let share = 1.0 - self.next_decay();
        let mut updater = Updater { ema: self, share, seen: BTreeSet::new() };
        model.visit(&mut updater);
        if !inventory.unaveraged.is_empty() {
            model.visit(&mut Starter { ema: self, path: ModulePath::default() });
        }
        self.updates += 1;
        Ok(())
    }

    /// `model` with the averages in place of its weights, in the weights' own types; what is not
    /// averaged stays as it is. Keep a clone of `model` to go on training.
    ///
    /// # Errors
    ///
    /// When `model` lacks a parameter that is averaged, or has it in another shape.
    pub fn apply<M: Module>(&self, model: M) -> Result<M, EmaError> {
        self.check("Ema::apply", &model)?;
        Ok(model.map(&mut Applier { shadows: &self.shadows }))
    }

    /// What to save beside the record of `model`. Waits for the device: the averages are copied to
    /// the host.
    ///
    /// # Errors
    ///
    /// When `model` lacks a parameter that is averaged, or has it in another shape.
    pub fn to_record<M: Module>(&self, model: &M) -> Result<EmaRecord, EmaError> {
        self.check("Ema::to_record", model)?;
        Ok(EmaRecord::read(self, model))
    }

    fn check<M: Module>(&self, operation: &'static str, model: &M) -> Result<Inventory, EmaError> {
        let mut inspector = Inspector {
            operation,
            entries: &self.entries,
            path: ModulePath::default(),
            inventory: Inventory::default(),
            error: None,
        };
        model.visit(&mut inspector);
        if let Some(error) = inspector.error {
            return Err(error);
        }
        let missing = self.entries.iter().find(|(id, _)| !inspector.inventory.found.contains(id));
        match missing {
            Some((id, entry)) => {
                Err(EmaError::Missing { operation, path: entry.path.clone(), id: *id })
            }
            None => Ok(inspector.inventory),
        }
    }
}

/// A model's parameters, as the average sees them.
#[derive(Default)]
struct Inventory {
    /// Parameters that are averaged.
    found: BTreeSet<ParamId>,
    /// Parameters that train and are not averaged, by path.
    unaveraged: BTreeMap<ParamId, String>,
}

struct Inspector<'a> {
    operation: &'static str,
    entries: &'a BTreeMap<ParamId, Entry>,
    path: ModulePath,
    inventory: Inventory,
    error: Option<EmaError>,
}

impl ModuleVisitor for Inspector<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match self.entries.get(&param.id) {
            Some(entry) if entry.shape == param.lazy_shape() => {
                self.inventory.found.insert(param.id);
            }
            Some(entry) => {
                self.error.get_or_insert(EmaError::Shape {
                    operation: self.operation,
                    path: self.path.name(),
                    expected: entry.shape.to_vec(),
                    actual: param.lazy_shape().to_vec(),
                });
            }
            None if trains(param) => {
                self.inventory.unaveraged.insert(param.id, self.path.name());
            }
            None => {}
        }
    }
}

/// Whether the optimizer changes it. Running statistics are visited as parameters that never do.
///
/// On a device without autodiff no value requires a gradient; there, only a parameter's own
/// transition to training tells.
pub(crate) fn trains<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let value = param.base();
    match value.is_autodiff() {
        true => value.is_require_grad(),
        false => Module::train(param.clone()).base().is_require_grad(),
    }
}

/// The value as the average keeps it.
fn shadow<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    let value = param.base().without_autodiff();
    match value.dtype() {
        DType::F64 => value,
        _ => value.cast(FloatDType::F32),
    }
}

/// Begins the average of every parameter that trains and is not averaged yet.
struct Starter<'a> {
    ema: &'a mut Ema,
    path: ModulePath,
}

impl ModuleVisitor for Starter<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ema.entries.contains_key(&param.id) || !trains(param) {
            return;
        }
        let entry = Entry { path: self.path.name(), shape: param.lazy_shape() };
        self.ema.entries.insert(param.id, entry);
        self.ema.shadows.register(param.id, shadow(param));
    }
}

struct Updater<'a> {
    ema: &'a mut Ema,
    share: f64,
    /// A parameter in two places of a model is visited twice, and averaged once.
    seen: BTreeSet<ParamId>,
}

impl ModuleVisitor for Updater<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(average) = self.ema.shadows.remove::<Tensor<D>>(&param.id) else { return };
        let value = shadow(param);
        let average = average.to_device(&value.device());
        // In this form an average equal to the weight stays so, whatever the share.
        let step = value.sub(average.clone()).mul_scalar(self.share);
        self.ema.shadows.register(param.id, average.add(step));
    }
}

struct Applier<'a> {
    shadows: &'a TensorContainer<ParamId>,
}

impl ModuleMapper for Applier<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(average) = self.shadows.get::<Tensor<D>>(&param.id) else { return param };
        let id = param.id;
        param.map(|weight| {
            let dtype = weight.dtype();
            let average = average.to_device(&weight.device().without_autodiff());
            let average = if average.dtype() == dtype { average } else { average.cast(dtype) };
            in_context_of(weight, average, id)
        })
    }
}

/// `value` with the part in automatic differentiation that `weight` plays.
fn in_context_of<const D: usize>(weight: Tensor<D>, value: Tensor<D>, id: ParamId) -> Tensor<D> {
    let Some(strategy) = weight.gradient_checkpointing_strategy() else { return value };
    let value = value.autodiff().with_gradient_checkpointing_strategy(strategy);
    let value = value.set_require_grad(weight.is_require_grad());
    if weight.is_distributed() { value.set_distributed(id) } else { value }
}

#[cfg(test)]
mod tests;
