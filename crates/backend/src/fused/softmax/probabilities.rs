//! Softmax itself: in the stream, and when it runs.

use super::{
    OP, SOFTMAX,
    pass::{RowOutputs, SoftmaxPass, make_of_nothing, problem_of},
    search::PassSearch,
};
use crate::{
    fused::mask_fill::MaskFill,
    stream::{Matcher, Next, Part},
    tensors::{Location, TensorRows, Tensors, consume, cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// Looks for the pass behind masks, the last of which is taken along.
#[derive(Clone)]
pub(super) struct ProbabilitiesSearch {
    /// How many operations are in front.
    leads: usize,
    /// The last of them, if it masks.
    mask: Option<MaskFill>,
    flow: Matcher,
}

impl Default for ProbabilitiesSearch {
    fn default() -> Self {
        Self { leads: 0, mask: None, flow: Matcher::data_flow(SOFTMAX) }
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
        if taken {
            self.leads += 1;
            self.mask = MaskFill::of(operation);
        }
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
            let makes_x = |mask: &&MaskFill| {
                mask.out.id == x.id
                    && x.status == TensorStatus::ReadWrite
                    && mask.input.shape == x.shape
                    && mask.input.dtype == x.dtype
            };
            let mask = self.mask.as_ref().filter(makes_x).cloned();
            let mut unfused: Vec<usize> = (0..self.leads).collect();
            let mut steps = flow.positions().to_vec();
            if mask.is_some()
                && let Some(last) = unfused.pop()
            {
                steps.insert(0, last);
            }
            let pass = Probabilities {
                x: mask.as_ref().map_or(x, |mask| &mask.input).clone(),
                mask,
                y: y.clone(),
                peak: flow.kept("peak"),
                shifted: flow.kept("shifted"),
                exp: flow.kept("exp"),
                sum: flow.kept("sum"),
            };
            let pass = Part::Replaced(steps, SoftmaxPass::Probabilities(pass));
            vec![Part::Unfused(unfused), pass]
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
    mask: Option<MaskFill>,
    y: TensorIr,
    peak: Option<TensorIr>,
    shifted: Option<TensorIr>,
    exp: Option<TensorIr>,
    sum: Option<TensorIr>,
}

impl Probabilities {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Self { x, mask, y, peak, shifted, exp, sum } = self;
        let tensor = cube_tensor(context, x, OP)?;
        if tensor.meta.shape().num_elements() == 0 {
            let elements = [Some(y), shifted.as_ref(), exp.as_ref()];
            let of_rows = [peak.as_ref(), None];
            make_of_nothing(context, &Location::of(&tensor), elements, sum.as_ref(), of_rows)?;
            for read in [Some(x), mask.as_ref().map(|mask| &mask.mask)].into_iter().flatten() {
                consume(context, read);
            }
            return Ok(());
        }
        let of_rows = |mask: &MaskFill| {
            let rows = mask.rows(context, &tensor.meta.shape)?;
            Ok::<_, KernelError>((rows, mask.value(context)? as f32))
        };
        let of_rows = mask.as_ref().map(of_rows).transpose()?;
        let rows = TensorRows::of(tensor);
        let made = RowOutputs {
            y,
            shifted: shifted.as_ref(),
            exp: exp.as_ref(),
            peak: peak.as_ref(),
            sum: sum.as_ref(),
        };
        let masked = of_rows.as_ref().map(|(rows, value)| (rows, *value));
        made.launch(context, &problem_of(&rows, y.dtype)?, &rows, masked, false)?;
        for read in [Some(x), mask.as_ref().map(|mask| &mask.mask)].into_iter().flatten() {
            consume(context, read);
        }
        Ok(())
    }
}
