//! The passes of GELU that were found, when they run.

use super::{BACKWARD, FORWARD, NAME};
use crate::{
    declined::tell_once,
    fused::column_sum::RowSum,
    stream::{ExpectedScalar, Matcher, burn_score},
    tensors::{Input, Tensors, consume, register_output},
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    gelu::{GeluGradients, gelu_backward, gelu_backward_sum, gelu_forward},
};
use burn_backend::DType;
use burn_cubecl_fusion::{FallbackOperation, optim::FusedOperation};
use burn_fusion::stream::ScalarId;
use burn_ir::TensorIr;
use serde::{Deserialize, Serialize};

pub(super) const OP: &str = "gelu";

/// One or both passes on the kernels, or on Burn's own operations where those decline.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct GeluOperation {
    /// The operations of one stand behind those of the other.
    pub(super) passes: Vec<Pass>,
    /// The position of the operation that makes `dy`, if it is among them.
    pub(super) ones: Option<usize>,
    /// The sum of the rows of what the last pass makes, behind it.
    pub(super) sum: Option<RowSum>,
}

/// A pass, forward or backward.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Pass {
    pub(super) x: TensorIr,
    /// The gradient of the output in the backward pass.
    pub(super) dy: Option<TensorIr>,
    pub(super) out: TensorIr,
    scalars: Vec<ExpectedScalar>,
    /// How many operations it replaces.
    operations: usize,
}

impl GeluOperation {
    /// The one pass that `complete` has followed, if the kernel takes the type.
    pub(crate) fn of(complete: &Matcher) -> Option<Self> {
        Pass::of(complete).map(|pass| Self { passes: vec![pass], ..Self::default() })
    }

    /// With `sum`, of the rows of what it makes, behind it.
    pub(crate) fn with_sum(self, sum: RowSum) -> Self {
        Self { sum: Some(sum), ..self }
    }

    /// What Burn's own fusion bids for the same operations.
    pub(super) fn burn_score(&self) -> u64 {
        let pass = |(at, pass): (usize, &Pass)| match pass.dy {
            None => burn_score(FORWARD, 2),
            // The second pass does not read x again, and ones are not read.
            Some(_) => burn_score(BACKWARD, 3 - at - usize::from(self.ones.is_some())),
        };
        self.passes.iter().enumerate().map(pass).sum()
    }
}

impl Pass {
    pub(super) fn of(complete: &Matcher) -> Option<Self> {
        let x = complete.tensor("x")?.clone();
        matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16).then_some(())?;
        Some(Self {
            x,
            dy: complete.tensor("dy").cloned(),
            out: complete.output()?.clone(),
            scalars: complete.scalars().to_vec(),
            operations: complete.len(),
        })
    }

    /// Runs the pass, and makes the sum of its rows in the same launch if there is a `sum` to make:
    /// then it is returned, with the tensor that it is like.
    fn launch(
        &self,
        context: &mut Tensors,
        sum: Option<&RowSum>,
    ) -> Result<Option<(Input, Buffer)>, KernelError> {
        let unsupported = |reason: &str| KernelError::Unsupported { op: OP, reason: reason.into() };
        let is_there = |expected: &ExpectedScalar| {
            let id = ScalarId { value: expected.id };
            context.scalars.get(&id).is_some_and(|actual| expected.is(*actual))
        };
        if !self.scalars.iter().all(is_there) {
            return Err(unsupported("its operations, but with other constants"));
        }
        // Two passes more for a strided input: about the time of Burn's one kernel, and a fraction of
        // that of its operations one by one.
        let read = |tensor| Input::of(context, tensor, OP).map(Input::contiguous);
        let x = read(&self.x)?;
        let x_buffer = x.buffer(x.elements());
        let (out, db) = match &self.dy {
            None => (gelu_forward(&x.client, &x_buffer)?, None),
            Some(dy) => {
                let dy = read(dy)?;
                let dy = dy.buffer(dy.elements());
                let columns = sum.and_then(|sum| sum.columns(context));
                match columns.map(|columns| gelu_backward_sum(&x.client, columns, &x_buffer, &dy)) {
                    Some(Ok(GeluGradients { dx, db })) => (dx, Some(db)),
                    declined => {
                        if let Some(Err(reason)) = declined {
                            tell_once(NAME, &reason);
                        }
                        (gelu_backward(&x.client, &x_buffer, &dy)?, None)
                    }
                }
            }
        };
        register_output(context, &self.out, &x, out, OP)?;
        for input in [Some(&self.x), self.dy.as_ref()].into_iter().flatten() {
            consume(context, input);
        }
        Ok(db.map(|db| (x, db)))
    }
}

impl FusedOperation for GeluOperation {
    const NAME: &'static str = NAME;
    type State = Self;

    fn num_ops_fused(&self) -> usize {
        let operations: usize = self.passes.iter().map(|pass| pass.operations).sum();
        let sum = self.sum.as_ref().map_or(0, RowSum::operations);
        operations + usize::from(self.ones.is_some()) + sum
    }

    fn run(
        &mut self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        if let Some(ones) = self.ones {
            fallback(ones).run(context);
        }
        let mut positions = (0..self.num_ops_fused()).filter(|at| self.ones != Some(*at));
        let mut db = None;
        for (at, pass) in self.passes.iter().enumerate() {
            let own: Vec<usize> = positions.by_ref().take(pass.operations).collect();
            let is_last = at + 1 == self.passes.len();
            db = pass.launch(context, self.sum.as_ref().filter(|_| is_last)).unwrap_or_else(
                |reason| {
                    tell_once(NAME, &reason);
                    for position in own {
                        fallback(position).run(context);
                    }
                    None
                },
            );
        }
        if let Some(sum) = &self.sum {
            let own: Vec<usize> = positions.collect();
            sum.run(context, db, &|at| fallback(own[at]));
        }
    }

    fn to_state(&self) -> Self::State {
        self.clone()
    }

    fn from_state(_device: &cubecl::Device, state: Self::State) -> Self {
        state
    }
}
