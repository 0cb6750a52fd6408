//! Device buffers with their length and element type, contiguous or by rows that lie apart.

use crate::{KernelError, ahead, device::ALIGNMENT_BYTES};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::BufferArg,
    server::Handle,
};

/// The type of sums and statistics.
pub(crate) const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Whether `dtype` is f32, f16 or bf16, which every op takes.
pub(crate) fn is_float(dtype: ElemType) -> bool {
    matches!(dtype, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16))
}

/// Refuses other types than f32, f16 and bf16 for `what` an op is asked of.
pub(crate) fn check_float(
    op: &'static str,
    what: &str,
    dtype: ElemType,
) -> Result<(), KernelError> {
    match is_float(dtype) {
        true => Ok(()),
        false => {
            let reason = format!("{what} of {dtype:?}; it takes f32, f16 and bf16");
            Err(KernelError::unsupported(op, reason))
        }
    }
}

/// An allocation's number, which is never given to another one, and the byte at which a tensor begins in it.
pub type Address = (usize, u64);

/// Where a tensor begins.
pub fn address(handle: &Handle) -> Address {
    (handle.memory.descriptor().id.value, handle.offset_start.unwrap_or(0))
}

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

    /// What lies behind its first `elements` elements, of which it has more.
    #[cfg(feature = "cuda")]
    pub(crate) fn behind(&self, elements: usize) -> Self {
        let bytes = (elements * self.dtype.size()) as u64;
        let handle = self.handle.clone().offset_start(bytes);
        Self { handle, elements: self.elements - elements, dtype: self.dtype }
    }

    /// Refuses another length or type, in the name of `op` and of its `argument`.
    pub(crate) fn check(
        &self,
        op: &'static str,
        argument: &'static str,
        elements: usize,
        dtype: ElemType,
    ) -> Result<(), KernelError> {
        if (self.elements, self.dtype) == (elements, dtype) {
            return Ok(());
        }
        Err(self.mismatch(op, argument, format!("{elements} elements of {dtype:?}")))
    }

    /// As [`check`](Self::check), of memory that may be longer.
    pub(crate) fn check_span(
        &self,
        op: &'static str,
        argument: &'static str,
        elements: usize,
        dtype: ElemType,
    ) -> Result<(), KernelError> {
        if self.elements >= elements && self.dtype == dtype {
            return Ok(());
        }
        Err(self.mismatch(op, argument, format!("at least {elements} elements of {dtype:?}")))
    }

    /// Refuses a buffer that does not begin where the widest vectors can be loaded from.
    pub(crate) fn check_start(
        &self,
        op: &'static str,
        argument: &'static str,
    ) -> Result<(), KernelError> {
        let start = self.offset_bytes();
        if start.is_multiple_of(ALIGNMENT_BYTES as u64) {
            return Ok(());
        }
        let reason = format!(
            "{argument} begins at byte {start}, and not at a multiple of {ALIGNMENT_BYTES}"
        );
        Err(KernelError::unsupported(op, reason))
    }

    /// That the buffer is not what was expected.
    pub(crate) fn mismatch(
        &self,
        op: &'static str,
        argument: &'static str,
        expected: impl Into<String>,
    ) -> KernelError {
        let actual = format!("{} elements of {:?}", self.elements, self.dtype);
        KernelError::invalid(op, argument, expected, actual)
    }

    /// Bytes from the beginning of its allocation.
    pub(crate) fn offset_bytes(&self) -> u64 {
        self.handle.offset_start.unwrap_or(0)
    }

    /// The memory as an argument of a launch.
    pub(crate) fn argument(&self) -> Handle {
        ahead::argument(&self.handle)
    }

    /// The buffer as a kernel argument of vectors of `vector_size` elements.
    pub(crate) fn arg(&self, vector_size: usize) -> BufferArg {
        debug_assert_eq!(self.elements % vector_size, 0);
        // SAFETY: `elements` is the length that the handle was allocated with.
        unsafe { BufferArg::from_raw_parts(self.argument(), self.elements) }
    }

    /// The memory as a kernel argument that may end within a vector, which no kernel reads: pixels that lie apart, a
    /// tensor of which a part is copied.
    pub(crate) fn arg_read_in_part(&self) -> BufferArg {
        // SAFETY: whoever made the buffer states that its memory holds its elements.
        unsafe { BufferArg::from_raw_parts(self.argument(), self.elements) }
    }
}

/// Rows of a tensor, in memory of `buffer.elements` elements.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The memory, from the first row to the end of the last one.
    pub buffer: Buffer,
    /// How many rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Elements from one row to the next, at least `columns`.
    pub pitch: usize,
}

impl Rows {
    /// All of a buffer, as one row.
    pub fn one(buffer: Buffer) -> Self {
        Self { rows: 1, columns: buffer.elements, pitch: buffer.elements, buffer }
    }

    /// Memory for the same rows, with whatever it held before: contiguous where these are, and otherwise
    /// each where the device would begin it, if not sooner.
    pub(crate) fn empty_like(&self, client: &Client) -> Self {
        let Self { buffer: Buffer { dtype, .. }, rows, columns, .. } = *self;
        let pitch = if self.is_contiguous() {
            columns
        } else {
            let alignment = client.properties().memory.alignment as usize;
            let aligned = columns.next_multiple_of((alignment / dtype.size()).max(1));
            self.pitch.min(aligned)
        };
        Self { buffer: Buffer::empty(client, rows * pitch, dtype), rows, columns, pitch }
    }

    /// Elements of all rows, without what lies between them.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Elements from the first to the last, with what lies between rows.
    pub(crate) fn span(&self) -> usize {
        match self.rows {
            0 => 0,
            rows => (rows - 1) * self.pitch + self.columns,
        }
    }

    /// Whether nothing lies between rows.
    pub fn is_contiguous(&self) -> bool {
        self.rows <= 1 || self.pitch == self.columns
    }

    /// Whether vectors of that many elements may be moved to the end of each row, beyond it where they do
    /// not divide it: in its own memory, which has to be that long unless it is known to go on.
    pub(crate) fn takes_vectors(&self, vector_size: usize, goes_on: bool) -> bool {
        let bytes = self.buffer.dtype.size();
        let offset = self.buffer.handle.offset_start.unwrap_or(0);
        let row = self.columns.next_multiple_of(vector_size);
        let end = self.rows.saturating_sub(1) * self.pitch + row;
        (self.rows <= 1 || self.pitch.is_multiple_of(vector_size) && row <= self.pitch)
            && offset.is_multiple_of((vector_size * bytes) as u64)
            && (row == self.columns
                || goes_on
                || (end * bytes) as u64 <= self.buffer.handle.size_in_used())
    }

    /// The memory as a kernel argument; a kernel may have to stop before its end.
    pub(crate) fn arg(&self) -> BufferArg {
        // SAFETY: whoever made the rows states that `buffer` has its elements.
        unsafe { BufferArg::from_raw_parts(self.buffer.argument(), self.buffer.elements) }
    }
}

impl From<Buffer> for Rows {
    fn from(buffer: Buffer) -> Self {
        Self::one(buffer)
    }
}
