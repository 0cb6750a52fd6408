use crate::{
    KernelError,
    buffer::{Buffer, F32, check_float},
};
use cubecl::ir::ElemType;

pub(super) const FORWARD: &str = "layer_norm_forward";
pub(super) const BACKWARD: &str = "layer_norm_backward";

/// What rows are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Norm {
    /// Their deviation, after their mean was taken off.
    Layer,
    /// The root of the mean of their squares.
    Rms,
}

/// What the normalization of rows asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerNormProblem {
    /// Which normalization.
    pub norm: Norm,
    /// Rows, each normalized by itself.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Type of the rows.
    pub dtype: ElemType,
    /// Type of gamma and beta.
    pub parameter: ElemType,
    /// Whether there is a beta.
    pub bias: bool,
    /// Forward, whether a residual is added first; backward, whether there is a gradient of the sum.
    pub residual: bool,
    /// Forward, whether the steps in between are written, too; backward, whether it is from these.
    pub parts: bool,
    /// Whether there is a gamma. The backward pass from parts may go without.
    pub scaled: bool,
    /// Forward, whether a bias is added to the rows of the residual; backward, whether its gradient is asked for.
    pub residual_bias: bool,
    /// Whether the largest magnitude is asked for: forward that of y, backward that of the residual's gradient.
    pub watched: bool,
}

impl LayerNormProblem {
    /// Elements of the widest rows whose residual may have a bias: backward, units that hold more of a row have no
    /// registers for its sums.
    pub const WIDEST_WITH_BIAS: usize = 4096;

    /// Refuses rows that are too wide for a bias of the residual.
    pub(super) fn check_bias(&self, op: &'static str) -> Result<(), KernelError> {
        match self.residual_bias && self.width > Self::WIDEST_WITH_BIAS {
            true => {
                let reason = format!("a bias of the residual in rows of {} elements", self.width);
                Err(KernelError::unsupported(op, reason))
            }
            false => Ok(()),
        }
    }

    /// The problem that rows `x` and the factors gamma pose.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] when x is not rows of gamma's length;
    /// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16, for parameters that are
    /// neither f32 nor of the type of x, and for tensors beyond 32-bit indices.
    pub(super) fn new(
        op: &'static str,
        norm: Norm,
        x: &Buffer,
        gamma: &Buffer,
    ) -> Result<Self, KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 24;
        let unsupported = |reason: String| KernelError::Unsupported { op, reason };
        let (dtype, parameter, width) = (x.dtype, gamma.dtype, gamma.elements);
        check_float(op, "rows", dtype)?;
        if parameter != F32 && parameter != dtype {
            return Err(unsupported(format!("rows of {dtype:?} with a gamma of {parameter:?}")));
        }
        if u32::try_from(x.elements + STEP).is_err() {
            return Err(unsupported(format!("{} elements", x.elements)));
        }
        if x.elements > 0 && (width == 0 || !x.elements.is_multiple_of(width)) {
            return Err(KernelError::invalid(
                op,
                "x",
                format!("rows of {width} elements, as gamma has"),
                format!("{} elements", x.elements),
            ));
        }
        let rows = x.elements.checked_div(width).unwrap_or(0);
        Ok(Self {
            norm,
            rows,
            width,
            dtype,
            parameter,
            bias: false,
            residual: false,
            parts: false,
            scaled: true,
            residual_bias: false,
            watched: false,
        })
    }

    /// Whether `buffer` is rows as x is.
    pub(super) fn check_rows(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        buffer.check(op, argument, self.rows * self.width, self.dtype)
    }

    /// Whether `buffer` is a parameter as gamma is.
    pub(super) fn check_parameter(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        buffer.check(op, argument, self.width, self.parameter)
    }

    /// Whether `buffer` is one f32 a row.
    pub(super) fn check_statistic(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        buffer.check(op, argument, self.rows, F32)
    }

    /// Bytes that the forward pass has to move: x in and y out, with a residual that in and the sum
    /// out, with parts two of them out, the parameters in, the statistics out.
    pub fn forward_bytes(&self) -> usize {
        let tensors = 2 + 2 * usize::from(self.residual) + 2 * usize::from(self.parts);
        tensors * self.tensor_bytes() + self.parameter_bytes() + self.statistics_bytes()
    }

    /// Bytes that the backward pass has to move: x and dy in and dx out, with a residual the gradient
    /// of the sum in, gamma and the statistics in, the gradients of the parameters out.
    pub fn backward_bytes(&self) -> usize {
        let tensors = if self.residual { 4 } else { 3 };
        let gamma = self.width * self.parameter.size();
        tensors * self.tensor_bytes() + self.statistics_bytes() + gamma + self.parameter_bytes()
    }

    fn tensor_bytes(&self) -> usize {
        self.rows * self.width * self.dtype.size()
    }

    fn parameter_bytes(&self) -> usize {
        let parameters = 1 + usize::from(self.bias) + usize::from(self.residual_bias);
        parameters * self.width * self.parameter.size()
    }

    fn statistics_bytes(&self) -> usize {
        let numbers = if self.norm == Norm::Rms { 1 } else { 2 };
        numbers * self.rows * F32.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    #[test]
    fn a_residual_moves_two_tensors_more_forward_and_one_more_backward() {
        let plain = LayerNormProblem {
            norm: Norm::Layer,
            rows: 100,
            width: 10,
            dtype: ElemType::Float(FloatKind::BF16),
            parameter: F32,
            bias: true,
            residual: false,
            parts: false,
            scaled: true,
            residual_bias: false,
            watched: false,
        };
        let with_residual = LayerNormProblem { residual: true, ..plain };
        assert_eq!(plain.forward_bytes(), 2 * 2000 + 2 * 40 + 2 * 400);
        assert_eq!(with_residual.forward_bytes() - plain.forward_bytes(), 2 * 2000);
        assert_eq!(plain.backward_bytes(), 3 * 2000 + 3 * 40 + 2 * 400);
        assert_eq!(with_residual.backward_bytes() - plain.backward_bytes(), 2000);
        let with_bias = LayerNormProblem { residual_bias: true, ..with_residual };
        assert_eq!(with_bias.forward_bytes() - with_residual.forward_bytes(), 40);
        assert_eq!(with_bias.backward_bytes() - with_residual.backward_bytes(), 40);
        let rms = LayerNormProblem { norm: Norm::Rms, bias: false, ..plain };
        assert_eq!(rms.forward_bytes(), 2 * 2000 + 40 + 400);
    }
}
