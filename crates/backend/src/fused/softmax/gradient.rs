//! The gradient of softmax itself: in the stream, and when it runs.

use super::{
    GRADIENT, GRADIENT_OF_INVERSE, OP,
    pass::{SoftmaxPass, numbers, problem_of},
    search::PassSearch,
};
use crate::{
    declined::unsupported,
    fused::mask_fill::MaskFill,
    stream::{Elapsed, ExpectedScalar, Matcher, Next, Part, Pattern, number},
    tensors::{TensorRows, Tensors, consume, cube_tensor, register_cube_tensor},
};
use blackburn_kernels::{
    KernelError,
    softmax::{SoftmaxGradient, softmax_rows_backward},
};
use burn_backend::DType;
use burn_ir::{
    FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorIr, TensorStatus,
};
use serde::{Deserialize, Serialize};

/// Looks for the gradient, which begins as that of every division by a number for each row does.
#[derive(Clone)]
pub(super) struct GradientSearch {
    pattern: Pattern,
    flow: Matcher,
    /// A mask behind it, and its position.
    masked: Option<(MaskFill, usize)>,
    /// A product with a number behind that: where that number is, its position, and what it makes.
    scaled: Option<(u64, usize, TensorIr)>,
}

impl Default for GradientSearch {
    fn default() -> Self {
        Self { pattern: GRADIENT, flow: Matcher::data_flow(GRADIENT), masked: None, scaled: None }
    }
}

impl GradientSearch {
    /// How many operations may come for other blocks before the next one of the gradient does: those of the
    /// values' gradient.
    const PATIENCE: u64 = 8;

    /// The number by which attention divides its scores comes back as a factor of their gradient.
    fn scaled(&self, operation: &OperationIr, position: usize) -> Option<(u64, usize, TensorIr)> {
        let OperationIr::NumericFloat(_, NumericOperationIr::MulScalar(op)) = operation else {
            return None;
        };
        let ScalarIr::UInt(factor) = op.rhs else { return None };
        self.ends_in(&op.lhs).then(|| (factor, position, op.out.clone()))
    }

    /// Masked scores have no gradient.
    fn masked(&self, operation: &OperationIr, position: usize) -> Option<(MaskFill, usize)> {
        let mask = MaskFill::of_scores(operation)?;
        let fits = mask.input.shape == mask.out.shape && self.ends_in(&mask.input);
        fits.then_some((mask, position))
    }

    /// Whether `read` is what has been made so far, and is read for the last time.
    fn ends_in(&self, read: &TensorIr) -> bool {
        let made = self.masked.as_ref().map(|(mask, _)| &mask.out).or(self.flow.output());
        made.is_some_and(|made| made.id == read.id) && read.status == TensorStatus::ReadWrite
    }
}

/// The pattern that may begin with `operation`: with the inverse of a number for each row, or the product with it.
fn beginning_with(operation: &OperationIr) -> Option<Pattern> {
    /// How the stream tells the size 1.
    const ONE: usize = 0;
    let is_of_rows = |tensor: &TensorIr| {
        tensor.shape.num_dims() > 1 && tensor.shape.last().is_some_and(|size| *size == ONE)
    };
    match operation {
        OperationIr::Float(_, FloatOperationIr::Recip(op)) => {
            is_of_rows(&op.input).then_some(GRADIENT)
        }
        OperationIr::NumericFloat(_, NumericOperationIr::Mul(op)) => {
            (is_of_rows(&op.rhs) && !is_of_rows(&op.lhs)).then_some(GRADIENT_OF_INVERSE)
        }
        _ => None,
    }
}

impl PassSearch for GradientSearch {
    fn follow(&mut self, operation: &OperationIr, position: usize) -> Next {
        if self.flow.is_complete() {
            if self.masked.is_none() {
                self.masked = self.masked(operation, position);
                if self.masked.is_some() {
                    return Next::Taken;
                }
            }
            self.scaled = self.scaled(operation, position);
            return if self.scaled.is_some() { Next::Last } else { Next::Refused };
        }
        if position == 0 {
            let Some(pattern) = beginning_with(operation) else { return Next::Refused };
            (self.pattern, self.flow) = (pattern, Matcher::data_flow(pattern));
        }
        Next::taken_if(self.flow.follow(operation, position))
    }

    fn unclaimed_prefix(&self) -> usize {
        0
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        let patience = if self.flow.is_complete() { 0 } else { Self::PATIENCE };
        elapsed.since_last > patience
    }

    fn found(&self) -> Option<Vec<Part<SoftmaxPass>>> {
        let flow = &self.flow;
        let of = |name| flow.tensor(name).cloned();
        let (_, intermediates) = self.pattern.split_last()?;
        let is_ours =
            flow.is_complete() && intermediates.iter().all(|(made, _)| flow.is_dead(made));
        is_ours.then_some(())?;
        let (exp, dx) = (of("exp")?, of("dx")?);
        let fits = ["dy", "shifted", "ones"]
            .iter()
            .all(|name| flow.tensor(name).is_some_and(|tensor| tensor.shape == exp.shape));
        (fits && dx.dtype == exp.dtype).then_some(())?;
        let pass = Gradient {
            scalars: flow.scalars().to_vec(),
            factor: self.scaled.as_ref().map(|(factor, ..)| *factor),
            exp,
            shifted: of("shifted")?,
            sum: of("sum")?,
            inverse: of("inverse").filter(|_| !flow.has("inverse")),
            dy: of("dy")?,
            mask: self.masked.as_ref().map(|(mask, _)| mask.clone()),
            dx: match (&self.scaled, &self.masked) {
                (Some((.., out)), _) => out.clone(),
                (None, Some((mask, _))) => mask.out.clone(),
                (None, None) => dx,
            },
        };
        let masked = self.masked.as_ref().map(|(_, position)| *position);
        let scaled = self.scaled.as_ref().map(|(_, position, _)| *position);
        let steps = flow.positions().iter().copied().chain(masked).chain(scaled).collect();
        Some(vec![Part::Replaced(steps, SoftmaxPass::Gradient(pass))])
    }
}

/// The gradient.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Gradient {
    scalars: Vec<ExpectedScalar>,
    factor: Option<u64>,
    exp: TensorIr,
    /// Only exponentials are made of it, which are there.
    shifted: TensorIr,
    sum: TensorIr,
    /// That of the sums, where it is made in front. The kernel divides.
    inverse: Option<TensorIr>,
    dy: TensorIr,
    mask: Option<MaskFill>,
    dx: TensorIr,
}

impl Gradient {
    pub(super) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Self { scalars, factor, exp, shifted, sum, inverse, dy, mask, dx } = self;
        if !ExpectedScalar::are_there(scalars, context) {
            return Err(unsupported(OP, "its operations, but with other constants"));
        }
        let factor = match factor {
            Some(id) => {
                let unknown = || unsupported(OP, "a factor that is unknown");
                number(context, *id).ok_or_else(unknown)? as f32
            }
            None => 1.0,
        };
        let y = cube_tensor(context, exp, OP)?;
        if y.meta.shape().num_elements() == 0 {
            return Err(unsupported(OP, "rows without elements"));
        }
        let y = TensorRows::of(y);
        let rows = y.layout();
        let grads = TensorRows::of(cube_tensor(context, dy, OP)?);
        let sums = numbers(context, sum, DType::F32)?;
        if grads.tensor.meta.shape() != y.tensor.meta.shape() || sums.elements != y.rows {
            return Err(unsupported(
                OP,
                "the gradient of a division by numbers that are not of its rows",
            ));
        }
        let problem = problem_of(&y, dx.dtype)?;
        let of_rows = match mask {
            Some(fill) if fill.value(context)? != 0.0 => {
                return Err(unsupported(OP, "a gradient that is another number where masked"));
            }
            Some(fill) => Some(fill.rows(context, y.tensor.meta.shape())?),
            None => None,
        };
        let inputs = SoftmaxGradient {
            y: &y.span(),
            sum: Some(&sums),
            dy: &grads.span(),
            dy_stride: grads.stride,
            factor,
            mask: of_rows.as_ref(),
        };
        let made = softmax_rows_backward(&rows.client, &problem, &inputs)?;
        register_cube_tensor(context, dx, rows.rows(made.handle, dx.dtype), OP)?;
        let mask = mask.as_ref().map(|fill| &fill.mask);
        for tensor in [exp, shifted, sum, dy].into_iter().chain(inverse).chain(mask) {
            consume(context, tensor);
        }
        Ok(())
    }
}
