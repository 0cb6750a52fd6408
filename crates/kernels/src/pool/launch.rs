use super::{
    PoolProblem, PoolWindow, Windows,
    adaptive::{PartsLaunch, pool_adaptive_kernel},
    backward::{BackwardPlan, pool_backward_kernel},
    blueprint::{PoolBlueprint, Way, lines},
    forward::{ForwardPlan, Taken, pool_forward_kernel},
    problem::{I32, OP},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, Rows},
    column_sum::{ColumnSumProblem, column_sum_scaled},
    divisor::divisor,
    row_sum::row_sum,
};
use cubecl::client::Client;

/// What a pool by maxima returns.
#[derive(Clone, Debug)]
pub struct MaxPooled {
    /// The largest number of each window.
    pub y: Buffer,
    /// Where it is, as row times width plus column, where that was asked for.
    pub indices: Option<Buffer>,
}

/// The largest number of each window, and if `with_indices` asks for it where that is.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the problem contradicts itself or x does not hold it;
/// [`KernelError::Unsupported`] for other dtypes, empty tensors, tensors of 2^31 elements and more, tensors that do
/// not begin at a multiple of 16 bytes, and adaptive windows.
pub fn max_pool(
    client: &Client,
    problem: &PoolProblem,
    x: &Buffer,
    with_indices: bool,
) -> Result<MaxPooled, KernelError> {
    problem.validate()?;
    let window = walking(problem)?;
    problem.check_pixels("x", x, problem.pixels(), problem.x_stride, problem.dtype)?;
    let taken = if with_indices { Taken::MaxAndIndex } else { Taken::Max };
    let indices = with_indices.then(|| Buffer::empty(client, problem.outputs(), I32));
    let plan = ForwardPlan::new(taken, false, &window);
    let y = forward(client, problem, &window, plan, x, indices.as_ref());
    Ok(MaxPooled { y, indices })
}

/// The gradient of x given that of y and the indices: dx, contiguous.
///
/// # Errors
///
/// As [`max_pool`]; [`KernelError::InvalidProblem`] also names dy or indices that do not go with the problem.
pub fn max_pool_backward(
    client: &Client,
    problem: &PoolProblem,
    dy: &Buffer,
    indices: &Buffer,
) -> Result<Buffer, KernelError> {
    problem.validate()?;
    let window = walking(problem)?;
    problem.check_pixels("dy", dy, problem.window_count(), problem.dy_stride, problem.dtype)?;
    problem.check_pixels("indices", indices, problem.window_count(), problem.channels, I32)?;
    let plan = BackwardPlan::new(true, false, &window);
    Ok(backward(client, problem, &window, plan, dy, Some(indices)))
}

/// The mean of each window, with `include_padding` over the padding too.
///
/// # Errors
///
/// As [`max_pool`]; [`KernelError::Unsupported`] also for windows with a dilation, and such as lie outside of the
/// image. Adaptive windows are served.
pub fn average_pool(
    client: &Client,
    problem: &PoolProblem,
    x: &Buffer,
    include_padding: bool,
) -> Result<Buffer, KernelError> {
    problem.validate()?;
    problem.check_average()?;
    problem.check_pixels("x", x, problem.pixels(), problem.x_stride, problem.dtype)?;
    let problem = &problem.walking();
    if problem.is_global() {
        if let Some(means) = image_means(client, problem, x) {
            return means;
        }
    }
    match problem.windows {
        Windows::Adaptive => Ok(adaptive(client, problem, x, Way::Forward)),
        Windows::Walking(window) => {
            let plan = ForwardPlan::new(Taken::Mean, include_padding, &window);
            Ok(forward(client, problem, &window, plan, x, None))
        }
    }
}

/// The gradient of x given that of y: dx, contiguous.
///
/// # Errors
///
/// As [`average_pool`], of dy.
pub fn average_pool_backward(
    client: &Client,
    problem: &PoolProblem,
    dy: &Buffer,
    include_padding: bool,
) -> Result<Buffer, KernelError> {
    problem.validate()?;
    problem.check_average()?;
    problem.check_pixels("dy", dy, problem.window_count(), problem.dy_stride, problem.dtype)?;
    let problem = &problem.walking();
    match problem.windows {
        Windows::Adaptive => Ok(adaptive(client, problem, dy, Way::Backward(problem.input))),
        Windows::Walking(window) => {
            let plan = BackwardPlan::new(false, include_padding, &window);
            Ok(backward(client, problem, &window, plan, dy, None))
        }
    }
}

fn walking(problem: &PoolProblem) -> Result<PoolWindow, KernelError> {
    match problem.windows {
        Windows::Walking(window) => Ok(window),
        Windows::Adaptive => Err(KernelError::unsupported(OP, "maxima of adaptive windows")),
    }
}

/// The launch of a forward kernel, after all was checked.
fn forward(
    client: &Client,
    problem: &PoolProblem,
    window: &PoolWindow,
    plan: ForwardPlan,
    x: &Buffer,
    indices: Option<&Buffer>,
) -> Buffer {
    let blueprint = PoolBlueprint::plan(problem, Way::Forward, client);
    let vector_size = blueprint.vector_size;
    let (count, dim) = blueprint.plan.cubes(client);
    let y = Buffer::empty(client, problem.outputs(), problem.dtype);
    // What is not written is not compiled in, but must not be in use either.
    let written = indices.cloned().unwrap_or_else(|| Buffer::empty(client, vector_size, I32));
    // SAFETY: x holds the problem's pixels, whose channels and, where there are more, stride are multiples of the
    // vector size, with indices of 32 bits as `validate` has seen. Loads stay inside of the image. y and, where they
    // are written, the indices have a vector for each unit, behind which the kernel stops.
    ahead::launch(client, |client| unsafe {
        let [rows, columns] = lines(problem, window);
        pool_forward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            x.arg_read_in_part(),
            y.arg(vector_size),
            written.arg(vector_size),
            blueprint.plan.spread(),
            rows,
            columns,
            f32::NEG_INFINITY,
            plan,
            problem.dtype,
        )
    });
    y
}

/// The launch of a backward kernel, after all was checked.
fn backward(
    client: &Client,
    problem: &PoolProblem,
    window: &PoolWindow,
    plan: BackwardPlan,
    dy: &Buffer,
    indices: Option<&Buffer>,
) -> Buffer {
    let way = Way::Backward(plan.grid(problem, window));
    let blueprint = PoolBlueprint::plan(problem, way, client);
    let vector_size = blueprint.vector_size;
    let (count, dim) = blueprint.plan.cubes(client);
    let dx = Buffer::empty(client, problem.inputs(), problem.dtype);
    // Without indices none are compiled in. What stands in for them has a vector of them: WebGPU refuses less.
    let none = || Buffer::empty(client, vector_size, I32);
    let indices = indices.cloned().unwrap_or_else(none);
    // SAFETY: as in `forward`, of dy; the indices, contiguous, were checked too. Cells cover the image, and pixels
    // outside of it are not written.
    ahead::launch(client, |client| unsafe {
        let [rows, columns] = lines(problem, window);
        pool_backward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            dy.arg_read_in_part(),
            indices.arg_read_in_part(),
            dx.arg(vector_size),
            blueprint.plan.spread(),
            rows,
            columns,
            plan,
            problem.dtype,
        )
    });
    dx
}

/// The launch of the adaptive kernel, after all was checked: y from x, or dx from dy.
fn adaptive(client: &Client, problem: &PoolProblem, from: &Buffer, way: Way) -> Buffer {
    let is_gradient = way != Way::Forward;
    let blueprint = PoolBlueprint::plan(problem, way, client);
    let vector_size = blueprint.vector_size;
    let (count, dim) = blueprint.plan.cubes(client);
    let (read, written, elements) = match is_gradient {
        false => (problem.input, problem.output, problem.outputs()),
        true => (problem.output, problem.input, problem.inputs()),
    };
    let parts = || {
        [0, 1].map(|dim| PartsLaunch { read: divisor(read[dim]), written: divisor(written[dim]) })
    };
    let to = Buffer::empty(client, elements, problem.dtype);
    // SAFETY: as in `forward`, of what is read. Parts lie inside of it.
    ahead::launch(client, |client| unsafe {
        let [rows, columns] = parts();
        pool_adaptive_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            from.arg_read_in_part(),
            to.arg(vector_size),
            blueprint.plan.spread(),
            rows,
            columns,
            is_gradient,
            problem.dtype,
        )
    });
    to
}

/// The mean of each channel of each image: as many units share an image as fill the device. `None` for images of one
/// channel whose pixels lie apart.
fn image_means(
    client: &Client,
    problem: &PoolProblem,
    x: &Buffer,
) -> Option<Result<Buffer, KernelError>> {
    let PoolProblem { images, channels, input: [height, width], x_stride, dtype, .. } = *problem;
    let pixels = height * width;
    let factor = (1.0 / pixels as f64) as f32;
    if channels > 1 {
        let shape = [images, pixels, channels];
        let strides = [pixels * x_stride, x_stride, 1];
        let sums = ColumnSumProblem::new(&shape, &strides, 1..2, dtype);
        return Some(sums.and_then(|sums| column_sum_scaled(client, &sums, x, factor)));
    }
    (x_stride == 1).then(|| {
        let rows = Rows { buffer: x.clone(), rows: images, columns: pixels, pitch: pixels };
        row_sum(client, &rows, factor)
    })
}
