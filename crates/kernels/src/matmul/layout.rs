//! How tensor cores take an operand: as it lies, or copied into shape.

use super::{MatmulProblem, Operand, problem::is_fp8};
use crate::{buffer::Buffer, device::ALIGNMENT_BYTES};

/// Which way the rows of an operand run for tensor cores, and whether it is copied for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct OperandLayout {
    /// Rows run along k; else along the rows or columns of the output.
    pub(super) k_major: bool,
    /// It has to be copied first: its rows are not contiguous or not aligned as it lies.
    pub(super) copied: bool,
}

/// An operand by the dimensions that both operands have: those of the output, and k.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperandWalk {
    pub(super) operand: Operand,
    /// Rows or columns of the output, and the distance between them.
    pub(super) mn: usize,
    pub(super) mn_stride: usize,
    pub(super) k: usize,
    pub(super) k_stride: usize,
    /// Matrices along each batch dimension; 1 where one serves all.
    pub(super) matrices: [usize; 2],
}

impl OperandWalk {
    /// The left operand.
    pub(super) fn lhs(problem: &MatmulProblem) -> Self {
        let Operand { row_stride, column_stride, .. } = problem.lhs;
        Self::new(problem, problem.lhs, problem.m, row_stride, column_stride)
    }

    /// The right operand.
    pub(super) fn rhs(problem: &MatmulProblem) -> Self {
        let Operand { row_stride, column_stride, .. } = problem.rhs;
        Self::new(problem, problem.rhs, problem.rhs_columns(), column_stride, row_stride)
    }

    fn new(
        problem: &MatmulProblem,
        operand: Operand,
        mn: usize,
        mn_stride: usize,
        k_stride: usize,
    ) -> Self {
        let matrices = [0, 1].map(|dim| match operand.batch_strides[dim] {
            0 => 1,
            _ => problem.batch[dim],
        });
        Self { operand, mn, mn_stride, k: problem.k, k_stride, matrices }
    }

    /// Whether rows or columns of the output are neighbors.
    fn lies_across_k(&self) -> bool {
        self.mn_stride == 1 || self.mn == 1
    }

    /// Whether k is.
    fn lies_along_k(&self) -> bool {
        self.k_stride == 1 || self.k == 1
    }

    /// Whether it is an operand of 8 bits that runs across k.
    pub(super) fn is_fp8_across_k(&self) -> bool {
        is_fp8(self.operand.dtype) && self.lies_across_k() && !self.lies_along_k()
    }

    /// How tensor cores take it from `memory`, those that take its type across k or not.
    pub(super) fn layout(&self, memory: &Buffer, across_k: bool) -> OperandLayout {
        let offset = memory.offset_bytes();
        self.layout_at(offset, across_k)
    }

    /// As [`layout`](Self::layout), for memory that begins at byte `offset` of its allocation.
    fn layout_at(&self, offset: u64, across_k: bool) -> OperandLayout {
        let bytes = self.operand.dtype.size();
        let aligned = |stride: usize, size: usize| {
            size == 1 || (stride > 0 && (stride * bytes).is_multiple_of(ALIGNMENT_BYTES))
        };
        let base_aligned = offset.is_multiple_of(ALIGNMENT_BYTES as u64)
            && (0..2).all(|dim| aligned(self.operand.batch_strides[dim], self.matrices[dim]));
        let across = across_k && self.lies_across_k();
        let along = self.lies_along_k();
        if base_aligned && along && aligned(self.mn_stride, self.mn) {
            return OperandLayout { k_major: true, copied: false };
        }
        if base_aligned && across && aligned(self.k_stride, self.k) {
            return OperandLayout { k_major: false, copied: false };
        }
        OperandLayout { k_major: !across || along, copied: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::{F32Precision, TensorLayout};
    use cubecl::ir::{ElemType, FloatKind};

    fn lhs(strides: [usize; 2], kind: FloatKind, offset: u64, across_k: bool) -> (bool, bool) {
        let dtype = ElemType::Float(kind);
        let lhs = TensorLayout { shape: &[64, 48], strides: &strides, dtype };
        let rhs = TensorLayout { shape: &[48, 32], strides: &[32, 1], dtype };
        let out = if dtype.size() == 1 { ElemType::Float(FloatKind::BF16) } else { dtype };
        let problem = MatmulProblem::new(lhs, rhs, out, F32Precision::Tf32).unwrap();
        let layout = OperandWalk::lhs(&problem).layout_at(offset, across_k);
        (layout.k_major, layout.copied)
    }

    #[test]
    fn aligned_rows_are_taken_as_they_lie() {
        assert_eq!(lhs([48, 1], FloatKind::BF16, 0, true), (true, false));
        assert_eq!(lhs([1, 64], FloatKind::BF16, 32, true), (false, false));
    }

    #[test]
    fn rows_or_memory_that_are_not_aligned_are_copied() {
        assert_eq!(lhs([49, 1], FloatKind::BF16, 0, true), (true, true));
        assert_eq!(lhs([48, 1], FloatKind::BF16, 2, true), (true, true));
        assert_eq!(lhs([1, 65], FloatKind::BF16, 0, true), (false, true));
        // Four bytes each: 66 of them are no multiple of 16 bytes.
        assert_eq!(lhs([1, 66], FloatKind::F32, 0, true), (false, true));
    }

    #[test]
    fn rows_across_k_are_copied_along_k_where_tensor_cores_do_not_take_them() {
        for kind in [FloatKind::F32, FloatKind::E4M3] {
            assert_eq!(lhs([1, 64], kind, 0, false), (true, true), "{kind:?}");
            assert_eq!(lhs([1, 64], kind, 0, true), (false, false), "{kind:?}");
            // Rows that are k's anyhow.
            assert_eq!(lhs([48, 1], kind, 0, true), (true, false), "{kind:?}");
        }
        assert_eq!(lhs([1, 65], FloatKind::E4M3, 0, true), (false, true));
    }
}
