use super::{
    BACKWARD, FORWARD, FORWARD_WITHOUT_BETA, GRADIENTS, OUTPUTS,
    pass::{Backward, Forward, LayerNormPass},
};
use crate::{
    fused::dropped::DroppedSumSearch,
    stream::{Claim, Elapsed, Matcher, Moment, Next, Part, Pattern, Search},
};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr,
};

/// Follows both passes at once, until one of them is found.
///
/// The sum in front of the rows that a norm takes is claimed with it where dropout is in it. Burn's fusion of
/// reductions begins with those operations and takes the norm along, by a kernel for each mean.
#[derive(Clone, Default)]
pub(crate) struct LayerNormSearch {
    /// What may be in front.
    sum: DroppedSumSearch,
    candidates: Vec<Candidate>,
}

/// A pass that may be there, as far as the stream has followed it.
#[derive(Clone)]
struct Candidate {
    pattern: Pattern,
    is_forward: bool,
    flow: Matcher,
    /// Views of gamma's gradient, which come early where the rows' is the last of a program.
    behind: Vec<usize>,
    /// Whether it took all that came.
    is_open: bool,
}

impl Candidate {
    /// Those of all passes. What is longer comes first: it is what is claimed if it is there.
    fn all() -> Vec<Self> {
        let candidate = |pattern, is_forward| {
            let flow = Matcher::data_flow(pattern);
            Self { pattern, is_forward, flow, behind: Vec::new(), is_open: true }
        };
        let forward = [FORWARD, FORWARD_WITHOUT_BETA].map(|pattern| candidate(pattern, true));
        forward.into_iter().chain(BACKWARD.map(|pattern| candidate(pattern, false))).collect()
    }

    fn take(&mut self, operation: &OperationIr, position: usize, is_first: bool) -> bool {
        let may_begin = match self.is_forward {
            true => {
                matches!(operation, OperationIr::NumericFloat(_, NumericOperationIr::MeanDim(_)))
            }
            false => may_begin_backward(operation),
        };
        if self.views_gradient(operation) {
            self.behind.push(position);
            return true;
        }
        (!is_first || may_begin) && self.flow.follow(operation, position) && self.fits()
    }

    /// Whether it is a norm of the rows `x`.
    fn normalizes(&self, x: TensorId) -> bool {
        self.is_forward && self.flow.tensor("x").is_some_and(|rows| rows.id == x)
    }

    fn views_gradient(&self, operation: &OperationIr) -> bool {
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) => {
                self.flow.tensor("dgamma").is_some_and(|dgamma| dgamma.id == op.input.id)
            }
            _ => false,
        }
    }

    /// Whether what rows are multiplied by is a number for each column.
    fn fits(&self) -> bool {
        let (gamma, rows) = if self.is_forward { ("gamma_of_all", "x") } else { ("gamma", "dy") };
        let both = self.flow.tensor(gamma).zip(self.flow.tensor(rows));
        both.is_none_or(|(gamma, rows)| is_of_columns(gamma, rows))
    }

    fn found(&self) -> Option<Vec<Part<LayerNormPass>>> {
        let flow = &self.flow;
        let outputs = if self.is_forward { &OUTPUTS[..] } else { &GRADIENTS };
        let mut intermediates =
            self.pattern.iter().map(|(made, _)| *made).filter(|made| !outputs.contains(made));
        let is_whole = flow.is_complete() && intermediates.all(|made| flow.is_dead(made));
        is_whole.then_some(())?;
        let pass = match self.is_forward {
            true => LayerNormPass::Forward(Forward::of(flow)?),
            false => LayerNormPass::Backward(Backward::of(flow)?),
        };
        // Parameters get the rank of the rows, which costs nothing, and who comes later may read them so.
        let views = ["gamma_of_all", "beta_of_all"];
        let views: Vec<usize> = views.iter().filter_map(|made| flow.position_of(made)).collect();
        let steps = flow.positions().iter().copied().filter(|at| !views.contains(at)).collect();
        let behind = Part::Unfused(self.behind.clone());
        Some(vec![Part::Unfused(views), Part::Replaced(steps, pass), behind])
    }
}

/// Whether `operation` may be the first one of a gradient: the product with gamma; or, where Burn joins blocks, the
/// inverse of the deviation. Other steps are too common to begin with.
fn may_begin_backward(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::NumericFloat(_, NumericOperationIr::Mul(op)) => {
            is_of_columns(&op.rhs, &op.lhs)
        }
        OperationIr::Float(_, FloatOperationIr::Recip(op)) => {
            op.input.shape.num_dims() > 1 && op.input.shape.last() == Some(&ONE)
        }
        _ => false,
    }
}

/// How the stream tells the size 1.
const ONE: usize = 0;

/// Whether a tensor has one number for each column of `rows`.
fn is_of_columns(tensor: &TensorIr, rows: &TensorIr) -> bool {
    let (Some((last, leading)), Some((columns, _))) =
        (tensor.shape.split_last(), rows.shape.split_last())
    else {
        return false;
    };
    last == columns
        && *last != ONE
        && !leading.is_empty()
        && leading.iter().all(|size| *size == ONE)
}

impl LayerNormSearch {
    /// Above what Burn's fusions bid for as many operations: those get 100 for an input or output saved, 10 for
    /// an operation.
    const SCORE: u64 = 100_000;
    /// How many operations may come for other blocks before the next one of a pass does: parameters are cast and
    /// get their shapes there.
    const PATIENCE: u64 = 8;
}

impl Search for LayerNormSearch {
    type Replacement = LayerNormPass;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        if now.position == 0 {
            self.candidates = Candidate::all();
        }
        if self.sum.follow(operation, now.position) {
            return Next::Taken;
        }
        if self.sum.is_under_way() {
            return Next::Refused;
        }
        let sum = self.sum.found().map(|sum| sum.out.id);
        let is_first = now.position == sum.map_or(0, |_| DroppedSumSearch::OPERATIONS);
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.is_open) {
            let taken = candidate.take(operation, now.position, is_first);
            candidate.is_open = taken && sum.is_none_or(|sum| candidate.normalizes(sum));
        }
        if is_first {
            self.candidates.retain(|candidate| candidate.is_open);
        }
        let mut open = self.candidates.iter().filter(|candidate| candidate.is_open).peekable();
        let is_taken = open.peek().is_some();
        // One that is complete waits for others that may be longer.
        let is_over = is_taken && open.all(|candidate| candidate.flow.is_complete());
        if is_over { Next::Last } else { Next::taken_if(is_taken) }
    }

    fn claim(&self) -> Option<Claim<LayerNormPass>> {
        let mut parts = self.candidates.iter().find_map(Candidate::found)?;
        if let Some(sum) = self.sum.found() {
            let positions = (0..DroppedSumSearch::OPERATIONS).collect();
            parts.insert(0, Part::Replaced(positions, LayerNormPass::Sum(sum.clone())));
        }
        Some(Claim { score: Self::SCORE, parts })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_last > Self::PATIENCE
    }
}
