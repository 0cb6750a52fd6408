use crate::{
    KernelError,
    buffer::{Buffer, F32, check_float},
};
use cubecl::ir::{ElemType, IntKind};

pub(super) const OP: &str = "cross_entropy";

pub(super) const I32: ElemType = ElemType::Int(IntKind::I32);

/// What becomes of the losses of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their mean over the rows that are not ignored.
    Mean,
    /// Their sum.
    Sum,
}

/// What a cross-entropy asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyProblem {
    /// Rows, each with a target.
    pub rows: usize,
    /// Classes, contiguous in memory.
    pub classes: usize,
    /// Elements from one row of logits to the next.
    pub row_stride: usize,
    /// Type of the logits and of their gradient.
    pub dtype: ElemType,
    /// The target of rows that do not count.
    pub ignore_index: Option<i32>,
    /// The share of the target that is spread evenly over all classes, from 0 to below 1.
    pub smoothing: f32,
}

impl CrossEntropyProblem {
    /// Checks what the numbers have to be.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] without classes, for a stride that is shorter than a row and a
    /// smoothing out of its range; [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16
    /// and for logits beyond 32-bit indices.
    pub fn validate(&self) -> Result<(), KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 24;
        check_float(OP, "logits", self.dtype)?;
        if self.classes == 0 {
            return Err(KernelError::invalid(OP, "logits", "at least one class", "0 classes"));
        }
        if self.row_stride < self.classes {
            let expected = format!("at least the {} classes", self.classes);
            return Err(KernelError::invalid(OP, "row_stride", expected, self.row_stride));
        }
        if !(0.0..1.0).contains(&self.smoothing) {
            let expected = "a number from 0 to below 1";
            return Err(KernelError::invalid(OP, "smoothing", expected, self.smoothing));
        }
        let span = self.rows.checked_mul(self.row_stride).and_then(|span| span.checked_add(STEP));
        if span.is_none_or(|span| u32::try_from(span).is_err()) {
            let reason = format!("{} rows, {} elements apart", self.rows, self.row_stride);
            return Err(KernelError::Unsupported { op: OP, reason });
        }
        Ok(())
    }

    /// Elements from the first to the last logit.
    pub fn span(&self) -> usize {
        self.rows.checked_sub(1).map_or(0, |before| before * self.row_stride + self.classes)
    }

    /// Bytes that the forward pass has to move: logits and targets in, losses and `lse` out.
    pub fn forward_bytes(&self) -> usize {
        self.rows * (self.classes * self.dtype.size() + I32.size() + 2 * F32.size())
    }

    /// Bytes that the backward pass has to move: logits, targets and `lse` in, the gradient out.
    pub fn backward_bytes(&self) -> usize {
        self.rows * (2 * self.classes * self.dtype.size() + I32.size() + F32.size())
    }

    pub(super) fn check_logits(&self, logits: &Buffer) -> Result<(), KernelError> {
        logits.check_span(OP, "logits", self.span(), self.dtype)
    }

    pub(super) fn check_targets(&self, targets: &Buffer) -> Result<(), KernelError> {
        targets.check(OP, "targets", self.rows, I32)
    }

    pub(super) fn check_row_values(
        &self,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        buffer.check(OP, argument, self.rows, F32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const GPT2: CrossEntropyProblem = CrossEntropyProblem {
        rows: 8192,
        classes: 50_257,
        row_stride: 50_257,
        dtype: ElemType::Float(FloatKind::BF16),
        ignore_index: None,
        smoothing: 0.0,
    };

    #[test]
    fn gpt2_is_served_and_reads_its_logits_once_forward_and_moves_them_twice_backward() {
        GPT2.validate().expect("a problem of the size that this is for");
        let logits = 8192 * 50_257 * 2;
        assert_eq!(GPT2.forward_bytes() / logits, 1);
        assert_eq!(GPT2.backward_bytes() / logits, 2);
    }

    #[test]
    fn the_argument_at_fault_is_named() {
        let named = |problem: CrossEntropyProblem| match problem.validate() {
            Err(KernelError::InvalidProblem { argument, .. }) => argument,
            Err(KernelError::Unsupported { .. }) => "unsupported",
            other => panic!("{other:?}"),
        };
        assert_eq!(named(CrossEntropyProblem { classes: 0, ..GPT2 }), "logits");
        assert_eq!(named(CrossEntropyProblem { row_stride: 50_256, ..GPT2 }), "row_stride");
        assert_eq!(named(CrossEntropyProblem { smoothing: 1.0, ..GPT2 }), "smoothing");
        assert_eq!(named(CrossEntropyProblem { smoothing: f32::NAN, ..GPT2 }), "smoothing");
        assert_eq!(named(CrossEntropyProblem { rows: 1 << 20, ..GPT2 }), "unsupported");
        let dtype = ElemType::Int(IntKind::I32);
        assert_eq!(named(CrossEntropyProblem { dtype, ..GPT2 }), "unsupported");
    }
}
