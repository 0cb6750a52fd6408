//! A contiguous device buffer with its length and element type.

use cubecl::{client::Client, ir::ElemType, prelude::BufferArg, server::Handle};

/// A contiguous run of elements on a device.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The device memory.
    pub handle: Handle,
    /// How many elements it holds.
    pub elements: usize,
    /// What they are.
    pub dtype: ElemType,
}

impl Buffer {
    /// Memory for `elements` elements, with whatever it held before.
    pub fn empty(client: &Client, elements: usize, dtype: ElemType) -> Self {
        Self { handle: client.empty(elements * dtype.size()), elements, dtype }
    }

    /// The buffer as a kernel argument of vectors of `vector_size` elements.
    pub(crate) fn arg(&self, vector_size: usize) -> BufferArg {
        debug_assert_eq!(self.elements % vector_size, 0);
        // SAFETY: `elements` is the length that the handle was allocated with.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.elements) }
    }
}
