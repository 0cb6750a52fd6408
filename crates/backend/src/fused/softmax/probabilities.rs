//! Softmax itself: in the stream, and when it runs.

use super::{
    OP, SOFTMAX,
    operation::{Positions, make_of_nothing},
};
use crate::{
    stream::DataFlow,
    tensors::{Place, Tensors, consume, cube_tensor, register_cube_tensor},
    tensors::{RowLayout, Rows},
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    softmax::{SoftmaxOutputs, SoftmaxProblem, softmax_rows},
};
use burn_backend::DType;
use burn_cubecl::kernel::cast;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

/// Looks for the pass behind masks.
#[derive(Clone)]
pub(super) struct ProbabilitiesSearch {
    /// How many operations are in front.
    leads: usize,
    flow: DataFlow,
    /// Positions of the steps that were found.
    steps: Vec<usize>,
}

impl ProbabilitiesSearch {
    /// Two masks that are viewed. With more in front, what is saved is lost on running these one by one.
    const MOST_LEADS: usize = 4;

    /// The search behind `operation`, if a pass may begin with it.
    pub(super) fn start(operation: &OperationIr) -> Option<Self> {
        let mut search = Self { leads: 0, flow: DataFlow::new(SOFTMAX), steps: Vec::new() };
        search.follow(operation, 0).then_some(search)
    }

    /// Whether `operation`, at that position, was let in.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        let mut flow = self.flow.clone();
        if flow.follow(operation) && flow.has("peak") {
            self.flow = flow;
            self.steps.push(position);
            return true;
        }
        let let_in = self.steps.is_empty() && self.leads < Self::MOST_LEADS && is_lead(operation);
        self.leads += usize::from(let_in);
        let_in
    }

    /// How many of the operations no other fusion takes: those in front.
    pub(super) fn lone(&self) -> usize {
        self.leads
    }

    /// Whether there is nothing left to wait for.
    pub(super) fn is_over(&self) -> bool {
        self.flow.is_complete()
    }

    /// The pass, if what was found is one.
    pub(super) fn found(&self) -> Option<Probabilities> {
        let flow = &self.flow;
        let kept = |name| flow.tensor(name).filter(|_| !flow.is_dead(name)).cloned();
        let (x, y) = (flow.tensor("x")?, flow.tensor("y")?);
        let fits = flow.is_complete() && x.shape == y.shape && x.dtype == y.dtype;
        fits.then(|| Probabilities {
            positions: Positions {
                passengers: (0..self.leads).collect(),
                steps: self.steps.clone(),
            },
            x: x.clone(),
            y: y.clone(),
            peak: kept("peak"),
            shifted: kept("shifted"),
            exp: kept("exp"),
            sum: kept("sum"),
        })
    }
}

/// Whether an operation masks, or is a view of a mask. Arithmetic in front is not waited behind: it is
/// everywhere, and segments that grow too long for Burn to put them in order are not fused at all.
fn is_lead(operation: &OperationIr) -> bool {
    matches!(
        operation,
        OperationIr::BaseFloat(BaseOperationIr::MaskFill(_)) | OperationIr::BaseBool(_)
    )
}

/// The pass, with its tensors as their last readers describe them, and with what is read of it later.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Probabilities {
    pub(super) positions: Positions,
    x: TensorIr,
    y: TensorIr,
    peak: Option<TensorIr>,
    shifted: Option<TensorIr>,
    exp: Option<TensorIr>,
    sum: Option<TensorIr>,
}

impl Probabilities {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Self { x, y, peak, shifted, exp, sum, .. } = self;
        let tensor = cube_tensor(context, x, OP)?;
        if tensor.meta.shape().num_elements() == 0 {
            let elements = [Some(y), shifted.as_ref(), exp.as_ref()];
            let of_rows = [peak.as_ref(), None];
            make_of_nothing(context, &Place::of(&tensor), elements, sum.as_ref(), of_rows)?;
            consume(context, x);
            return Ok(());
        }
        let rows = Rows::of(tensor);
        let (layout, problem) = (rows.layout(), problem_of(&rows)?);
        let outputs = SoftmaxOutputs {
            logarithms: false,
            shifted: shifted.is_some(),
            exponentials: exp.is_some(),
        };
        let made = softmax_rows(&layout.client, &problem, outputs, &rows.span())?;
        let elements = [
            (Some(y), Some(made.y)),
            (shifted.as_ref(), made.shifted),
            (exp.as_ref(), made.exponentials),
        ];
        for (out, buffer) in elements {
            if let (Some(out), Some(buffer)) = (out, buffer) {
                register_cube_tensor(context, out, layout.rows(buffer.handle, y.dtype), OP)?;
            }
        }
        for (out, buffer) in [(peak, &made.peak), (sum, &made.sum)] {
            if let Some(out) = out {
                register_numbers(context, out, &layout, buffer)?;
            }
        }
        consume(context, x);
        Ok(())
    }
}

/// Rows that are written in the type that they are read in.
fn problem_of(rows: &Rows) -> Result<SoftmaxProblem, KernelError> {
    let dtype = rows.span().dtype;
    let problem = SoftmaxProblem {
        rows: rows.rows,
        classes: rows.columns,
        row_stride: rows.stride,
        dtype,
        out: dtype,
    };
    problem.validate()?;
    Ok(problem)
}

/// Makes `buffer`, a number for each row, what `out` stands for.
pub(super) fn register_numbers(
    context: &mut Tensors,
    out: &TensorIr,
    layout: &RowLayout,
    buffer: &Buffer,
) -> Result<(), KernelError> {
    let numbers = layout.numbers(buffer.handle.clone(), DType::F32);
    register_cube_tensor(context, out, cast(numbers, out.dtype), OP)
}
