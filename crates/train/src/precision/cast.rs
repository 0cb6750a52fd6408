//! The reparameterization that casts.

use super::{Masters, paths::FloatParameter};
use burn::{
    module::{Module, ModuleMapper, Param, ParamId, Reparameterization, Reparameterizer},
    tensor::{FloatDType, Tensor},
};
use std::collections::HashMap;

/// Gives a parameter in another type than it is stored in. [`PrecisionPolicy`] attaches it.
///
/// [`PrecisionPolicy`]: super::PrecisionPolicy
#[derive(Module, Debug)]
pub struct Cast {
    #[module(skip)]
    dtype: FloatDType,
}

impl Cast {
    /// The type that is computed in.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }
}

impl Reparameterization for Cast {
    const NAME: &'static str = "cast";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base.cast(self.dtype)
    }
}

/// Attaches [`Cast`] to the chosen parameters.
pub(super) struct Caster {
    dtype: FloatDType,
    /// By id; the value tells whether it is a running statistic.
    chosen: HashMap<ParamId, bool>,
    masters: Masters,
}

impl Caster {
    pub(super) fn new(
        dtype: FloatDType,
        masters: Masters,
        chosen: impl Iterator<Item = FloatParameter>,
    ) -> Self {
        let chosen = chosen.map(|parameter| (parameter.id, is_running_statistic(&parameter)));
        Self { dtype, chosen: chosen.collect(), masters }
    }

    /// The mapper that stores what it would have attached a cast to in the type itself.
    pub(super) fn in_place(self) -> InPlace {
        InPlace(self)
    }
}

/// Burn's `BatchNorm` reads them past the reparameterization.
pub(super) fn is_running_statistic(parameter: &FloatParameter) -> bool {
    parameter.layer_type() == "BatchNorm"
        && parameter.path.rsplit('.').next().is_some_and(|name| name.starts_with("running_"))
}

impl Reparameterizer for Caster {
    type Reparam = Cast;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Cast>) {
        match self.chosen.get(&param.id) {
            None => (param, None),
            Some(is_statistic) if *is_statistic || self.masters == Masters::None => {
                (stored_in(param, self.dtype), None)
            }
            Some(_) => (param, Some(Cast { dtype: self.dtype })),
        }
    }
}

/// See [`Caster::in_place`].
pub(super) struct InPlace(Caster);

impl ModuleMapper for InPlace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0.reparameterize("", param).0
    }
}

/// The parameter as a leaf in another type.
fn stored_in<const D: usize>(param: Param<Tensor<D>>, dtype: FloatDType) -> Param<Tensor<D>> {
    param.map(|tensor| {
        let is_trained = tensor.is_require_grad();
        let stored = tensor.cast(dtype).detach();
        if is_trained { stored.require_grad() } else { stored }
    })
}
