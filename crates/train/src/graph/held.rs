//! A copy of a model's parameters in memory that stays where it is.

use super::state::shared_values;
use crate::precision::PrecisionPolicy;
use blackburn_backend::{
    copies::Copies,
    overwrite::{copied_float, overwrite_float_together},
    steps::Together,
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor},
};
use std::collections::{HashMap, HashSet};

/// A model like another one, whose parameters are leaves in memory of their own, in the types that are
/// computed in.
#[derive(Debug)]
pub(super) struct HeldModel<M> {
    /// Its numbers are those of the last [`refresh`](Self::refresh).
    pub(super) model: M,
    memory: GradientsParams,
    /// Optimizers' steps write the memory, too, once it has been refreshed: a recording that fails has none yet.
    copies: Copies,
}

impl<M: Module> HeldModel<M> {
    /// A copy of `model` as it is now, in the memory of `before` as far as that fits.
    pub(super) fn of(model: &M, policy: &PrecisionPolicy, before: Option<Self>) -> Self {
        let (before, copies) = match before {
            Some(held) => (held.memory, held.copies),
            None => Default::default(),
        };
        let mut holder = Holder {
            types: policy.computed_types(model),
            shared: shared_values(model),
            before,
            together: copies.together().clone(),
            memory: GradientsParams::new(),
            leaves: GradientsParams::new(),
        };
        let model = model.clone().map(&mut holder);
        let memory = holder.memory;
        Self { model, memory, copies }
    }

    /// Takes the numbers of `model`, which differs in nothing else.
    pub(super) fn refresh(&mut self, model: &M) {
        let Self { memory, copies, .. } = self;
        model.visit(&mut Refresher { memory, copies, seen: HashSet::new() });
    }
}

struct Holder {
    types: HashMap<ParamId, FloatDType>,
    /// The model's clones share it: what is written there is written to the caller's model.
    shared: HashSet<ParamId>,
    before: GradientsParams,
    together: Together,
    memory: GradientsParams,
    /// What was made for a parameter: in a second place it is the same leaf.
    leaves: GradientsParams,
}

impl Holder {
    /// A parameter's numbers in memory of their own, that of before if it fits.
    fn hold<const D: usize>(&mut self, id: ParamId, plain: Tensor<D>, dtype: DType) -> Tensor<D> {
        let fits = |old: &Tensor<D>| {
            old.dims() == plain.dims() && old.dtype() == dtype && old.device() == plain.device()
        };
        match self.before.remove::<D>(id).filter(fits) {
            Some(old) => overwrite_float_together(old, plain, &self.together),
            None => copied_float(plain, dtype, &self.together),
        }
    }
}

impl ModuleMapper for Holder {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        if self.shared.contains(&id) {
            return param;
        }
        if let Some(leaf) = self.leaves.get::<D>(id) {
            return param.map(|_| leaf);
        }
        param.map(|base| {
            let plain = base.clone().without_autodiff();
            let dtype = self.types.get(&id).map_or(plain.dtype(), |dtype| (*dtype).into());
            let memory = self.hold(id, plain, dtype);
            self.memory.register::<D>(id, memory.clone());
            let leaf = match base.gradient_checkpointing_strategy() {
                Some(strategy) => memory.autodiff().with_gradient_checkpointing_strategy(strategy),
                None => memory,
            };
            let leaf = if base.is_require_grad() { leaf.require_grad() } else { leaf };
            self.leaves.register::<D>(id, leaf.clone());
            leaf
        })
    }
}

struct Refresher<'a> {
    memory: &'a mut GradientsParams,
    copies: &'a Copies,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Refresher<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(memory) = self.memory.remove::<D>(param.id) else { return };
        let memory = self.copies.refresh(memory, param.base().without_autodiff());
        self.memory.register::<D>(param.id, memory);
    }
}
