use crate::{
    KernelError,
    buffer::{Buffer, check_float},
};
use cubecl::ir::{ElemType, IntKind};

pub(super) const OP: &str = "embedding_backward";

/// What a gradient asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EmbeddingProblem {
    /// Indices, and rows of `dy`.
    pub indices: usize,
    /// Rows of `dw`.
    pub rows: usize,
    /// Columns of both.
    pub columns: usize,
    /// Type of both.
    pub dtype: ElemType,
}

impl EmbeddingProblem {
    /// The problem that these tensors pose.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for other types, and for tensors of 2^31 elements or more;
    /// [`KernelError::InvalidProblem`] when they do not go together.
    pub fn new(
        index: &Buffer,
        dy: &Buffer,
        dw: &Buffer,
        columns: usize,
    ) -> Result<Self, KernelError> {
        let unsupported = |reason| Err(KernelError::Unsupported { op: OP, reason });
        if index.dtype != ElemType::Int(IntKind::I32) {
            return unsupported(format!("indices of {:?}; it takes i32", index.dtype));
        }
        check_float(OP, "dy", dy.dtype)?;
        let indices = index.elements;
        for (argument, buffer) in [("index", index), ("dy", dy), ("dw", dw)] {
            if i32::try_from(buffer.elements).is_err() {
                return unsupported(format!("{} elements of {argument}", buffer.elements));
            }
        }
        let rows = dw.elements / columns.max(1);
        for (argument, buffer, rows) in [("dy", dy, indices), ("dw", dw, rows)] {
            if buffer.dtype != dy.dtype || buffer.elements != rows * columns {
                let expected = format!("{rows} rows of {columns} elements of {:?}", dy.dtype);
                return Err(buffer.mismatch(OP, argument, expected));
            }
        }
        Ok(Self { indices, rows, columns, dtype: dy.dtype })
    }
}
