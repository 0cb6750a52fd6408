use super::{
    EmbeddingProblem,
    backward::{COLUMN_UNITS, SHARES, embedding_backward_kernel},
    sort::{UNITS, embedding_sort_kernel},
};
use crate::{KernelError, buffer::Buffer};
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
    let problem = EmbeddingProblem::new(index, dy, dw, columns)?;
    let EmbeddingProblem { indices, rows, columns, dtype } = problem;
    if indices * rows * columns == 0 {
        return Ok(());
    }
    let [order, starts, counts] =
        [(); 3].map(|()| Buffer::empty(client, indices, ElemType::UInt(UIntKind::U32)));
    // SAFETY: index, order, starts and counts hold `indices` elements. Places are a permutation: smaller
    // indices and equal ones before are fewer than `indices`, and differ from place to place.
    unsafe {
        embedding_sort_kernel::launch_unchecked(
            client,
            CubeCount::Static(indices.div_ceil(UNITS as usize) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            index.arg(1),
            order.arg(1),
            starts.arg(1),
            counts.arg(1),
            indices as u32,
        );
    }
    let vector_size = client
        .io_optimized_vector_sizes(dtype.size())
        .filter(|size| *size <= WIDEST && columns.is_multiple_of(*size))
        .max()
        .unwrap_or(1);
    let vectors = (columns / vector_size) as u32;
    let down = indices.min(MOST_CUBES) as u32;
    // SAFETY: as above; dy holds `indices` rows and dw `rows` of `columns` elements, a multiple of the
    // vector size, and the kernel stops at the last place, row and column.
    unsafe {
        embedding_backward_kernel::launch_unchecked(
            client,
            CubeCount::Static(vectors.div_ceil(COLUMN_UNITS), down, 1),
            CubeDim::new_2d(COLUMN_UNITS, SHARES),
            vector_size,
            index.arg(1),
            order.arg(1),
            starts.arg(1),
            counts.arg(1),
            dy.arg(vector_size),
            dw.arg(vector_size),
            indices as u32,
            rows as u32,
            vectors,
            dtype,
        );
    }
    Ok(())
}
