//! The forward pass: in the stream, and when it runs.

use super::{
    FORWARD, OP,
    operation::{Positions, numbers, unsupported},
};
use crate::{
    arithmetic::arithmetic_output,
    handles::{Tensors, consume, cube_tensor, register_cube_tensor},
    pattern::DataFlow,
    rows::{RowLayout, Rows},
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    softmax::{SoftmaxProblem, log_softmax, softmax_shifted, softmax_sums},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::kernel::cast;
use burn_ir::{BaseOperationIr, CastOpIr, OperationIr, TensorId, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// Looks for the forward pass.
#[derive(Clone)]
pub(super) struct ForwardSearch {
    /// What an arithmetic operation in front makes.
    lead: Option<TensorId>,
    /// A cast behind it.
    cast: Option<CastOpIr>,
    flow: DataFlow,
    /// Positions of the steps that were found.
    steps: Vec<usize>,
    /// Positions of views of integers, which targets may be.
    views: Vec<usize>,
}

impl ForwardSearch {
    /// The search behind `operation`, if a pass may begin with it.
    pub(super) fn start(operation: &OperationIr) -> Option<Self> {
        let mut search = Self {
            lead: arithmetic_output(operation),
            cast: None,
            flow: DataFlow::new(FORWARD),
            steps: Vec::new(),
            views: Vec::new(),
        };
        (search.lead.is_some() || search.begin(operation, 0)).then_some(search)
    }

    /// Before the first step. Says whether `operation` was let in.
    fn begin(&mut self, operation: &OperationIr, position: usize) -> bool {
        let made = self.cast.as_ref().map(|cast| cast.out.id).or(self.lead);
        if let OperationIr::BaseFloat(BaseOperationIr::Cast(op)) = operation
            && self.cast.is_none()
            && made.is_none_or(|made| made == op.input.id)
        {
            self.cast = Some(op.clone());
            return true;
        }
        let mut flow = self.flow.clone();
        let begins = flow.follow(operation)
            && flow.has("peak")
            && flow.tensor("x").is_some_and(|x| made.is_none_or(|made| made == x.id));
        if begins {
            self.flow = flow;
            self.steps.push(position);
        }
        begins
    }

    /// Whether `operation`, at that position, was let in.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        if !self.flow.has("peak") {
            return self.begin(operation, position);
        }
        if self.flow.follow(operation) {
            self.steps.push(position);
            return true;
        }
        let is_view = matches!(operation, OperationIr::BaseInt(BaseOperationIr::Reshape(_)));
        let let_in = is_view && self.flow.has("y") && self.views.is_empty();
        if let_in {
            self.views.push(position);
        }
        let_in
    }

    /// Whether the peak is the head.
    pub(super) fn starts_with_peak(&self) -> bool {
        self.lead.is_none() && self.cast.is_none() && self.flow.has("peak")
    }

    /// Whether there is nothing left to wait for.
    pub(super) fn is_over(&self) -> bool {
        self.flow.is_complete()
    }

    /// The pass, if what was found is one.
    pub(super) fn found(&self) -> Option<Forward> {
        let flow = &self.flow;
        let is_served = flow.has("y") && flow.is_dead("exp") && flow.is_dead("log");
        is_served.then_some(())?;
        let kept = |name| flow.tensor(name).filter(|_| !flow.is_dead(name)).cloned();
        let x = flow.tensor("x")?;
        let mut positions = Positions { steps: self.steps.clone(), ..Positions::default() };
        positions.passengers.extend(self.lead.map(|_| 0));
        let mut input = x.clone();
        if let Some(cast) = &self.cast {
            let position = usize::from(self.lead.is_some());
            if x.status == TensorStatus::ReadWrite && is_widened(cast) {
                positions.steps.insert(0, position);
                input = cast.input.clone();
            } else {
                positions.passengers.push(position);
            }
        }
        let end = self.steps.last()?;
        positions.passengers.extend(self.views.iter().filter(|view| *view < end));
        Some(Forward {
            positions,
            input,
            dtype: x.dtype,
            peak: kept("peak"),
            shifted: kept("shifted"),
            sum: kept("sum"),
            y: kept("y"),
            targets: flow.tensor("targets").cloned(),
            picked: flow.tensor("picked").cloned(),
        })
    }
}

/// Whether every number stays what it is.
fn is_widened(cast: &CastOpIr) -> bool {
    matches!(cast.input.dtype, DType::F16 | DType::BF16) && cast.out.dtype == DType::F32
}

/// The forward pass, with what is read of it later.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Forward {
    pub(super) positions: Positions,
    /// The elements, as its last reader describes them.
    input: TensorIr,
    /// The type of everything else.
    dtype: DType,
    peak: Option<TensorIr>,
    shifted: Option<TensorIr>,
    sum: Option<TensorIr>,
    y: Option<TensorIr>,
    targets: Option<TensorIr>,
    picked: Option<TensorIr>,
}

impl Forward {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let x = Rows::of(cube_tensor(context, &self.input, OP)?);
        let layout = x.layout();
        let problem = SoftmaxProblem {
            rows: x.rows,
            classes: x.columns,
            row_stride: x.stride,
            dtype: x.span().dtype,
            out: dtype_to_elem_type(self.dtype),
        };
        problem.validate()?;
        if problem.rows == 0 {
            return Err(unsupported("no rows"));
        }
        let targets = self.targets.as_ref().map(|targets| {
            let shape = context.tensors.get(&targets.id).map(|known| &known.shape);
            if !shape.is_some_and(|shape| layout.is_of_rows(shape)) {
                return Err(unsupported("targets that are not one for each row"));
            }
            numbers(context, targets, DType::I32)
        });
        let targets = targets.transpose()?;
        let client = &layout.client;
        let sums = softmax_sums(client, &problem, &x.span(), targets.as_ref())?;

        let rows = [
            (&self.peak, Some(&sums.peak)),
            (&self.sum, Some(&sums.sum)),
            (&self.picked, sums.picked.as_ref()),
        ];
        for (out, buffer) in rows {
            if let (Some(out), Some(buffer)) = (out, buffer) {
                self.register_numbers(context, out, &layout, buffer)?;
            }
        }
        if let Some(y) = &self.y {
            let buffer = log_softmax(client, &problem, x.span(), &sums)?;
            register_cube_tensor(context, y, layout.rows(buffer.handle, self.dtype), OP)?;
        }
        if let Some(shifted) = &self.shifted {
            // Where the elements are not read again, they are overwritten.
            consume(context, &self.input);
            let buffer = softmax_shifted(client, &problem, x.into_span(), &sums.peak)?;
            register_cube_tensor(context, shifted, layout.rows(buffer.handle, self.dtype), OP)?;
        } else {
            consume(context, &self.input);
        }
        if let Some(targets) = &self.targets {
            consume(context, targets);
        }
        Ok(())
    }

    fn register_numbers(
        &self,
        context: &mut Tensors,
        out: &TensorIr,
        layout: &RowLayout,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        let numbers = layout.numbers(buffer.handle.clone(), DType::F32);
        register_cube_tensor(context, out, cast(numbers, self.dtype), OP)
    }
}
