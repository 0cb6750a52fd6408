//! Softmax itself: in the stream, and when it runs.

use super::{
    OP, SOFTMAX,
    pass::{Passes, RowOutputs, SoftmaxPass, make_of_nothing, problem_of},
    search::PassSearch,
};
use crate::{
    declined::unsupported,
    fused::{
        dropped::{Dropped, DroppedSearch},
        mask_fill::MaskFill,
    },
    stream::{Elapsed, Matcher, Next, Part},
    tensors::{Location, TensorRows, Tensors, consume, cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// Looks for the pass behind masks, the last of which is taken along, and for dropout behind it.
#[derive(Clone)]
pub(super) struct ProbabilitiesSearch {
    /// How many operations are in front.
    leads: usize,
    /// The last of them, if it masks.
    mask: Option<MaskFill>,
    flow: Matcher,
    dropped: Box<DroppedSearch>,
}

impl ProbabilitiesSearch {
    /// One that has not begun. `burn_draws` says whether masks of dropout are Burn's to draw.
    pub(super) fn new(burn_draws: bool) -> Self {
        let dropped = Box::new(DroppedSearch::new(burn_draws));
        Self { leads: 0, mask: None, flow: Matcher::data_flow(SOFTMAX), dropped }
    }

    /// Two masks that are viewed. With more in front, what is saved is lost on running these one by one.
    const MOST_LEADS: usize = 4;
    /// Whether dropout may follow. It is waited for behind attention's scores alone, which have four dimensions in Burn.
    fn may_be_dropped(&self) -> bool {
        self.flow.tensor("y").is_some_and(|y| y.shape.num_dims() == 4)
    }
}

impl PassSearch for ProbabilitiesSearch {
    fn follow(&mut self, operation: &OperationIr, position: usize) -> Next {
        if self.flow.is_complete() {
            let taken = self.dropped.follow(operation, position, self.flow.tensor("y"));
            return match self.dropped.found() {
                Some(_) => Next::Last,
                None => Next::taken_if(taken),
            };
        }
        let mut flow = self.flow.clone();
        if flow.follow(operation, position) && flow.has("peak") {
            self.flow = flow;
            let is_over = self.flow.is_complete() && !self.may_be_dropped();
            return if is_over { Next::Last } else { Next::Taken };
        }
        let taken =
            self.flow.positions().is_empty() && self.leads < Self::MOST_LEADS && is_lead(operation);
        if taken {
            self.leads += 1;
            self.mask = MaskFill::of_scores(operation);
        }
        Next::taken_if(taken)
    }

    /// Those in front.
    fn unclaimed_prefix(&self) -> usize {
        self.leads
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        self.flow.is_complete() && elapsed.since_last > 0
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
            let dropped = self.dropped.found().cloned().map(Box::new);
            let drawn = self.dropped.drawn(SoftmaxPass::Mask).filter(|_| dropped.is_some());
            if dropped.is_some() {
                steps.extend(self.dropped.positions());
            }
            let pass = Probabilities {
                x: mask.as_ref().map_or(x, |mask| &mask.input).clone(),
                mask,
                y: dropped.as_ref().map_or(y, |dropped| &dropped.out).clone(),
                dropped,
                peak: flow.kept("peak"),
                shifted: flow.kept("shifted"),
                exp: flow.kept("exp"),
                sum: flow.kept("sum"),
            };
            let mut parts = vec![Part::Unfused(unfused)];
            parts.extend(drawn);
            parts.push(Part::Replaced(steps, SoftmaxPass::Probabilities(pass)));
            parts
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
    /// Dropout that makes y of the probabilities.
    dropped: Option<Box<Dropped>>,
    peak: Option<TensorIr>,
    shifted: Option<TensorIr>,
    exp: Option<TensorIr>,
    sum: Option<TensorIr>,
}

impl Probabilities {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Self { x, mask, y, dropped, peak, shifted, exp, sum } = self;
        let tensor = cube_tensor(context, x, OP)?;
        if tensor.meta.shape().num_elements() == 0 {
            let elements = [Some(y), shifted.as_ref(), exp.as_ref()];
            if dropped.is_some() {
                return Err(unsupported(OP, "dropout of nothing"));
            }
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
        let kept = dropped
            .as_ref()
            .map(|dropped| dropped.kept_in_order(context, rows.tensor.meta.shape()));
        let kept = kept.transpose()?;
        let passes = Passes { mask: masked, kept: kept.as_ref(), logarithms: false };
        made.launch(context, &problem_of(&rows, y.dtype)?, &rows, passes)?;
        if let Some(dropped) = dropped {
            dropped.consume(context);
        }
        for read in [Some(x), mask.as_ref().map(|mask| &mask.mask)].into_iter().flatten() {
            consume(context, read);
        }
        Ok(())
    }
}
