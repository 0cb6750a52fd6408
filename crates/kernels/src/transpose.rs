//! Copies of matrices whose columns follow each other in memory, such that their rows do.
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | source, read | rows x columns, columns `pitch` elements apart | any of 1, 2 or 4 bytes |
//! | target, overwritten | rows x columns | the same |
//!
//! A square is read along columns and turned in shared memory, so that both sides are read and written in whole
//! segments.

use crate::{
    KernelError,
    buffer::Buffer,
    matmul::{Operand, mma_parts::MatrixSource},
};
use cubecl::client::Client;

const OP: &str = "transpose";

/// Writes `source`, whose `columns` lie `pitch` elements apart, to `target` row by row.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the two do not go together; [`KernelError::Unsupported`] for elements of 8
/// bytes, and for matrices of 2^32 elements or more.
pub fn transpose(
    client: &Client,
    source: &Buffer,
    target: &Buffer,
    columns: usize,
    pitch: usize,
) -> Result<(), KernelError> {
    let rows = target.elements / columns.max(1);
    target.check(OP, "target", rows * columns, source.dtype)?;
    if rows * columns == 0 {
        return Ok(());
    }
    let span = (columns - 1) * pitch + rows;
    if pitch < rows || source.elements < span {
        let expected = format!("{columns} columns of {rows} elements, {pitch} apart");
        return Err(source.mismatch(OP, "source", expected));
    }
    if source.dtype.size() > 4 || u32::try_from(span).is_err() {
        let reason = format!("{span} elements of {:?}", source.dtype);
        return Err(KernelError::unsupported(OP, reason));
    }
    let (row, column) = (1, pitch);
    let operand = Operand {
        row_stride: row,
        column_stride: column,
        batch_strides: [0; 2],
        dtype: source.dtype,
    };
    let matrices = [1; 2];
    let matrix = MatrixSource { memory: source, operand, matrices, rows, columns, row, column };
    matrix.pack(client, OP, target, columns)
}
