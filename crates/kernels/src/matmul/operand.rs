//! Operands as tensor cores take them.

use super::{
    Operand,
    layout::{OperandLayout, OperandWalk},
    pack::{PackSourceLaunch, ROWS, TILE, matmul_pack_kernel},
};
use crate::{
    KernelError, ahead,
    buffer::Buffer,
    device::{ALIGNMENT_BYTES, grid},
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// An operand whose rows are contiguous and aligned: rows of k for each row or column of the
/// output, or rows of those for each k.
#[derive(Clone, Debug)]
pub(super) struct AlignedOperand {
    pub(super) memory: Buffer,
    pub(super) k_major: bool,
    /// Elements from row to row.
    pub(super) pitch: usize,
    /// Elements from matrix to matrix, along the outer and the inner batch dimension.
    pub(super) batch_strides: [usize; 2],
    /// Matrices along each batch dimension; 1 where one serves all.
    pub(super) matrices: [usize; 2],
    /// Rows or columns of the output.
    pub(super) mn: usize,
    pub(super) k: usize,
}

impl AlignedOperand {
    /// Copied into shape if need be; it may lie across k if the plan takes its type so.
    pub(super) fn new(
        client: &Client,
        op: &'static str,
        walk: OperandWalk,
        memory: &Buffer,
        across_k: bool,
    ) -> Result<Self, KernelError> {
        let OperandWalk { operand, mn, mn_stride, k, k_stride, matrices } = walk;
        let OperandLayout { k_major, copied } = walk.layout(memory, across_k);
        let bytes = operand.dtype.size();
        let (rows, columns, row, column) =
            if k_major { (mn, k, mn_stride, k_stride) } else { (k, mn, k_stride, mn_stride) };
        if !copied {
            return Ok(Self {
                memory: memory.clone(),
                k_major,
                // Nobody steps over the rows of a single one, but they still need a distance.
                pitch: if rows == 1 { padded(columns, bytes) } else { row },
                batch_strides: operand.batch_strides,
                matrices,
                mn,
                k,
            });
        }
        let pitch = padded(columns, bytes);
        let matrix = rows * pitch;
        let packed = Buffer::empty(client, matrices[0] * matrices[1] * matrix, operand.dtype);
        let source = MatrixSource { memory, operand, matrices, rows, columns, row, column };
        source.pack(client, op, &packed, pitch)?;
        Ok(Self {
            memory: packed,
            k_major,
            pitch,
            batch_strides: [matrices[1] * matrix, matrix],
            matrices,
            mn,
            k,
        })
    }
}

/// `elements`, rounded up to whole aligned units.
fn padded(elements: usize, bytes: usize) -> usize {
    elements.next_multiple_of(ALIGNMENT_BYTES / bytes)
}

/// An operand that has to be copied, as rows and columns of the copy.
pub(crate) struct MatrixSource<'a> {
    pub(crate) memory: &'a Buffer,
    pub(crate) operand: Operand,
    pub(crate) matrices: [usize; 2],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements from row to row and from column to column.
    pub(crate) row: usize,
    pub(crate) column: usize,
}

impl MatrixSource<'_> {
    /// Copies the rows to `packed`, `pitch` elements apart, for `op`. What lies behind a shorter row stays as it was.
    pub(crate) fn pack(
        &self,
        client: &Client,
        op: &'static str,
        packed: &Buffer,
        pitch: usize,
    ) -> Result<(), KernelError> {
        let cubes = [
            self.columns.div_ceil(TILE as usize),
            self.rows.div_ceil(TILE as usize),
            self.matrices[0] * self.matrices[1],
        ];
        if u32::try_from(packed.elements).is_err() {
            let reason = format!("{} elements of an aligned operand", packed.elements);
            return Err(KernelError::unsupported(op, reason));
        }
        // Bits are moved, whatever they stand for.
        let element = ElemType::UInt(match self.operand.dtype.size() {
            1 => UIntKind::U8,
            2 => UIntKind::U16,
            _ => UIntKind::U32,
        });
        let [outer, inner] = self.operand.batch_strides;
        // SAFETY: the source holds the problem's span, whose indices fit 32 bits, the copy was
        // allocated for rows of `pitch` elements; the kernel stops rows and columns at their ends.
        ahead::launch(client, |client| unsafe {
            matmul_pack_kernel::launch_unchecked(
                client,
                grid(op, client, cubes)?,
                CubeDim::new_2d(TILE, ROWS),
                self.memory.arg(1),
                packed.arg(1),
                PackSourceLaunch {
                    row: self.row as u32,
                    column: self.column as u32,
                    outer: outer as u32,
                    inner: inner as u32,
                    rows: self.rows as u32,
                    columns: self.columns as u32,
                    inner_batches: self.matrices[1] as u32,
                },
                pitch as u32,
                self.column != 1 && self.row == 1,
                element,
            );
            Ok(())
        })?;
        Ok(())
    }
}
