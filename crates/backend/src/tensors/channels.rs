//! Images and sequences as rows of channels.

use super::{contiguous, contiguous_buffer, contiguous_tensor, rows_of};
use blackburn_kernels::buffer::{Buffer, Rows};
use burn_cubecl::{
    ops::{permute_nchw_to_nhwc, permute_nhwc_to_nchw},
    tensor::CubeTensor,
};

/// A tensor of channels in the second dimension, as rows of them.
pub(crate) struct Channels {
    /// With channels in the last dimension.
    tensor: CubeTensor,
    pub(crate) rows: Rows,
}

impl Channels {
    /// As it lies if channels follow each other there, and otherwise a copy.
    pub(crate) fn of(tensor: CubeTensor) -> Self {
        let tensor = permute_nchw_to_nhwc(tensor);
        match Self::in_place(&tensor) {
            Some(rows) => Self { tensor, rows },
            None => {
                let tensor = contiguous(tensor);
                let rows = Rows::one(contiguous_buffer(tensor.clone()));
                Self { rows: Self::apart(&tensor, rows), tensor }
            }
        }
    }

    /// As it lies, if channels follow each other there.
    pub(crate) fn in_place_of(tensor: CubeTensor) -> Option<Self> {
        let tensor = permute_nchw_to_nhwc(tensor);
        Self::in_place(&tensor).map(|rows| Self { tensor, rows })
    }

    fn in_place(tensor: &CubeTensor) -> Option<Rows> {
        rows_of(tensor).map(|rows| Self::apart(tensor, rows))
    }

    /// What is one row, where nothing lies between rows, as those of channels.
    fn apart(tensor: &CubeTensor, rows: Rows) -> Rows {
        if !rows.is_contiguous() {
            return rows;
        }
        let shape = tensor.meta.shape();
        let channels = shape.last().copied().unwrap_or(1);
        let count = shape.num_elements() / channels.max(1);
        Rows { rows: count, columns: channels, pitch: channels, buffer: rows.buffer }
    }

    /// Its rows with nothing between them.
    pub(crate) fn contiguous(self) -> Buffer {
        if self.rows.is_contiguous() { self.rows.buffer } else { contiguous_buffer(self.tensor) }
    }

    /// A tensor of the same shape whose rows of channels are `buffer`.
    pub(crate) fn images(&self, buffer: Buffer) -> CubeTensor {
        let (shape, dtype) = (self.tensor.meta.shape().clone(), self.tensor.dtype);
        permute_nhwc_to_nchw(contiguous_tensor(&self.tensor, buffer, shape, dtype))
    }
}
