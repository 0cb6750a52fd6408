use super::{
    BACKWARD, BACKWARD_OF_ROWS, FORWARD, FORWARD_OF_ROWS, FORWARD_WITHOUT_PARAMETERS, GRADIENTS,
    OUTPUTS,
    pass::{Backward, Forward, GroupNormPass},
};
use crate::stream::{Claim, Elapsed, Matcher, Moment, Next, Part, Pattern, Search};
use burn_ir::{BaseOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr};

/// Follows both passes at once, until one of them is found.
///
/// A sum in front of a norm ends in front of the view that makes rows, and Burn settles both together: the norm is not
/// found without its view. So the sum is claimed alone where the view follows it, for less than anything else bids.
#[derive(Clone, Default)]
pub(crate) struct GroupNormSearch {
    candidates: Vec<Candidate>,
    /// A sum of images at the head, and whether the rows of a norm are made of it.
    head: Option<TensorId>,
    makes_rows_of_head: bool,
}

/// A pass that may be there, as far as the stream has followed it.
#[derive(Clone)]
struct Candidate {
    pattern: Pattern,
    is_forward: bool,
    flow: Matcher,
    /// Casts of parameters, which run first.
    in_front: Vec<usize>,
    /// Views and casts of gamma's gradient, which come early where that of the input is the last of a program, and
    /// what they make.
    behind: Vec<(usize, TensorId)>,
    /// Whether it took all that came.
    is_open: bool,
}

impl Candidate {
    /// Those of all passes. What is longer comes first: it is what is claimed if it is there.
    fn all() -> Vec<Self> {
        let passes = [
            (FORWARD, true),
            (FORWARD_WITHOUT_PARAMETERS, true),
            (FORWARD_OF_ROWS, true),
            (BACKWARD, false),
            (BACKWARD_OF_ROWS, false),
        ];
        let candidate = |(pattern, is_forward)| {
            let flow = Matcher::data_flow(pattern);
            let (in_front, behind) = (Vec::new(), Vec::new());
            Self { pattern, is_forward, flow, in_front, behind, is_open: true }
        };
        passes.map(candidate).into()
    }

    fn take(&mut self, operation: &OperationIr, position: usize) -> bool {
        if let Some(made) = self.made_of_gradient(operation) {
            self.behind.push((position, made));
            return true;
        }
        let makes_rows = self.pattern.iter().any(|(made, _)| *made == "rows");
        // What comes second tells the rows of a norm from other views, of which programs are full.
        let is_begun = match (self.is_forward, position) {
            (true, 0) if makes_rows => turns_into_rows(operation),
            (true, 0) => is_mean(operation),
            (true, 1) if makes_rows => is_mean(operation),
            (false, 0) => may_begin_backward(operation),
            _ => true,
        };
        if is_begun && self.flow.follow(operation, position) {
            return self.fits();
        }
        // Burn joins the block of a parameter's cast with this one where the parameter is read.
        let casts_parameter = position > 1 && self.casts_another(operation);
        if casts_parameter {
            self.in_front.push(position);
        }
        casts_parameter
    }

    /// Whether what images are multiplied by is a number for each channel.
    fn fits(&self) -> bool {
        let gamma = self.flow.tensor("gamma_of_all").zip(self.flow.tensor("x"));
        gamma.is_none_or(|(gamma, x)| is_of_channels(gamma, x))
    }

    /// Whether `operation` casts a tensor that is none of the pass.
    fn casts_another(&self, operation: &OperationIr) -> bool {
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => !self.flow.knows(op.input.id),
            _ => false,
        }
    }

    /// What `operation` makes, if it reads the gradient of gamma, in another shape or type.
    fn made_of_gradient(&self, operation: &OperationIr) -> Option<TensorId> {
        let (input, out) = match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) => (op.input.id, op.out.id),
            OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => (op.input.id, op.out.id),
            _ => return None,
        };
        let is_gradient = self.flow.tensor("dgamma").is_some_and(|dgamma| dgamma.id == input);
        (is_gradient || self.behind.iter().any(|(_, made)| *made == input)).then_some(out)
    }

    fn found(&self) -> Option<Vec<Part<GroupNormPass>>> {
        let flow = &self.flow;
        let outputs = if self.is_forward { &OUTPUTS[..] } else { &GRADIENTS };
        let mut intermediates =
            self.pattern.iter().map(|(made, _)| *made).filter(|made| !outputs.contains(made));
        let is_whole = flow.is_complete() && intermediates.all(|made| flow.is_dead(made));
        is_whole.then_some(())?;
        let pass = match self.is_forward {
            true => GroupNormPass::Forward(Forward::of(flow)?),
            false => GroupNormPass::Backward(Backward::of(flow)?),
        };
        // Parameters get the rank of the images, which costs nothing, and who comes later may read them so.
        let views = ["gamma_of_all", "beta_of_all"];
        let views: Vec<usize> = views.iter().filter_map(|made| flow.position_of(made)).collect();
        let steps = flow.positions().iter().copied().filter(|at| !views.contains(at)).collect();
        let in_front = self.in_front.iter().copied().chain(views.iter().copied()).collect();
        let behind = self.behind.iter().map(|(position, _)| *position).collect();
        Some(vec![Part::Unfused(in_front), Part::Replaced(steps, pass), Part::Unfused(behind)])
    }
}

/// Whether `operation` makes rows of images: for each sample one a group of several channels.
///
/// Rows of one channel each look like heads of attention that are joined again, of which programs are full. A search that
/// began there would let Burn join the block with what reads it: with the sum that is a bias's gradient, which then runs
/// on Burn's kernel.
fn turns_into_rows(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) => {
            op.out.shape.num_dims() == 3
                && op.input.shape.num_dims() > 1
                && op.input.shape.first() == op.out.shape.first()
                && op.input.shape[1] != op.out.shape[1]
        }
        _ => false,
    }
}

/// What `operation` makes, if it adds images or sequences.
fn sum_of_images(operation: &OperationIr) -> Option<TensorId> {
    match operation {
        OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) => {
            (op.out.shape.num_dims() > 2).then_some(op.out.id)
        }
        _ => None,
    }
}

/// Whether `operation` takes the mean of rows, for each sample of one a group.
fn is_mean(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::NumericFloat(_, NumericOperationIr::MeanDim(op)) => {
            op.input.shape.num_dims() == 3
        }
        _ => false,
    }
}

/// Whether `operation` is the product of a gradient of images with a number for each channel.
fn may_begin_backward(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::NumericFloat(_, NumericOperationIr::Mul(op)) => {
            is_of_channels(&op.rhs, &op.lhs)
        }
        _ => false,
    }
}

/// How the stream tells the size 1.
const ONE: usize = 0;

/// Whether a tensor has one number for each channel of `images`.
fn is_of_channels(tensor: &TensorIr, images: &TensorIr) -> bool {
    let (shape, images) = (&tensor.shape, &images.shape);
    shape.num_dims() > 2
        && shape.num_dims() == images.num_dims()
        && shape[1] == images[1]
        && shape[1] != ONE
        && (0..shape.num_dims()).all(|dim| dim == 1 || shape[dim] == ONE)
}

impl GroupNormSearch {
    /// Above what Burn's fusions bid for as many operations: those get 100 for an input or output saved, 10 for
    /// an operation.
    const SCORE: u64 = 100_000;
    /// Below any other fusion.
    const SCORE_OF_HEAD: u64 = 1;
    /// How many operations may come for other blocks before the next one of a pass does: parameters are cast and
    /// get their shapes there.
    const PATIENCE: u64 = 8;
}

impl Search for GroupNormSearch {
    type Replacement = GroupNormPass;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        let is_first = now.position == 0;
        if is_first {
            self.candidates = Candidate::all();
        } else if let Some(head) = self.head {
            let mut inputs = operation.inputs();
            self.makes_rows_of_head =
                turns_into_rows(operation) && inputs.any(|input| input.id == head);
            return Next::Refused;
        }
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.is_open) {
            candidate.is_open = candidate.take(operation, now.position);
        }
        if is_first {
            self.candidates.retain(|candidate| candidate.is_open);
            self.head = sum_of_images(operation).filter(|_| self.candidates.is_empty());
            if self.head.is_some() {
                return Next::Taken;
            }
        }
        let mut open = self.candidates.iter().filter(|candidate| candidate.is_open).peekable();
        let is_taken = open.peek().is_some();
        // One that is complete waits for others that may be longer.
        let is_over = is_taken && open.all(|candidate| candidate.flow.is_complete());
        if is_over { Next::Last } else { Next::taken_if(is_taken) }
    }

    fn claim(&self) -> Option<Claim<GroupNormPass>> {
        if self.makes_rows_of_head {
            return Some(Claim { score: Self::SCORE_OF_HEAD, parts: vec![Part::Unfused(vec![0])] });
        }
        let parts = self.candidates.iter().find_map(Candidate::found)?;
        Some(Claim { score: Self::SCORE, parts })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_last > if self.head.is_some() { 0 } else { Self::PATIENCE }
    }
}
