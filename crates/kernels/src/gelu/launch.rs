use super::{
    GeluSumBlueprint,
    backward::{gelu_backward_kernel, gelu_backward_sum_kernel},
    forward::gelu_forward_kernel,
};
use crate::{
    KernelError,
    buffer::Buffer,
    column_sum::{
        ColumnSumBlueprint, ColumnSumProblem, ROW_LANES, VECTOR_LANES, column_sum, cube_count,
        sum_with,
    },
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
};
use cubecl::{client::Client, prelude::*};

/// y = gelu(x).
///
/// # Errors
///
/// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16.
pub fn gelu_forward(client: &Client, x: &Buffer) -> Result<Buffer, KernelError> {
    let problem = ElementwiseProblem::new("gelu_forward", x)?;
    let y = Buffer::empty(client, x.elements, x.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let blueprint = ElementwiseBlueprint::plan(&problem, client);
    let (count, dim) = blueprint.cubes(problem.elements, client);
    // SAFETY: x and y hold `problem.elements` elements, a multiple of the vector size; the kernel
    // stops units past y's end.
    unsafe {
        gelu_forward_kernel::launch_unchecked(
            client,
            count,
            dim,
            blueprint.vector_size,
            x.arg(blueprint.vector_size),
            y.arg(blueprint.vector_size),
            problem.dtype,
        );
    }
    Ok(y)
}

/// dx = dy gelu'(x).
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `dy` differs from `x` in length or dtype;
/// [`KernelError::Unsupported`] as for [`gelu_forward`].
pub fn gelu_backward(client: &Client, x: &Buffer, dy: &Buffer) -> Result<Buffer, KernelError> {
    let problem = ElementwiseProblem::new("gelu_backward", x)?;
    problem.check_operand("gelu_backward", "dy", dy)?;
    let dx = Buffer::empty(client, x.elements, x.dtype);
    if problem.elements == 0 {
        return Ok(dx);
    }
    let blueprint = ElementwiseBlueprint::plan(&problem, client);
    let (count, dim) = blueprint.cubes(problem.elements, client);
    // SAFETY: as in `gelu_forward`; dy's length was checked.
    unsafe {
        gelu_backward_kernel::launch_unchecked(
            client,
            count,
            dim,
            blueprint.vector_size,
            x.arg(blueprint.vector_size),
            dy.arg(blueprint.vector_size),
            dx.arg(blueprint.vector_size),
            problem.dtype,
        );
    }
    Ok(dx)
}

/// What [`gelu_backward_sum`] returns.
#[derive(Clone, Debug)]
pub struct GeluGradients {
    /// The gradient of the input, `rows` by `columns`.
    pub dx: Buffer,
    /// The sum of its rows, `columns` elements.
    pub db: Buffer,
}

/// `dx = dy gelu'(x)` of `elements / columns` rows, and `db[c] = sum_r dx[r, c]`, by the plan that is
/// expected to be faster.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `columns` do not divide x, and as for [`gelu_backward`];
/// [`KernelError::Unsupported`] as for [`ColumnSumProblem::new`], for a single column and for empty
/// tensors among others.
pub fn gelu_backward_sum(
    client: &Client,
    columns: usize,
    x: &Buffer,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    let problem = sum_problem(columns, x)?;
    let blueprint = GeluSumBlueprint::plan(&problem, client);
    gelu_backward_sum_with(client, columns, blueprint, x, dy)
}

/// As [`gelu_backward_sum`], by a plan of the caller's.
///
/// # Errors
///
/// As [`gelu_backward_sum`], and [`KernelError::InvalidProblem`] when the plan's vectors do not
/// divide the columns.
pub fn gelu_backward_sum_with(
    client: &Client,
    columns: usize,
    blueprint: GeluSumBlueprint,
    x: &Buffer,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    let problem = sum_problem(columns, x)?;
    ElementwiseProblem::new(BACKWARD_SUM, x)?.check_operand(BACKWARD_SUM, "dy", dy)?;
    match blueprint {
        GeluSumBlueprint::Fused(blueprint) => launch_sum(client, &problem, blueprint, x, dy),
        GeluSumBlueprint::Separate => {
            let dx = gelu_backward(client, x, dy)?;
            let db = column_sum(client, &problem, &dx)?;
            Ok(GeluGradients { dx, db })
        }
    }
}

const BACKWARD_SUM: &str = "gelu_backward_sum";

/// x as the rows whose gradients are summed.
fn sum_problem(columns: usize, x: &Buffer) -> Result<ColumnSumProblem, KernelError> {
    if columns == 0 || !x.elements.is_multiple_of(columns) {
        return Err(KernelError::invalid(
            BACKWARD_SUM,
            "columns",
            format!("a divisor of the {} elements of x", x.elements),
            columns,
        ));
    }
    ColumnSumProblem::new(&[x.elements / columns, columns], &[columns, 1], 0..1, x.dtype)
}

fn launch_sum(
    client: &Client,
    problem: &ColumnSumProblem,
    blueprint: ColumnSumBlueprint,
    x: &Buffer,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    let vector_size = blueprint.vector_size;
    if vector_size == 0 || blueprint.splits == 0 || !problem.columns.is_multiple_of(vector_size) {
        return Err(KernelError::invalid(
            BACKWARD_SUM,
            "blueprint",
            format!("splits, and vectors that divide {} columns", problem.columns),
            format!("{blueprint:?}"),
        ));
    }
    let count = cube_count(client, problem, blueprint)?;
    let dx = Buffer::empty(client, x.elements, x.dtype);
    let db = sum_with(client, problem, blueprint, |sums| {
        // SAFETY: x, dy and dx hold rows of whole vectors, which the kernel stops at the ends of, and
        // `sums` a row for each split. `ColumnSumProblem::new` has seen to 32-bit indices.
        unsafe {
            gelu_backward_sum_kernel::launch_unchecked(
                client,
                count,
                CubeDim::new_2d(VECTOR_LANES, ROW_LANES),
                vector_size,
                x.arg(vector_size),
                dy.arg(vector_size),
                dx.arg(vector_size),
                sums.arg(vector_size),
                problem.rows as u32,
                (problem.columns / vector_size) as u32,
                problem.dtype,
                sums.dtype,
            );
        }
        Ok(())
    })?;
    Ok(GeluGradients { dx, db })
}
