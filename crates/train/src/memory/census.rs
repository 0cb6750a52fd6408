//! What the parameters of a model take.

use crate::{ema::trains, precision::PrecisionPolicy};
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{Bool, DType, FloatDType, Int, Tensor},
};
use std::collections::{HashMap, HashSet};

/// Numbers of parameters, and their bytes. A parameter in two places of a model counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    /// Numbers that an optimizer changes.
    pub(crate) trained: u64,
    /// All parameters, running statistics and constants of the model, as they are stored.
    pub(crate) stored_bytes: u64,
    /// What is computed in another type than it is stored in, in that type.
    pub(crate) cast_bytes: u64,
    /// All floats, in the type that they are computed in.
    pub(crate) computed_bytes: u64,
    /// What an optimizer changes, as it is stored.
    pub(crate) trained_stored_bytes: u64,
    /// The same, in the type that it is computed in.
    pub(crate) trained_computed_bytes: u64,
}

impl Census {
    /// Of a model that `policy` was applied to.
    pub(crate) fn of<M: Module>(model: &M, policy: &PrecisionPolicy) -> Self {
        let mut taker = Taker {
            computed: policy.computed_types(model),
            seen: HashSet::new(),
            census: Self::default(),
        };
        model.visit(&mut taker);
        taker.census
    }

    /// Of `numbers` that are trained, all of them stored and computed in the same types.
    pub(crate) fn of_numbers(numbers: u64, policy: &PrecisionPolicy) -> Self {
        let computed: DType = policy.precision().dtype().into();
        let stored = if policy.casts() { DType::F32 } else { computed };
        let mut census = Self::default();
        // Sizes that a user made up stay beyond any memory, and sums of bytes within range: less than 64 a number.
        let numbers = numbers.min(u64::MAX / 64);
        census.count(numbers, stored, computed, true);
        census
    }

    fn count(&mut self, numbers: u64, stored: DType, computed: DType, is_trained: bool) {
        let [stored_bytes, computed_bytes] =
            [stored, computed].map(|dtype| numbers * dtype.size() as u64);
        self.stored_bytes += stored_bytes;
        self.computed_bytes += computed_bytes;
        if stored != computed {
            self.cast_bytes += computed_bytes;
        }
        if is_trained {
            self.trained += numbers;
            self.trained_stored_bytes += stored_bytes;
            self.trained_computed_bytes += computed_bytes;
        }
    }
}

struct Taker {
    /// Types of parameters that are cast when they are read.
    computed: HashMap<ParamId, FloatDType>,
    seen: HashSet<ParamId>,
    census: Census,
}

impl ModuleVisitor for Taker {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let stored = param.base().dtype();
        let computed = self.computed.get(&param.id).map_or(stored, |dtype| (*dtype).into());
        let numbers = param.shape().num_elements() as u64;
        self.census.count(numbers, stored, computed, trains(param));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.seen.insert(param.id) {
            let size = param.val().dtype().size();
            self.census.stored_bytes += (param.shape().num_elements() * size) as u64;
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if self.seen.insert(param.id) {
            let size = param.val().dtype().size();
            self.census.stored_bytes += (param.shape().num_elements() * size) as u64;
        }
    }
}
