use super::{RowSumBlueprint, blueprint::UNITS, forward::row_sum_kernel};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32, Rows, check_float},
    device::grid,
};
use cubecl::{client::Client, ir::ElemType, prelude::*};

const OP: &str = "row_sum";

/// `y[r] = factor sum_c x[r, c]`.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when x is smaller than its rows, or rows lie on each other;
/// [`KernelError::Unsupported`] for other dtypes, empty tensors, and what 32 bits do not count.
pub fn row_sum(client: &Client, x: &Rows, factor: f32) -> Result<Buffer, KernelError> {
    row_sum_as(client, x, factor, x.buffer.dtype)
}

/// The same in the type `out`: that of x, or f32.
///
/// # Errors
///
/// As [`row_sum`], and [`KernelError::Unsupported`] for other types.
pub fn row_sum_as(
    client: &Client,
    x: &Rows,
    factor: f32,
    out: ElemType,
) -> Result<Buffer, KernelError> {
    if out != x.buffer.dtype && out != F32 {
        let reason = format!("sums of {:?} in {out:?}", x.buffer.dtype);
        return Err(KernelError::Unsupported { op: OP, reason });
    }
    sum(client, x, None, factor, out)
}

/// `y[r] = factor sum_c (x[r, c] - means[r])^2`, with means of the type of x.
///
/// # Errors
///
/// As [`row_sum`], and [`KernelError::InvalidProblem`] for means of another type or number than rows.
pub fn row_squares(
    client: &Client,
    x: &Rows,
    means: &Buffer,
    factor: f32,
) -> Result<Buffer, KernelError> {
    means.check(OP, "means", x.rows, x.buffer.dtype)?;
    sum(client, x, Some(means), factor, x.buffer.dtype)
}

fn sum(
    client: &Client,
    x: &Rows,
    means: Option<&Buffer>,
    factor: f32,
    out: ElemType,
) -> Result<Buffer, KernelError> {
    check(x)?;
    let blueprint = RowSumBlueprint::plan(x, client);
    let y = Buffer::empty(client, x.rows, out);
    if blueprint.splits == 1 {
        launch(client, x, means, blueprint, factor, &y)?;
        return Ok(y);
    }
    let partial = Buffer::empty(client, x.rows * blueprint.splits, F32);
    launch(client, x, means, blueprint, 1.0, &partial)?;
    let columns = blueprint.splits;
    let partial = Rows { buffer: partial, rows: x.rows, columns, pitch: columns };
    let blueprint = RowSumBlueprint::of_partial_sums(&partial, client);
    launch(client, &partial, None, blueprint, factor, &y)?;
    Ok(y)
}

fn check(x: &Rows) -> Result<(), KernelError> {
    /// Vectors beyond a row's end that a unit's last step may count to.
    const MARGIN: usize = 1 << 24;
    let unsupported = |reason: String| Err(KernelError::Unsupported { op: OP, reason });
    let Rows { buffer, rows, columns, pitch } = x;
    check_float(OP, "x", buffer.dtype)?;
    if rows * columns == 0 {
        return unsupported("an empty tensor".into());
    }
    let invalid = |argument, expected: String, actual: String| {
        Err(KernelError::invalid(OP, argument, expected, actual))
    };
    if *rows > 1 && pitch < columns {
        let expected = format!("at least {columns}, the columns of a row");
        return invalid("pitch", expected, pitch.to_string());
    }
    if buffer.elements < x.span() {
        let expected = format!("at least {} elements", x.span());
        return invalid("x", expected, buffer.elements.to_string());
    }
    if u32::try_from(rows * pitch.max(columns) + MARGIN).is_err() {
        return unsupported(format!("{rows} rows of {columns} elements, {pitch} apart"));
    }
    Ok(())
}

fn launch(
    client: &Client,
    x: &Rows,
    means: Option<&Buffer>,
    blueprint: RowSumBlueprint,
    factor: f32,
    y: &Buffer,
) -> Result<(), KernelError> {
    let RowSumBlueprint { vector_size, lanes, splits } = blueprint;
    let cubes = [x.rows.div_ceil((UNITS / lanes) as usize), splits, 1];
    let vectors = |elements: usize| (elements / vector_size) as u32;
    // SAFETY: x holds its rows, which are whole vectors, means, if they are read, a number for each row, and y one for
    // each row and split; the kernel stops rows and columns at their ends.
    ahead::launch(client, |client| unsafe {
        row_sum_kernel::launch_unchecked(
            client,
            grid(OP, client, cubes)?,
            CubeDim::new_2d(lanes, UNITS / lanes),
            vector_size,
            x.arg(),
            means.unwrap_or(&x.buffer).arg(1),
            y.arg(1),
            x.rows as u32,
            vectors(x.columns),
            vectors(x.pitch),
            factor,
            lanes,
            means.is_some(),
            x.buffer.dtype,
            y.dtype,
        );
        Ok(())
    })?;
    Ok(())
}
