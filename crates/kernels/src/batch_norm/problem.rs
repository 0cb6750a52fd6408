use crate::{
    KernelError,
    buffer::{Buffer, F32, check_float},
};
use cubecl::ir::ElemType;

pub(super) const STATISTICS: &str = "batch_norm_statistics";
pub(super) const RUNNING: &str = "batch_norm_running";
pub(super) const APPLY: &str = "batch_norm_apply";
pub(super) const BACKWARD: &str = "batch_norm_backward";

/// What batch normalization asks. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormProblem {
    /// Numbers that a channel's statistics are taken over: images times pixels.
    pub rows: usize,
    /// Channels, contiguous in memory.
    pub channels: usize,
    /// Distance between `x[r]` and `x[r + 1]`, at least `channels`.
    pub row_stride: usize,
    /// Distance between `dy[r]` and `dy[r + 1]`, at least `channels`. Only backward reads it.
    pub dy_stride: usize,
    /// Type of x, the residual, y and their gradients.
    pub dtype: ElemType,
    /// Type of gamma, beta and their gradients: f32 or `dtype`.
    pub parameter: ElemType,
    /// Is added to the variance.
    pub epsilon: f64,
}

impl BatchNormProblem {
    /// The problem of contiguous rows.
    pub fn contiguous(
        rows: usize,
        channels: usize,
        dtype: ElemType,
        parameter: ElemType,
        epsilon: f64,
    ) -> Self {
        let (row_stride, dy_stride) = (channels, channels);
        Self { rows, channels, row_stride, dy_stride, dtype, parameter, epsilon }
    }

    /// Checks what the numbers have to be, in the name of `op`.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for a stride below `channels` and an epsilon that is negative or no number;
    /// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16, parameters that are neither f32
    /// nor of that type, empty tensors, and tensors beyond 32-bit indices.
    pub fn validate(&self, op: &'static str) -> Result<(), KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 24;
        let Self { rows, channels, row_stride, dy_stride, dtype, parameter, epsilon } = *self;
        let unsupported = |reason: String| Err(KernelError::Unsupported { op, reason });
        check_float(op, "rows", dtype)?;
        if parameter != F32 && parameter != dtype {
            return unsupported(format!("rows of {dtype:?} with parameters of {parameter:?}"));
        }
        if rows == 0 || channels == 0 {
            return unsupported(format!("an empty tensor of {rows} rows and {channels} channels"));
        }
        for (argument, stride) in [("row_stride", row_stride), ("dy_stride", dy_stride)] {
            if stride < channels {
                return Err(KernelError::invalid(
                    op,
                    argument,
                    format!("at least {channels}, the channels of a row"),
                    stride,
                ));
            }
            let fits = |end: usize| u32::try_from(end).is_ok();
            if !(rows - 1)
                .checked_mul(stride)
                .and_then(|end| end.checked_add(channels + STEP))
                .is_some_and(fits)
            {
                return unsupported(format!("{rows} rows that are {stride} elements apart"));
            }
        }
        if !(epsilon >= 0.0 && epsilon.is_finite()) {
            return Err(KernelError::invalid(op, "epsilon", "a number from 0", epsilon));
        }
        Ok(())
    }

    /// Elements of a tensor of rows, without what lies between them.
    pub fn elements(&self) -> usize {
        self.rows * self.channels
    }

    /// Elements from the first to the last of rows that are `stride` apart.
    pub(super) fn span(&self, stride: usize) -> usize {
        (self.rows - 1) * stride + self.channels
    }

    /// Bytes that the statistics have to move: x in, mean and variance out.
    pub fn statistics_bytes(&self) -> usize {
        self.tensor_bytes() + 2 * self.channels * F32.size()
    }

    /// Bytes that y has to move, with f32 statistics: x and a residual in, y out, and what each channel has.
    pub fn apply_bytes(&self, residual: bool) -> usize {
        let tensors = 2 + usize::from(residual);
        tensors * self.tensor_bytes() + 2 * self.channels * (F32.size() + self.parameter.size())
    }

    /// Bytes that the gradients have to move, with f32 statistics. x and dy, and after a `ReLU` y, are read
    /// twice: the sums have to be there before dx. With a residual its gradient is written too.
    pub fn backward_bytes(&self, relu: bool, residual: bool) -> usize {
        let tensors = 2 * (2 + usize::from(relu)) + 1 + usize::from(residual);
        // gamma in, its gradient and that of beta out.
        let of_channel = 2 * F32.size() + 3 * self.parameter.size();
        tensors * self.tensor_bytes() + self.channels * of_channel
    }

    fn tensor_bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Whether `buffer` holds rows of channels that are `stride` apart.
    pub(super) fn check_strided(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
        stride: usize,
    ) -> Result<(), KernelError> {
        buffer.check_span(op, argument, self.span(stride), self.dtype)?;
        buffer.check_start(op, argument)
    }

    /// Whether `buffer` holds contiguous rows of channels.
    pub(super) fn check_rows(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        check(op, argument, buffer, self.elements(), self.dtype)
    }

    /// Whether `buffer` is a parameter.
    pub(super) fn check_parameter(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        check(op, argument, buffer, self.channels, self.parameter)
    }

    /// Whether these are a mean and a variance for each channel, both in f32 or in the type of x.
    pub(super) fn check_statistics(
        &self,
        op: &'static str,
        mean: &Buffer,
        variance: &Buffer,
    ) -> Result<(), KernelError> {
        let dtype = if mean.dtype == self.dtype { self.dtype } else { F32 };
        check(op, "mean", mean, self.channels, dtype)?;
        check(op, "variance", variance, self.channels, dtype)
    }
}

fn check(
    op: &'static str,
    argument: &'static str,
    buffer: &Buffer,
    elements: usize,
    dtype: ElemType,
) -> Result<(), KernelError> {
    buffer.check(op, argument, elements, dtype)?;
    buffer.check_start(op, argument)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    fn plain() -> BatchNormProblem {
        BatchNormProblem::contiguous(100, 10, BF16, F32, 1e-5)
    }

    #[test]
    fn bytes_are_those_of_each_pass() {
        let problem = plain();
        assert_eq!(problem.statistics_bytes(), 2000 + 80);
        assert_eq!([false, true].map(|it| problem.apply_bytes(it)), [4160, 6160]);
        assert_eq!(problem.backward_bytes(false, false), 5 * 2000 + 200);
        assert_eq!(problem.backward_bytes(true, true), 8 * 2000 + 200);
    }

    #[test]
    fn numbers_that_contradict_each_other_are_named() {
        let named = |problem: BatchNormProblem| match problem.validate(APPLY) {
            Err(KernelError::InvalidProblem { op: APPLY, argument, .. }) => argument,
            other => panic!("{problem:?} gave {other:?}"),
        };
        assert!(plain().validate(APPLY).is_ok());
        assert_eq!(named(BatchNormProblem { row_stride: 9, ..plain() }), "row_stride");
        assert_eq!(named(BatchNormProblem { dy_stride: 9, ..plain() }), "dy_stride");
        for epsilon in [-1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(named(BatchNormProblem { epsilon, ..plain() }), "epsilon");
        }
    }

    #[test]
    fn what_no_kernel_serves_is_declined() {
        let integers = ElemType::Int(cubecl::ir::IntKind::I32);
        let f16 = ElemType::Float(FloatKind::F16);
        for problem in [
            BatchNormProblem { rows: 0, ..plain() },
            BatchNormProblem { channels: 0, ..plain() },
            BatchNormProblem { dtype: integers, ..plain() },
            BatchNormProblem { parameter: f16, ..plain() },
            BatchNormProblem { rows: 1 << 29, ..plain() },
            BatchNormProblem { dy_stride: 1 << 30, ..plain() },
            BatchNormProblem { rows: usize::MAX, row_stride: usize::MAX, ..plain() },
        ] {
            let result = problem.validate(STATISTICS);
            assert!(matches!(result, Err(KernelError::Unsupported { .. })), "{problem:?}");
        }
    }
}
