//! Parameters and gradients of a module as a row of tensors, in the order in which a visitor meets them, which is
//! the same on all ranks.

use crate::engine::{AnyTensor, is_cuda};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{Bool, DType, Device, Int, Tensor, TensorData},
};
use std::collections::{HashMap, HashSet};

/// Float parameters, each once, by identity, with the number of their elements and their device.
pub(crate) fn parameters<M: Module>(module: &M) -> Vec<(ParamId, usize, Device)> {
    #[derive(Default)]
    struct Parameters {
        seen: HashSet<ParamId>,
        found: Vec<(ParamId, usize, Device)>,
    }
    impl ModuleVisitor for Parameters {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.insert(param.id) {
                let elements = param.lazy_shape().num_elements();
                let device = param.lazy_device().without_autodiff();
                self.found.push((param.id, elements, device));
            }
        }
    }
    let mut parameters = Parameters::default();
    module.visit(&mut parameters);
    parameters.found
}

/// Takes gradients out, as tensors of one dimension.
pub(crate) fn take<M: Module>(
    module: &M,
    gradients: GradientsParams,
) -> HashMap<ParamId, Tensor<1>> {
    struct Taker {
        gradients: GradientsParams,
        taken: HashMap<ParamId, Tensor<1>>,
    }
    impl ModuleVisitor for Taker {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.gradients.remove::<D>(param.id) {
                let elements = gradient.shape().num_elements();
                self.taken.insert(param.id, gradient.reshape([elements]));
            }
        }
    }
    let mut taker = Taker { gradients, taken: HashMap::new() };
    module.visit(&mut taker);
    taker.taken
}

/// Gradients as they lie in memory, by identity, with their types. Each parameter's once.
#[derive(Default)]
pub(crate) struct Lying {
    pub(crate) ids: Vec<ParamId>,
    pub(crate) types: Vec<DType>,
    pub(crate) tensors: Vec<AnyTensor>,
}

impl Lying {
    pub(crate) fn of<M: Module>(module: &M, gradients: &GradientsParams) -> Self {
        struct Finder<'a> {
            gradients: &'a GradientsParams,
            seen: HashSet<ParamId>,
            found: Lying,
        }
        impl ModuleVisitor for Finder<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
                if self.seen.insert(param.id) {
                    self.found.ids.push(param.id);
                    self.found.types.push(gradient.dtype());
                    self.found.tensors.push(AnyTensor::of(gradient));
                }
            }
        }
        let mut finder = Finder { gradients, seen: HashSet::new(), found: Self::default() };
        module.visit(&mut finder);
        finder.found
    }
}

/// Those of the gradients whose parameters `keeps`.
pub(crate) fn keep<M: Module>(
    module: &M,
    gradients: GradientsParams,
    keeps: impl Fn(&ParamId) -> bool,
) -> GradientsParams {
    struct Keeper<F> {
        gradients: GradientsParams,
        keeps: F,
    }
    impl<F: Fn(&ParamId) -> bool> ModuleVisitor for Keeper<F> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if !(self.keeps)(&param.id) {
                drop(self.gradients.remove::<D>(param.id));
            }
        }
    }
    let mut keeper = Keeper { gradients, keeps };
    module.visit(&mut keeper);
    keeper.gradients
}

/// Gradients in the shapes of their parameters, laid out as those that a product of this rank makes.
pub(crate) fn give<M: Module>(
    module: &M,
    gradients: HashMap<ParamId, Tensor<1>>,
) -> GradientsParams {
    struct Giver {
        flat: HashMap<ParamId, Tensor<1>>,
        given: GradientsParams,
    }
    impl ModuleVisitor for Giver {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.flat.remove(&param.id) {
                let gradient = laid_out(gradient.reshape(param.lazy_shape()));
                self.given.register::<D>(param.id, gradient);
            }
        }
    }
    let mut giver = Giver { flat: gradients, given: GradientsParams::new() };
    module.visit(&mut giver);
    giver.given
}

/// A tensor whose elements follow each other, laid out as new tensors of its device are. On CUDA devices Burn begins each
/// row at a multiple of so many bytes. Kernels add up numbers in the order in which they lie, so results on several ranks
/// would not have the bits of results on one if some tensors had gaps between their rows on one of them only.
fn laid_out<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    /// CUDA's alignment of textures, by which CubeCL aligns rows.
    const ROW_BYTES: usize = 512;
    let shape = tensor.dims();
    let row_bytes = shape.last().map_or(0, |columns| columns * tensor.dtype().size());
    if D < 2 || row_bytes.is_multiple_of(ROW_BYTES) || !is_cuda(&tensor.device()) {
        return tensor;
    }
    let new = Tensor::empty(shape, (&tensor.device(), tensor.dtype()));
    new.slice_assign(shape.map(|size| 0..size), tensor)
}

/// Numbers of a module's parameters.
#[derive(Default)]
pub(crate) struct Values<'a> {
    /// All, if it is not said which.
    wanted: Option<&'a HashSet<ParamId>>,
    seen: HashSet<ParamId>,
    /// In the order of the visit, each parameter once.
    pub(crate) ids: Vec<ParamId>,
    /// Of floats.
    pub(crate) floats: Vec<(ParamId, Tensor<1>)>,
    /// Of integers and truth values.
    pub(crate) others: Vec<(ParamId, TensorData)>,
}

impl<'a> Values<'a> {
    pub(crate) fn of<M: Module>(module: &M) -> Self {
        let mut values = Self::default();
        module.visit(&mut values);
        values
    }

    /// Those of the parameters `wanted` alone.
    pub(crate) fn some_of<M: Module>(module: &M, wanted: &'a HashSet<ParamId>) -> Self {
        let mut values = Self { wanted: Some(wanted), ..Self::default() };
        module.visit(&mut values);
        values
    }

    fn is_new(&mut self, id: ParamId) -> bool {
        let is_new = self.wanted.is_none_or(|wanted| wanted.contains(&id)) && self.seen.insert(id);
        if is_new {
            self.ids.push(id);
        }
        is_new
    }
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.is_new(param.id) {
            let plain = param.base().without_autodiff();
            let elements = plain.shape().num_elements();
            self.floats.push((param.id, plain.reshape([elements])));
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.is_new(param.id) {
            self.others.push((param.id, param.val().into_data()));
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if self.is_new(param.id) {
            self.others.push((param.id, param.val().into_data()));
        }
    }
}

/// Puts numbers in the place of parameters', and identities in the place of theirs.
#[derive(Default)]
pub(crate) struct Replacement {
    pub(crate) floats: HashMap<ParamId, Tensor<1>>,
    /// Whether floats go where the parameter's own lie: numbers that have come lie in one row, and parameters have places
    /// in memory that kernels read faster.
    pub(crate) in_place: bool,
    pub(crate) others: HashMap<ParamId, TensorData>,
    /// Those that change.
    pub(crate) ids: HashMap<ParamId, ParamId>,
    /// What was made for a parameter: in a second place it is the same leaf of automatic differentiation.
    pub(crate) leaves: GradientsParams,
}

impl Replacement {
    fn id(&self, old: ParamId) -> ParamId {
        self.ids.get(&old).copied().unwrap_or(old)
    }
}

impl ModuleMapper for Replacement {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (old, base, mapper) = param.consume();
        let value = match (self.leaves.get::<D>(old), self.floats.remove(&old)) {
            (Some(leaf), _) => leaf,
            (None, None) => base,
            (None, Some(new)) => {
                let new = new.reshape(base.shape());
                let strategy = base.gradient_checkpointing_strategy();
                let is_trained = base.is_require_grad();
                let new = if self.in_place {
                    let all = base.dims().map(|size| 0..size);
                    base.without_autodiff().slice_assign(all, new)
                } else {
                    new
                };
                let leaf = match strategy {
                    Some(strategy) => new.autodiff().with_gradient_checkpointing_strategy(strategy),
                    None => new,
                };
                let leaf = if is_trained { leaf.require_grad() } else { leaf };
                self.leaves.register::<D>(old, leaf.clone());
                leaf
            }
        };
        Param::from_mapped_value(self.id(old), value, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (old, base, mapper) = param.consume();
        let value = match self.others.get(&old) {
            None => base,
            Some(new) => Tensor::from_data(new.clone(), (&base.device(), new.dtype())),
        };
        Param::from_mapped_value(self.id(old), value, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let (old, base, mapper) = param.consume();
        let value = match self.others.get(&old) {
            None => base,
            Some(new) => Tensor::from_data(new.clone(), &base.device()),
        };
        Param::from_mapped_value(self.id(old), value, mapper)
    }
}
