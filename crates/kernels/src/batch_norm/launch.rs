use super::{
    BatchNormBlueprint, BatchNormPass, BatchNormProblem,
    apply::{Tail, batch_norm_apply_kernel},
    backward::{
        BackwardRowsLaunch, batch_norm_input_gradient_kernel, batch_norm_merge_sums_kernel,
        batch_norm_sums_kernel,
    },
    channels::{ExtentLaunch, PartialsLaunch, StatisticsLaunch, StridedRowsLaunch},
    problem::{APPLY, BACKWARD, RUNNING, STATISTICS},
    statistics::{
        batch_norm_merge_moments_kernel, batch_norm_running_kernel, batch_norm_statistics_kernel,
    },
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32},
};
use cubecl::{calculate_cube_count_elemwise, client::Client, prelude::*};

/// Mean and biased variance of each channel.
#[derive(Clone, Debug)]
pub struct Statistics {
    /// Means.
    pub mean: Buffer,
    /// Variances, in the type of the means.
    pub variance: Buffer,
}

/// What y is made of.
#[derive(Clone, Debug)]
pub struct BatchNormInputs {
    /// Rows of channels, `row_stride` apart.
    pub x: Buffer,
    /// Of a batch or of many, in f32 or in the type of x.
    pub statistics: Statistics,
    /// One factor a channel.
    pub gamma: Buffer,
    /// Is added to the channels.
    pub beta: Buffer,
    /// Is added to what is normalized: contiguous rows of channels.
    pub residual: Option<Buffer>,
    /// Whether a `ReLU` comes last.
    pub relu: bool,
}

/// What backward reads beside the gradient of y.
#[derive(Clone, Debug)]
pub struct BatchNormSaved {
    /// As forward had it.
    pub x: Buffer,
    /// Those of the batch, in f32 or rounded to the type of x.
    pub statistics: Statistics,
    /// As forward had it.
    pub gamma: Buffer,
    /// What forward returned, where a `ReLU` came last.
    pub y: Option<Buffer>,
}

/// What backward returns.
#[derive(Clone, Debug)]
pub struct BatchNormGradients {
    /// Of x: contiguous rows.
    pub dx: Buffer,
    /// Of the factors, in their type.
    pub dgamma: Buffer,
    /// Of what is added, in the type of the factors.
    pub dbeta: Buffer,
    /// Of the residual, where it is asked for after a `ReLU`: contiguous rows. Without a `ReLU` it is dy itself.
    pub dresidual: Option<Buffer>,
}

/// Mean and biased variance of each channel, in f32.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the problem contradicts itself or x does not hold it;
/// [`KernelError::Unsupported`] for other dtypes, empty tensors, tensors beyond 32-bit indices, tensors that
/// do not begin at a multiple of 16 bytes, and more channels than the device has cubes for.
pub fn batch_norm_statistics(
    client: &Client,
    problem: &BatchNormProblem,
    x: &Buffer,
) -> Result<Statistics, KernelError> {
    problem.validate(STATISTICS)?;
    problem.check_strided(STATISTICS, "x", x, problem.row_stride)?;
    let blueprint = BatchNormBlueprint::plan(problem, BatchNormPass::Statistics, client);
    let BatchNormBlueprint { vector_size, splits, tile, .. } = blueprint;
    let cubes = blueprint.cubes(STATISTICS, problem.channels, client)?;
    let merging = BatchNormBlueprint::merging_cubes(STATISTICS, problem.channels, client)?;
    let merging_tile = BatchNormBlueprint::merging(client);
    let partials = Buffer::empty(client, 2 * splits * problem.channels, F32);
    let [mean, variance] = [(); 2].map(|()| Buffer::empty(client, problem.channels, F32));
    // SAFETY: x holds the problem's rows, whose channels and, where there are more, stride are multiples of
    // the vector size, with indices of 32 bits as `validate` has seen; `partials` has two rows of channels
    // for each split. The kernels stop at the last row, split and channel.
    unsafe {
        ahead::launch(client, |client| {
            batch_norm_statistics_kernel::launch_unchecked(
                client,
                cubes.clone(),
                tile.dim(),
                vector_size,
                blueprint.strided(x, problem.row_stride),
                partials.arg(vector_size),
                blueprint.extent(problem),
                tile,
                problem.dtype,
            )
        });
        ahead::launch(client, |client| {
            batch_norm_merge_moments_kernel::launch_unchecked(
                client,
                merging.clone(),
                merging_tile.dim(),
                blueprint.partials(problem, &partials),
                rows_of(x),
                mean.arg(1),
                variance.arg(1),
                merging_tile,
                problem.dtype,
            )
        });
    }
    Ok(Statistics { mean, variance })
}

/// Means and variances of many batches, and how the next batch counts among them.
#[derive(Clone, Debug)]
pub struct RunningStatistics {
    /// Means, in f32, f16 or bf16.
    pub mean: Buffer,
    /// Variances, in the type of the means.
    pub variance: Buffer,
    /// The factor of what they were: one less the momentum, in Burn's and PyTorch's sense.
    pub kept: f32,
    /// The factor of the batch's: the momentum.
    pub new: f32,
}

/// Mean and variance behind a batch with those `statistics`, in f32: new buffers, in the type of `running`.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where `statistics` are not in f32, or tensors differ in length or type.
pub fn batch_norm_running(
    client: &Client,
    running: &RunningStatistics,
    statistics: &Statistics,
) -> Result<[Buffer; 2], KernelError> {
    const UNITS: u32 = 64;
    let RunningStatistics { mean, variance, kept, new } = running;
    let (channels, dtype) = (mean.elements, mean.dtype);
    for (argument, buffer, expected) in [
        ("variance", variance, dtype),
        ("statistics", &statistics.mean, F32),
        ("statistics", &statistics.variance, F32),
    ] {
        buffer.check(RUNNING, argument, channels, expected)?;
    }
    let updated = [(); 2].map(|()| Buffer::empty(client, channels, dtype));
    if channels == 0 {
        return Ok(updated);
    }
    let dim = CubeDim::new_1d(UNITS);
    // SAFETY: all hold a number for each channel, at which the kernel stops.
    ahead::launch(client, |client| unsafe {
        batch_norm_running_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, channels, dim),
            dim,
            mean.arg(1),
            variance.arg(1),
            statistics.mean.arg(1),
            statistics.variance.arg(1),
            updated[0].arg(1),
            updated[1].arg(1),
            channels as u32,
            *kept,
            *new,
            dtype,
        )
    });
    Ok(updated)
}

/// y, in contiguous rows.
///
/// # Errors
///
/// As [`batch_norm_statistics`]; [`KernelError::InvalidProblem`] also names another tensor that does not go
/// with the problem.
pub fn batch_norm_apply(
    client: &Client,
    problem: &BatchNormProblem,
    inputs: &BatchNormInputs,
) -> Result<Buffer, KernelError> {
    let BatchNormInputs { x, statistics, gamma, beta, residual, relu } = inputs;
    problem.validate(APPLY)?;
    problem.check_strided(APPLY, "x", x, problem.row_stride)?;
    problem.check_statistics(APPLY, &statistics.mean, &statistics.variance)?;
    problem.check_parameter(APPLY, "gamma", gamma)?;
    problem.check_parameter(APPLY, "beta", beta)?;
    if let Some(residual) = residual {
        problem.check_rows(APPLY, "residual", residual)?;
    }
    let pass = BatchNormPass::Apply { residual: residual.is_some() };
    let blueprint = BatchNormBlueprint::plan(problem, pass, client);
    let BatchNormBlueprint { vector_size, tile, .. } = blueprint;
    let cubes = blueprint.cubes(APPLY, problem.channels, client)?;
    let y = Buffer::empty(client, problem.elements(), problem.dtype);
    // SAFETY: as in `batch_norm_statistics`; the other tensors were checked too. Without a residual none is
    // compiled in, and x stands in for it.
    ahead::launch(client, |client| unsafe {
        batch_norm_apply_kernel::launch_unchecked(
            client,
            cubes.clone(),
            tile.dim(),
            vector_size,
            blueprint.strided(x, problem.row_stride),
            rows_of(residual.as_ref().unwrap_or(x)),
            statistics.args(problem),
            gamma.arg(vector_size),
            beta.arg(vector_size),
            y.arg(vector_size),
            blueprint.extent(problem),
            Tail { residual: residual.is_some(), relu: *relu },
            tile,
            [problem.dtype, statistics.mean.dtype, problem.parameter],
        )
    });
    Ok(y)
}

/// The gradients of x, gamma and beta given that of y, whose rows are `dy_stride` apart, and if `residual`
/// asks for it and a `ReLU` came last that of the residual.
///
/// # Errors
///
/// As [`batch_norm_apply`].
pub fn batch_norm_backward(
    client: &Client,
    problem: &BatchNormProblem,
    saved: &BatchNormSaved,
    dy: &Buffer,
    residual: bool,
) -> Result<BatchNormGradients, KernelError> {
    let BatchNormSaved { x, statistics, gamma, y } = saved;
    problem.validate(BACKWARD)?;
    problem.check_strided(BACKWARD, "x", x, problem.row_stride)?;
    problem.check_strided(BACKWARD, "dy", dy, problem.dy_stride)?;
    problem.check_statistics(BACKWARD, &statistics.mean, &statistics.variance)?;
    problem.check_parameter(BACKWARD, "gamma", gamma)?;
    if let Some(y) = y {
        problem.check_rows(BACKWARD, "y", y)?;
    }
    let Sums { sums, dgamma, dbeta } = sums_of(client, problem, saved, dy)?;
    let relu = y.is_some();
    let blueprint =
        BatchNormBlueprint::plan(problem, BatchNormPass::InputGradient { relu }, client);
    let BatchNormBlueprint { vector_size, tile, .. } = blueprint;
    let cubes = blueprint.cubes(BACKWARD, problem.channels, client)?;
    let dx = Buffer::empty(client, problem.elements(), problem.dtype);
    let dresidual =
        (relu && residual).then(|| Buffer::empty(client, problem.elements(), problem.dtype));
    // What is not written is not compiled in, but must not be in use either.
    let written =
        dresidual.clone().unwrap_or_else(|| Buffer::empty(client, vector_size, problem.dtype));
    // SAFETY: as in `batch_norm_statistics`; the other tensors were checked too, and `sums` holds two rows of
    // channels. Without a ReLU no y is compiled in, and dy stands in for it.
    ahead::launch(client, |client| unsafe {
        batch_norm_input_gradient_kernel::launch_unchecked(
            client,
            cubes.clone(),
            tile.dim(),
            vector_size,
            backward_rows(problem, &blueprint, saved, dy),
            statistics.args(problem),
            gamma.arg(vector_size),
            sums.arg(vector_size),
            dx.arg(vector_size),
            written.arg(vector_size),
            blueprint.extent(problem),
            (1.0 / problem.rows as f64) as f32,
            dresidual.is_some(),
            tile,
            [problem.dtype, statistics.mean.dtype, problem.parameter],
        )
    });
    Ok(BatchNormGradients { dx, dgamma, dbeta, dresidual })
}

/// The gradients of the parameters, and both before their rounding: dbeta, then dgamma.
struct Sums {
    sums: Buffer,
    dgamma: Buffer,
    dbeta: Buffer,
}

/// The first two launches of the backward pass, after all tensors were checked.
fn sums_of(
    client: &Client,
    problem: &BatchNormProblem,
    saved: &BatchNormSaved,
    dy: &Buffer,
) -> Result<Sums, KernelError> {
    let BatchNormSaved { statistics, y, .. } = saved;
    let relu = y.is_some();
    let blueprint = BatchNormBlueprint::plan(problem, BatchNormPass::Sums { relu }, client);
    let BatchNormBlueprint { vector_size, splits, tile, .. } = blueprint;
    let cubes = blueprint.cubes(BACKWARD, problem.channels, client)?;
    let merging = BatchNormBlueprint::merging_cubes(BACKWARD, problem.channels, client)?;
    let merging_tile = BatchNormBlueprint::merging(client);
    let partials = Buffer::empty(client, 2 * splits * problem.channels, F32);
    let sums = Buffer::empty(client, 2 * problem.channels, F32);
    let [dgamma, dbeta] =
        [(); 2].map(|()| Buffer::empty(client, problem.channels, problem.parameter));
    // SAFETY: as in `batch_norm_backward`; `partials` has two rows of channels for each split.
    unsafe {
        ahead::launch(client, |client| {
            batch_norm_sums_kernel::launch_unchecked(
                client,
                cubes.clone(),
                tile.dim(),
                vector_size,
                backward_rows(problem, &blueprint, saved, dy),
                statistics.mean.arg(vector_size),
                partials.arg(vector_size),
                blueprint.extent(problem),
                tile,
                [problem.dtype, statistics.mean.dtype],
            )
        });
        ahead::launch(client, |client| {
            batch_norm_merge_sums_kernel::launch_unchecked(
                client,
                merging.clone(),
                merging_tile.dim(),
                blueprint.partials(problem, &partials),
                statistics.variance.arg(1),
                sums.arg(1),
                dgamma.arg(1),
                dbeta.arg(1),
                problem.epsilon as f32,
                merging_tile,
                [statistics.mean.dtype, problem.parameter],
            )
        });
    }
    Ok(Sums { sums, dgamma, dbeta })
}

impl Statistics {
    fn args<T: CubePrimitive>(&self, problem: &BatchNormProblem) -> StatisticsLaunch<T> {
        let (mean, variance) = (self.mean.arg(1), self.variance.arg(1));
        StatisticsLaunch { mean, variance, epsilon: problem.epsilon as f32 }
    }
}

impl BatchNormBlueprint {
    fn extent(&self, problem: &BatchNormProblem) -> ExtentLaunch {
        ExtentLaunch {
            rows: problem.rows as u32,
            columns: (problem.channels / self.vector_size) as u32,
            split_rows: self.split_rows as u32,
        }
    }

    fn strided<T: CubePrimitive>(&self, buffer: &Buffer, stride: usize) -> StridedRowsLaunch<T> {
        StridedRowsLaunch { memory: rows_of(buffer), stride: (stride / self.vector_size) as u32 }
    }

    fn partials(&self, problem: &BatchNormProblem, sums: &Buffer) -> PartialsLaunch {
        PartialsLaunch {
            sums: sums.arg(1),
            channels: problem.channels as u32,
            splits: self.splits as u32,
            rows: problem.rows as u32,
            split_rows: self.split_rows as u32,
        }
    }
}

/// What both kernels over rows of the backward pass read. Without a `ReLU` no y is read, and dy stands in.
fn backward_rows<T: CubePrimitive>(
    problem: &BatchNormProblem,
    blueprint: &BatchNormBlueprint,
    saved: &BatchNormSaved,
    dy: &Buffer,
) -> BackwardRowsLaunch<T> {
    BackwardRowsLaunch {
        x: blueprint.strided(&saved.x, problem.row_stride),
        dy: blueprint.strided(dy, problem.dy_stride),
        y: rows_of(saved.y.as_ref().unwrap_or(dy)),
        relu: saved.y.is_some(),
    }
}

/// Rows as a kernel argument: those that lie apart may end within a vector that no kernel reads.
fn rows_of(buffer: &Buffer) -> BufferArg {
    // SAFETY: whoever made the buffer states that its memory holds its elements.
    unsafe { BufferArg::from_raw_parts(buffer.argument(), buffer.elements) }
}
