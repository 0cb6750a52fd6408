use super::{
    RotaryBlueprint, RotaryProblem,
    turn::{StepsLaunch, WalkLaunch, rotary_kernel},
};
use crate::{
    KernelError, Pass, ahead,
    attention::HeadStrides,
    buffer::{Buffer, Rows},
    divisor::divisor,
    magnitude::Magnitudes,
};
use cubecl::{calculate_cube_count_elemwise, client::Client, prelude::*};

/// Where x is among the arguments.
const X: usize = 0;

/// The rows of `x` turned by `table`, in [`RotaryProblem::order`]; backward, the gradient of `x` given that of the
/// result. In the memory of `x` where that lies as the result does and nobody else holds it.
///
/// # Errors
///
/// As [`RotaryProblem::check`].
pub fn rotary(
    client: &Client,
    problem: &RotaryProblem,
    pass: Pass,
    x: Buffer,
    table: &Rows,
) -> Result<Buffer, KernelError> {
    launch(client, problem, pass, x, table, false).map(|(y, _)| y)
}

/// As [`rotary`], with the magnitudes of the result, unless it is empty.
///
/// # Errors
///
/// As [`rotary`].
pub fn rotary_watched(
    client: &Client,
    problem: &RotaryProblem,
    pass: Pass,
    x: Buffer,
    table: &Rows,
) -> Result<(Buffer, Option<Magnitudes>), KernelError> {
    launch(client, problem, pass, x, table, true)
}

fn launch(
    client: &Client,
    problem: &RotaryProblem,
    pass: Pass,
    x: Buffer,
    table: &Rows,
    watched: bool,
) -> Result<(Buffer, Option<Magnitudes>), KernelError> {
    problem.check(&x, table)?;
    let elements = problem.elements();
    if elements == 0 {
        return Ok((Buffer::empty(client, 0, problem.dtype), None));
    }
    let blueprint = RotaryBlueprint::plan(problem, &x, table, client);
    let RotaryBlueprint { vector_size, table_vector, rows_per_unit, neighbors, units_per_cube } =
        blueprint;
    let rows = problem.batch * problem.heads;
    let vectors = problem.head_dim / vector_size;
    let units = vectors * neighbors * problem.seq * rows.div_ceil(neighbors * rows_per_unit);
    let dim = CubeDim::new_1d(units_per_cube);
    let steps = |strides: HeadStrides| {
        let HeadStrides { batch, head, row } = strides;
        // That of a dimension of size 1 has no meaning, and is multiplied by zero.
        let [batch, head, row] = [batch, head, row].map(|step| (step / vector_size) as u32);
        StepsLaunch::new(batch, head, row)
    };
    // Asked before a copy of the handle is made for the launch.
    let is_ours = x.handle.can_mut() && problem.lies_as_result();
    let y = (!is_ours).then(|| Buffer::empty(client, elements, problem.dtype));
    let count = calculate_cube_count_elemwise(client, units, dim);
    // Cubes along x alone have a part each.
    let magnitudes = match &count {
        CubeCount::Static(cubes, 1, 1) if watched => {
            Some(Magnitudes::of_cubes(client, *cubes as usize))
        }
        _ => None,
    };
    let largest = Magnitudes::argument(client, magnitudes.as_ref());
    // A whole number of vectors: strides and rows are.
    let span = problem.span();
    // SAFETY: `check` has seen that the table has every position, that x has its span, and that indices fit 32
    // bits; the plan that vectors divide rows, strides and where tensors begin. y has all elements. The kernel
    // stops units past the last, and rows past the last. In place, each vector is read and written by the unit
    // that owns it.
    ahead::launch(client, |client| unsafe {
        rotary_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            table_vector,
            BufferArg::from_raw_parts(x.argument(), span),
            table.arg(),
            match &y {
                Some(y) => y.arg(vector_size),
                None => BufferArg::alias(X, span),
            },
            largest.arg(1),
            WalkLaunch::new(
                units as u32,
                divisor(vectors),
                divisor(neighbors),
                divisor(problem.seq),
                rows as u32,
                divisor(problem.heads),
                problem.start as u32,
                (RotaryProblem::table_pitch(table) / table_vector) as u32,
            ),
            steps(problem.strides),
            steps(problem.out_strides()),
            rows_per_unit,
            pass,
            magnitudes.as_ref().map(|_| units_per_cube),
            problem.dtype,
        )
    });
    Ok((y.unwrap_or(Buffer { elements, ..x }), magnitudes))
}
