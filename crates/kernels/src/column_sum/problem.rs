use crate::{
    KernelError,
    buffer::{Buffer, check_float},
};
use cubecl::ir::ElemType;
use std::ops::Range;

pub(super) const OP: &str = "column_sum";

/// What a column sum asks. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnSumProblem {
    /// Independent sums.
    pub outer: usize,
    /// Terms of each sum.
    pub rows: usize,
    /// Columns, contiguous in memory.
    pub columns: usize,
    /// Distance between `x[o]` and `x[o + 1]`.
    pub outer_stride: usize,
    /// Distance between `x[o, r]` and `x[o, r + 1]`.
    pub row_stride: usize,
    /// Type of input and output.
    pub dtype: ElemType,
}

impl ColumnSumProblem {
    /// Views a tensor of `shape` and `strides` as `[outer, rows, columns]`, where the dimensions
    /// `axes`, which are summed, make the rows.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] when `axes` or `strides` do not go with `shape`;
    /// [`KernelError::Unsupported`] for other dtypes, sums along the last dimension, empty tensors,
    /// layouts that are no such view, and tensors beyond 32-bit indices.
    pub fn new(
        shape: &[usize],
        strides: &[usize],
        axes: Range<usize>,
        dtype: ElemType,
    ) -> Result<Self, KernelError> {
        let unsupported = |reason: String| KernelError::Unsupported { op: OP, reason };
        if strides.len() != shape.len() {
            return Err(KernelError::invalid(
                OP,
                "strides",
                format!("{} strides, one a dimension", shape.len()),
                strides.len(),
            ));
        }
        if axes.is_empty() || axes.end > shape.len() {
            return Err(KernelError::invalid(
                OP,
                "axes",
                format!("at least one dimension, and only ones below {}", shape.len()),
                format!("{axes:?}"),
            ));
        }
        check_float(OP, "x", dtype)?;
        let size = |dims: Range<usize>| -> usize { shape[dims].iter().product() };
        let stride = |dims: Range<usize>| {
            collapse(&shape[dims.clone()], &strides[dims]).ok_or_else(|| KernelError::Unsupported {
                op: OP,
                reason: format!("shape {shape:?} with strides {strides:?}, summed over {axes:?}"),
            })
        };
        let (before, after) = (0..axes.start, axes.end..shape.len());
        let (outer, rows, columns) =
            (size(before.clone()), size(axes.clone()), size(after.clone()));
        if outer * rows * columns == 0 {
            return Err(unsupported("an empty tensor".into()));
        }
        if columns == 1 {
            return Err(unsupported("a sum along the last dimension".into()));
        }
        if stride(after)? != 1 {
            return Err(unsupported(format!("columns apart: {shape:?}, strides {strides:?}")));
        }
        let (outer_stride, row_stride) = (stride(before)?, stride(axes.clone())?);
        let problem = Self { outer, rows, columns, outer_stride, row_stride, dtype };
        if u32::try_from(problem.span()).is_err() {
            return Err(unsupported(format!("{} elements apart", problem.span())));
        }
        Ok(problem)
    }

    /// Elements from the first to the last that is read.
    pub fn span(&self) -> usize {
        (self.outer - 1) * self.outer_stride + (self.rows - 1) * self.row_stride + self.columns
    }

    /// Bytes that have to be moved: x in, y out.
    pub fn bytes(&self) -> usize {
        self.outer * self.columns * (self.rows + 1) * self.dtype.size()
    }

    pub(super) fn check_input(&self, x: &Buffer) -> Result<(), KernelError> {
        x.check_span(OP, "x", self.span(), self.dtype)
    }
}

/// The one stride by which these dimensions are walked in order, if there is one. Dimensions of
/// one element have no say; with no other, the stride is 1.
fn collapse(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let mut dims = shape.iter().zip(strides).rev().filter(|(size, _)| **size != 1);
    let Some((size, stride)) = dims.next() else { return Some(1) };
    let mut next = size * stride;
    for (size, stride) in dims {
        if *stride != next {
            return None;
        }
        next = size * stride;
    }
    Some(*stride)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const F32: ElemType = ElemType::Float(FloatKind::F32);

    #[test]
    fn contiguous_tensors_collapse_around_the_axis() {
        let p = ColumnSumProblem::new(&[2, 3, 4, 5], &[60, 20, 5, 1], 1..2, F32).unwrap();
        assert_eq!((p.outer, p.rows, p.columns), (2, 3, 20));
        assert_eq!((p.outer_stride, p.row_stride, p.span()), (60, 20, 120));
    }

    #[test]
    fn rows_may_be_padded_and_batches_may_follow_them() {
        let p = ColumnSumProblem::new(&[6, 5], &[8, 1], 0..1, F32).unwrap();
        assert_eq!((p.outer, p.row_stride, p.span()), (1, 8, 45));
        // A batch of one has no stride of its own.
        let p = ColumnSumProblem::new(&[1, 6, 5], &[999, 8, 1], 1..2, F32).unwrap();
        assert_eq!((p.outer, p.row_stride), (1, 8));
    }

    #[test]
    fn several_dimensions_are_summed_at_once_where_one_stride_walks_them() {
        let p = ColumnSumProblem::new(&[8, 16, 5], &[80, 5, 1], 0..2, F32).unwrap();
        assert_eq!((p.outer, p.rows, p.columns, p.row_stride), (1, 128, 5, 5));
        // Padding between the batches breaks the walk.
        assert!(ColumnSumProblem::new(&[8, 16, 5], &[96, 5, 1], 0..2, F32).is_err());
    }

    #[test]
    fn what_is_no_such_view_is_declined() {
        let declined = |shape: &[usize], strides: &[usize], axes| {
            matches!(
                ColumnSumProblem::new(shape, strides, axes, F32),
                Err(KernelError::Unsupported { .. })
            )
        };
        assert!(declined(&[4, 5], &[5, 1], 1..2), "the last dimension");
        assert!(declined(&[4, 5], &[1, 4], 0..1), "transposed columns");
        assert!(declined(&[2, 3, 4, 5], &[60, 1, 15, 3], 1..2), "columns that do not collapse");
        assert!(declined(&[0, 5], &[5, 1], 0..1), "an empty tensor");
        let integers = ElemType::Int(cubecl::ir::IntKind::I32);
        assert!(ColumnSumProblem::new(&[4, 5], &[5, 1], 0..1, integers).is_err());
    }

    #[test]
    fn arguments_that_contradict_each_other_are_named() {
        let error = ColumnSumProblem::new(&[4, 5], &[5, 1], 2..3, F32).unwrap_err();
        assert!(matches!(error, KernelError::InvalidProblem { argument: "axes", .. }));
        let error = ColumnSumProblem::new(&[4, 5], &[1], 0..1, F32).unwrap_err();
        assert!(matches!(error, KernelError::InvalidProblem { argument: "strides", .. }));
    }
}
