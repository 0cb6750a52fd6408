//! The backward pass: in the stream, and when it runs.

use super::{
    BACKWARD, OP,
    operation::{Positions, numbers, unsupported},
};
use crate::{
    stream::{DataFlow, ExpectedScalar, Shown},
    tensors::Rows,
    tensors::{Place, Tensors, consume, cube_tensor, register_cube_tensor, register_zeros},
};
use blackburn_kernels::{
    KernelError,
    softmax::{SoftmaxProblem, picked_backward},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_fusion::stream::ScalarId;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// Looks for the backward pass.
#[derive(Clone)]
pub(super) struct BackwardSearch {
    flow: DataFlow,
    /// Positions of the steps that were found.
    steps: Vec<usize>,
    /// Positions of the operations between the zeros and what is added to them.
    passengers: Vec<usize>,
    /// What a cast behind the pass makes.
    cast: Option<TensorIr>,
    shown: Shown,
    /// How many had been shown with the last step.
    complete_at: u64,
}

impl BackwardSearch {
    /// The gradient of a loss, with weights and rows that do not count, takes fewer.
    const MOST_PASSENGERS: usize = 16;

    /// The search behind `operation`, if the pass may begin with it.
    pub(super) fn start(operation: &OperationIr, shown: &Shown) -> Option<Self> {
        let mut flow = DataFlow::new(BACKWARD);
        let is_start = matches!(operation, OperationIr::BaseFloat(BaseOperationIr::Zeros(_)))
            && flow.follow(operation);
        is_start.then(|| Self {
            flow,
            steps: vec![0],
            passengers: Vec::new(),
            cast: None,
            shown: shown.clone(),
            complete_at: 0,
        })
    }

    /// Whether `operation`, at that position, was let in.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        if self.flow.is_complete() {
            return self.follow_cast(operation, position);
        }
        let is_scatter = matches!(operation, OperationIr::BaseFloat(BaseOperationIr::Scatter(_)));
        if !self.flow.has("dy") && !is_scatter {
            let let_in = self.is_beside(operation);
            if let_in {
                self.passengers.push(position);
            }
            return let_in;
        }
        let let_in = self.flow.follow(operation);
        if let_in {
            self.steps.push(position);
            self.complete_at = self.shown.so_far();
        }
        let_in
    }

    fn follow_cast(&mut self, operation: &OperationIr, position: usize) -> bool {
        let OperationIr::BaseFloat(BaseOperationIr::Cast(op)) = operation else { return false };
        let is_ours = self.cast.is_none()
            && self.flow.tensor("dx").is_some_and(|dx| dx.id == op.input.id)
            && op.input.status == TensorStatus::ReadWrite
            && matches!(op.out.dtype, DType::F32 | DType::F16 | DType::BF16);
        if is_ours {
            self.cast = Some(op.out.clone());
            self.steps.push(position);
        }
        is_ours
    }

    /// How many of the operations no other fusion takes: the zeros, what is added to them, and what was let
    /// in between.
    pub(super) fn lone(&self) -> usize {
        1 + self.passengers.len() + usize::from(self.flow.has("dy"))
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

    /// Whether there is nothing left to wait for: another block got the operation behind the pass.
    pub(super) fn is_over(&self) -> bool {
        let waits = self.cast.is_none() && self.complete_at == self.shown.so_far();
        self.flow.is_complete() && !waits
    }

    /// The pass, if it was found.
    pub(super) fn found(&self) -> Option<Backward> {
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
        Some(Backward {
            positions: Positions { passengers: self.passengers.clone(), steps: self.steps.clone() },
            scalars: flow.scalars().to_vec(),
            shifted: of("shifted")?.clone(),
            sum: of("sum")?.clone(),
            targets: of("targets")?.clone(),
            grad: of("grad")?.clone(),
            dx: self.cast.as_ref().or(of("dx"))?.clone(),
        })
    }
}

/// The backward pass.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Backward {
    pub(super) positions: Positions,
    scalars: Vec<ExpectedScalar>,
    shifted: TensorIr,
    sum: TensorIr,
    targets: TensorIr,
    grad: TensorIr,
    dx: TensorIr,
}

impl Backward {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let is_there = |expected: &ExpectedScalar| {
            let id = ScalarId { value: expected.id };
            context.scalars.get(&id).is_some_and(|actual| expected.is(*actual))
        };
        if !self.scalars.iter().all(is_there) {
            return Err(unsupported("its operations, but with other constants"));
        }
        let shifted = cube_tensor(context, &self.shifted, OP)?;
        if shifted.meta.shape().num_elements() == 0 {
            register_zeros(context, &self.dx, &Place::of(&shifted), OP)?;
            for tensor in [&self.shifted, &self.sum, &self.targets, &self.grad] {
                consume(context, tensor);
            }
            return Ok(());
        }
        let shifted = Rows::of(shifted);
        let layout = shifted.layout();
        let problem = SoftmaxProblem {
            rows: shifted.rows,
            classes: shifted.columns,
            row_stride: shifted.stride,
            dtype: shifted.span().dtype,
            out: dtype_to_elem_type(self.dx.dtype),
        };
        problem.validate()?;
        let shape = context.tensors.get(&self.targets.id).map(|known| &known.shape);
        if !shape.is_some_and(|shape| layout.is_of_rows(shape)) {
            return Err(unsupported("targets that are not one for each row"));
        }
        let targets = numbers(context, &self.targets, DType::I32)?;
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
