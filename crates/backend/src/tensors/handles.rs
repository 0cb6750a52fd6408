//! Between the tensors of Burn's fusion stream and the buffers that kernels take.

use super::contiguous;
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::{CubeBackend, CubeDevice, ops::numeric::zeros_client, tensor::CubeTensor};
use burn_cubecl_fusion::CubeFusionHandle;
use burn_fusion::stream::Context;
use burn_ir::{BackendIr, TensorId, TensorIr};
use burn_std::{Metadata, Shape};
use cubecl::{client::Client, ir::ElemType, server::Handle};

/// The tensors that exist while a provider's operation runs.
pub(crate) type Tensors = Context<CubeFusionHandle>;

/// A tensor that a kernel reads, as it lies in memory.
#[derive(Clone)]
pub(crate) struct Input {
    /// Where its memory is.
    pub(crate) client: Client,
    /// Size of each dimension.
    pub(crate) shape: Vec<usize>,
    /// Elements between neighbors in each dimension.
    pub(crate) strides: Vec<usize>,
    /// Element type.
    pub(crate) dtype: ElemType,
    pub(crate) handle: Handle,
    device: cubecl::Device,
    burn_dtype: DType,
}

impl Input {
    /// The memory behind `tensor`, which `op` reads. It stays with the stream: see [`consume`].
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the tensor is not laid out in rows of plain numbers, or
    /// holds nothing.
    pub(crate) fn of(
        context: &Tensors,
        tensor: &TensorIr,
        op: &'static str,
    ) -> Result<Self, KernelError> {
        let (known, handle) = plain(context, tensor, op)?;
        Ok(Self {
            client: handle.client.clone(),
            shape: known.shape.iter().copied().collect(),
            strides: handle.strides.iter().copied().collect(),
            dtype: dtype_to_elem_type(handle.dtype),
            handle: handle.handle.clone(),
            device: handle.device.clone(),
            burn_dtype: handle.dtype,
        })
    }

    /// How many elements the tensor has.
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether its elements follow each other in the order of its dimensions, without gaps.
    pub(crate) fn is_contiguous(&self) -> bool {
        let dense = contiguous_strides(&self.shape);
        // The stride of a dimension of size 1 is never stepped over.
        (0..self.shape.len()).all(|dim| self.shape[dim] == 1 || self.strides[dim] == dense[dim])
    }

    /// Whether its elements fill its memory without gaps, in whatever order of its dimensions: images whose
    /// channels follow each other do.
    pub(crate) fn is_dense(&self) -> bool {
        let mut dims: Vec<(usize, usize)> =
            self.strides.iter().copied().zip(self.shape.iter().copied()).collect();
        dims.retain(|(_, size)| *size != 1);
        dims.sort_unstable();
        let mut next = 1;
        dims.into_iter().all(|(stride, size)| {
            let follows = stride == next;
            next *= size;
            follows
        })
    }

    /// Whether the elements of both lie in the same order, without gaps.
    pub(crate) fn lies_as(&self, other: &Self) -> bool {
        let dims = 0..self.shape.len();
        self.shape == other.shape
            && self.is_dense()
            && dims
                .into_iter()
                .all(|dim| self.shape[dim] == 1 || self.strides[dim] == other.strides[dim])
    }

    /// The same tensor, contiguous: itself where it is already, and otherwise a copy.
    pub(crate) fn contiguous(self) -> Self {
        if self.is_contiguous() || self.elements() == 0 {
            return self;
        }
        let Self { client, shape, strides, device, handle, burn_dtype, .. } = &self;
        let metadata = Metadata::new(Shape::from(shape.clone()), strides.clone());
        let strided =
            CubeTensor::new(client.clone(), handle.clone(), metadata, device.clone(), *burn_dtype);
        let copy = contiguous(strided);
        Self { handle: copy.handle, strides: contiguous_strides(shape), ..self }
    }

    /// Whether its memory goes on for that many elements.
    pub(crate) fn holds(&self, elements: usize) -> bool {
        let bytes = elements as u64 * self.dtype.size() as u64;
        bytes <= self.handle.size_in_used()
    }

    /// Where it is.
    pub(crate) fn location(&self) -> Location {
        Location { client: self.client.clone(), device: self.device.clone() }
    }

    /// Its first `elements` elements in memory, as a kernel takes them.
    pub(crate) fn buffer(&self, elements: usize) -> Buffer {
        Buffer { handle: self.handle.clone(), elements, dtype: self.dtype }
    }
}

/// What Burn's backend knows `tensor` as, which `op` reads, under the conditions of [`Input::of`].
///
/// # Errors
///
/// As [`Input::of`].
pub(crate) fn cube_tensor(
    context: &Tensors,
    tensor: &TensorIr,
    op: &'static str,
) -> Result<CubeTensor, KernelError> {
    let (known, handle) = plain(context, tensor, op)?;
    // Tensors of all kinds are made alike.
    Ok(CubeBackend::float_tensor(burn_ir::TensorHandle {
        handle: handle.clone(),
        shape: known.shape.clone(),
    }))
}

/// The shape of `tensor`, if [`cube_tensor`] has it.
///
/// # Errors
///
/// As [`Input::of`].
pub(crate) fn shape_of<'a>(
    context: &'a Tensors,
    tensor: &TensorIr,
    op: &'static str,
) -> Result<&'a Shape, KernelError> {
    plain(context, tensor, op).map(|(known, _)| &known.shape)
}

/// As [`cube_tensor`], but taken from the stream where the operation is its last reader: where nobody else holds the
/// memory, a kernel may write there. It takes the place of [`consume`].
///
/// # Errors
///
/// As [`Input::of`]; nothing is taken then.
pub(crate) fn take_cube_tensor(
    context: &mut Tensors,
    tensor: &TensorIr,
    op: &'static str,
) -> Result<CubeTensor, KernelError> {
    let (known, _) = plain(context, tensor, op)?;
    let (id, shape) = (known.id, known.shape.clone());
    let handle = context.handles.get_handle(&id, &tensor.status);
    Ok(CubeBackend::float_tensor(burn_ir::TensorHandle { handle, shape }))
}

/// The memory of a tensor, copied if its elements do not follow each other. It is let go of: where it was
/// the last to hold it, a kernel may write there.
pub(crate) fn contiguous_buffer(tensor: CubeTensor) -> Buffer {
    let tensor = contiguous(tensor);
    let elements = tensor.meta.shape().num_elements();
    Buffer { elements, dtype: dtype_to_elem_type(tensor.dtype), handle: tensor.handle }
}

/// A contiguous tensor of that shape whose memory is `buffer`, on the device of `like`.
pub(crate) fn contiguous_tensor(
    like: &CubeTensor,
    buffer: Buffer,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    CubeTensor::new_contiguous(client, device, shape, buffer.handle, dtype)
}

/// A tensor's rows, where they follow each other and none lies on another; one, where nothing lies between
/// them.
pub(crate) fn rows_of(tensor: &CubeTensor) -> Option<Rows> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let elements = shape.num_elements();
    let columns = shape.last().copied().unwrap_or(1);
    let rows = elements / columns.max(1);
    // Strides of dimensions of size 1 say nothing.
    let innermost = (0..strides.len().saturating_sub(1)).rev().find(|dim| shape[*dim] > 1);
    let (rows, pitch) = match innermost {
        Some(dim) if rows > 1 => (rows, strides[dim]),
        _ => (1, elements),
    };
    let follows = |dim: usize| {
        let inner: usize = shape[dim + 1..strides.len() - 1].iter().product();
        shape[dim] == 1 || strides[dim] == inner * pitch
    };
    // Rows of an expanded tensor lie on each other: as such a kernel would take them for one.
    let are_apart = rows <= 1 || pitch >= columns;
    let is_dense = columns <= 1 || strides.last() == Some(&1);
    let is_plain = tensor.qparams.is_none() && !tensor.meta.is_tiled();
    let all_follow = (0..strides.len().saturating_sub(1)).all(|dim| rows == 1 || follows(dim));
    if !(is_plain && is_dense && are_apart && all_follow) {
        return None;
    }
    let buffer = |elements| Buffer {
        handle: tensor.handle.clone(),
        elements,
        dtype: dtype_to_elem_type(tensor.dtype),
    };
    Some(if pitch == columns || rows == 1 {
        Rows::one(buffer(elements))
    } else {
        Rows { buffer: buffer((rows - 1) * pitch + columns), rows, columns, pitch }
    })
}

/// The memory of a tensor by rows, copied if they do not follow each other, or are not counted in 32 bits
/// with what lies between them. It is let go of: where it was the last to hold it, a kernel may write
/// there.
pub(crate) fn rows(tensor: CubeTensor) -> Rows {
    /// What kernels leave free at the upper end.
    const MARGIN: usize = 1 << 24;
    let is_counted = |rows: &Rows| u32::try_from(rows.rows * rows.pitch + MARGIN).is_ok();
    rows_of(&tensor).filter(is_counted).unwrap_or_else(|| Rows::one(contiguous_buffer(tensor)))
}

/// A tensor of that shape whose memory is `rows`.
pub(crate) fn tensor_of_rows(
    like: &Location,
    shape: Shape,
    rows: Rows,
    dtype: DType,
) -> CubeTensor {
    let mut steps: Vec<usize> = shape.iter().copied().collect();
    if let (Some(columns), false) = (steps.last_mut(), rows.is_contiguous()) {
        *columns = rows.pitch;
    }
    CubeTensor::new(
        like.client.clone(),
        rows.buffer.handle,
        Metadata::new(shape, contiguous_strides(&steps)),
        like.device.clone(),
        dtype,
    )
}

/// Where tensors are.
pub(crate) struct Location {
    pub(crate) client: Client,
    pub(crate) device: CubeDevice,
}

impl Location {
    /// Where `tensor` is.
    pub(crate) fn of(tensor: &CubeTensor) -> Self {
        Self { client: tensor.client.clone(), device: tensor.device.clone() }
    }
}

/// Makes `tensor` what `out` stands for.
///
/// # Errors
///
/// As [`register_output`].
pub(crate) fn register_cube_tensor(
    context: &mut Tensors,
    out: &TensorIr,
    tensor: CubeTensor,
    op: &'static str,
) -> Result<(), KernelError> {
    let id = known_output(context, out, op)?.id;
    context.handles.register_handle(id, tensor.into());
    Ok(())
}

/// Makes zeros what `out` stands for, or no numbers where its shape holds none.
///
/// # Errors
///
/// As [`register_output`].
pub(crate) fn register_zeros(
    context: &mut Tensors,
    out: &TensorIr,
    place: &Location,
    op: &'static str,
) -> Result<(), KernelError> {
    let shape = known_output(context, out, op)?.shape.clone();
    register_cube_tensor(context, out, zeros(place, shape, out.dtype), op)
}

/// Contiguous zeros of that shape.
pub(crate) fn zeros(place: &Location, shape: Shape, dtype: DType) -> CubeTensor {
    let Location { client, device } = place;
    let handle = match shape.num_elements() {
        // No kernel is launched for nothing.
        0 => client.empty(0),
        // In one row, which CUDA's runtime does not pad.
        elements => {
            zeros_client(client.clone(), device.clone(), Shape::new([elements]), dtype).handle
        }
    };
    CubeTensor::new_contiguous(client.clone(), device.clone(), shape, handle, dtype)
}

/// Gives the memory of `tensor` back if the operation that holds this description is its last
/// reader. Call it once for each time an operation names a tensor, after the kernels that read it
/// were launched.
pub(crate) fn consume(context: &mut Tensors, tensor: &TensorIr) {
    let Some(known) = context.tensors.get(&tensor.id).cloned() else { return };
    context.handles.free(&TensorIr { status: tensor.status, ..known });
}

/// Whether something has been made what `tensor` stands for.
pub(crate) fn is_made(context: &Tensors, tensor: &TensorIr) -> bool {
    context.tensors.get(&tensor.id).is_some_and(|known| context.handles.has_handle(&known.id))
}

/// Makes `buffer` the memory of `out`, contiguous, on the device of `like` and of its type.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where the stream does not know `out`; nothing is changed then.
pub(crate) fn register_output(
    context: &mut Tensors,
    out: &TensorIr,
    like: &Input,
    buffer: Buffer,
    op: &'static str,
) -> Result<(), KernelError> {
    let known = known_output(context, out, op)?;
    let (id, strides) = (known.id, contiguous_strides(&known.shape));
    register_strided(context, id, like, buffer, &strides);
    Ok(())
}

/// The same, with the elements in the order in which those of `like` lie, which is as large.
///
/// # Errors
///
/// As [`register_output`].
pub(crate) fn register_in_order(
    context: &mut Tensors,
    out: &TensorIr,
    like: &Input,
    buffer: Buffer,
    op: &'static str,
) -> Result<(), KernelError> {
    let id = known_output(context, out, op)?.id;
    register_strided(context, id, like, buffer, &like.strides);
    Ok(())
}

/// The same with neighbors of each dimension as far apart as `strides` says.
///
/// # Errors
///
/// As [`register_output`].
pub(crate) fn register_with_strides(
    context: &mut Tensors,
    out: &TensorIr,
    like: &Input,
    buffer: Buffer,
    strides: &[usize],
    op: &'static str,
) -> Result<(), KernelError> {
    let id = known_output(context, out, op)?.id;
    register_strided(context, id, like, buffer, strides);
    Ok(())
}

fn register_strided(
    context: &mut Tensors,
    id: TensorId,
    like: &Input,
    buffer: Buffer,
    strides: &[usize],
) {
    let handle = CubeFusionHandle {
        client: like.client.clone(),
        handle: buffer.handle,
        device: like.device.clone(),
        dtype: like.burn_dtype,
        strides: strides.into(),
        tiles: None,
        qparams: None,
    };
    context.handles.register_handle(id, handle);
}

/// The memory behind `tensor`, laid out in rows of plain numbers.
fn plain<'a>(
    context: &'a Tensors,
    tensor: &TensorIr,
    op: &'static str,
) -> Result<(&'a TensorIr, &'a CubeFusionHandle), KernelError> {
    let unsupported = |reason: &str| KernelError::Unsupported { op, reason: reason.into() };
    let Some(known) = context.tensors.get(&tensor.id) else {
        return Err(unsupported("its tensors are unknown"));
    };
    let Some(handle) = context.handles.get_handle_ref(&known.id) else {
        return Err(unsupported("an input has no memory of its own"));
    };
    if handle.tiles.is_some() || handle.qparams.is_some() {
        return Err(unsupported("a tiled or quantized input"));
    }
    Ok((known, handle))
}

/// The size and type of `out`, which `op` makes.
///
/// # Errors
///
/// As [`register_output`].
pub(crate) fn known_output<'a>(
    context: &'a Tensors,
    out: &TensorIr,
    op: &'static str,
) -> Result<&'a TensorIr, KernelError> {
    let unknown = || KernelError::Unsupported { op, reason: "its output is unknown".into() };
    context.tensors.get(&out.id).ok_or_else(unknown)
}

/// Elements between neighbors in each dimension where the elements follow each other in the order of dimensions.
pub(crate) fn contiguous_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (0..shape.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * shape[dim + 1];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_strides_are_the_products_of_the_sizes_to_the_right() {
        assert_eq!(contiguous_strides(&[2, 3, 4]), [12, 4, 1]);
        assert_eq!(contiguous_strides(&[5]), [1]);
        assert!(contiguous_strides(&[]).is_empty());
    }
}
