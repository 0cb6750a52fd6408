use super::{
    EmbeddingProblem,
    backward::{CHUNK, COLUMN_UNITS, SHARES, embedding_backward_kernel, embedding_join_kernel},
    sort::{DIGIT_BITS, DIGITS, embedding_count_kernel, embedding_sort_kernel},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32},
    device::widest_vector,
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Columns of a unit. Sums of eight spill on GPUs with 1536 threads a multiprocessor, where the compiler
/// allows 40 registers.
pub(crate) const WIDEST: usize = 4;
/// Cubes along places, which go on from there.
const MOST_CUBES: usize = 1 << 15;
/// Cubes that sort: more than multiprocessors, and each reads what all have counted.
const MOST_SORT_CUBES: usize = 256;

const WORD: ElemType = ElemType::UInt(UIntKind::U32);

/// Overwrites the rows of `dw` that an index names with their sums; others stay as they are. `dw` has to
/// be the caller's alone.
///
/// # Errors
///
/// As [`EmbeddingProblem::new`].
pub fn embedding_backward(
    client: &Client,
    index: &Buffer,
    dy: &Buffer,
    dw: &Buffer,
    columns: usize,
) -> Result<(), KernelError> {
    sum_rows(client, [index, dy, dw], columns, false)
}

/// As [`embedding_backward`], with the sums added to the rows of `dw`, which are f32 until both are rounded together.
///
/// # Errors
///
/// As [`EmbeddingProblem::new`].
pub fn embedding_backward_onto(
    client: &Client,
    index: &Buffer,
    dy: &Buffer,
    dw: &Buffer,
    columns: usize,
) -> Result<(), KernelError> {
    sum_rows(client, [index, dy, dw], columns, true)
}

fn sum_rows(
    client: &Client,
    [index, dy, dw]: [&Buffer; 3],
    columns: usize,
    adds: bool,
) -> Result<(), KernelError> {
    let problem = EmbeddingProblem::new(index, dy, dw, columns)?;
    let EmbeddingProblem { indices, rows, columns, dtype } = problem;
    if indices * rows * columns == 0 {
        return Ok(());
    }
    let [keys, order] = sorted(client, index, rows);
    let vector_size =
        widest_vector(client, dtype.size(), |size| size <= WIDEST && columns.is_multiple_of(size));
    let vectors = (columns / vector_size) as u32;
    let chunks = indices.div_ceil(CHUNK as usize);
    // Two for each chunk, where there is more than one.
    let parts = if chunks > 1 { 2 * chunks * columns } else { vector_size };
    let partials = Buffer::empty(client, parts, F32);
    let grid = |cubes: usize| {
        let down = cubes.min(MOST_CUBES) as u32;
        CubeCount::Static(vectors.div_ceil(COLUMN_UNITS), down, 1)
    };
    // SAFETY: keys and order hold `indices` elements, and order a permutation of the places; dy holds
    // `indices` rows, dw `rows` and partials, where they are used, two for each chunk, of `columns` elements,
    // a multiple of the vector size. The kernel stops at the last place, row and column.
    ahead::launch(client, |client| unsafe {
        embedding_backward_kernel::launch_unchecked(
            client,
            grid(indices),
            CubeDim::new_2d(COLUMN_UNITS, SHARES),
            vector_size,
            keys.arg(1),
            order.arg(1),
            dy.arg(vector_size),
            dw.arg(vector_size),
            partials.arg(vector_size),
            indices as u32,
            rows as u32,
            vectors,
            adds,
            dtype,
        )
    });
    if chunks == 1 {
        return Ok(());
    }
    // SAFETY: as above.
    ahead::launch(client, |client| unsafe {
        embedding_join_kernel::launch_unchecked(
            client,
            grid(chunks - 1),
            CubeDim::new_2d(COLUMN_UNITS, SHARES),
            vector_size,
            keys.arg(1),
            partials.arg(vector_size),
            dw.arg(vector_size),
            indices as u32,
            rows as u32,
            vectors,
            adds,
            dtype,
        )
    });
    Ok(())
}

/// The indices in ascending order, those that name none of `rows` as that number behind all others, and the
/// place of each.
pub(crate) fn sorted(client: &Client, index: &Buffer, rows: usize) -> [Buffer; 2] {
    let places = index.elements;
    let stretch = places.div_ceil(MOST_SORT_CUBES).next_multiple_of(DIGITS as usize);
    let cubes = places.div_ceil(stretch);
    let counts = Buffer::empty(client, cubes * DIGITS as usize, WORD);
    let dims = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(DIGITS));
    // Negative ones are large as unsigned numbers.
    let mut keys = Buffer { dtype: WORD, ..index.clone() };
    // The first pass reads none.
    let mut order = keys.clone();
    for pass in 0..passes(rows) {
        let [sorted_keys, sorted_order] = [(); 2].map(|()| Buffer::empty(client, places, WORD));
        // SAFETY: keys, order and what they become hold `places` elements, and counts one for each cube and
        // digit. Cubes stop at their stretches' ends. Where a place goes is the number of others that come
        // before it by digit and then by order: less than `places`, and different for each.
        unsafe {
            ahead::launch(client, |client| {
                embedding_count_kernel::launch_unchecked(
                    client,
                    dims.0.clone(),
                    dims.1,
                    keys.arg(1),
                    counts.arg(1),
                    places as u32,
                    rows as u32,
                    pass * DIGIT_BITS,
                    stretch as u32,
                )
            });
            ahead::launch(client, |client| {
                embedding_sort_kernel::launch_unchecked(
                    client,
                    dims.0.clone(),
                    dims.1,
                    keys.arg(1),
                    order.arg(1),
                    counts.arg(1),
                    sorted_keys.arg(1),
                    sorted_order.arg(1),
                    places as u32,
                    rows as u32,
                    pass * DIGIT_BITS,
                    stretch as u32,
                    pass == 0,
                )
            });
        }
        (keys, order) = (sorted_keys, sorted_order);
    }
    [keys, order]
}

/// Digits of the largest key, the number of rows.
fn passes(rows: usize) -> u32 {
    (rows.ilog2() + 1).div_ceil(DIGIT_BITS)
}

#[cfg(test)]
mod tests {
    use super::passes;

    #[test]
    fn as_many_digits_are_sorted_by_as_the_number_of_rows_has() {
        assert_eq!([1, 255, 256, 50_257, 65_535, 65_536].map(passes), [1, 1, 2, 2, 2, 3]);
    }
}
