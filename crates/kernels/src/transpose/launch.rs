use super::forward::{EDGE, SHARES, transpose_halves_kernel, transpose_words_kernel};
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

const OP: &str = "transpose";

/// Writes `source`, whose `columns` lie `pitch` elements apart, to `target` row by row.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the two do not go together; [`KernelError::Unsupported`] for elements of other
/// than 2 and 4 bytes, for those of 2 bytes where two neighbors lie in no word, and for 2^32 elements or more.
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
    let halves = source.dtype.size() == 2;
    let begins_a_word =
        [source, target].iter().all(|it| it.offset_bytes().is_multiple_of(ALIGNMENT_BYTES as u64));
    let is_served = match source.dtype.size() {
        4 => true,
        // The last pair of a column of an odd number of rows has to be there.
        2 => {
            let is_even = columns.is_multiple_of(2) && pitch.is_multiple_of(2);
            is_even && source.elements >= span.next_multiple_of(2)
        }
        _ => false,
    };
    if !is_served || !begins_a_word || u32::try_from(span.max(target.elements)).is_err() {
        let reason = format!("{rows} x {columns} of {:?}, {pitch} apart", source.dtype);
        return Err(KernelError::unsupported(OP, reason));
    }
    let of_words = if halves { 2 } else { 1 };
    let edge = EDGE as usize * of_words;
    let cubes = grid(OP, client, [columns.div_ceil(edge), rows.div_ceil(edge), 1])?;
    let words = |buffer: &Buffer| Buffer {
        elements: buffer.elements / of_words,
        dtype: ElemType::UInt(UIntKind::U32),
        ..buffer.clone()
    };
    let (from, to) = (words(source), words(target));
    // SAFETY: the source holds all columns, pairs of rows included, and the target all rows; cubes stop at the last row
    // and column, both counted in 32 bits.
    ahead::launch(client, |client| unsafe {
        let launch = if halves {
            transpose_halves_kernel::launch_unchecked
        } else {
            transpose_words_kernel::launch_unchecked
        };
        launch(
            client,
            cubes.clone(),
            CubeDim::new_2d(EDGE, SHARES),
            from.arg(1),
            to.arg(1),
            rows as u32,
            columns as u32,
            pitch as u32,
        );
    });
    Ok(())
}
