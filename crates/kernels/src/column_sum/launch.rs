use super::{
    ColumnSumBlueprint, ColumnSumProblem,
    blueprint::{ROW_LANES, VECTOR_LANES},
    clusters::{self, column_sum_cluster_kernel},
    forward::column_sum_kernel,
    problem::OP,
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, F32},
    device::grid,
};
use cubecl::{client::Client, prelude::*};

/// `y[o, c] = sum_r x[o, r, c]`.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when x is smaller than the problem says or of another dtype;
/// [`KernelError::Unsupported`] where the device cannot launch so many cubes.
pub fn column_sum(
    client: &Client,
    problem: &ColumnSumProblem,
    x: &Buffer,
) -> Result<Buffer, KernelError> {
    column_sum_scaled(client, problem, x, 1.0)
}

/// `y[o, c] = factor sum_r x[o, r, c]`.
///
/// # Errors
///
/// As [`column_sum`].
pub fn column_sum_scaled(
    client: &Client,
    problem: &ColumnSumProblem,
    x: &Buffer,
    factor: f32,
) -> Result<Buffer, KernelError> {
    sum(client, problem, x, None, factor)
}

/// `y[o, c] = factor sum_r (x[o, r, c] - means[o, c])^2`, with means of the type of x.
///
/// # Errors
///
/// As [`column_sum`], and [`KernelError::InvalidProblem`] for means of another type or number than sums.
pub fn column_squares(
    client: &Client,
    problem: &ColumnSumProblem,
    x: &Buffer,
    means: &Buffer,
    factor: f32,
) -> Result<Buffer, KernelError> {
    means.check(OP, "means", problem.outer * problem.columns, problem.dtype)?;
    sum(client, problem, x, Some(means), factor)
}

fn sum(
    client: &Client,
    problem: &ColumnSumProblem,
    x: &Buffer,
    means: Option<&Buffer>,
    factor: f32,
) -> Result<Buffer, KernelError> {
    problem.check_input(x)?;
    let blueprint = ColumnSumBlueprint::plan(problem, client);
    if blueprint.is_for_clusters(problem, DeviceProfile::of(client)) {
        return sum_in_clusters(client, problem, blueprint, x, means, factor);
    }
    sum_with(client, problem, blueprint, |y| {
        launch(client, problem, blueprint, x, means, y, factor)
    })
}

fn sum_in_clusters(
    client: &Client,
    problem: &ColumnSumProblem,
    ColumnSumBlueprint { vector_size, .. }: ColumnSumBlueprint,
    x: &Buffer,
    means: Option<&Buffer>,
    factor: f32,
) -> Result<Buffer, KernelError> {
    let count = grid(OP, client, [clusters::cubes(problem, vector_size), 1, problem.outer])?;
    let y = Buffer::empty(client, problem.outer * problem.columns, problem.dtype);
    let vectors = |elements: usize| (elements / vector_size) as u32;
    let means_or_x = means.unwrap_or(x);
    // SAFETY: as in `launch`, with one split.
    ahead::launch(client, |client| unsafe {
        column_sum_cluster_kernel::launch_unchecked(
            client,
            count.clone(),
            CubeDim::new_2d(clusters::VECTOR_LANES, clusters::ROW_LANES),
            vector_size,
            BufferArg::from_raw_parts(x.argument(), x.elements),
            BufferArg::from_raw_parts(means_or_x.argument(), means_or_x.elements),
            y.arg(vector_size),
            problem.rows as u32,
            vectors(problem.columns),
            vectors(problem.outer_stride),
            vectors(problem.row_stride),
            factor,
            means.is_some(),
            problem.dtype,
        )
    });
    Ok(y)
}

/// Sums what `first` makes: it writes its cubes' sums to the buffer that it gets, which is the result
/// if there is one split, and otherwise an f32 workspace `[outer, splits, columns]` that a second
/// launch sums.
pub(crate) fn sum_with(
    client: &Client,
    problem: &ColumnSumProblem,
    blueprint: ColumnSumBlueprint,
    first: impl FnOnce(&Buffer) -> Result<(), KernelError>,
) -> Result<Buffer, KernelError> {
    let y = Buffer::empty(client, problem.outer * problem.columns, problem.dtype);
    if blueprint.splits == 1 {
        first(&y)?;
        return Ok(y);
    }
    let partials = problem.outer * blueprint.splits * problem.columns;
    let workspace = Buffer::empty(client, partials, F32);
    first(&workspace)?;
    let rest = ColumnSumProblem {
        rows: blueprint.splits,
        outer_stride: blueprint.splits * problem.columns,
        row_stride: problem.columns,
        dtype: workspace.dtype,
        ..*problem
    };
    // f32 has wider elements, so its vectors may be narrower; few rows are left, so no splits.
    let blueprint = ColumnSumBlueprint { splits: 1, ..ColumnSumBlueprint::plan(&rest, client) };
    launch(client, &rest, blueprint, &workspace, None, &y, 1.0)?;
    Ok(y)
}

fn launch(
    client: &Client,
    problem: &ColumnSumProblem,
    blueprint: ColumnSumBlueprint,
    x: &Buffer,
    means: Option<&Buffer>,
    y: &Buffer,
    factor: f32,
) -> Result<(), KernelError> {
    let count = cube_count(client, problem, blueprint)?;
    let vector_size = blueprint.vector_size;
    // `ColumnSumProblem::new` has seen to it that all of these fit 32 bits.
    let vectors = |elements: usize| (elements / vector_size) as u32;
    // Without means x stands in for them.
    let means_or_x = means.unwrap_or(x);
    // SAFETY: x holds the problem's span, rounded up to whole vectors by the allocator's alignment, means, if they
    // are read, `outer * columns` elements, and y `outer * splits * columns`; the kernel stops rows and columns at their
    // ends.
    ahead::launch(client, |client| unsafe {
        column_sum_kernel::launch_unchecked(
            client,
            count.clone(),
            CubeDim::new_2d(VECTOR_LANES, ROW_LANES),
            vector_size,
            BufferArg::from_raw_parts(x.argument(), x.elements),
            BufferArg::from_raw_parts(means_or_x.argument(), means_or_x.elements),
            y.arg(vector_size),
            problem.rows as u32,
            vectors(problem.columns),
            vectors(problem.outer_stride),
            vectors(problem.row_stride),
            factor,
            means.is_some(),
            problem.dtype,
            y.dtype,
        )
    });
    Ok(())
}

/// Cubes: columns along x, splits along y, outer along z.
pub(crate) fn cube_count(
    client: &Client,
    problem: &ColumnSumProblem,
    blueprint: ColumnSumBlueprint,
) -> Result<CubeCount, KernelError> {
    let ColumnSumBlueprint { vector_size, splits } = blueprint;
    let cubes =
        [ColumnSumBlueprint::column_cubes(problem.columns, vector_size), splits, problem.outer];
    grid(OP, client, cubes)
}
