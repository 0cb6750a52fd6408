//! Launches of losses and their gradient by one pass.

use super::{
    CrossEntropyBlueprint, CrossEntropyProblem, Reduction,
    at_once::{GradientLaunch, cross_entropy_at_once_kernel, cross_entropy_rescale_kernel},
    backward::ElementForm,
    blueprint::UNITS,
    launch::{cubes_along_x, launch_reduce, logits_of, whole},
    problem::OP,
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, F32},
    device::widest_vector,
};
use cubecl::{client::Client, prelude::*};

/// What [`cross_entropy_at_once`] returns.
#[derive(Clone, Debug)]
pub struct CrossEntropyAtOnce {
    /// The mean or the sum of the losses, f32.
    pub loss: Buffer,
    /// The gradient of the logits where that of the loss is 1, in the logits' layout.
    pub dlogits: Buffer,
}

/// Bytes of the rows at work that a cache holds: half of what Hopper's does, whose halves keep copies of each other's.
const CACHED_BYTES: usize = 28 << 20;

/// The mean or the sum of the losses of rows, and the gradient of the logits for a gradient of 1, in their memory where
/// nobody else holds that. Logits are read from memory once. What lies between rows that are apart is unspecified.
///
/// # Errors
///
/// As [`cross_entropy_forward`](super::cross_entropy_forward).
pub fn cross_entropy_at_once(
    client: &Client,
    problem: &CrossEntropyProblem,
    reduction: Reduction,
    logits: Buffer,
    targets: &Buffer,
) -> Result<CrossEntropyAtOnce, KernelError> {
    /// The positions of the logits among the kernel's buffers, by vectors and one by one.
    const LOGITS: [usize; 2] = [0, 1];

    problem.validate()?;
    problem.check_logits(&logits)?;
    problem.check_targets(targets)?;
    // Asked before a copy of the handle is made for the launch.
    let is_ours = logits.handle.can_mut();
    let losses = Buffer::empty(client, problem.rows, F32);
    let reduce = |losses| launch_reduce(client, problem, reduction, losses, targets);
    if problem.rows == 0 {
        return Ok(CrossEntropyAtOnce { loss: reduce(Some(&losses)).loss, dlogits: logits });
    }
    let factor = reduce(None).factor;
    let blueprint = CrossEntropyBlueprint::plan_at_once(problem, &logits, client);
    let width = blueprint.vector_size;
    // With what lies behind the last row, too: who reads aligned rows reads all of it.
    let span = problem.rows * problem.row_stride;
    let new = (!is_ours).then(|| Buffer::empty(client, span, problem.dtype));
    let part = |place: usize, elements| match &new {
        // SAFETY: new memory was allocated for the span.
        Some(new) => unsafe { BufferArg::from_raw_parts(new.argument(), elements) },
        None => BufferArg::alias(LOGITS[place], elements),
    };
    // SAFETY: the logits span what was checked, in which every index below the last row's end lies; `validate` has
    // seen to 32-bit indices with a margin for steps beyond the end. In place, each element is written by the unit that
    // read it last: units have met in between, and read the target's logit before.
    ahead::launch(client, |client| unsafe {
        cross_entropy_at_once_kernel::launch_unchecked(
            client,
            cubes(client, problem, &blueprint),
            CubeDim::new_1d(blueprint.units),
            width,
            logits_of(problem, &logits, width),
            targets.arg(1),
            factor.arg(1),
            losses.arg(1),
            GradientLaunch {
                vectors: part(0, whole(problem, width)),
                elements: part(1, problem.span()),
            },
            problem.extent(),
            problem.rules(),
            problem.derivative(true, ElementForm::OfLosses),
            blueprint,
            problem.dtype,
        )
    });
    Ok(CrossEntropyAtOnce { loss: reduce(Some(&losses)).loss, dlogits: new.unwrap_or(logits) })
}

/// So few cubes that the cache holds the rows that are at work, and enough to fill the device if it does.
fn cubes(
    client: &Client,
    problem: &CrossEntropyProblem,
    blueprint: &CrossEntropyBlueprint,
) -> CubeCount {
    /// Units of a multiprocessor that hide the latency of memory.
    const BUSY_UNITS: u32 = 2048;
    let multiprocessors = DeviceProfile::of(client).multiprocessors.max(1);
    let row_bytes = problem.row_stride * problem.dtype.size() * blueprint.rows_a_cube() as usize;
    let held = CACHED_BYTES / (multiprocessors * row_bytes).max(1);
    let most = (BUSY_UNITS / blueprint.units) as usize;
    let most = u32::try_from(multiprocessors * held.clamp(1, most)).unwrap_or(u32::MAX);
    CubeCount::Static(cubes_along_x(client, problem.rows, blueprint).min(most), 1, 1)
}

/// `dlogits` times `grad`, one number, in place: for a loss that was not the last thing that was computed. `dlogits` are
/// as [`cross_entropy_at_once`] returns them; whoever else holds their memory sees the change. Nothing is done where the
/// number is 1.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when a buffer does not go with the problem.
pub fn cross_entropy_rescale(
    client: &Client,
    problem: &CrossEntropyProblem,
    dlogits: Buffer,
    grad: &Buffer,
) -> Result<Buffer, KernelError> {
    problem.validate()?;
    problem.check_logits(&dlogits)?;
    grad.check(OP, "grad", 1, F32)?;
    let offset = dlogits.offset_bytes() as usize;
    let (span, size) = (problem.span(), problem.dtype.size());
    let width = widest_vector(client, size, |width| {
        span.is_multiple_of(width) && offset.is_multiple_of(width * size)
    });
    if span == 0 {
        return Ok(dlogits);
    }
    let vectors = span / width;
    let most = DeviceProfile::of(client).multiprocessors.max(1) * 8;
    let cubes = vectors.div_ceil(UNITS as usize).min(most) as u32;
    // SAFETY: the memory spans the problem, in whole vectors, at the last of which the kernel stops.
    ahead::launch(client, |client| unsafe {
        cross_entropy_rescale_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            width,
            BufferArg::from_raw_parts(dlogits.argument(), span),
            grad.arg(1),
            vectors as u32,
            problem.dtype,
        )
    });
    Ok(dlogits)
}
