//! Softmax itself, and its gradient: in the stream, and when they run.

use super::{
    OP, SOFTMAX, SOFTMAX_BACKWARD,
    operation::{Positions, numbers, unsupported},
};
use crate::{
    arithmetic::arithmetic_output,
    handles::{Tensors, consume, cube_tensor, register_cube_tensor},
    pattern::{DataFlow, ExpectedScalar, Pattern},
    rows::{RowLayout, Rows},
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    softmax::{SoftmaxOutputs, SoftmaxProblem, softmax_rows, softmax_rows_backward},
};
use burn_backend::DType;
use burn_cubecl::kernel::cast;
use burn_fusion::stream::ScalarId;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

/// Looks for either pass behind operations on elements, of which a scale and masks are some.
#[derive(Clone)]
pub(super) struct ProbabilitiesSearch {
    /// How many operations are in front, and how many of the first of these are none of arithmetic.
    leads: usize,
    lone: usize,
    chain: Option<Chain>,
}

/// A pass that has begun.
#[derive(Clone)]
struct Chain {
    is_forward: bool,
    flow: DataFlow,
    /// Positions of the steps that were found.
    steps: Vec<usize>,
}

impl Chain {
    /// The pass that begins with `operation`.
    fn start(operation: &OperationIr, position: usize) -> Option<Self> {
        let begin = |pattern: Pattern, is_forward| {
            let mut flow = DataFlow::new(pattern);
            let first = pattern.first()?.0;
            let begins = flow.follow(operation) && flow.has(first);
            begins.then(|| Self { is_forward, flow, steps: vec![position] })
        };
        begin(SOFTMAX, true).or_else(|| begin(SOFTMAX_BACKWARD, false))
    }
}

impl ProbabilitiesSearch {
    /// A scale, and two masks that are viewed. With more in front, what is saved is lost on running these
    /// one by one.
    const MOST_LEADS: usize = 5;

    /// The search behind `operation`, if a pass may begin with it.
    pub(super) fn start(operation: &OperationIr) -> Option<Self> {
        let mut search = Self { leads: 0, lone: 0, chain: None };
        search.follow(operation, 0).then_some(search)
    }

    /// Whether `operation`, at that position, was let in.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        if let Some(chain) = &mut self.chain {
            let is_step = chain.flow.follow(operation);
            if is_step {
                chain.steps.push(position);
            }
            return is_step;
        }
        self.chain = Chain::start(operation, position);
        let is_lead = self.chain.is_none() && self.leads < Self::MOST_LEADS && is_lead(operation);
        if is_lead {
            let is_lone = self.lone == self.leads && arithmetic_output(operation).is_none();
            self.lone += usize::from(is_lone);
            self.leads += 1;
        }
        is_lead || self.chain.is_some()
    }

    /// How many of the first operations nothing may fuse: what is behind them may be what a product waits
    /// for, which would be settled with them.
    pub(super) fn lone(&self) -> usize {
        self.lone
    }

    /// Whether there is nothing left to wait for.
    pub(super) fn is_over(&self) -> bool {
        self.chain.as_ref().is_some_and(|chain| chain.flow.is_complete())
    }

    /// The pass, if what was found is one.
    pub(super) fn found(&self) -> Option<Probabilities> {
        let Chain { is_forward, flow, steps } = self.chain.as_ref()?;
        let positions = Positions { passengers: (0..self.leads).collect(), steps: steps.clone() };
        let which = if *is_forward { found_forward(flow)? } else { found_backward(flow)? };
        Some(Probabilities { positions, which })
    }
}

/// Whether an operation works on elements one by one, or is a view of a mask.
fn is_lead(operation: &OperationIr) -> bool {
    let is_fill = matches!(
        operation,
        OperationIr::BaseFloat(BaseOperationIr::MaskFill(_)) | OperationIr::BaseBool(_)
    );
    is_fill || arithmetic_output(operation).is_some()
}

fn found_forward(flow: &DataFlow) -> Option<Which> {
    let kept = |name| flow.tensor(name).filter(|_| !flow.is_dead(name)).cloned();
    let (x, y) = (flow.tensor("x")?, flow.tensor("y")?);
    let fits = flow.is_complete() && x.shape == y.shape && x.dtype == y.dtype;
    fits.then(|| Which::Forward {
        x: x.clone(),
        y: y.clone(),
        peak: kept("peak"),
        shifted: kept("shifted"),
        exp: kept("exp"),
        sum: kept("sum"),
    })
}

fn found_backward(flow: &DataFlow) -> Option<Which> {
    let (_, intermediates) = SOFTMAX_BACKWARD.split_last()?;
    let is_ours = flow.is_complete() && intermediates.iter().all(|(made, _)| flow.is_dead(made));
    is_ours.then_some(())?;
    let of = |name| flow.tensor(name);
    let dx = of("dx")?;
    let same = ["dy", "exp", "shifted", "ones"]
        .iter()
        .all(|name| of(name).is_some_and(|is| is.shape == dx.shape && is.dtype == dx.dtype));
    (same && of("sum")?.dtype == dx.dtype).then_some(())?;
    Some(Which::Backward {
        scalars: flow.scalars().to_vec(),
        exp: of("exp")?.clone(),
        shifted: of("shifted")?.clone(),
        sum: of("sum")?.clone(),
        dy: of("dy")?.clone(),
        dx: dx.clone(),
    })
}

/// A pass.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Probabilities {
    pub(super) positions: Positions,
    which: Which,
}

/// Which one, with its tensors as their last readers describe them; in the forward pass with what is read
/// of it later.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Which {
    Forward {
        x: TensorIr,
        y: TensorIr,
        peak: Option<TensorIr>,
        shifted: Option<TensorIr>,
        exp: Option<TensorIr>,
        sum: Option<TensorIr>,
    },
    Backward {
        scalars: Vec<ExpectedScalar>,
        exp: TensorIr,
        shifted: TensorIr,
        sum: TensorIr,
        dy: TensorIr,
        dx: TensorIr,
    },
}

impl Probabilities {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        match &self.which {
            Which::Forward { .. } => self.forward(context),
            Which::Backward { .. } => self.backward(context),
        }
    }

    fn forward(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Which::Forward { x, y, peak, shifted, exp, sum } = &self.which else {
            return Err(unsupported("another pass"));
        };
        let rows = Rows::of(cube_tensor(context, x, OP)?);
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

    fn backward(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Which::Backward { scalars, exp, shifted, sum, dy, dx } = &self.which else {
            return Err(unsupported("another pass"));
        };
        let is_there = |expected: &ExpectedScalar| {
            let id = ScalarId { value: expected.id };
            context.scalars.get(&id).is_some_and(|actual| expected.is(*actual))
        };
        if !scalars.iter().all(is_there) {
            return Err(unsupported("its operations, but with other constants"));
        }
        let rows = Rows::of(cube_tensor(context, exp, OP)?);
        let grads = Rows::of(cube_tensor(context, dy, OP)?);
        let (layout, problem) = (rows.layout(), problem_of(&rows)?);
        let shape = context.tensors.get(&sum.id).map(|known| &known.shape);
        if !shape.is_some_and(|shape| layout.is_of_rows(shape)) {
            return Err(unsupported("sums that are not one for each row"));
        }
        let sums = numbers(context, sum, DType::F32)?;
        let made = softmax_rows_backward(
            &layout.client,
            &problem,
            &rows.span(),
            Some(&sums),
            &grads.span(),
            grads.stride,
        )?;
        register_cube_tensor(context, dx, layout.rows(made.handle, dx.dtype), OP)?;
        for read in [exp, shifted, sum, dy] {
            consume(context, read);
        }
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
    if problem.rows == 0 { Err(unsupported("no rows")) } else { Ok(problem) }
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
