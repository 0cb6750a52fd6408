//! Running statistics that clones of a module do not share.

use burn::{
    module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::Tensor,
};
use std::collections::HashMap;

/// `module` with running statistics of its own, up to date.
///
/// Burn's clones share them, so that a change of type would reach every other clone. They part where a module
/// goes to inference and comes back. That way loses the device's gradient checkpointing: modules with it, and
/// those of which a part takes no part in differentiation, keep sharing.
pub(super) fn with_own_statistics<M: Module>(module: M) -> M {
    let mut found = Found::default();
    module.visit(&mut found);
    let Found { plain, tracked, checkpointed, mut training } = found;
    match (plain, tracked, checkpointed) {
        (0, _, 0) => module.valid().train().map(&mut training),
        (_, 0, 0) => {
            // Tensors tell nothing of it here, and parameters keep it.
            training.require_grad.clear();
            module.valid().map(&mut training)
        }
        _ => module,
    }
}

/// How many tensors there are of each kind, and what of a module is trained.
#[derive(Default)]
struct Found {
    /// Without automatic differentiation.
    plain: usize,
    /// With it.
    tracked: usize,
    /// And with checkpointing.
    checkpointed: usize,
    training: Training,
}

/// What inference switches off, to be as it was.
#[derive(Default)]
struct Training {
    require_grad: HashMap<ParamId, bool>,
    flags: HashMap<ParamId, bool>,
}

impl ModuleVisitor for Found {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        match tensor.gradient_checkpointing_strategy() {
            None => self.plain += 1,
            Some(strategy) if strategy == Default::default() => self.tracked += 1,
            Some(_) => self.checkpointed += 1,
        }
        self.training.require_grad.insert(param.id, tensor.is_require_grad());
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.training.flags.insert(flag.id, flag.is_enabled());
    }
}

impl ModuleMapper for Training {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.require_grad.get(&param.id) {
            Some(is_trained) => param.set_require_grad(*is_trained),
            None => param,
        }
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        match self.flags.get(&flag.id) {
            Some(is_enabled) => flag.with_value(*is_enabled),
            None => flag,
        }
    }
}
