use super::{SoftmaxProblem, forward::softmax_sums_kernel, problem::I32};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32},
    cross_entropy::{
        CrossEntropyBlueprint, ElementForm, RowNumbers, launch_elements, logits_of, row_cubes,
    },
};
use cubecl::{client::Client, prelude::*};

/// What [`softmax_sums`] returns, an f32 for each row.
#[derive(Clone, Debug)]
pub struct SoftmaxSums {
    /// The largest element.
    pub peak: Buffer,
    /// The sum of the exponentials of what the elements lack to it.
    pub sum: Buffer,
    /// The logarithm of the sum.
    pub log: Buffer,
    /// The logarithm of softmax at the target, where there are targets.
    pub picked: Option<Buffer>,
}

/// What is to be known of each row before anything of its length is written.
///
/// # Errors
///
/// As [`SoftmaxProblem::validate`], and [`KernelError::InvalidProblem`] when a buffer does not go with the
/// problem.
pub fn softmax_sums(
    client: &Client,
    problem: &SoftmaxProblem,
    x: &Buffer,
    targets: Option<&Buffer>,
) -> Result<SoftmaxSums, KernelError> {
    const OP: &str = "softmax_sums";

    problem.validate()?;
    problem.check_rows(OP, "x", x)?;
    if let Some(targets) = targets {
        problem.check_numbers(OP, "targets", targets, I32)?;
    }
    let [peak, sum, log, picked] = [(); 4].map(|()| Buffer::empty(client, problem.rows, F32));
    let sums = |picked| SoftmaxSums { peak, sum, log, picked };
    if problem.rows == 0 {
        return Ok(sums(targets.map(|_| picked)));
    }
    let blueprint = CrossEntropyBlueprint::plan(&problem.loss(), x, client);
    let none = Buffer::empty(client, problem.rows, I32);
    let sums = sums(Some(picked.clone()));
    // SAFETY: x spans what was checked, in which every index below the last row's end lies; `validate` has
    // seen to 32-bit indices with a margin for steps beyond the end. The kernel reads an element at a
    // target only where there is one, and stops at the last row. Without targets none are read.
    ahead::launch(client, |client| unsafe {
        softmax_sums_kernel::launch_unchecked(
            client,
            row_cubes(client, problem.rows, &blueprint, 1),
            CubeDim::new_1d(blueprint.units),
            blueprint.vector_size,
            logits_of(&problem.loss(), x, blueprint.vector_size),
            targets.unwrap_or(&none).arg(1),
            sums.peak.arg(1),
            sums.sum.arg(1),
            sums.log.arg(1),
            picked.arg(1),
            problem.loss().extent(),
            f32::NAN,
            blueprint,
            targets.is_some(),
            problem.dtype,
        )
    });
    Ok(SoftmaxSums { picked: targets.map(|_| picked), ..sums })
}

/// `x - peak`: what each element lacks to the largest of its row.
///
/// # Errors
///
/// As [`softmax_sums`].
pub fn softmax_shifted(
    client: &Client,
    problem: &SoftmaxProblem,
    x: Buffer,
    peak: &Buffer,
) -> Result<Buffer, KernelError> {
    const OP: &str = "softmax_shifted";

    problem.validate()?;
    problem.check_rows(OP, "x", &x)?;
    problem.check_numbers(OP, "peak", peak, F32)?;
    let numbers = RowNumbers { targets: peak, lse: peak, grad: peak, factor: None };
    Ok(launch_elements(client, &problem.loss(), x, problem.out, numbers, ElementForm::Less))
}

/// `x - peak - log`: the logarithm of softmax.
///
/// # Errors
///
/// As [`softmax_sums`].
pub fn log_softmax(
    client: &Client,
    problem: &SoftmaxProblem,
    x: Buffer,
    sums: &SoftmaxSums,
) -> Result<Buffer, KernelError> {
    const OP: &str = "log_softmax";

    let SoftmaxSums { peak, log, .. } = sums;
    problem.validate()?;
    problem.check_rows(OP, "x", &x)?;
    problem.check_numbers(OP, "peak", peak, F32)?;
    problem.check_numbers(OP, "log", log, F32)?;
    let numbers = RowNumbers { targets: peak, lse: peak, grad: log, factor: None };
    Ok(launch_elements(client, &problem.loss(), x, problem.out, numbers, ElementForm::LessTwice))
}

/// The gradient of `x` where `grad` is that of the logarithm of softmax at each row's target.
///
/// # Errors
///
/// As [`softmax_sums`].
pub fn picked_backward(
    client: &Client,
    problem: &SoftmaxProblem,
    shifted: Buffer,
    sum: &Buffer,
    targets: &Buffer,
    grad: &Buffer,
) -> Result<Buffer, KernelError> {
    const OP: &str = "picked_backward";

    problem.validate()?;
    problem.check_rows(OP, "shifted", &shifted)?;
    problem.check_numbers(OP, "targets", targets, I32)?;
    problem.check_numbers(OP, "sum", sum, F32)?;
    problem.check_numbers(OP, "grad", grad, F32)?;
    let numbers = RowNumbers { targets, lse: sum, grad, factor: None };
    let form = ElementForm::OfLogProbabilities;
    Ok(launch_elements(client, &problem.loss(), shifted, problem.out, numbers, form))
}
