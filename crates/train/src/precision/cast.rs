//! The reparameterization that casts.

use super::{Masters, paths::FloatParameter};
use blackburn_backend::fp8_linear::{self, Recipe};
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
    #[module(skip)]
    recipe: Option<Recipe>,
}

impl Cast {
    /// The type that is computed in.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// How products with the parameter are computed in 8 bits, if they are.
    pub fn recipe(&self) -> Option<Recipe> {
        self.recipe
    }
}

impl Reparameterization for Cast {
    const NAME: &'static str = "cast";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let cast = base.cast(self.dtype);
        match &self.recipe {
            // Of two dimensions, as weights of linear layers are: the reshape makes that known.
            Some(recipe) if D == 2 => {
                let shape = cast.dims();
                fp8_linear::mark(cast.reshape([shape[0], shape[1]]), recipe).reshape(shape)
            }
            _ => cast,
        }
    }
}

/// What becomes of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Computation {
    /// It is read in another type.
    Cast,
    /// And multiplied in 8 bits.
    Fp8(Recipe),
    /// It is a running statistic, which is stored in the other type.
    Statistic,
}

/// Attaches [`Cast`] to the chosen parameters.
pub(super) struct Caster {
    dtype: FloatDType,
    chosen: HashMap<ParamId, Computation>,
    masters: Masters,
}

impl Caster {
    pub(super) fn new(
        dtype: FloatDType,
        masters: Masters,
        chosen: HashMap<ParamId, Computation>,
    ) -> Self {
        Self { dtype, chosen, masters }
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
        let Some(computation) = self.chosen.get(&param.id) else { return (param, None) };
        let recipe = match computation {
            Computation::Statistic => return (stored_in(param, self.dtype), None),
            Computation::Fp8(recipe) => Some(*recipe),
            Computation::Cast => None,
        };
        let cast = Cast { dtype: self.dtype, recipe };
        match self.masters {
            Masters::F32 => (param, Some(cast)),
            Masters::None => (stored_in(param, self.dtype), recipe.map(|_| cast)),
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
