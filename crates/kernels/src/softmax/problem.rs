use crate::{
    KernelError,
    buffer::{Buffer, F32},
    cross_entropy::CrossEntropyProblem,
};
use cubecl::ir::{ElemType, IntKind};

pub(super) const I32: ElemType = ElemType::Int(IntKind::I32);

/// Rows that a pass reads, and in what type it writes as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SoftmaxProblem {
    /// Rows.
    pub rows: usize,
    /// Elements of a row, contiguous in memory.
    pub classes: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Type of what is read.
    pub dtype: ElemType,
    /// Type of what is written: the same, or one with more bits, or with fewer.
    pub out: ElemType,
}

impl SoftmaxProblem {
    /// Checks what the numbers have to be.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] without classes and for a stride that is shorter than a row;
    /// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16 and for rows beyond 32-bit
    /// indices.
    pub fn validate(&self) -> Result<(), KernelError> {
        self.of(self.dtype).validate()?;
        self.of(self.out).validate()
    }

    /// Elements from the first to the last.
    pub fn span(&self) -> usize {
        self.loss().span()
    }

    /// Bytes that [`softmax_sums`](super::softmax_sums) has to move: the rows in, and the logarithm of their
    /// sums, with the target's where one is picked, out.
    pub fn sums_bytes(&self) -> usize {
        self.rows * (self.classes * self.dtype.size() + 4 * F32.size())
    }

    /// Bytes that a pass over the elements has to move: the rows in, and as many elements out.
    pub fn elements_bytes(&self) -> usize {
        self.rows * self.classes * (self.dtype.size() + self.out.size())
    }

    /// Bytes that [`softmax_rows_backward`](super::softmax_rows_backward) has to move: y and dy in, dx out.
    pub fn backward_bytes(&self) -> usize {
        3 * self.rows * self.classes * self.dtype.size()
    }

    /// The cross-entropy of such rows.
    pub(super) fn loss(&self) -> CrossEntropyProblem {
        self.of(self.dtype)
    }

    fn of(&self, dtype: ElemType) -> CrossEntropyProblem {
        let Self { rows, classes, row_stride, .. } = *self;
        CrossEntropyProblem { rows, classes, row_stride, dtype, ignore_index: None, smoothing: 0.0 }
    }

    pub(super) fn check_rows(
        &self,
        op: &'static str,
        argument: &'static str,
        x: &Buffer,
    ) -> Result<(), KernelError> {
        x.check_span(op, argument, self.span(), self.dtype)
    }

    pub(super) fn check_numbers(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
        dtype: ElemType,
    ) -> Result<(), KernelError> {
        buffer.check(op, argument, self.rows, dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const GPT2: SoftmaxProblem = SoftmaxProblem {
        rows: 8192,
        classes: 50_257,
        row_stride: 50_432,
        dtype: ElemType::Float(FloatKind::BF16),
        out: F32,
    };

    #[test]
    fn sums_read_rows_once_and_elements_are_read_and_written_once() {
        GPT2.validate().expect("a problem of the size that this is for");
        let logits = 8192 * 50_257 * 2;
        assert_eq!(GPT2.sums_bytes() / logits, 1);
        assert_eq!(GPT2.elements_bytes() / logits, 3);
    }

    #[test]
    fn what_no_kernel_serves_is_refused() {
        let out = ElemType::Float(FloatKind::F64);
        let refused = SoftmaxProblem { out, ..GPT2 }.validate();
        assert!(matches!(refused, Err(KernelError::Unsupported { .. })));
        let refused = SoftmaxProblem { rows: 1 << 20, ..GPT2 }.validate();
        assert!(matches!(refused, Err(KernelError::Unsupported { .. })));
        let refused = SoftmaxProblem { row_stride: 9, ..GPT2 }.validate();
        assert!(matches!(refused, Err(KernelError::InvalidProblem { argument: "row_stride", .. })));
    }
}
