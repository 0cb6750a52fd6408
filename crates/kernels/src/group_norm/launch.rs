use super::{
    Form, GroupNormBlueprint, GroupNormPass, GroupNormProblem, Order,
    backward::{
        BackwardRowsLaunch, MergeSumsInLaunch, MergeSumsOutLaunch,
        group_norm_input_gradient_kernel, group_norm_merge_sums_kernel, group_norm_sums_kernel,
    },
    forward::{
        ApplyOutLaunch, MomentsOutLaunch, group_norm_apply_kernel, group_norm_apply_turned_kernel,
        group_norm_merge_moments_kernel, group_norm_statistics_kernel,
    },
    problem::{BACKWARD, FORWARD},
    samples::{ExtentLaunch, GroupingLaunch, PartialsLaunch},
};
use crate::{
    KernelError, ahead,
    batch_norm::StridedRowsLaunch,
    buffer::{Buffer, F32},
    device::grid,
    layer_norm::{SUM_COLUMNS, layer_norm_parameters_kernel},
};
use cubecl::{client::Client, prelude::*};

/// The parameters.
#[derive(Clone, Debug)]
pub struct Affine {
    /// One factor a channel.
    pub gamma: Buffer,
    /// Is added to the channels.
    pub beta: Buffer,
}

/// What y is made of.
#[derive(Clone, Debug)]
pub struct GroupNormInputs {
    /// Samples, as the problem says.
    pub x: Buffer,
    /// The parameters, if there are any.
    pub affine: Option<Affine>,
}

/// What forward returns.
#[derive(Clone, Debug)]
pub struct GroupNormOutput {
    /// In the order of x, contiguous.
    pub y: Buffer,
    /// Of each group of each sample, in f32.
    pub mean: Buffer,
    /// 1 / deviation, likewise.
    pub rstd: Buffer,
}

/// The steps to y that Burn keeps, in the type of x.
#[derive(Clone, Debug)]
pub struct GroupNormParts {
    /// `x - mean`, with pixels last.
    pub centered: Buffer,
    /// h, in the order of x.
    pub normalized: Buffer,
    /// Of each group of each sample, with epsilon.
    pub variance: Buffer,
    /// The root of that.
    pub deviation: Buffer,
}

/// What backward reads beside the gradient of y.
#[derive(Clone, Debug)]
pub struct GroupNormSaved {
    /// x, or what is there in its place.
    pub x: Buffer,
    /// What that is.
    pub form: Form,
    /// The means that forward returned, where x is x.
    pub mean: Option<Buffer>,
    /// 1 / deviation, as forward returned it; where x is not x, deviations in f32.
    pub rstd: Buffer,
    /// As forward had it.
    pub gamma: Option<Buffer>,
}

/// What backward returns.
#[derive(Clone, Debug)]
pub struct GroupNormGradients {
    /// In the order of x, contiguous.
    pub dx: Buffer,
    /// Those of gamma and beta, in their type, where they are asked for.
    pub parameters: Option<[Buffer; 2]>,
}

/// y, and what backward reads.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the problem contradicts itself or a tensor does not go with it;
/// [`KernelError::Unsupported`] for other dtypes, empty tensors, tensors beyond 32-bit indices or that do not begin
/// at a multiple of 16 bytes, and more samples than the device has cubes for.
pub fn group_norm_forward(
    client: &Client,
    problem: &GroupNormProblem,
    inputs: &GroupNormInputs,
) -> Result<GroupNormOutput, KernelError> {
    let plans = Plans::of(client, problem, inputs, false)?;
    let Moments { mean, rstd, coefficients, .. } = moments(client, problem, inputs, &plans);
    let y = Buffer::empty(client, problem.elements(), problem.dtype);
    let plan = &plans.apply;
    let vector_size = plan.vector_size;
    // What is not written is not compiled in, but must not be in use either.
    let [normalized, centered] =
        [(); 2].map(|()| Buffer::empty(client, vector_size, problem.dtype));
    // SAFETY: as in `moments`; y has as many elements as x.
    ahead::launch(client, |client| unsafe {
        group_norm_apply_kernel::launch_unchecked(
            client,
            plans.apply_cubes.clone(),
            plan.tile.dim(),
            vector_size,
            plan.strided(&inputs.x, 0),
            coefficients.arg(vector_size),
            plan.written(&y, &normalized),
            centered.arg(vector_size),
            plan.extent(),
            false,
            plan.tile,
            problem.dtype,
        )
    });
    Ok(GroupNormOutput { y, mean, rstd })
}

/// y, and the steps to it.
///
/// # Errors
///
/// As [`group_norm_forward`].
pub fn group_norm_forward_with_parts(
    client: &Client,
    problem: &GroupNormProblem,
    inputs: &GroupNormInputs,
) -> Result<(Buffer, GroupNormParts), KernelError> {
    let plans = Plans::of(client, problem, inputs, true)?;
    let Moments { coefficients, variance, deviation, .. } =
        moments(client, problem, inputs, &plans);
    let [y, normalized, centered] =
        [(); 3].map(|()| Buffer::empty(client, problem.elements(), problem.dtype));
    let plan = &plans.apply;
    let (vector_size, tile) = (plan.vector_size, plan.tile);
    // SAFETY: as in `moments`; what is written has as many elements as x.
    unsafe {
        match problem.order {
            Order::PixelsLast => ahead::launch(client, |client| {
                group_norm_apply_kernel::launch_unchecked(
                    client,
                    plans.apply_cubes.clone(),
                    tile.dim(),
                    vector_size,
                    plan.strided(&inputs.x, 0),
                    coefficients.arg(vector_size),
                    plan.written(&y, &normalized),
                    centered.arg(vector_size),
                    plan.extent(),
                    true,
                    tile,
                    problem.dtype,
                )
            }),
            Order::ChannelsLast => ahead::launch(client, |client| {
                group_norm_apply_turned_kernel::launch_unchecked(
                    client,
                    plans.apply_cubes.clone(),
                    tile.dim(),
                    vector_size,
                    plan.strided(&inputs.x, 0),
                    coefficients.arg(vector_size),
                    plan.written(&y, &normalized),
                    centered.arg(1),
                    plan.extent(),
                    tile,
                    problem.dtype,
                )
            }),
        }
    }
    Ok((y, GroupNormParts { centered, normalized, variance, deviation }))
}

/// How both passes over x run, after all was checked.
struct Plans {
    statistics: GroupNormBlueprint,
    statistics_cubes: CubeCount,
    merging_cubes: CubeCount,
    apply: GroupNormBlueprint,
    apply_cubes: CubeCount,
    parts: bool,
}

impl Plans {
    fn of(
        client: &Client,
        problem: &GroupNormProblem,
        inputs: &GroupNormInputs,
        parts: bool,
    ) -> Result<Self, KernelError> {
        problem.validate(FORWARD)?;
        problem.check_strided(FORWARD, "x", &inputs.x, problem.x_stride)?;
        if let Some(Affine { gamma, beta }) = &inputs.affine {
            problem.check_parameter(FORWARD, "gamma", gamma)?;
            problem.check_parameter(FORWARD, "beta", beta)?;
        }
        let statistics = GroupNormBlueprint::plan(problem, GroupNormPass::Statistics, client);
        let apply = GroupNormBlueprint::plan(problem, GroupNormPass::Apply { parts }, client);
        Ok(Self {
            statistics_cubes: statistics.cubes(FORWARD, client)?,
            merging_cubes: grid(FORWARD, client, [problem.samples * problem.groups, 1, 1])?,
            apply_cubes: apply.cubes(FORWARD, client)?,
            statistics,
            apply,
            parts,
        })
    }
}

/// What the first two launches leave; variance and deviation with parts alone.
struct Moments {
    mean: Buffer,
    rstd: Buffer,
    coefficients: Buffer,
    variance: Buffer,
    deviation: Buffer,
}

fn moments(
    client: &Client,
    problem: &GroupNormProblem,
    inputs: &GroupNormInputs,
    plans: &Plans,
) -> Moments {
    let GroupNormInputs { x, affine } = inputs;
    let plan = &plans.statistics;
    let (vector_size, tile) = (plan.vector_size, plan.tile);
    let groups = problem.samples * problem.groups;
    let partials = Buffer::empty(client, plan.partials(), F32);
    let [mean, rstd] = [(); 2].map(|()| Buffer::empty(client, groups, F32));
    let of_parts = if plans.parts { groups } else { 1 };
    let [variance, deviation] = [(); 2].map(|()| Buffer::empty(client, of_parts, problem.dtype));
    let coefficients = plans.apply.coefficients(client, problem);
    let merging = GroupNormBlueprint::merging_moments();
    let [gamma, beta] = match affine {
        Some(Affine { gamma, beta }) => [gamma.clone(), beta.clone()],
        None => [(); 2].map(|()| Buffer::empty(client, 1, problem.parameter)),
    };
    let members = plan.members(problem);
    // SAFETY: x holds the problem's samples, whose columns and strides are multiples of the vector size, with
    // indices of 32 bits as `validate` has seen; `partials` has two rows of columns for each split of a sample.
    // The kernels stop at the last row, column, split and channel.
    unsafe {
        ahead::launch(client, |client| {
            group_norm_statistics_kernel::launch_unchecked(
                client,
                plans.statistics_cubes.clone(),
                tile.dim(),
                vector_size,
                plan.strided(x, 0),
                partials.arg(vector_size),
                plan.extent(),
                tile,
                problem.dtype,
            )
        });
        ahead::launch(client, |client| {
            group_norm_merge_moments_kernel::launch_unchecked(
                client,
                plans.merging_cubes.clone(),
                merging.dim(),
                plan.merged(&partials),
                StridedRowsLaunch { memory: all_of(x), stride: plan.view.strides[0] as u32 },
                gamma.arg(1),
                beta.arg(1),
                MomentsOutLaunch {
                    mean: mean.arg(1),
                    rstd: rstd.arg(1),
                    coefficients: coefficients.arg(1),
                    variance: variance.arg(1),
                    deviation: deviation.arg(1),
                },
                plans.apply.grouping(problem),
                members as u32,
                problem.epsilon as f32,
                affine.is_some(),
                plans.parts,
                merging,
                [problem.dtype, problem.parameter],
            )
        });
    }
    Moments { mean, rstd, coefficients, variance, deviation }
}

/// The gradients of x, and if `parameters` asks for them of gamma and beta, given that of y.
///
/// # Errors
///
/// As [`group_norm_forward`]; [`KernelError::InvalidProblem`] also where means are missing that the form of x
/// needs.
pub fn group_norm_backward(
    client: &Client,
    problem: &GroupNormProblem,
    saved: &GroupNormSaved,
    dy: &Buffer,
    parameters: bool,
) -> Result<GroupNormGradients, KernelError> {
    let GroupNormSaved { x, form, mean, rstd, gamma } = saved;
    problem.validate(BACKWARD)?;
    problem.check_strided(BACKWARD, "x", x, problem.x_stride)?;
    problem.check_strided(BACKWARD, "dy", dy, problem.dy_stride)?;
    problem.check_statistic(BACKWARD, "rstd", rstd)?;
    match (form, mean) {
        (Form::Input, None) => {
            return Err(KernelError::invalid(BACKWARD, "mean", "means, as x needs them", "none"));
        }
        (Form::Input, Some(mean)) => problem.check_statistic(BACKWARD, "mean", mean)?,
        _ => {}
    }
    if let Some(gamma) = gamma {
        problem.check_parameter(BACKWARD, "gamma", gamma)?;
    }
    // What is not compiled in has another tensor of its type in its place.
    let mean = mean.as_ref().filter(|_| *form == Form::Input).unwrap_or(rstd);
    let sums_plan = GroupNormBlueprint::plan(problem, GroupNormPass::Sums, client);
    let plan = GroupNormBlueprint::plan(problem, GroupNormPass::InputGradient, client);
    let sums_cubes = sums_plan.cubes(BACKWARD, client)?;
    let merging_cubes = grid(BACKWARD, client, [problem.samples * problem.groups, 1, 1])?;
    let cubes = plan.cubes(BACKWARD, client)?;
    let vector_size = plan.vector_size;
    let partials = Buffer::empty(client, sums_plan.partials(), F32);
    let sums = Buffer::empty(client, 2 * problem.samples * problem.channels, F32);
    let coefficients = plan.coefficients(client, problem);
    let dx = Buffer::empty(client, problem.elements(), problem.dtype);
    let factors = match gamma {
        Some(gamma) => gamma.clone(),
        None => Buffer::empty(client, 1, problem.parameter),
    };
    let merging = GroupNormBlueprint::merging_sums();
    let of_count = 1.0 / (problem.group_channels() * problem.pixels) as f64;
    // SAFETY: as in `moments`, of x and of dy; both plans have vectors of the same size, since what they read lies
    // alike, and so the same copies of a channel. `sums` has two numbers for each channel of a sample.
    unsafe {
        ahead::launch(client, |client| {
            group_norm_sums_kernel::launch_unchecked(
                client,
                sums_cubes.clone(),
                sums_plan.tile.dim(),
                vector_size,
                sums_plan.read(x, dy),
                mean.arg(1),
                partials.arg(vector_size),
                sums_plan.extent(),
                problem.group_channels() as u32,
                *form,
                problem.order,
                sums_plan.tile,
                problem.dtype,
            )
        });
        ahead::launch(client, |client| {
            group_norm_merge_sums_kernel::launch_unchecked(
                client,
                merging_cubes.clone(),
                merging.dim(),
                sums_plan.merged(&partials),
                MergeSumsInLaunch { gamma: factors.arg(1), mean: mean.arg(1), rstd: rstd.arg(1) },
                MergeSumsOutLaunch { sums: sums.arg(1), coefficients: coefficients.arg(1) },
                plan.grouping(problem),
                of_count as f32,
                gamma.is_some(),
                *form,
                problem.order,
                merging,
                problem.parameter,
            )
        });
        ahead::launch(client, |client| {
            group_norm_input_gradient_kernel::launch_unchecked(
                client,
                cubes.clone(),
                plan.tile.dim(),
                vector_size,
                plan.read(x, dy),
                coefficients.arg(vector_size),
                dx.arg(vector_size),
                plan.extent(),
                plan.tile,
                problem.dtype,
            )
        });
    }
    let parameters = parameters.then(|| parameters_of(client, problem, &sums));
    Ok(GroupNormGradients { dx, parameters })
}

/// The gradients of gamma and beta from those of each sample, `[2, samples, channels]`.
fn parameters_of(client: &Client, problem: &GroupNormProblem, sums: &Buffer) -> [Buffer; 2] {
    const LANES: u32 = 8;
    let GroupNormProblem { samples, channels, parameter, .. } = *problem;
    let [dgamma, dbeta] = [(); 2].map(|()| Buffer::empty(client, channels, parameter));
    let across = channels.div_ceil(SUM_COLUMNS as usize) as u32;
    let unused = Buffer::empty(client, 1, parameter);
    // SAFETY: `sums` has a row of channels for each sample and parameter, and there are two cubes along y; the
    // kernel stops at the last channel.
    ahead::launch(client, |client| unsafe {
        layer_norm_parameters_kernel::launch_unchecked(
            client,
            CubeCount::Static(across, 2, 1),
            CubeDim::new_2d(SUM_COLUMNS, LANES),
            sums.arg(1),
            dgamma.arg(1),
            dbeta.arg(1),
            unused.arg(1),
            samples as u32,
            channels as u32,
            LANES,
            true,
            false,
            parameter,
        )
    });
    [dgamma, dbeta]
}

impl GroupNormBlueprint {
    fn extent(&self) -> ExtentLaunch {
        ExtentLaunch {
            rows: self.view.rows as u32,
            columns: self.vectors() as u32,
            across: self.across() as u32,
            split_rows: self.split_rows as u32,
        }
    }

    /// x, the first of the strides, or dy.
    fn strided<T: CubePrimitive>(&self, buffer: &Buffer, which: usize) -> StridedRowsLaunch<T> {
        let stride = self.view.strides[which] / self.vector_size;
        StridedRowsLaunch { memory: all_of(buffer), stride: stride as u32 }
    }

    fn read<T: CubePrimitive>(&self, x: &Buffer, dy: &Buffer) -> BackwardRowsLaunch<T> {
        BackwardRowsLaunch { x: self.strided(x, 0), dy: self.strided(dy, 1) }
    }

    fn written<T: CubePrimitive>(&self, y: &Buffer, normalized: &Buffer) -> ApplyOutLaunch<T> {
        let [y, normalized] = [y, normalized].map(|buffer| buffer.arg(self.vector_size));
        ApplyOutLaunch { y, normalized }
    }

    fn merged(&self, sums: &Buffer) -> PartialsLaunch {
        PartialsLaunch {
            sums: sums.arg(1),
            splits: self.splits as u32,
            rows: self.view.rows as u32,
            split_rows: self.split_rows as u32,
            columns: self.view.columns as u32,
        }
    }

    fn grouping(&self, problem: &GroupNormProblem) -> GroupingLaunch {
        GroupingLaunch {
            channels: problem.channels as u32,
            of_group: problem.group_channels() as u32,
            copies: self.copies(problem.order) as u32,
        }
    }

    /// Four numbers for each channel of a sample, as this plan reads them.
    fn coefficients(&self, client: &Client, problem: &GroupNormProblem) -> Buffer {
        let channels = problem.samples * problem.channels;
        Buffer::empty(client, 4 * channels * self.copies(problem.order), F32)
    }
}

/// All of a buffer as a kernel argument: rows that lie apart may end within a vector that no kernel reads.
fn all_of(buffer: &Buffer) -> BufferArg {
    // SAFETY: whoever made the buffer states that its memory holds its elements.
    unsafe { BufferArg::from_raw_parts(buffer.argument(), buffer.elements) }
}
