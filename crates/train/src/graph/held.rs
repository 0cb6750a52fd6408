//! A copy of a model's parameters in memory that stays where it is.

use crate::precision::PrecisionPolicy;
use blackburn_backend::overwrite::overwrite_float;
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{FloatDType, Tensor},
};
use std::collections::{HashMap, HashSet};

/// A model like another one, whose parameters are leaves in memory of their own, in the types that are
/// computed in.
#[derive(Debug)]
pub(super) struct HeldModel<M> {
    /// Its numbers are those of the last [`refresh`](Self::refresh).
    pub(super) model: M,
    memory: GradientsParams,
}

impl<M: Module> HeldModel<M> {
    pub(super) fn new(model: &M, policy: &PrecisionPolicy) -> Self {
        let mut holder = Holder {
            types: policy.computed_types(model),
            memory: GradientsParams::new(),
            leaves: GradientsParams::new(),
        };
        let model = model.clone().map(&mut holder);
        Self { model, memory: holder.memory }
    }

    /// Takes the parameters of `model` over.
    pub(super) fn refresh(&mut self, model: &M) {
        model.visit(&mut Refresher { memory: &mut self.memory, seen: HashSet::new() });
    }
}

struct Holder {
    types: HashMap<ParamId, FloatDType>,
    memory: GradientsParams,
    /// What was made for a parameter: in a second place it is the same leaf.
    leaves: GradientsParams,
}

impl ModuleMapper for Holder {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        if let Some(leaf) = self.leaves.get::<D>(id) {
            return param.map(|_| leaf);
        }
        param.map(|base| {
            let plain = base.clone().without_autodiff();
            let dtype = self.types.get(&id).map_or(plain.dtype(), |dtype| (*dtype).into());
            let memory = Tensor::empty(plain.dims(), (&plain.device(), dtype));
            let memory = overwrite_float(memory, plain);
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
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Refresher<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(memory) = self.memory.remove::<D>(param.id) else { return };
        let memory = overwrite_float(memory, param.base().without_autodiff());
        self.memory.register::<D>(param.id, memory);
    }
}
