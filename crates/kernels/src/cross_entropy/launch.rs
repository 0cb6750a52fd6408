use super::{
    CrossEntropyBlueprint, CrossEntropyProblem, Reduction,
    backward::{DerivativeLaunch, ElementForm, RowTensorsLaunch, cross_entropy_backward_kernel},
    blueprint::UNITS,
    forward::{ExtentLaunch, LogitsLaunch, LossRulesLaunch, cross_entropy_forward_kernel},
    problem::OP,
    reduce::cross_entropy_reduce_kernel,
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, F32},
};
use cubecl::{client::Client, ir::ElemType, prelude::*};

/// What the forward pass returns.
#[derive(Clone, Debug)]
pub struct CrossEntropyOutput {
    /// The loss of each row, f32.
    pub loss: Buffer,
    /// The logarithm of each row's sum of exponentials, f32, which the backward pass reads.
    pub lse: Buffer,
}

/// What [`cross_entropy_reduce`] returns, one f32 each.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// The mean or the sum of the losses.
    pub loss: Buffer,
    /// What the gradient of a row is multiplied by: 1 over the number of rows that count, or 1.
    pub factor: Buffer,
}

/// The loss of each row.
///
/// # Errors
///
/// As [`CrossEntropyProblem::validate`], and [`KernelError::InvalidProblem`] when a buffer does not go
/// with the problem.
pub fn cross_entropy_forward(
    client: &Client,
    problem: &CrossEntropyProblem,
    logits: &Buffer,
    targets: &Buffer,
) -> Result<CrossEntropyOutput, KernelError> {
    let blueprint = CrossEntropyBlueprint::plan(problem, logits, client);
    cross_entropy_forward_with(client, problem, blueprint, logits, targets)
}

/// As [`cross_entropy_forward`], by a plan of the caller's.
///
/// # Errors
///
/// As [`cross_entropy_forward`], and [`KernelError::InvalidProblem`] when lanes or plane of the plan are
/// no powers of two up to a cube's units.
pub fn cross_entropy_forward_with(
    client: &Client,
    problem: &CrossEntropyProblem,
    blueprint: CrossEntropyBlueprint,
    logits: &Buffer,
    targets: &Buffer,
) -> Result<CrossEntropyOutput, KernelError> {
    problem.validate()?;
    problem.check_logits(logits)?;
    problem.check_targets(targets)?;
    check_blueprint(&blueprint)?;
    let [loss, lse] = [(); 2].map(|()| Buffer::empty(client, problem.rows, F32));
    if problem.rows == 0 {
        return Ok(CrossEntropyOutput { loss, lse });
    }
    let width = blueprint.vector_size;
    // SAFETY: logits span what was checked, in which every index below the last row's end lies;
    // `validate` has seen to 32-bit indices with a margin for steps beyond the end. The kernel reads a
    // target's logit only where there is one, and stops at the last row.
    ahead::launch(client, |client| unsafe {
        cross_entropy_forward_kernel::launch_unchecked(
            client,
            row_cubes(client, problem.rows, &blueprint, 1),
            CubeDim::new_1d(blueprint.units),
            width,
            logits_of(problem, logits, width),
            targets.arg(1),
            loss.arg(1),
            lse.arg(1),
            problem.extent(),
            problem.rules(),
            blueprint,
            problem.dtype,
        )
    });
    Ok(CrossEntropyOutput { loss, lse })
}

/// The mean or the sum of the losses of rows. It stays on the device.
///
/// # Errors
///
/// As [`cross_entropy_forward`].
pub fn cross_entropy_reduce(
    client: &Client,
    problem: &CrossEntropyProblem,
    reduction: Reduction,
    losses: &Buffer,
    targets: &Buffer,
) -> Result<Reduced, KernelError> {
    problem.validate()?;
    problem.check_row_values("loss", losses)?;
    problem.check_targets(targets)?;
    Ok(launch_reduce(client, problem, reduction, Some(losses), targets))
}

/// As [`cross_entropy_reduce`]; without losses the factor alone, and a sum over nothing.
pub(super) fn launch_reduce(
    client: &Client,
    problem: &CrossEntropyProblem,
    reduction: Reduction,
    losses: Option<&Buffer>,
    targets: &Buffer,
) -> Reduced {
    let [loss, factor] = [(); 2].map(|()| Buffer::empty(client, 1, F32));
    // SAFETY: losses and targets hold a number for each row, at the last of which the kernel stops. Losses that are
    // not there are not read.
    ahead::launch(client, |client| unsafe {
        cross_entropy_reduce_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(UNITS),
            losses.unwrap_or(&factor).arg(1),
            targets.arg(1),
            loss.arg(1),
            factor.arg(1),
            problem.rows as u32,
            problem.ignore_index.unwrap_or_default(),
            f32::NAN,
            problem.ignore_index.is_some(),
            reduction == Reduction::Mean,
            losses.is_some(),
        )
    });
    Reduced { loss, factor }
}

/// The gradient of the logits, in their layout, and in their memory where nobody else holds that.
///
/// `grad` is the gradient of each row's loss; with a `factor`, which is [`Reduced::factor`], it is the
/// gradient of what the losses were reduced to. What lies between rows that are apart is unspecified.
///
/// # Errors
///
/// As [`cross_entropy_forward`].
pub fn cross_entropy_backward(
    client: &Client,
    problem: &CrossEntropyProblem,
    logits: Buffer,
    targets: &Buffer,
    lse: &Buffer,
    grad: &Buffer,
    factor: Option<&Buffer>,
) -> Result<Buffer, KernelError> {
    problem.validate()?;
    problem.check_logits(&logits)?;
    problem.check_targets(targets)?;
    problem.check_row_values("lse", lse)?;
    match factor {
        Some(factor) => {
            grad.check(OP, "grad", 1, F32)?;
            factor.check(OP, "factor", 1, F32)?;
        }
        None => problem.check_row_values("grad", grad)?,
    }
    let terms = RowNumbers { targets, lse, grad, factor };
    Ok(launch_elements(client, problem, logits, problem.dtype, terms, ElementForm::OfLosses))
}

/// What a pass over the elements of rows reads besides, a number for each row: of those that a form does
/// not read, any buffer.
#[derive(Clone, Copy)]
pub(crate) struct RowNumbers<'a> {
    pub(crate) targets: &'a Buffer,
    pub(crate) lse: &'a Buffer,
    pub(crate) grad: &'a Buffer,
    /// What `grad` is multiplied by if it is one for all rows.
    pub(crate) factor: Option<&'a Buffer>,
}

/// What `form` makes of the elements of a valid problem, in their layout and of type `out`, and in their
/// memory where nobody else holds that and it is their type. Lengths were checked by the caller.
pub(crate) fn launch_elements(
    client: &Client,
    problem: &CrossEntropyProblem,
    logits: Buffer,
    out: ElemType,
    terms: RowNumbers<'_>,
    form: ElementForm,
) -> Buffer {
    let RowNumbers { targets, lse, grad, factor } = terms;
    // Asked before a copy of the handle is made for the launch.
    let is_ours = out == problem.dtype && logits.handle.can_mut();
    if problem.rows == 0 && out == problem.dtype {
        return logits;
    }
    let blueprint = CrossEntropyBlueprint::plan_for(problem, &logits, out, client);
    // With what lies behind the last row, too: who reads aligned rows reads all of it.
    let out = (!is_ours).then(|| Buffer::empty(client, problem.rows * problem.row_stride, out));
    let dtype = out.as_ref().map_or(problem.dtype, |out| out.dtype);
    let end = whole(problem, blueprint.vector_size);
    let ends = CrossEntropyBlueprint { vector_size: 1, ..blueprint };
    let launches = [(blueprint, 0, end), (ends, end, problem.span())];
    for (blueprint, first, last) in launches {
        if first == last {
            continue;
        }
        // What is left for vectors of one is shorter than a row.
        let first_row = if first == 0 { 0 } else { problem.rows - 1 };
        let parts = if first == 0 { parts(client, problem, &blueprint) } else { 1 };
        let target = || match &out {
            // SAFETY: as below; new memory was allocated for the span.
            Some(new) => unsafe { BufferArg::from_raw_parts(new.argument(), last) },
            None => BufferArg::alias(LOGITS, last),
        };
        // SAFETY: vectors end before the last logit, and the kernel stops there; rows have their terms,
        // whose lengths were checked. `validate` has seen to 32-bit indices. In place, each vector is
        // read and written by the unit that owns it. Without a factor none is compiled in, and the
        // gradients stand in for it.
        ahead::launch(client, |client| unsafe {
            cross_entropy_backward_kernel::launch_unchecked(
                client,
                row_cubes(client, problem.rows - first_row, &blueprint, parts),
                CubeDim::new_1d(blueprint.units),
                blueprint.vector_size,
                BufferArg::from_raw_parts(logits.argument(), last),
                RowTensorsLaunch {
                    targets: targets.arg(1),
                    lse: lse.arg(1),
                    grad: grad.arg(1),
                    factor: factor.unwrap_or(grad).arg(1),
                },
                target(),
                problem.extent(),
                first_row as u32,
                first as u32,
                problem.derivative(factor.is_some(), form),
                blueprint,
                [problem.dtype, dtype],
            )
        });
    }
    out.unwrap_or(logits)
}

impl CrossEntropyProblem {
    pub(super) fn rules(&self) -> LossRulesLaunch {
        LossRulesLaunch {
            ignore_index: self.ignore_index.unwrap_or_default(),
            smoothing: self.smoothing,
            invalid: f32::NAN,
            ignores: self.ignore_index.is_some(),
            is_smoothed: self.smoothing > 0.0,
        }
    }

    pub(super) fn derivative(&self, is_reduced: bool, form: ElementForm) -> DerivativeLaunch {
        DerivativeLaunch {
            everywhere: self.smoothing / self.classes as f32,
            at_target: 1.0 - self.smoothing,
            ignore_index: self.ignore_index.unwrap_or_default(),
            invalid: f32::NAN,
            ignores: self.ignore_index.is_some(),
            is_smoothed: self.smoothing > 0.0,
            is_reduced,
            form,
        }
    }

    pub(crate) fn extent(&self) -> ExtentLaunch {
        ExtentLaunch {
            rows: self.rows as u32,
            classes: self.classes as u32,
            row_stride: self.row_stride as u32,
        }
    }
}

/// Logits as an argument: those of whole vectors, and all of them one by one.
pub(crate) fn logits_of<F: Float, N: Size>(
    problem: &CrossEntropyProblem,
    logits: &Buffer,
    vector_size: usize,
) -> LogitsLaunch<F, N> {
    let whole = whole(problem, vector_size);
    // SAFETY: the logits were checked to span the problem, and whole vectors end before it does.
    let part = |elements| unsafe { BufferArg::from_raw_parts(logits.argument(), elements) };
    LogitsLaunch { vectors: part(whole), elements: part(problem.span()) }
}

/// The position of the logits among the backward kernel's buffers.
const LOGITS: usize = 0;

/// Elements of the whole vectors in the span of the logits.
pub(super) fn whole(problem: &CrossEntropyProblem, vector_size: usize) -> usize {
    problem.span() / vector_size * vector_size
}

/// Cubes for each multiprocessor: eight of 256 units are all that it has room for.
const CUBES_A_MULTIPROCESSOR: usize = 8;

/// In how many parts rows are worked on: one, unless there are too few rows to fill the device.
fn parts(client: &Client, problem: &CrossEntropyProblem, blueprint: &CrossEntropyBlueprint) -> u32 {
    let wanted = DeviceProfile::of(client).multiprocessors * CUBES_A_MULTIPROCESSOR;
    let cubes = problem.rows.div_ceil(blueprint.rows_a_cube() as usize);
    let steps = (problem.classes / blueprint.vector_size).div_ceil(blueprint.lanes as usize);
    // At most some thousands.
    wanted.div_ceil(cubes).clamp(1, steps.max(1)) as u32
}

/// Rows along x, which step over what the device does not take at once; parts along y.
pub(crate) fn row_cubes(
    client: &Client,
    rows: usize,
    blueprint: &CrossEntropyBlueprint,
    parts: u32,
) -> CubeCount {
    let most = client.properties().hardware.max_cube_count;
    CubeCount::Static(cubes_along_x(client, rows, blueprint), parts.min(most.1), 1)
}

/// Cubes for all rows, as far as the device takes them.
pub(super) fn cubes_along_x(
    client: &Client,
    rows: usize,
    blueprint: &CrossEntropyBlueprint,
) -> u32 {
    let most = client.properties().hardware.max_cube_count;
    let cubes = rows.div_ceil(blueprint.rows_a_cube() as usize);
    u32::try_from(cubes).map_or(most.0, |cubes| cubes.min(most.0))
}

fn check_blueprint(blueprint: &CrossEntropyBlueprint) -> Result<(), KernelError> {
    let is_share = |units: u32| units.is_power_of_two() && units <= blueprint.units;
    let is_cube = blueprint.units == UNITS;
    if is_cube
        && is_share(blueprint.lanes)
        && is_share(blueprint.plane)
        && blueprint.vector_size > 0
    {
        return Ok(());
    }
    Err(KernelError::invalid(
        OP,
        "blueprint",
        format!("{UNITS} units, lanes and a plane of powers of two up to that"),
        format!("{blueprint:?}"),
    ))
}
