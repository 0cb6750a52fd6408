use super::{
    SoftmaxBlueprint, SoftmaxProblem,
    row_mask::{MaskReading, RowMask},
    rows_backward::{GradientForm, softmax_rows_backward_kernel},
    rows_forward::{
        ExtentLaunch, KeptRowsLaunch, RowOutputsLaunch, SoftmaxForm, softmax_rows_kernel,
    },
};
use crate::{
    KernelError, Pass, ahead,
    buffer::{Buffer, F32},
    dropout::KeptElements,
};
use cubecl::{client::Client, prelude::*};

const FORWARD: &str = "softmax_rows";
const BACKWARD: &str = "softmax_rows_backward";

/// What [`softmax_rows`] is to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SoftmaxOutputs {
    /// The logarithm of softmax as y, and otherwise softmax.
    pub logarithms: bool,
    /// What elements lack to the largest of their row, too.
    pub shifted: bool,
    /// The exponentials of that, too.
    pub exponentials: bool,
}

/// What [`softmax_rows`] returns.
#[derive(Clone, Debug)]
pub struct SoftmaxRows {
    /// Softmax or its logarithm, as far apart as the rows of x.
    pub y: Buffer,
    /// What elements lack to the largest of their row, if asked for.
    pub shifted: Option<Buffer>,
    /// The exponentials of that, if asked for.
    pub exponentials: Option<Buffer>,
    /// The largest element of each row, f32.
    pub peak: Buffer,
    /// The sum of the exponentials of each row, f32.
    pub sum: Buffer,
}

/// The plan of [`softmax_rows`].
pub fn plan_forward(client: &Client, problem: &SoftmaxProblem, x: &Buffer) -> SoftmaxBlueprint {
    SoftmaxBlueprint::plan_for(problem, Pass::Forward, &[(x, problem.row_stride)], client)
}

/// The plan of [`softmax_rows_backward`].
pub fn plan_backward(
    client: &Client,
    problem: &SoftmaxProblem,
    y: &Buffer,
    dy: &Buffer,
    dy_stride: usize,
) -> SoftmaxBlueprint {
    let inputs = [(y, problem.row_stride), (dy, dy_stride)];
    SoftmaxBlueprint::plan_for(problem, Pass::Backward, &inputs, client)
}

/// Softmax of rows, or its logarithm, with what else is asked for. What lies between rows of what is
/// written is unspecified.
///
/// # Errors
///
/// As [`SoftmaxProblem::validate`], and [`KernelError::InvalidProblem`] when x does not go with the
/// problem.
pub fn softmax_rows(
    client: &Client,
    problem: &SoftmaxProblem,
    outputs: SoftmaxOutputs,
    x: &Buffer,
) -> Result<SoftmaxRows, KernelError> {
    masked_softmax_rows(client, problem, outputs, x, None, None)
}

/// [`softmax_rows`] of x with the elements of a mask taken for a value: minus infinity leaves them out. y is what dropout
/// leaves of it, where that is told; then its mask has rows without gaps.
///
/// # Errors
///
/// As [`softmax_rows`], and [`KernelError::InvalidProblem`] where a mask does not go with the problem.
pub fn masked_softmax_rows(
    client: &Client,
    problem: &SoftmaxProblem,
    outputs: SoftmaxOutputs,
    x: &Buffer,
    mask: Option<(&RowMask, f32)>,
    kept: Option<&KeptElements>,
) -> Result<SoftmaxRows, KernelError> {
    problem.validate()?;
    problem.check_rows(FORWARD, "x", x)?;
    mask.map_or(Ok(()), |(mask, _)| mask.validate(FORWARD, problem))?;
    let elements = problem.rows * problem.classes;
    kept.map_or(Ok(()), |kept| kept.mask.check(FORWARD, "kept", elements, problem.out))?;
    let blueprint = match kept {
        None => plan_forward(client, problem, x),
        Some(kept) => {
            let inputs = [(x, problem.row_stride), (&kept.mask, problem.classes)];
            SoftmaxBlueprint::plan_for(problem, Pass::Forward, &inputs, client)
        }
    };
    let vector_size = blueprint.vector_size;
    let span = whole_span(problem, problem.row_stride, vector_size);
    let rows_of = |elements| Buffer::empty(client, elements, problem.out);
    let y = rows_of(span);
    // What is not asked for is not compiled in, but must not be in use, too.
    let [shifted, exponentials] = [outputs.shifted, outputs.exponentials]
        .map(|asked| rows_of(if asked { span } else { vector_size }));
    let [peak, sum] = [(); 2].map(|()| Buffer::empty(client, problem.rows, F32));
    if problem.rows > 0 {
        let reading = MaskReading::of(mask.map(|(mask, _)| mask), problem.classes, vector_size);
        let form = SoftmaxForm {
            logarithms: outputs.logarithms,
            shifted: outputs.shifted,
            exponentials: outputs.exponentials,
            mask: reading.form,
            dropped: kept.is_some(),
        };
        let mask = || RowMask::argument(mask, x, reading);
        let kept = || KeptRowsLaunch {
            mask: match kept {
                // SAFETY: as x below, by the same plan.
                Some(kept) => unsafe {
                    let span = whole_span(problem, problem.classes, vector_size);
                    BufferArg::from_raw_parts(kept.mask.argument(), span)
                },
                // Not compiled in.
                None => y.arg(vector_size),
            },
            pitch: (problem.classes / vector_size) as u32,
            scale: kept.map_or(1.0, |kept| kept.scale),
        };
        // SAFETY: the plan's vectors begin and end where x has memory, and what is written was allocated
        // for as many; the kernel stops at the last row and column. `validate` has seen to 32-bit indices
        // with a margin for steps beyond the end. The mask was checked to have an element for each of a row.
        ahead::launch(client, |client| unsafe {
            softmax_rows_kernel::launch_unchecked(
                client,
                cubes(client, problem, &blueprint),
                CubeDim::new_2d(blueprint.units(), blueprint.rows),
                vector_size,
                reading.vector_size,
                BufferArg::from_raw_parts(x.argument(), span),
                mask(),
                kept(),
                RowOutputsLaunch {
                    y: y.arg(vector_size),
                    shifted: shifted.arg(vector_size),
                    exponentials: exponentials.arg(vector_size),
                    peaks: peak.arg(1),
                    sums: sum.arg(1),
                },
                extent(problem, vector_size),
                f32::NEG_INFINITY,
                form,
                blueprint,
                [problem.dtype, problem.out, reading.dtype],
            )
        });
    }
    let spanned = |buffer: Buffer| Buffer { elements: problem.span(), ..buffer };
    Ok(SoftmaxRows {
        y: spanned(y),
        shifted: outputs.shifted.then(|| spanned(shifted)),
        exponentials: outputs.exponentials.then(|| spanned(exponentials)),
        peak,
        sum,
    })
}

/// What [`softmax_rows_backward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxGradient<'a> {
    /// Softmax, or exponentials with `sum`.
    pub y: &'a Buffer,
    /// What the exponentials of each row add up to, f32.
    pub sum: Option<&'a Buffer>,
    /// The gradient of `factor` times softmax.
    pub dy: &'a Buffer,
    /// Elements from one row of `dy` to the next.
    pub dy_stride: usize,
    /// What softmax is multiplied by.
    pub factor: f32,
    /// Elements that x was given another value for: their gradient is 0.
    pub mask: Option<&'a RowMask>,
}

impl<'a> SoftmaxGradient<'a> {
    /// From softmax alone.
    pub fn of(y: &'a Buffer, dy: &'a Buffer, dy_stride: usize) -> Self {
        Self { y, sum: None, dy, dy_stride, factor: 1.0, mask: None }
    }
}

/// The gradient of x, as far apart as the rows of y.
///
/// # Errors
///
/// As [`masked_softmax_rows`], and [`KernelError::InvalidProblem`] where the problem asks for another type than
/// that of y.
pub fn softmax_rows_backward(
    client: &Client,
    problem: &SoftmaxProblem,
    inputs: &SoftmaxGradient<'_>,
) -> Result<Buffer, KernelError> {
    let SoftmaxGradient { y, sum, dy, dy_stride, factor, mask } = *inputs;
    let of_dy = SoftmaxProblem { row_stride: dy_stride, ..*problem };
    problem.validate()?;
    of_dy.validate()?;
    problem.check_rows(BACKWARD, "y", y)?;
    of_dy.check_rows(BACKWARD, "dy", dy)?;
    if let Some(sum) = sum {
        problem.check_numbers(BACKWARD, "sum", sum, F32)?;
    }
    mask.map_or(Ok(()), |mask| mask.validate(BACKWARD, problem))?;
    if problem.out != problem.dtype {
        return Err(KernelError::invalid(
            BACKWARD,
            "out",
            format!("{:?}, as y is", problem.dtype),
            format!("{:?}", problem.out),
        ));
    }
    let blueprint = plan_backward(client, problem, y, dy, dy_stride);
    let vector_size = blueprint.vector_size;
    let [span, dy_span] =
        [problem.row_stride, dy_stride].map(|stride| whole_span(problem, stride, vector_size));
    let dx = Buffer::empty(client, span, problem.dtype);
    if problem.rows > 0 {
        let reading = MaskReading::of(mask, problem.classes, vector_size);
        let form = GradientForm { scaled: sum.is_some(), mask: reading.form };
        let sum = sum.cloned().unwrap_or_else(|| Buffer::empty(client, 1, F32));
        let mask = || RowMask::argument(mask.map(|mask| (mask, 0.0)), &sum, reading);
        // SAFETY: as in `masked_softmax_rows`; the sums were checked to be one for each row, and are not compiled
        // in where there are none.
        ahead::launch(client, |client| unsafe {
            softmax_rows_backward_kernel::launch_unchecked(
                client,
                cubes(client, problem, &blueprint),
                CubeDim::new_2d(blueprint.units(), blueprint.rows),
                vector_size,
                reading.vector_size,
                BufferArg::from_raw_parts(y.argument(), span),
                BufferArg::from_raw_parts(dy.argument(), dy_span),
                sum.arg(1),
                mask(),
                dx.arg(vector_size),
                extent(problem, vector_size),
                (dy_stride / vector_size) as u32,
                factor,
                form,
                blueprint,
                [problem.dtype, reading.dtype],
            )
        });
    }
    Ok(Buffer { elements: problem.span(), ..dx })
}

fn extent(problem: &SoftmaxProblem, vector_size: usize) -> ExtentLaunch {
    ExtentLaunch {
        rows: problem.rows as u32,
        classes: problem.classes as u32,
        columns: problem.classes.div_ceil(vector_size) as u32,
        pitch: (problem.row_stride / vector_size) as u32,
    }
}

/// Elements from the first to the end of the last vector.
fn whole_span(problem: &SoftmaxProblem, stride: usize, vector_size: usize) -> usize {
    let last = problem.classes.next_multiple_of(vector_size);
    problem.rows.checked_sub(1).map_or(0, |before| before * stride + last)
}

/// Rows along x, which step over what the device does not take at once.
fn cubes(client: &Client, problem: &SoftmaxProblem, blueprint: &SoftmaxBlueprint) -> CubeCount {
    let most = client.properties().hardware.max_cube_count.0;
    let cubes = problem.rows.div_ceil(blueprint.rows as usize);
    CubeCount::Static(cubes.min(most as usize) as u32, 1, 1)
}
