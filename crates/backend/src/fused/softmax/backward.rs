//! The backward pass: in the stream, and when it runs.

use super::{
    BACKWARD, OP,
    pass::{SoftmaxPass, numbers, problem_of, targets_of},
    search::PassSearch,
};
use crate::{
    declined::unsupported,
    stream::{Elapsed, ExpectedScalar, Matcher, Next, Part},
    tensors::{
        Location, TensorRows, Tensors, consume, cube_tensor, register_cube_tensor, register_zeros,
    },
};
use blackburn_kernels::{KernelError, softmax::picked_backward};
use burn_backend::DType;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// Looks for the backward pass.
#[derive(Clone)]
pub(super) struct BackwardSearch {
    flow: Matcher,
    /// Positions of the operations between the zeros and what is added to them.
    passengers: Vec<usize>,
    /// What a cast behind the pass makes, and its position.
    cast: Option<(usize, TensorIr)>,
}

impl Default for BackwardSearch {
    fn default() -> Self {
        Self { flow: Matcher::data_flow(BACKWARD), passengers: Vec::new(), cast: None }
    }
}

impl BackwardSearch {
    /// The gradient of a loss, with weights and rows that do not count, takes fewer.
    const MOST_PASSENGERS: usize = 16;

    /// What a cast behind the pass makes of its gradient alone.
    fn cast_of(&self, operation: &OperationIr) -> Option<TensorIr> {
        let OperationIr::BaseFloat(BaseOperationIr::Cast(op)) = operation else { return None };
        let is_ours = self.flow.tensor("dx").is_some_and(|dx| dx.id == op.input.id)
            && op.input.status == TensorStatus::ReadWrite
            && matches!(op.out.dtype, DType::F32 | DType::F16 | DType::BF16);
        is_ours.then(|| op.out.clone())
    }

    /// Whether an operation reads nothing of the pass and does not go over as many elements, as those that
    /// make the gradient. That begins with the gradient of a loss, which is 1 in one dimension; ones in more
    /// are what label smoothing adds.
    fn is_beside(&self, operation: &OperationIr) -> bool {
        let is_float = matches!(
            operation,
            OperationIr::BaseFloat(_) | OperationIr::NumericFloat(..) | OperationIr::Float(..)
        );
        let is_rank_one = |tensor: &TensorIr| tensor.shape.num_dims() == 1;
        let may_begin = !self.passengers.is_empty()
            || !matches!(operation, OperationIr::BaseFloat(BaseOperationIr::Ones(_)))
            || operation.outputs().all(is_rank_one);
        let row = self.flow.tensor("zeros").and_then(|zeros| zeros.shape.last());
        let is_small = |tensor: &TensorIr| row.is_some_and(|row| !tensor.shape.contains(row));
        is_float
            && may_begin
            && self.passengers.len() < Self::MOST_PASSENGERS
            && operation.nodes().into_iter().all(is_small)
    }
}

impl PassSearch for BackwardSearch {
    fn follow(&mut self, operation: &OperationIr, position: usize) -> Next {
        if self.flow.is_complete() {
            self.cast = self.cast_of(operation).map(|out| (position, out));
            return if self.cast.is_some() { Next::Last } else { Next::Refused };
        }
        let base = match operation {
            OperationIr::BaseFloat(operation) => Some(operation),
            _ => None,
        };
        if position == 0 && !matches!(base, Some(BaseOperationIr::Zeros(_))) {
            return Next::Refused;
        }
        let is_scatter = matches!(base, Some(BaseOperationIr::Scatter(_)));
        if position > 0 && !self.flow.has("dy") && !is_scatter {
            let is_beside = self.is_beside(operation);
            if is_beside {
                self.passengers.push(position);
            }
            return Next::taken_if(is_beside);
        }
        Next::taken_if(self.flow.follow(operation, position))
    }

    /// The zeros, what is added to them, and what was let in between.
    fn unclaimed_prefix(&self) -> usize {
        1 + self.passengers.len() + usize::from(self.flow.has("dy"))
    }

    /// A cast behind the pass is waited for until another block gets an operation.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        self.flow.is_complete() && elapsed.since_last > 0
    }

    fn found(&self) -> Option<Vec<Part<SoftmaxPass>>> {
        let flow = &self.flow;
        let (_, intermediates) = BACKWARD.split_last()?;
        let is_ours =
            flow.is_complete() && intermediates.iter().all(|(made, _)| flow.is_dead(made));
        is_ours.then_some(())?;
        let of = |name| flow.tensor(name);
        let same_shape = |names: [&'static str; 3]| {
            let shapes = names.map(|name| of(name).map(|tensor| &tensor.shape));
            shapes[0].is_some() && shapes.iter().all(|shape| *shape == shapes[0])
        };
        let dtype = of("dx")?.dtype;
        let one_type = ["grad", "sum", "shifted", "zeros", "ones"]
            .iter()
            .all(|name| of(name).is_some_and(|tensor| tensor.dtype == dtype));
        let fits = same_shape(["zeros", "ones", "shifted"])
            && same_shape(["targets", "grad", "sum"])
            && one_type;
        fits.then_some(())?;
        let (cast, dx) = self.cast.clone().unzip();
        let pass = Backward {
            scalars: flow.scalars().to_vec(),
            shifted: of("shifted")?.clone(),
            sum: of("sum")?.clone(),
            targets: of("targets")?.clone(),
            grad: of("grad")?.clone(),
            dx: dx.or(of("dx").cloned())?,
        };
        let steps = flow.positions().iter().copied().chain(cast).collect();
        let passengers = Part::Unfused(self.passengers.clone());
        Some(vec![passengers, Part::Replaced(steps, SoftmaxPass::Backward(pass))])
    }
}

/// The backward pass.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Backward {
    scalars: Vec<ExpectedScalar>,
    shifted: TensorIr,
    sum: TensorIr,
    targets: TensorIr,
    grad: TensorIr,
    dx: TensorIr,
}

impl Backward {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        if !ExpectedScalar::are_there(&self.scalars, context) {
            return Err(unsupported(OP, "its operations, but with other constants"));
        }
        let shifted = cube_tensor(context, &self.shifted, OP)?;
        if shifted.meta.shape().num_elements() == 0 {
            register_zeros(context, &self.dx, &Location::of(&shifted), OP)?;
            for tensor in [&self.shifted, &self.sum, &self.targets, &self.grad] {
                consume(context, tensor);
            }
            return Ok(());
        }
        let shifted = TensorRows::of(shifted);
        let layout = shifted.layout();
        let problem = problem_of(&shifted, self.dx.dtype)?;
        let targets = targets_of(context, &self.targets, &layout)?;
        let [sum, grad] = [&self.sum, &self.grad].map(|of| numbers(context, of, DType::F32));
        let (sum, grad) = (sum?, grad?);

        // Where nobody reads it again, it is overwritten.
        consume(context, &self.shifted);
        let shifted = shifted.into_span();
        let dx = picked_backward(&layout.client, &problem, shifted, &sum, &targets, &grad)?;
        register_cube_tensor(context, &self.dx, layout.rows(dx.handle, self.dx.dtype), OP)?;
        for tensor in [&self.sum, &self.targets, &self.grad] {
            consume(context, tensor);
        }
        Ok(())
    }
}
