//! The forward pass: in the stream, and when it runs.

use super::{
    FORWARD, OP,
    pass::{
        Passes, RowOutputs, SoftmaxPass, make_of_nothing, problem_of, register_numbers, targets_of,
    },
    search::PassSearch,
};
use crate::{
    stream::{Elapsed, Matcher, Next, Part, arithmetic_output},
    tensors::{Location, TensorRows, Tensors, consume, cube_tensor, register_cube_tensor},
};
use blackburn_kernels::{
    KernelError,
    softmax::{log_softmax, softmax_shifted, softmax_sums},
};
use burn_backend::DType;
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
    flow: Matcher,
    /// Positions of views of integers, which targets may be.
    views: Vec<usize>,
}

impl Default for ForwardSearch {
    fn default() -> Self {
        let (made, cast) = (None, None);
        Self { leads: 0, made, cast, flow: Matcher::data_flow(FORWARD), views: Vec::new() }
    }
}

impl ForwardSearch {
    /// The logits of a model are scaled or get a bias, and are cast.
    const MOST_LEADS: usize = 2;
    /// Targets of sequences become those of a batch, and those a column.
    const MOST_VIEWS: usize = 4;

    /// Whether `operation` is taken before the first step is found: operations that Burn's element-wise
    /// fusion waits on too.
    fn begin(&mut self, operation: &OperationIr) -> bool {
        let made = self.made;
        let reads = |id| operation.inputs().any(|input| input.id == id);
        if !made.is_none_or(reads) {
            return false;
        }
        let mut flow = self.flow.clone();
        if flow.follow(operation, self.leads) && flow.has("peak") {
            self.flow = flow;
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
}

impl PassSearch for ForwardSearch {
    fn follow(&mut self, operation: &OperationIr, position: usize) -> Next {
        if !self.flow.has("peak") {
            return Next::taken_if(self.begin(operation));
        }
        if self.flow.follow(operation, position) {
            return Next::Taken;
        }
        let is_view = matches!(operation, OperationIr::BaseInt(BaseOperationIr::Reshape(_)));
        let taken = is_view && self.flow.has("y") && self.views.len() < Self::MOST_VIEWS;
        if taken {
            self.views.push(position);
        }
        Next::taken_if(taken)
    }

    /// The operation that finds the peak, at the head.
    fn unclaimed_prefix(&self) -> usize {
        usize::from(self.leads == 0 && self.flow.has("peak"))
    }

    /// Views of targets are still taken behind the last step.
    fn gives_up(&self, _elapsed: Elapsed) -> bool {
        self.flow.is_complete()
    }

    fn found(&self) -> Option<Vec<Part<SoftmaxPass>>> {
        let flow = &self.flow;
        let is_served = flow.has("y") && flow.is_dead("exp") && flow.is_dead("log");
        is_served.then_some(())?;
        let x = flow.tensor("x")?;
        let mut passengers: Vec<usize> = (0..self.leads).collect();
        let mut steps = flow.positions().to_vec();
        let mut input = x.clone();
        if let Some(cast) = &self.cast
            && x.status == TensorStatus::ReadWrite
            && is_widened(cast)
            && let Some(position) = passengers.pop()
        {
            steps.insert(0, position);
            input = cast.input.clone();
        }
        // One that nothing came of too: Burn would search again for what a block leaves between others, for
        // all of it at once, and where others wait for a part of that, fuse nothing at all.
        passengers.extend(&self.views);
        let pass = Forward {
            input,
            dtype: x.dtype,
            peak: flow.kept("peak"),
            shifted: flow.kept("shifted"),
            sum: flow.kept("sum"),
            y: flow.kept("y"),
            targets: flow.tensor("targets").cloned(),
            picked: flow.tensor("picked").cloned(),
        };
        let pass = Part::Replaced(steps, SoftmaxPass::Forward(pass));
        Some(vec![Part::Unfused(passengers), pass])
    }
}

/// Whether every number stays what it is.
fn is_widened(cast: &CastOpIr) -> bool {
    matches!(cast.input.dtype, DType::F16 | DType::BF16) && cast.out.dtype == DType::F32
}

/// The forward pass, with what is read of it later.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Forward {
    /// The elements, as its last reader describes them.
    input: TensorIr,
    /// The type of all other tensors.
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
            make_of_nothing(context, &Location::of(&x), elements, self.sum.as_ref(), of_rows)?;
            for read in [Some(&self.input), self.targets.as_ref()].into_iter().flatten() {
                consume(context, read);
            }
            return Ok(());
        }
        let x = TensorRows::of(x);
        let layout = x.layout();
        let problem = problem_of(&x, self.dtype)?;
        let targets = self.targets.as_ref();
        let targets = targets.map(|targets| targets_of(context, targets, &layout)).transpose()?;
        let client = &layout.client;
        if targets.is_none()
            && let Some(y) = &self.y
        {
            let made = RowOutputs {
                y,
                shifted: self.shifted.as_ref(),
                exp: None,
                peak: self.peak.as_ref(),
                sum: self.sum.as_ref(),
            };
            made.launch(context, &problem, &x, Passes { logarithms: true, ..Passes::default() })?;
            consume(context, &self.input);
            return Ok(());
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
}
