//! A sketch of many tensors: a few sums that tell how far two sets of tensors are apart, long after the tensors are gone.
//!
//! ```text
//! sums[e mod P] += sign(e) x[e - first]          P = PLACES
//! ```
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | x | rows x columns, with a pitch | f32, f16 or bf16 |
//! | sums, in and out | [`PLACES`] | f32 |
//!
//! `e` counts the elements of all tensors of a sketch, and `first` those of the tensors before. A sign is 1 or -1 by a
//! hash of `e`. The squares of a sketch's sums come to those of the elements, and the squares of what two sketches are
//! apart to those of what their elements are apart: to the rounding of f32 where there are no more elements than
//! places, and elsewhere with a standard deviation of sqrt(2 / P), 0.3 % (Charikar, Chen, Farach-Colton, "Finding
//! frequent items in data streams", 2002).
//!
//! A unit owns a place and adds its elements in their order, so that results repeat to the bit, whatever memory the
//! tensors have. Infinite and missing numbers come out as such. Sums are overwritten where nobody else holds them.

pub mod variants;

use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32, Rows, check_float},
};
use cubecl::{client::Client, prelude::*};
pub(crate) use variants::variants;

const OP: &str = "sketch";

/// Sums of a sketch, a power of two: 1 MiB.
pub const PLACES: usize = 1 << 18;

/// Units in a cube: every adapter takes as many.
const UNITS: u32 = 256;

/// `sums` with the elements of `x`, before which the sketch has had `first` others; in the same memory where nobody
/// else holds it.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where `sums` are not [`PLACES`] numbers of f32, or rows are not within their memory;
/// [`KernelError::Unsupported`] for a tensor that is not f32, f16 or bf16 or is beyond 32-bit indices.
pub fn sketch(
    client: &Client,
    sums: Buffer,
    x: &Rows,
    first: usize,
) -> Result<Buffer, KernelError> {
    sums.check(OP, "sums", PLACES, F32)?;
    check_float(OP, "x", x.buffer.dtype)?;
    if x.span() > x.buffer.elements || x.pitch < x.columns && x.rows > 1 {
        let expected = "rows one after another, within their memory";
        return Err(KernelError::invalid(OP, "x", expected, format!("{x:?}")));
    }
    // A unit steps beyond the end before it stops.
    if u32::try_from(x.span().max(x.elements()) + PLACES).is_err() {
        let reason = format!("{} rows of {} elements", x.rows, x.columns);
        return Err(KernelError::Unsupported { op: OP, reason });
    }
    if x.elements() == 0 {
        return Ok(sums);
    }
    // Asked before a copy of the handle is made for the launch. In new memory every place is written.
    let new = (!sums.handle.can_mut()).then(|| Buffer::empty(client, PLACES, sums.dtype));
    let units = if new.is_some() { PLACES } else { x.elements().min(PLACES) };
    let cubes = (units as u32).div_ceil(UNITS);
    // SAFETY: x holds its rows, sums a number for each place, and both indices and a step beyond fit 32 bits. The
    // kernel stops at the last element; a cube's last units have places, too.
    ahead::launch(client, |client| unsafe {
        sketch_kernel::launch_unchecked(
            client,
            CubeCount::new_1d(cubes),
            CubeDim::new_1d(UNITS),
            x.arg(),
            sums.arg(1),
            match &new {
                Some(new) => new.arg(1),
                None => BufferArg::alias(1, PLACES),
            },
            // Places and signs repeat every 2^32 elements.
            first as u32,
            x.elements() as u32,
            x.columns as u32,
            x.pitch as u32,
            !x.is_contiguous(),
            x.buffer.dtype,
        )
    });
    Ok(new.unwrap_or(sums))
}

/// A place a unit: that of element `ABSOLUTE_POS` of `x`.
#[cube(launch_unchecked)]
pub(crate) fn sketch_kernel<F: Float>(
    x: &[F],
    sums: &[f32],
    sums_out: &mut [f32],
    first: u32,
    elements: u32,
    columns: u32,
    pitch: u32,
    #[comptime] by_rows: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut element = ABSOLUTE_POS as u32;
    let place = ((first + element) & comptime!(PLACES as u32 - 1)) as usize;
    let mut sum = sums[place];
    while element < elements {
        let mut at = element;
        if comptime!(by_rows) {
            at = element / columns * pitch + element % columns;
        }
        let value = f32::cast_from(x[at as usize]);
        sum += select(is_negative(first + element), -value, value);
        element += comptime!(PLACES as u32);
    }
    sums_out[place] = sum;
}

/// Whether the sign of element `e` of a sketch is -1: a bit of a hash whose every bit depends on all of `e`.
///
/// Source: Wellons, "Prospecting for hash functions", 2018, the function `lowbias32`.
#[cube]
fn is_negative(e: u32) -> bool {
    let mut hash = e;
    hash ^= hash >> 16;
    hash *= 0x7FEB_352Du32;
    hash ^= hash >> 15;
    hash *= 0x846C_A68Bu32;
    hash ^= hash >> 16;
    hash & 1u32 == 1u32
}
