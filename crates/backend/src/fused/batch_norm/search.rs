use super::{
    BACKWARD, BACKWARD_OF_RELU, FORWARD, FORWARD_WITH_RUNNING, GRADIENTS, OUTPUTS,
    pass::{Backward, BatchNormPass, Forward},
    view::ChannelRows,
};
use crate::{
    fused::{
        channels::ByChannel,
        conv::Convolution,
        mask_fill::{AtMost, MaskFill},
    },
    stream::{
        Claim, Elapsed, Matcher, Moment, Next, Part, Pattern, Search, SingleOperation,
        arithmetic_output,
    },
};
use blackburn_kernels::matmul::F32Precision;
use burn_ir::{BaseOperationIr, NumericOperationIr, OperationIr, TensorId, TensorStatus};

/// Follows forward and backward at once, until one of them is found.
///
/// What is in front is taken with it: convolutions that make the input or its gradient, sums of gradients,
/// casts of parameters. A search that began behind these would have their block to itself only once they ran,
/// and Burn would give what does not depend on them, such as the deviation, to other fusions in the meantime.
///
/// Burn settles what a fusion waited on in vain without fusing any of it. So views at the head, which no other
/// fusion takes, are claimed alone where nothing else is found, for less than anything else bids: the next search
/// begins behind them. Rows of channels among them need no copy then. So are convolutions that no pass follows, as
/// where `batch_norm` of the operations takes it, and a comparison at the head, which the gradient of a ReLU begins with:
/// Burn may join its block with that of the whole loss.
#[derive(Clone, Default)]
pub(crate) struct BatchNormSearch {
    /// With what precision convolutions in front are computed; without it they are not taken.
    convolutions: Option<F32Precision>,
    /// Whether parts of channels of what these make are copied by their own kernel.
    takes_channels: bool,
    /// Whether a plain gradient is all that is looked for.
    of_gradients: bool,
    candidates: Vec<Candidate>,
    /// Views at the head of the block; rows of channels, or as Burn runs them.
    views: Vec<Option<ChannelRows>>,
    /// The comparison at the head, if a pass may begin with it.
    comparison: Option<AtMost>,
}

impl BatchNormSearch {
    /// Above what Burn's fusions bid for as many operations: those get 100 for an input or output saved,
    /// 10 for an operation.
    pub(super) const SCORE: u64 = 100_000;
    /// Above that of a convolution alone.
    const SCORE_OF_CONVOLUTIONS: u64 = 16;
    /// Below any other fusion.
    const SCORE_OF_HEAD: u64 = 1;

    pub(crate) fn new(convolutions: Option<F32Precision>, takes_channels: bool) -> Self {
        Self { convolutions, takes_channels, ..Self::default() }
    }

    /// For gradients alone, with nothing of other kinds in front.
    pub(super) fn of_gradients() -> Self {
        Self { of_gradients: true, ..Self::default() }
    }
}

/// A pass that may be there, as far as the stream has followed it.
#[derive(Clone)]
struct Candidate {
    pattern: Pattern,
    is_forward: bool,
    flow: Matcher,
    /// Operations that are none of the pass and run before it.
    passengers: Vec<Passenger>,
    /// What passengers make.
    made: Vec<TensorId>,
    /// Whether it took all that came.
    is_open: bool,
}

/// An operation that runs before a pass, by its position.
#[derive(Clone)]
enum Passenger {
    /// As Burn runs it.
    Unfused(usize),
    Convolution(usize, Box<Convolution>),
    Fill(usize, Box<MaskFill>),
    Channels(usize, Box<ByChannel>),
}

impl Candidate {
    /// Convolutions and gradients of them, a sum of gradients, casts of parameters, ends of tensors.
    const MOST_PASSENGERS: usize = 12;

    fn new(pattern: Pattern, is_forward: bool) -> Self {
        let flow = Matcher::data_flow(pattern);
        Self { pattern, is_forward, flow, passengers: Vec::new(), made: Vec::new(), is_open: true }
    }

    /// Those of all passes.
    fn all() -> Vec<Self> {
        // What is longer comes first: it is what is claimed if it is there.
        let passes = [
            (FORWARD_WITH_RUNNING, true),
            (FORWARD, true),
            (BACKWARD, false),
            (BACKWARD_OF_RELU, false),
        ];
        passes.map(|(pattern, is_forward)| Self::new(pattern, is_forward)).into()
    }

    /// Whether it takes `operation`, at that position of the block.
    fn take(
        &mut self,
        operation: &OperationIr,
        position: usize,
        convolutions: Option<F32Precision>,
        takes_channels: bool,
    ) -> bool {
        if self.flow.is_complete() {
            return false;
        }
        let may_begin = position > self.passengers.len() || may_begin(operation);
        if may_begin && self.flow.follow(operation, position) {
            return true;
        }
        // What runs first may neither need the pass nor end what it reads.
        let is_drop = matches!(operation, OperationIr::Drop(_));
        let may_run_first = operation.nodes().into_iter().all(|node| {
            let is_last = is_drop || node.status == TensorStatus::ReadWrite;
            !(self.flow.has_made(node.id) || is_last && self.flow.knows(node.id))
        });
        if !may_run_first || self.passengers.len() == Self::MOST_PASSENGERS {
            return false;
        }
        let convolution = convolutions.and_then(|with| Convolution::of(operation, &with));
        // The gradient of an activation that is cut off above zero, too, by a mask that was kept; or of a ReLU whose
        // comparison ran with another block.
        let fill =
            MaskFill::of(operation).filter(|_| position == 0 || self.reads_theirs(operation));
        let channels = || ByChannel::of(operation, &()).filter(|_| takes_channels);
        let passenger = match (convolution, fill) {
            (Some(convolution), _) => Passenger::Convolution(position, Box::new(convolution)),
            (None, Some(fill)) => Passenger::Fill(position, Box::new(fill)),
            // Arithmetic at the head is the business of other fusions.
            _ if position > 0 && (is_drop || self.belongs(operation)) => match channels() {
                Some(channels) => Passenger::Channels(position, Box::new(channels)),
                None => Passenger::Unfused(position),
            },
            _ => return false,
        };
        self.passengers.push(passenger);
        self.made.extend(operation.outputs().map(|output| output.id));
        true
    }

    /// Whether `operation` is arithmetic that may run before the pass: before its first operation only casts, and
    /// what reads results of passengers.
    ///
    /// With other arithmetic there, Burn would join the block of a convolution with any that it finds no other use
    /// for. What that block needs may need the convolution in turn; then Burn runs the whole lot unfused.
    fn belongs(&self, operation: &OperationIr) -> bool {
        let has_begun = !self.flow.positions().is_empty();
        let is_cast = || matches!(operation, OperationIr::BaseFloat(BaseOperationIr::Cast(_)));
        arithmetic_output(operation).is_some()
            && (has_begun || is_cast() || self.reads_theirs(operation))
    }

    /// Whether `operation` reads results of passengers.
    fn reads_theirs(&self, operation: &OperationIr) -> bool {
        operation.inputs().any(|input| self.made.contains(&input.id))
    }

    /// How many operations may come for other blocks before the next one of the pass does. What else begins so
    /// has its next operation at once, and Burn cuts off what is under way elsewhere if searches go on in vain.
    fn patience(&self) -> u64 {
        let is_behind_convolution =
            self.passengers.iter().any(|it| matches!(it, Passenger::Convolution(..)));
        match self.flow.positions().len() {
            // Parameters may be cast in between.
            0 if is_behind_convolution => 4,
            // The gradient of a ReLU: what is normalized is computed again in between.
            2 if self.flow.has("dy") => 8,
            0..=2 => 0,
            // Parameters get the shape of the input, and are cast.
            _ => 8,
        }
    }

    fn found(&self) -> Option<Vec<Part<BatchNormPass>>> {
        let flow = &self.flow;
        let outputs = if self.is_forward { &OUTPUTS[..] } else { &GRADIENTS };
        let mut intermediates =
            self.pattern.iter().map(|(made, _)| *made).filter(|made| !outputs.contains(made));
        let is_whole = flow.is_complete() && intermediates.all(|made| flow.is_dead(made));
        is_whole.then_some(())?;
        let pass = match self.is_forward {
            true => BatchNormPass::Forward(Forward::of(flow)?),
            false => BatchNormPass::Backward(Backward::of(flow)?),
        };
        let pass = Part::Replaced(flow.positions().to_vec(), pass);
        Some(self.in_front().chain([pass]).collect())
    }

    fn in_front(&self) -> impl Iterator<Item = Part<BatchNormPass>> {
        self.passengers.iter().map(|passenger| match passenger {
            Passenger::Unfused(position) => Part::Unfused(vec![*position]),
            Passenger::Convolution(position, convolution) => Part::Replaced(
                vec![*position],
                BatchNormPass::InFront(convolution.as_ref().clone()),
            ),
            Passenger::Fill(position, fill) => {
                Part::Replaced(vec![*position], BatchNormPass::Filled(fill.as_ref().clone()))
            }
            Passenger::Channels(position, channels) => {
                Part::Replaced(vec![*position], BatchNormPass::Channels(channels.as_ref().clone()))
            }
        })
    }

    /// Convolutions and what stands between them, where no pass follows.
    fn convolutions_alone(&self) -> Option<Vec<Part<BatchNormPass>>> {
        let is_convolution = |it: &Passenger| matches!(it, Passenger::Convolution(..));
        let last = self.passengers.iter().rposition(is_convolution)?;
        self.flow.positions().is_empty().then(|| self.in_front().take(last + 1).collect())
    }
}

/// Whether `operation` may be the first one of a pass: not every one of a pattern is, since views of parameters
/// and factors, which come early where Burn joins blocks, are too common to begin with. So is a transposed
/// matrix.
fn may_begin(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::BaseFloat(BaseOperationIr::SwapDims(op)) => op.input.shape.num_dims() > 2,
        OperationIr::NumericFloat(_, operation) => matches!(
            operation,
            NumericOperationIr::AddScalar(_) | NumericOperationIr::LowerEqualElem(_)
        ),
        _ => false,
    }
}

impl Search for BatchNormSearch {
    type Replacement = BatchNormPass;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        let is_first = now.position == 0;
        if is_first {
            self.candidates = match self.of_gradients {
                true => vec![Candidate::new(BACKWARD, false)],
                false => Candidate::all(),
            };
        }
        let is_view = matches!(
            operation,
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(_) | BaseOperationIr::Reshape(_))
        );
        let rows = ChannelRows::of(operation);
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.is_open) {
            candidate.is_open =
                candidate.take(operation, now.position, self.convolutions, self.takes_channels);
        }
        if is_first {
            // What begins with an operation beside all of them is nobody's yet: Burn has others to show it to.
            self.candidates.retain(|candidate| candidate.is_open);
            self.comparison = AtMost::of(operation).filter(|_| !self.candidates.is_empty());
        }
        let is_taken = self.candidates.iter().any(|candidate| candidate.is_open);
        let is_of_channels = is_first && rows.is_some();
        if is_view && (is_taken || is_of_channels) && self.views.len() == now.position {
            self.views.push(rows);
        }
        if is_of_channels && !is_taken {
            return Next::Last;
        }
        // One that is complete waits for others that may be longer.
        let mut open = self.candidates.iter().filter(|candidate| candidate.is_open);
        let is_over = is_taken && open.all(|candidate| candidate.flow.is_complete());
        if is_over { Next::Last } else { Next::taken_if(is_taken) }
    }

    fn claim(&self) -> Option<Claim<BatchNormPass>> {
        if let Some(parts) = self.candidates.iter().find_map(Candidate::found) {
            return Some(Claim { score: Self::SCORE, parts });
        }
        if let Some(parts) = self.candidates.iter().find_map(Candidate::convolutions_alone) {
            return Some(Claim { score: Self::SCORE_OF_CONVOLUTIONS, parts });
        }
        let view = |(at, rows): (usize, &Option<ChannelRows>)| match rows {
            Some(rows) => Part::Replaced(vec![at], BatchNormPass::View(rows.clone())),
            None => Part::Unfused(vec![at]),
        };
        let mut parts: Vec<_> = self.views.iter().enumerate().map(view).collect();
        if let Some(comparison) = &self.comparison {
            parts.push(Part::Replaced(vec![0], BatchNormPass::Compared(comparison.clone())));
        }
        (!parts.is_empty()).then_some(Claim { score: Self::SCORE_OF_HEAD, parts })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        let mut open = self.candidates.iter().filter(|candidate| candidate.is_open);
        open.all(|candidate| elapsed.since_last > candidate.patience())
    }
}
