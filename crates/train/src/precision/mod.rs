//! Mixed precision over unmodified modules.
//!
//! A [`PrecisionPolicy`] leaves a module's parameters in f32, the *masters*, and has every read of
//! one ([`Param::val`](burn::module::Param::val)) give it in the type that is computed in. The cast
//! takes part in differentiation, so gradients reach the masters in f32, optimizers keep their
//! state in f32, and records hold f32, loadable by the same model without a policy and the other
//! way round.
//!
//! | | stored | computed in | gradients | optimizer state |
//! |---|---|---|---|---|
//! | [`Precision::F32`], [`Precision::Tf32`] | f32 | f32 | f32 | f32 |
//! | [`Precision::Bf16`] | f32 | bf16 | bf16 between layers, f32 at the parameters | f32 |
//! | [`Precision::F16`] | f32 | f16 | f16, to be [scaled](crate::scaler); f32 at the parameters | f32 |
//! | [`Precision::Fp8`] | f32 | products of [`Linear`](burn::nn::Linear) layers in 8 bits, all else in bf16 | bf16 between layers, f32 at the parameters | f32 |
//! | any of these, [`Masters::None`] | 16 bits | the same | 16 bits | f32, by [`AdamWGroups`](crate::optim::AdamWGroups) |
//!
//! In 8 bits are the products alone: their operands are rounded as `blackburn::fp8` says, by scales of the
//! tensors at hand, and results are bf16. [`PrecisionPolicy::without_fp8`] leaves layers out; recipes in the
//! literature leave out the head. Tensors that such a layer reads should not be read by one that is left
//! out, whose weight's gradient would be computed in 8 bits too.
//!
//! Burn's operations want operands of one type and convert none by themselves. Inputs in floating
//! point are therefore cast where they enter the model ([`PrecisionPolicy::input`]), and its result
//! before the loss ([`full_precision`]): what PyTorch's autocast does in both places. What a layer
//! computes inside is its own affair: with f16 Burn's norms compute in f32, with bf16 they sum in f32 and
//! round in between; [`PrecisionPolicy::keep_type`] and [`keep_path`](PrecisionPolicy::keep_path)
//! leave parameters in f32 where the code around them casts, as `blackburn::nn::flash` does for
//! norms.
//!
//! ```
//! use blackburn_train::precision::{Precision, PrecisionPolicy, full_precision};
//! use burn::{nn::LinearConfig, optim::GradientsParams, prelude::*, tensor::DType};
//!
//! let device = Device::flex().autodiff();
//! let policy = PrecisionPolicy::new(Precision::Bf16);
//! let model = policy.apply(LinearConfig::new(4, 2).init(&device))?;
//!
//! let x = policy.input(Tensor::<2>::ones([3, 4], &device));
//! let y = model.forward(x);
//! assert_eq!(y.dtype(), DType::BF16);
//! let loss = full_precision(y).mean();
//!
//! let gradients = GradientsParams::from_grads(loss.backward(), &model);
//! let of_weight = gradients.get::<2>(model.weight.id).expect("the weight has a gradient");
//! assert_eq!(of_weight.dtype(), DType::F32);
//! println!("{}", policy.report(&model));
//! # Ok::<(), blackburn_train::precision::PrecisionError>(())
//! ```
//!
//! Source of the scheme: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; for
//! bf16, Kalamkar et al., arXiv:1905.12322.

mod cast;
mod constants;
mod paths;
mod report;
mod selector;
mod statistics;

pub use blackburn_backend::fp8_linear::{Format, Promotion, Recipe, Scaling};
pub use cast::Cast;
pub use report::{LayerPrecision, PrecisionReport};

use blackburn_backend::{fp8_linear, graph};
use burn::{
    module::{Module, ParamId, Reparameterization},
    tensor::{DType, Device, FloatDType, Tensor},
};
use cast::{Caster, Computation, is_running_statistic};
use constants::{WithConstants, modules_with_constants};
use paths::{FloatParameter, float_parameters};
use selector::{Selector, unmatched};
use serde::{Deserialize, Serialize};
use statistics::with_own_statistics;
use std::{collections::HashMap, fmt, str::FromStr};

/// What a model computes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// Single precision throughout.
    #[default]
    F32,
    /// Single precision whose matrix products round their operands to 11 bits on NVIDIA's tensor
    /// cores. The products' setting belongs to the process: `blackburn::Config::f32_matmul`.
    Tf32,
    /// 8 bits of precision in the range of f32: needs no loss scaling.
    Bf16,
    /// 11 bits of precision in a range of 6e-8 to 65504: needs
    /// [loss scaling](crate::scaler::GradScaler).
    F16,
    /// Products of linear layers in 8 bits by that recipe, all else as with `Bf16`. GPUs only, with
    /// Blackburn's products registered (`blackburn::init`); faster only where tensor cores take 8 bits and
    /// layers are large.
    Fp8(Recipe),
}

impl Precision {
    /// All of them; of 8 bits, the recipes that have a name.
    pub const ALL: [Self; 7] = [
        Self::F32,
        Self::Tf32,
        Self::Bf16,
        Self::F16,
        Self::Fp8(Recipe::hybrid()),
        Self::Fp8(Recipe::e4m3()),
        Self::Fp8(Recipe::mxfp8()),
    ];

    /// What a model trains fastest in on `device` without a change of its results beyond rounding and without
    /// [loss scaling](crate::scaler::GradScaler): bf16 on GPUs that compute in it, f32 elsewhere.
    pub fn fastest(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        match graph::is_supported(&device) && Self::Bf16.is_supported(&device) {
            true => Self::Bf16,
            false => Self::F32,
        }
    }

    /// The type of tensors between layers.
    pub fn dtype(self) -> FloatDType {
        match self {
            Self::F32 | Self::Tf32 => FloatDType::F32,
            Self::Bf16 | Self::Fp8(_) => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
        }
    }

    /// How products of linear layers are computed in 8 bits, where they are.
    pub fn recipe(self) -> Option<Recipe> {
        match self {
            Self::Fp8(recipe) => Some(recipe),
            _ => None,
        }
    }

    /// Whether `device` computes in it.
    pub fn is_supported(self, device: &Device) -> bool {
        let device = device.clone().without_autodiff();
        device.supports_dtype(self.dtype())
            && (self.recipe().is_none() || fp8_linear::serves_marks(&device))
    }

    /// Whether gradients would vanish without [loss scaling](crate::scaler::GradScaler).
    pub fn needs_loss_scaling(self) -> bool {
        self == Self::F16
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8(recipe) if recipe.scaling == Scaling::Blocks => "mxfp8",
            Self::Fp8(recipe) if recipe.backward == Format::E5m2 => "fp8",
            Self::Fp8(_) => "fp8-e4m3",
        })
    }
}

impl FromStr for Precision {
    type Err = PrecisionError;

    fn from_str(name: &str) -> Result<Self, PrecisionError> {
        let named = |precision: &Self| precision.to_string().eq_ignore_ascii_case(name);
        Self::ALL
            .into_iter()
            .find(named)
            .ok_or_else(|| PrecisionError::UnknownPrecision { name: name.to_string() })
    }
}

/// What a policy cannot do, and why.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrecisionError {
    /// There is no precision of that name.
    #[error("precision `{name}`: expected f32, tf32, bf16, f16, fp8, fp8-e4m3 or mxfp8")]
    UnknownPrecision {
        /// What was given.
        name: String,
    },
    /// The device does not compute in the type.
    #[error("PrecisionPolicy: {precision} is not among what {device} computes in: {supported}")]
    UnsupportedDtype {
        /// What was asked for.
        precision: Precision,
        /// The model's device.
        device: String,
        /// What it can do.
        supported: String,
    },
    /// An override names nothing.
    #[error("PrecisionPolicy: {selector} matches no parameter; there are {known}")]
    UnmatchedSelector {
        /// The override, `path blocks.7` or `type BatchNorm`.
        selector: String,
        /// What it could have matched.
        known: String,
    },
    /// The parameter's value is made from something else already.
    #[error(
        "PrecisionPolicy::apply: parameter `{path}` has the reparameterization `{found}` already; \
         expected a model without any"
    )]
    Reparameterized {
        /// Path of the parameter.
        path: String,
        /// The name of its reparameterization.
        found: String,
    },
    /// The masters would not be f32.
    #[error(
        "PrecisionPolicy::apply: parameter `{path}`: expected f32, got {dtype:?}; make the model on \
         a device whose default type is f32"
    )]
    MasterDtype {
        /// Path of the parameter.
        path: String,
        /// What it is stored in.
        dtype: DType,
    },
    /// The module's own code would fail.
    #[error(
        "PrecisionPolicy::apply: `{path}` is Burn's {module}, whose tables, noise or states are in f32 \
         whatever the policy: expected a module that takes {expected}. Use blackburn::nn::{module} in the \
         place of burn::nn::{module}: it is the same and takes any type. Or call {instead} instead of its \
         `forward` and say so by PrecisionPolicy::with_drop_ins. Or keep it in f32 by \
         keep_type(\"{module}\") and cast around it"
    )]
    ConstantsInF32 {
        /// Path of the module.
        path: String,
        /// Its type.
        module: String,
        /// The type that is computed in.
        expected: Precision,
        /// The function that takes its place.
        instead: &'static str,
    },
}

/// What is stored of a parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Masters {
    /// f32, cast at each use: 4 bytes a parameter, 2 more while a step is under way.
    #[default]
    F32,
    /// Nothing but the type that is computed in: 2 bytes a parameter, and its gradient has 2.
    /// Updates smaller than half a unit in the last place are lost unless the optimizer
    /// [rounds stochastically](crate::optim::AdamWGroups::stochastic_rounding).
    None,
}

/// Which type each parameter of a model is computed in. See the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrecisionPolicy {
    precision: Precision,
    masters: Masters,
    kept: Vec<Selector>,
    #[serde(default)]
    without_fp8: Vec<Selector>,
    #[serde(default)]
    has_drop_ins: bool,
    #[serde(default)]
    has_f32_statistics: bool,
}

impl PrecisionPolicy {
    /// Everything in `precision`, with masters in f32.
    pub fn new(precision: Precision) -> Self {
        Self { precision, ..Self::default() }
    }

    /// Chooses what is stored.
    pub fn with_masters(mut self, masters: Masters) -> Self {
        self.masters = masters;
        self
    }

    /// Leaves the parameters at `path` and below it in f32: `head`, `blocks.layers.0`. What flows
    /// into that module has to be f32 as well.
    pub fn keep_path(mut self, path: impl Into<String>) -> Self {
        self.kept.push(Selector::Path(path.into()));
        self
    }

    /// Leaves the parameters of modules of a type in f32: `LayerNorm`. What flows into them has to
    /// be f32 as well.
    pub fn keep_type(mut self, name: impl Into<String>) -> Self {
        self.kept.push(Selector::Type(name.into()));
        self
    }

    /// With [`Precision::Fp8`], computes the layers at `path` and below it in bf16. With others it changes
    /// nothing.
    pub fn without_fp8(mut self, path: impl Into<String>) -> Self {
        self.without_fp8.push(Selector::Path(path.into()));
        self
    }

    /// Says that the model calls the functions of `blackburn::nn::positions`, `recurrent` and `noise` where it has
    /// positional encodings, recurrent layers or noise of `burn::nn`. Burn's own code makes tables, states and
    /// noise in f32 there, which no policy reaches: without this, [`apply`](Self::apply) refuses such modules. It
    /// takes those of the same names of `blackburn::nn` as they are.
    pub fn with_drop_ins(mut self) -> Self {
        self.has_drop_ins = true;
        self
    }

    /// Keeps running statistics in f32, and says that the model calls `blackburn::nn::vision` for all its batch
    /// norms. Burn's own `forward` needs them in the type that is computed in, which for bf16 has too few digits for
    /// averages over many batches.
    pub fn with_f32_statistics(mut self) -> Self {
        self.has_f32_statistics = true;
        self
    }

    /// What most of the model is computed in.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// What is stored.
    pub fn masters(&self) -> Masters {
        self.masters
    }

    /// An input of the model, in the type that it computes in. Differentiable.
    pub fn input<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        tensor.cast(self.precision.dtype())
    }

    /// The model, which computes as the policy says from now on. Parameters keep their ids, so an
    /// optimizer made before fits it still.
    ///
    /// Running statistics, which are no parameters to an optimizer, cannot be cast at each use;
    /// they are stored in the type that is computed in, unless they are kept. Clones of the model keep
    /// theirs as they are, but not where the device recomputes activations (gradient checkpointing):
    /// there Burn's clones share them whatever their types.
    ///
    /// # Errors
    ///
    /// When the device does not compute in the type, when an override matches nothing, when a
    /// parameter is not stored in f32, when one has a reparameterization already, a policy's
    /// for example, and when a module's own code works in f32 alone (see
    /// [`with_drop_ins`](Self::with_drop_ins)). The model is as it was before then, if you kept a
    /// clone.
    pub fn apply<M: Module>(&self, module: M) -> Result<M, PrecisionError> {
        let parameters = float_parameters(&module);
        let with_constants = modules_with_constants(&module);
        for selector in self.kept.iter().chain(&self.without_fp8) {
            if !parameters.iter().any(|parameter| selector.matches(parameter))
                && !with_constants.iter().any(|module| selector.matches_module(module))
            {
                return Err(unmatched(selector, &parameters));
            }
        }
        for parameter in &parameters {
            if let Some(found) = &parameter.reparameterization {
                let (path, found) = (parameter.path.clone(), found.clone());
                return Err(PrecisionError::Reparameterized { path, found });
            }
            if parameter.dtype != DType::F32 {
                let (path, dtype) = (parameter.path.clone(), parameter.dtype);
                return Err(PrecisionError::MasterDtype { path, dtype });
            }
        }
        if let Some(device) = module.devices().first() {
            self.check_device(device)?;
        }
        let dtype = self.precision.dtype();
        if dtype == FloatDType::F32 {
            return Ok(module);
        }
        self.check_constants(with_constants)?;
        let chosen = parameters.iter().filter(|parameter| !self.keeps(parameter));
        let chosen: HashMap<_, _> =
            chosen.map(|parameter| (parameter.id, self.computation(parameter))).collect();
        let has_statistics = chosen.values().any(|chosen| *chosen == Computation::Statistic);
        let module = if has_statistics { with_own_statistics(module) } else { module };
        let caster = Caster::new(dtype, self.masters, chosen);
        Ok(match (self.masters, self.precision) {
            (Masters::F32, _) | (_, Precision::Fp8(_)) => module.apply_reparameterization(caster),
            (Masters::None, _) => module.map(&mut caster.in_place()),
        })
    }

    /// Whether all modules take inputs in 16 bits.
    fn check_constants(&self, modules: Vec<WithConstants>) -> Result<(), PrecisionError> {
        let is_kept = |module: &WithConstants| {
            self.kept.iter().any(|selector| selector.matches_module(module))
        };
        match modules.into_iter().find(|module| !self.has_drop_ins && !is_kept(module)) {
            None => Ok(()),
            Some(module) => Err(PrecisionError::ConstantsInF32 {
                module: module.name().to_string(),
                path: module.path,
                expected: self.precision,
                instead: module.instead,
            }),
        }
    }

    /// What `module` stores and computes in, layer by layer. Of a model that the policy was applied
    /// to, or of one that it is going to be.
    pub fn report<M: Module>(&self, module: &M) -> PrecisionReport {
        let of = |parameter: &FloatParameter| {
            (!self.keeps(parameter)).then(|| self.computation(parameter))
        };
        PrecisionReport::new(self.precision, self.masters, float_parameters(module), of)
    }

    /// Whether parameters are cast when they are read.
    pub(crate) fn casts(&self) -> bool {
        self.masters == Masters::F32 && self.precision.dtype() != FloatDType::F32
    }

    /// The type that each parameter which is cast on reading is computed in.
    pub(crate) fn computed_types<M: Module>(&self, module: &M) -> HashMap<ParamId, FloatDType> {
        float_parameters(module)
            .into_iter()
            .filter(|parameter| parameter.reparameterization.as_deref() == Some(Cast::NAME))
            .map(|parameter| (parameter.id, self.precision.dtype()))
            .collect()
    }

    fn keeps(&self, parameter: &FloatParameter) -> bool {
        self.has_f32_statistics && is_running_statistic(parameter)
            || self.kept.iter().any(|selector| selector.matches(parameter))
    }

    /// How a parameter that is not kept is computed.
    fn computation(&self, parameter: &FloatParameter) -> Computation {
        let is_left_out = self.without_fp8.iter().any(|selector| selector.matches(parameter));
        match self.precision {
            _ if is_running_statistic(parameter) => Computation::Statistic,
            Precision::Fp8(recipe) if parameter.is_weight_of_linear() && !is_left_out => {
                Computation::Fp8(recipe)
            }
            _ => Computation::Cast,
        }
    }

    /// Whether `device` computes as the policy says, before there is a model.
    ///
    /// # Errors
    ///
    /// When it does not compute in the type.
    pub fn check_device(&self, device: &Device) -> Result<(), PrecisionError> {
        if self.precision.is_supported(device) {
            return Ok(());
        }
        let supported: Vec<String> = Precision::ALL
            .into_iter()
            .filter(|precision| precision.is_supported(device))
            .map(|precision| precision.to_string())
            .collect();
        Err(PrecisionError::UnsupportedDtype {
            precision: self.precision,
            device: format!("{:?}", device.clone().without_autodiff()),
            supported: supported.join(", "),
        })
    }
}

/// A result in f32, for the loss. Differentiable.
pub fn full_precision<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.cast(FloatDType::F32)
}

#[cfg(test)]
mod tests;
