//! Overwriting memory that others know by its address.
//!
//! A captured graph reads its inputs where they lay when it was captured. New ones have to be put there,
//! whoever holds that memory:
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | source, read | rows x columns, each with its pitch | f32, f16, bf16, or any integer that the device has |
//! | target, overwritten | the same, with its own pitch | the same kind, rounded to the nearest value |
//!
//! What lies between rows stays as it is.

mod variants;

use crate::{DeviceProfile, KernelError, device::widest_vector};

pub use crate::buffer::Rows;
use cubecl::{
    client::Client,
    ir::{ElemType, VectorSize},
    prelude::*,
};
use std::ops::Range;
pub(crate) use variants::variants;

const OP: &str = "overwrite";

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;

/// Cubes that a multiprocessor has room for: 2048 threads.
const CUBES_A_MULTIPROCESSOR: usize = 8;

/// Writes the elements of `source` to the memory of `target`, in the type of `target`, although others
/// may hold it.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the two differ in size or in kind; [`KernelError::Unsupported`]
/// beyond 32-bit indices.
pub fn overwrite(client: &Client, target: &Rows, source: &Rows) -> Result<(), KernelError> {
    let is_float = |rows: &Rows| matches!(rows.buffer.dtype, ElemType::Float(_));
    let goes_together = (target.rows, target.columns) == (source.rows, source.columns)
        && (target.buffer.dtype == source.buffer.dtype || is_float(target) && is_float(source));
    if !goes_together {
        return Err(KernelError::invalid(OP, "source", told(target), told(source)));
    }
    if target.rows * target.columns == 0 {
        return Ok(());
    }
    if [target, source].iter().any(|side| side.span() > side.buffer.elements) {
        return Err(KernelError::invalid(
            OP,
            "source",
            "rows within the memory of both",
            format!("{target:?} and {source:?}"),
        ));
    }
    // Units step beyond the end of a row before they stop.
    if u32::try_from(target.span().max(source.span()) + (1 << 24)).is_err() {
        let reason = format!("{} rows of {} elements", target.rows, target.columns);
        return Err(KernelError::Unsupported { op: OP, reason });
    }
    let widest = target.buffer.dtype.size().max(source.buffer.dtype.size());
    let is_aligned = |side: &Rows, size| side.rows == 1 || side.pitch.is_multiple_of(size);
    let vector_size =
        widest_vector(client, widest, |size| is_aligned(target, size) && is_aligned(source, size));
    let whole = target.columns / vector_size * vector_size;
    launch(client, target, source, vector_size, 0..whole);
    launch(client, target, source, 1, whole..target.columns);
    Ok(())
}

/// Overwrites some columns, by vectors that divide them.
fn launch(
    client: &Client,
    target: &Rows,
    source: &Rows,
    vector_size: VectorSize,
    columns: Range<usize>,
) {
    if columns.is_empty() {
        return;
    }
    let at_once = DeviceProfile::of(client).multiprocessors * CUBES_A_MULTIPROCESSOR;
    let across = (columns.len() / vector_size).div_ceil(UNITS as usize).min(at_once);
    let down = target.rows.min((at_once / across).max(1));
    let vectors = |elements: usize| (elements / vector_size) as u32;
    // SAFETY: `overwrite` has seen that all rows are within the memory of both sides and that indices
    // and one step beyond fit 32 bits, and chosen vectors that divide pitches and columns. The kernel
    // stops at the last row and column.
    unsafe {
        overwrite_kernel::launch_unchecked(
            client,
            CubeCount::Static(across as u32, down as u32, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            source.arg(),
            target.arg(),
            target.rows as u32,
            vectors(columns.start),
            vectors(columns.end),
            vectors(source.pitch),
            vectors(target.pitch),
            source.buffer.dtype,
            target.buffer.dtype,
        );
    }
}

fn told(rows: &Rows) -> String {
    format!("{} rows of {} elements of {:?}", rows.rows, rows.columns, rows.buffer.dtype)
}

/// Columns from `start` to `end` along x, rows along y; all but rows count vectors.
#[cube(launch_unchecked)]
pub(crate) fn overwrite_kernel<S: Numeric, T: Numeric, N: Size>(
    source: &[Vector<S, N>],
    target: &mut [Vector<T, N>],
    rows: u32,
    start: u32,
    end: u32,
    source_pitch: u32,
    target_pitch: u32,
    #[define(S)] _source_dtype: ElemType,
    #[define(T)] _target_dtype: ElemType,
) {
    let mut row = CUBE_POS_Y;
    while row < rows {
        let mut column = start + CUBE_POS_X * CUBE_DIM + UNIT_POS;
        while column < end {
            let value = source[(row * source_pitch + column) as usize];
            target[(row * target_pitch + column) as usize] = Vector::cast_from(value);
            column += CUBE_COUNT_X * CUBE_DIM;
        }
        row += CUBE_COUNT_Y;
    }
}
