//! Tensors as rows along their last dimension, as kernels read them.

use super::contiguous;
use blackburn_kernels::buffer::Buffer;
use burn::{
    backend::TensorMetadata,
    tensor::{DType, Shape},
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Metadata;
use cubecl::{client::Client, server::Handle};

/// Rows, a fixed number of elements apart.
pub(crate) struct TensorRows {
    pub(crate) tensor: CubeTensor,
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) columns: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

impl TensorRows {
    /// The tensor, copied unless the elements of rows lie side by side and rows one behind the other, with
    /// no more between them than CUDA's runtime leaves to align them.
    pub(crate) fn of(tensor: CubeTensor) -> Self {
        match Self::stride_of(&tensor) {
            Some(stride) => Self::new(tensor, stride),
            None => {
                let tensor = contiguous(tensor);
                // The copy may have its rows aligned.
                let stride = Self::stride_of(&tensor);
                let columns = tensor.shape().last().copied().unwrap_or(1);
                Self::new(tensor, stride.unwrap_or(columns))
            }
        }
    }

    fn new(tensor: CubeTensor, stride: usize) -> Self {
        let shape = tensor.shape();
        let (columns, leading) =
            shape.split_last().map_or((1, &[][..]), |(last, rest)| (*last, rest));
        Self { rows: leading.iter().product(), columns, stride, tensor }
    }

    fn stride_of(tensor: &CubeTensor) -> Option<usize> {
        let strides = tensor.meta.strides();
        (!tensor.meta.is_tiled()).then(|| row_stride(&tensor.shape(), strides)).flatten()
    }

    /// The memory that they span.
    pub(crate) fn span(&self) -> Buffer {
        let elements =
            self.rows.checked_sub(1).map_or(0, |before| before * self.stride + self.columns);
        Buffer {
            handle: self.tensor.handle.clone(),
            elements,
            dtype: dtype_to_elem_type(self.tensor.dtype),
        }
    }

    /// The same, and the tensor is let go of: where it was the last to hold its memory, a kernel may write
    /// there.
    pub(crate) fn into_span(self) -> Buffer {
        self.span()
    }

    /// What makes tensors that lie as these rows do.
    pub(crate) fn layout(&self) -> RowLayout {
        RowLayout {
            client: self.tensor.client.clone(),
            device: self.tensor.device.clone(),
            shape: self.tensor.shape(),
            stride: self.stride,
        }
    }
}

/// Where rows lie, without their memory.
pub(crate) struct RowLayout {
    pub(crate) client: Client,
    device: cubecl::Device,
    shape: Shape,
    stride: usize,
}

impl RowLayout {
    /// Whether a tensor of that shape has one number for each row.
    pub(crate) fn is_of_rows(&self, shape: &Shape) -> bool {
        let leading = shape.num_dims().checked_sub(1);
        shape.num_dims() == self.shape.num_dims()
            && leading.is_some_and(|last| shape[last] == 1 && shape[..last] == self.shape[..last])
    }

    /// Rows of that shape and layout in `handle`.
    pub(crate) fn rows(&self, handle: Handle, dtype: DType) -> CubeTensor {
        let mut strides = vec![1; self.shape.num_dims()];
        let mut next = self.stride;
        for dim in (0..strides.len().saturating_sub(1)).rev() {
            strides[dim] = next;
            next *= self.shape[dim];
        }
        let meta = Metadata::new(self.shape.clone(), &strides[..]);
        CubeTensor::new(self.client.clone(), handle, meta, self.device.clone(), dtype)
    }

    /// A number for each row, contiguous, with a last dimension of 1.
    pub(crate) fn numbers(&self, handle: Handle, dtype: DType) -> CubeTensor {
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = 1;
        }
        CubeTensor::new_contiguous(self.client.clone(), self.device.clone(), shape, handle, dtype)
    }
}

/// How far apart rows are, if their elements lie side by side and they at equal distances, near each other.
fn row_stride(shape: &[usize], strides: &[usize]) -> Option<usize> {
    /// CUDA's runtime has rows begin at multiples of 512 bytes: so many elements of 16 bits, and as many of
    /// 32 bits in what is made of those and lies as they do.
    const NEAR: usize = 512 / 2;
    let (columns, leading) = shape.split_last()?;
    if *columns != 1 && *strides.last()? != 1 {
        return None;
    }
    // The stride of a dimension of size 1 is never stepped over.
    let mut steps = (0..leading.len()).rev().filter(|dim| leading[*dim] != 1);
    let Some(innermost) = steps.next() else { return Some(*columns) };
    let stride = strides[innermost];
    let mut next = stride * leading[innermost];
    for dim in steps {
        if strides[dim] != next {
            return None;
        }
        next *= leading[dim];
    }
    (stride.checked_sub(*columns)? < NEAR).then_some(stride)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_as_they_lie_if_they_are_near_and_equally_far_apart() {
        assert_eq!(row_stride(&[4, 7], &[7, 1]), Some(7));
        assert_eq!(row_stride(&[2, 4, 7], &[32, 8, 1]), Some(8));
        assert_eq!(row_stride(&[2, 4, 7], &[40, 8, 1]), None, "a gap between matrices");
        assert_eq!(row_stride(&[4, 7], &[1, 4]), None, "columns");
        assert_eq!(row_stride(&[4, 7], &[0, 1]), None, "one row for all");
        assert_eq!(row_stride(&[4, 7], &[7000, 1]), None, "far apart");
        // GPT-2's logits in 16 bits as CUDA's runtime lays them out, and in f32 what is made of them.
        assert_eq!(row_stride(&[8192, 50_257], &[50_432, 1]), Some(50_432));
    }

    #[test]
    fn a_dimension_of_size_1_has_no_say() {
        assert_eq!(row_stride(&[1, 7], &[9000, 1]), Some(7));
        assert_eq!(row_stride(&[7], &[1]), Some(7));
        assert_eq!(row_stride(&[3, 1, 7], &[8, 99, 1]), Some(8));
        assert_eq!(row_stride(&[5, 1], &[3, 9]), Some(3));
    }
}
