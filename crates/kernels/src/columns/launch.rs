use super::forward::{PlaceLaunch, copy_columns_kernel};
use crate::{
    KernelError, ahead,
    buffer::{Rows, check_float},
    device::widest_vector,
    divisor::{DIVIDEND_LIMIT, divisor},
};
use cubecl::{CubeDim, calculate_cube_count_elemwise, client::Client};

const OP: &str = "copy_columns";
const UNITS: u32 = 256;

/// Columns of a matrix from one on.
#[derive(Clone, Debug)]
pub struct Columns {
    /// All of the matrix.
    pub of: Rows,
    /// The first one.
    pub first: usize,
}

impl Columns {
    fn takes(&self, vector: usize) -> bool {
        let buffer = &self.of.buffer;
        let sizes = [self.of.pitch, self.first, buffer.elements];
        sizes.iter().all(|size| size.is_multiple_of(vector))
            && buffer.offset_bytes().is_multiple_of((vector * buffer.dtype.size()) as u64)
    }

    fn check(&self, name: &'static str, rows: usize, columns: usize) -> Result<(), KernelError> {
        let Rows { buffer, pitch, .. } = &self.of;
        let end = self.first + columns;
        let is_there = rows == self.of.rows
            && end <= self.of.columns
            && end <= *pitch
            && buffer.elements >= (rows - 1) * pitch + end;
        let expected = || format!("{rows} rows of at least {end} elements, {pitch} apart");
        if is_there { Ok(()) } else { Err(buffer.mismatch(OP, name, expected())) }
    }
}

/// Writes so many columns of each row of `source` to those of `target`.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where rows or columns are missing, or types differ; [`KernelError::Unsupported`] for a
/// dtype other than f32, f16 and bf16, and for 2^31 vectors and more.
pub fn copy_columns(
    client: &Client,
    columns: usize,
    source: &Columns,
    target: &Columns,
) -> Result<(), KernelError> {
    let (rows, dtype) = (source.of.rows, source.of.buffer.dtype);
    check_float(OP, "source", dtype)?;
    if target.of.buffer.dtype != dtype {
        return Err(target.of.buffer.mismatch(OP, "target", format!("{dtype:?}")));
    }
    if rows * columns == 0 {
        return Ok(());
    }
    source.check("source", rows, columns)?;
    target.check("target", rows, columns)?;
    let width = widest_vector(client, dtype.size(), |size| {
        columns.is_multiple_of(size) && source.takes(size) && target.takes(size)
    });
    let vectors = rows * columns / width;
    let spans = [source, target].map(|it| it.of.buffer.elements / width);
    if spans.into_iter().chain([vectors]).any(|size| size >= DIVIDEND_LIMIT) {
        let reason = format!("{vectors} vectors among {spans:?}");
        return Err(KernelError::unsupported(OP, reason));
    }
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let cube_dim = CubeDim::new_1d(units);
    let cubes = calculate_cube_count_elemwise(client, vectors, cube_dim);
    let place =
        |it: &Columns| PlaceLaunch::new((it.of.pitch / width) as u32, (it.first / width) as u32);
    // SAFETY: both have the rows and columns, as checked, and units stop at the last vector, counted in 31 bits.
    ahead::launch(client, |client| unsafe {
        copy_columns_kernel::launch_unchecked(
            client,
            cubes.clone(),
            cube_dim,
            width,
            source.of.buffer.arg(width),
            target.of.buffer.arg(width),
            vectors as u32,
            divisor(columns / width),
            place(source),
            place(target),
            dtype,
        );
    });
    Ok(())
}
