//! The forward pass: in the stream, and when it runs.

use super::{
    FORWARD, OP,
    operation::{Positions, make_of_nothing, numbers, unsupported},
    probabilities::register_numbers,
};
use crate::{
    stream::DataFlow,
    stream::arithmetic_output,
    tensors::Rows,
    tensors::{Place, Tensors, consume, cube_tensor, register_cube_tensor},
};
use blackburn_kernels::{
    KernelError,
    softmax::{
        SoftmaxOutputs, SoftmaxProblem, log_softmax, softmax_rows, softmax_shifted, softmax_sums,
    },
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_ir::{BaseOperationIr, CastOpIr, OperationIr, TensorId, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// Looks for the forward pass.
#[derive(Clone)]
pub(super) struct ForwardSearch {
    /// How many operations were let in in front.
    leads: usize,
    /// What the last of them makes.
    made: Option<TensorId>,
    /// The last of them, if it is a cast.
    cast: Option<CastOpIr>,
    flow: DataFlow,
    /// Positions of the steps that were found.
    steps: Vec<usize>,
    /// Positions of views of integers, which targets may be.
    views: Vec<usize>,
}

impl ForwardSearch {
    /// The logits of a model are scaled or get a bias, and are cast.
    const MOST_LEADS: usize = 2;
    /// Targets of sequences become those of a batch, and those a column.
    const MOST_VIEWS: usize = 4;

    /// The search behind `operation`, if a pass may begin with it.
    pub(super) fn start(operation: &OperationIr) -> Option<Self> {
        let mut search = Self {
            leads: 0,
            made: None,
            cast: None,
            flow: DataFlow::new(FORWARD),
            steps: Vec::new(),
            views: Vec::new(),
        };
        search.begin(operation).then_some(search)
    }

    /// Before the first step, with operations that Burn's element-wise fusion waits on too. Says whether
    /// `operation` was let in.
    fn begin(&mut self, operation: &OperationIr) -> bool {
        let made = self.made;
        let reads = |id| operation.inputs().any(|input| input.id == id);
        if !made.is_none_or(reads) {
            return false;
        }
        let mut flow = self.flow.clone();
        if flow.follow(operation) && flow.has("peak") {
            self.flow = flow;
            self.steps.push(self.leads);
            return true;
        }
        self.cast = match operation {
            OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => Some(op.clone()),
            _ => None,
        };
        self.made = self.cast.as_ref().map(|op| op.out.id).or(arithmetic_output(operation));
        self.leads += 1;
        self.made.is_some() && self.leads <= Self::MOST_LEADS
    }

    /// Whether `operation`, at that position, was let in.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        if !self.flow.has("peak") {
            return self.begin(operation);
        }
        if self.flow.follow(operation) {
            self.steps.push(position);
            return true;
        }
        let is_view = matches!(operation, OperationIr::BaseInt(BaseOperationIr::Reshape(_)));
        let let_in = is_view && self.flow.has("y") && self.views.len() < Self::MOST_VIEWS;
        if let_in {
            self.views.push(position);
        }
        let_in
    }

    /// How many of the operations no other fusion takes: the one that finds the peak, at the head.
    pub(super) fn lone(&self) -> usize {
        usize::from(self.leads == 0 && self.flow.has("peak"))
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
        let mut positions =
            Positions { passengers: (0..self.leads).collect(), steps: self.steps.clone() };
        let mut input = x.clone();
        if let Some(cast) = &self.cast
            && x.status == TensorStatus::ReadWrite
            && is_widened(cast)
            && let Some(position) = positions.passengers.pop()
        {
            positions.steps.insert(0, position);
            input = cast.input.clone();
        }
        // One that nothing came of too: Burn would search again for what a block leaves between others, for
        // all of it at once, and where others wait for a part of that, fuse nothing at all.
        positions.passengers.extend(&self.views);
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
        let x = cube_tensor(context, &self.input, OP)?;
        if x.meta.shape().num_elements() == 0 {
            let elements = [self.y.as_ref(), self.shifted.as_ref()];
            let of_rows = [self.peak.as_ref(), self.picked.as_ref()];
            make_of_nothing(context, &Place::of(&x), elements, self.sum.as_ref(), of_rows)?;
            for read in [Some(&self.input), self.targets.as_ref()].into_iter().flatten() {
                consume(context, read);
            }
            return Ok(());
        }
        let x = Rows::of(x);
        let layout = x.layout();
        let problem = SoftmaxProblem {
            rows: x.rows,
            classes: x.columns,
            row_stride: x.stride,
            dtype: x.span().dtype,
            out: dtype_to_elem_type(self.dtype),
        };
        problem.validate()?;
        let targets = self.targets.as_ref().map(|targets| {
            let shape = context.tensors.get(&targets.id).map(|known| &known.shape);
            if !shape.is_some_and(|shape| layout.is_of_rows(shape)) {
                return Err(unsupported("targets that are not one for each row"));
            }
            numbers(context, targets, DType::I32)
        });
        let targets = targets.transpose()?;
        let client = &layout.client;
        if targets.is_none()
            && let Some(y) = &self.y
        {
            return self.launch_whole(context, y, &problem, &x);
        }
        let sums = softmax_sums(client, &problem, &x.span(), targets.as_ref())?;

        let rows = [
            (&self.peak, Some(&sums.peak)),
            (&self.sum, Some(&sums.sum)),
            (&self.picked, sums.picked.as_ref()),
        ];
        for (out, buffer) in rows {
            if let (Some(out), Some(buffer)) = (out, buffer) {
                register_numbers(context, out, &layout, buffer)?;
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

    /// Without targets, in one pass.
    fn launch_whole(
        &self,
        context: &mut Tensors,
        y: &TensorIr,
        problem: &SoftmaxProblem,
        x: &Rows,
    ) -> Result<(), KernelError> {
        let layout = x.layout();
        let outputs = SoftmaxOutputs {
            logarithms: true,
            shifted: self.shifted.is_some(),
            exponentials: false,
        };
        let made = softmax_rows(&layout.client, problem, outputs, &x.span())?;
        for (out, buffer) in [(Some(y), Some(made.y)), (self.shifted.as_ref(), made.shifted)] {
            if let (Some(out), Some(buffer)) = (out, buffer) {
                register_cube_tensor(context, out, layout.rows(buffer.handle, self.dtype), OP)?;
            }
        }
        for (out, buffer) in [(&self.peak, &made.peak), (&self.sum, &made.sum)] {
            if let Some(out) = out {
                register_numbers(context, out, &layout, buffer)?;
            }
        }
        consume(context, &self.input);
        Ok(())
    }
}
