//! Softmax itself: in the stream, and when it runs.

use super::{
    OP, SOFTMAX,
    pass::{RowOutputs, SoftmaxPass, make_of_nothing, problem_of},
    search::PassSearch,
};
use crate::{
    stream::{Matcher, Next, Part},
    tensors::{Location, TensorRows, Tensors, consume, cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

/// Looks for the pass behind masks.
#[derive(Clone)]
pub(super) struct ProbabilitiesSearch {
    /// How many operations are in front.
    leads: usize,
    flow: Matcher,
}

impl Default for ProbabilitiesSearch {
    fn default() -> Self {
        Self { leads: 0, flow: Matcher::data_flow(SOFTMAX) }
    }
}

impl ProbabilitiesSearch {
    /// Two masks that are viewed. With more in front, what is saved is lost on running these one by one.
    const MOST_LEADS: usize = 4;
}

impl PassSearch for ProbabilitiesSearch {
    fn follow(&mut self, operation: &OperationIr, position: usize) -> Next {
        let mut flow = self.flow.clone();
        if flow.follow(operation, position) && flow.has("peak") {
            self.flow = flow;
            return if self.flow.is_complete() { Next::Last } else { Next::Taken };
        }
        let taken =
            self.flow.positions().is_empty() && self.leads < Self::MOST_LEADS && is_lead(operation);
        self.leads += usize::from(taken);
        Next::taken_if(taken)
    }

    /// Those in front.
    fn unclaimed_prefix(&self) -> usize {
        self.leads
    }

    fn found(&self) -> Option<Vec<Part<SoftmaxPass>>> {
        let flow = &self.flow;
        let (x, y) = (flow.tensor("x")?, flow.tensor("y")?);
        let fits = flow.is_complete() && x.shape == y.shape && x.dtype == y.dtype;
        fits.then(|| {
            let pass = Probabilities {
                x: x.clone(),
                y: y.clone(),
                peak: flow.kept("peak"),
                shifted: flow.kept("shifted"),
                exp: flow.kept("exp"),
                sum: flow.kept("sum"),
            };
            let steps = flow.positions().to_vec();
            let pass = Part::Replaced(steps, SoftmaxPass::Probabilities(pass));
            vec![Part::Unfused((0..self.leads).collect()), pass]
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
pub(crate) struct Probabilities {
    x: TensorIr,
    y: TensorIr,
    peak: Option<TensorIr>,
    shifted: Option<TensorIr>,
    exp: Option<TensorIr>,
    sum: Option<TensorIr>,
}

impl Probabilities {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Self { x, y, peak, shifted, exp, sum } = self;
        let tensor = cube_tensor(context, x, OP)?;
        if tensor.meta.shape().num_elements() == 0 {
            let elements = [Some(y), shifted.as_ref(), exp.as_ref()];
            let of_rows = [peak.as_ref(), None];
            make_of_nothing(context, &Location::of(&tensor), elements, sum.as_ref(), of_rows)?;
            consume(context, x);
            return Ok(());
        }
        let rows = TensorRows::of(tensor);
        let made = RowOutputs {
            y,
            shifted: shifted.as_ref(),
            exp: exp.as_ref(),
            peak: peak.as_ref(),
            sum: sum.as_ref(),
        };
        made.launch(context, &problem_of(&rows, y.dtype)?, &rows, false)?;
        consume(context, x);
        Ok(())
    }
}
