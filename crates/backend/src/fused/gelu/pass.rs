use super::super::{column_sum::Sum, dropped::Dropped, random::Random};
use crate::{
    declined::{tell_once, unsupported},
    stream::{Done, ExpectedScalar, Matcher, Replacement},
    tensors::{Input, Tensors, consume, is_made, register_in_order, register_output},
};
use blackburn_kernels::{
    KernelError,
    gelu::{
        GeluCall, GeluGradients, gelu_call_backward, gelu_call_backward_sum, gelu_call_forward,
    },
};
use burn_backend::DType;
use burn_ir::TensorIr;
use serde::{Deserialize, Serialize};

const OP: &str = "gelu";

/// What replaces operations of GELU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum GeluPass {
    Forward {
        elements: Elements,
        /// Dropout that makes the output of what GELU makes.
        dropped: Option<Box<Dropped>>,
    },
    /// The mask of that dropout.
    Mask(Random),
    Backward {
        elements: Elements,
        /// The gradient of the output.
        dy: TensorIr,
        /// The sum of the rows of what the pass makes: one kernel makes both.
        sum: Option<Box<Sum>>,
        /// Dropout that passes `dy` on.
        passed_on: Option<Box<Dropped>>,
    },
    /// That sum, behind the pass that may have made it.
    RowSum(Sum),
}

/// The input and the output of a pass, and the numbers that make its operations GELU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Elements {
    x: TensorIr,
    out: TensorIr,
    scalars: Vec<ExpectedScalar>,
}

impl GeluPass {
    /// The pass that `complete` has followed, with the `sum` of its rows, if the kernel takes the type.
    pub(super) fn of(complete: &Matcher, sum: Option<Sum>) -> Option<Self> {
        let x = complete.tensor("x")?.clone();
        matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16).then_some(())?;
        let (out, scalars) = (complete.output()?.clone(), complete.scalars().to_vec());
        let elements = Elements { x, out, scalars };
        Some(match complete.tensor("dy").cloned() {
            None => Self::Forward { elements, dropped: None },
            Some(dy) => Self::Backward { elements, dy, sum: sum.map(Box::new), passed_on: None },
        })
    }

    /// The gradient that it makes, if it is the backward pass.
    pub(super) fn gradient(&self) -> Option<&TensorIr> {
        match self {
            Self::Backward { elements, .. } => Some(&elements.out),
            Self::Forward { .. } | Self::Mask(_) | Self::RowSum(_) => None,
        }
    }

    /// The forward pass with dropout behind it.
    pub(super) fn dropped(self, dropped: &Dropped) -> Option<Self> {
        let Self::Forward { elements, .. } = self else { return None };
        let elements = Elements { out: dropped.out.clone(), ..elements };
        Some(Self::Forward { elements, dropped: Some(Box::new(dropped.clone())) })
    }
}

impl Replacement for GeluPass {
    const NAME: &'static str = "BlackburnGelu";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Forward { elements, dropped } => {
                let x = elements.input(tensors)?;
                let is_in_place = match dropped {
                    Some(dropped) => dropped.lies_as(tensors, &x)?,
                    None => x.is_dense(),
                };
                let x = if is_in_place { x } else { x.contiguous() };
                let kept = dropped.as_ref().map(|dropped| dropped.kept(tensors, &x)).transpose()?;
                let call = GeluCall { kept, ..GeluCall::alone(&x.buffer(x.elements())) };
                let y = gelu_call_forward(&x.client, &call)?;
                register_in_order(tensors, &elements.out, &x, y, OP)?;
                consume(tensors, &elements.x);
                if let Some(dropped) = dropped {
                    dropped.consume(tensors);
                }
            }
            Self::Mask(mask) => return mask.launch(tensors),
            Self::Backward { elements, dy, sum, passed_on } => {
                elements.backward(tensors, dy, sum.as_deref(), passed_on.as_deref())?
            }
            Self::RowSum(sum) if is_made(tensors, &sum.out) => consume(tensors, &sum.input),
            Self::RowSum(sum) => return sum.launch(tensors),
        }
        Ok(Done::All)
    }
}

impl Elements {
    fn input(&self, tensors: &Tensors) -> Result<Input, KernelError> {
        if !ExpectedScalar::are_there(&self.scalars, tensors) {
            return Err(unsupported(OP, "its operations, but with other constants"));
        }
        Input::of(tensors, &self.x, OP)
    }

    fn backward(
        &self,
        tensors: &mut Tensors,
        dy: &TensorIr,
        sum: Option<&Sum>,
        passed_on: Option<&Dropped>,
    ) -> Result<(), KernelError> {
        let dy = passed_on.map_or(dy, |dropped| &dropped.x);
        let (mut x, mut read) = (self.input(tensors)?, Input::of(tensors, dy, OP)?);
        // Rows are added up of tensors that have rows. Strided inputs are two passes more: about the time of Burn's
        // one kernel, and a fraction of that of its operations one by one.
        let is_apart = match passed_on {
            Some(dropped) => !dropped.lies_as(tensors, &x)?,
            None => false,
        };
        if sum.is_some() || is_apart || !x.lies_as(&read) {
            (x, read) = (x.contiguous(), read.contiguous());
        }
        let kept = passed_on.map(|dropped| dropped.kept(tensors, &x)).transpose()?;
        let call = GeluCall { kept, ..GeluCall::alone(&x.buffer(x.elements())) };
        let dy_buffer = read.buffer(read.elements());
        let with_sum = sum.and_then(|sum| {
            let columns = sum.columns(tensors)?;
            match gelu_call_backward_sum(&x.client, columns, &call, &dy_buffer) {
                Ok(gradients) => Some((sum, gradients)),
                Err(reason) => {
                    tell_once(GeluPass::NAME, &reason);
                    None
                }
            }
        });
        match with_sum {
            Some((sum, GeluGradients { dx, db })) => {
                register_output(tensors, &self.out, &x, dx, OP)?;
                register_output(tensors, &sum.out, &x, db, OP)?;
            }
            None => {
                let dx = gelu_call_backward(&x.client, &call, &dy_buffer)?;
                register_in_order(tensors, &self.out, &x, dx, OP)?;
            }
        }
        for input in [&self.x, dy] {
            consume(tensors, input);
        }
        if let Some(dropped) = passed_on {
            dropped.consume(tensors);
        }
        Ok(())
    }
}
