//! Attention by the plan's family.

use super::{
    AttentionBlueprint, AttentionGradients, AttentionInputs, AttentionOutput, AttentionProblem,
    AttentionResult, call::Call, decode_launch, portable_launch, problem::unsupported,
};
#[cfg(feature = "cuda")]
use super::{mma_launch, once_launch, tcgen05_launch, wgmma_launch};
use crate::{
    Family, KernelError, Pass,
    buffer::{Buffer, F32},
    column_sum::{ColumnSumProblem, column_sum},
};
use cubecl::client::Client;

/// The forward pass, by the plan that is expected to be fastest.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the problem is nonsense or a tensor is not what it says;
/// [`KernelError::Unsupported`] where this device has no kernel for it.
pub fn attention_forward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &AttentionInputs<'_>,
) -> Result<AttentionOutput, KernelError> {
    problem.validate()?;
    let blueprint = AttentionBlueprint::plan(problem, Pass::Forward, client)?;
    attention_forward_with(client, problem, &blueprint, inputs)
}

/// As [`attention_forward`], by a plan of the caller's.
///
/// # Errors
///
/// As [`attention_forward`].
pub fn attention_forward_with(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: &AttentionBlueprint,
    inputs: &AttentionInputs<'_>,
) -> Result<AttentionOutput, KernelError> {
    let call = Call::new(client, problem, inputs)?.planned(blueprint, Pass::Forward)?;
    let output = AttentionOutput::empty(client, problem);
    match blueprint.family {
        _ if blueprint.split => decode_launch::forward(&call, blueprint, None, &output)?,
        Family::Portable => portable_launch::forward(&call, blueprint, &output)?,
        #[cfg(feature = "cuda")]
        Family::Tcgen05 => tcgen05_launch::forward(&call, blueprint, &output)?,
        #[cfg(feature = "cuda")]
        Family::Wgmma => wgmma_launch::forward(&call, blueprint, &output)?,
        #[cfg(feature = "cuda")]
        Family::Mma => mma_launch::forward(&call, blueprint, &output)?,
        #[cfg(not(feature = "cuda"))]
        other => return Err(unsupported(format!("the forward pass by {other:?}"))),
    }
    Ok(output)
}

/// The backward pass, by the plan that is expected to be fastest.
///
/// # Errors
///
/// As [`attention_forward`].
pub fn attention_backward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &AttentionInputs<'_>,
    result: &AttentionResult<'_>,
    wants_bias: bool,
) -> Result<AttentionGradients, KernelError> {
    problem.validate()?;
    let mut blueprint = AttentionBlueprint::plan(problem, Pass::Backward, client)?;
    let gives_bias = |plan: &AttentionBlueprint| plan.gives_bias_gradient(problem, client);
    if wants_bias && problem.bias.is_some() && !gives_bias(&blueprint) {
        let plans = AttentionBlueprint::candidates(problem, Pass::Backward, client);
        let giving = plans.into_iter().find(gives_bias);
        let none = || unsupported("the gradient of a bias on this device".into());
        blueprint = giving.ok_or_else(none)?;
    }
    attention_backward_with(client, problem, &blueprint, inputs, result, wants_bias)
}

/// As [`attention_backward`], by a plan of the caller's.
///
/// # Errors
///
/// As [`attention_forward`].
pub fn attention_backward_with(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: &AttentionBlueprint,
    inputs: &AttentionInputs<'_>,
    result: &AttentionResult<'_>,
    wants_bias: bool,
) -> Result<AttentionGradients, KernelError> {
    let call = Call::new(client, problem, inputs)?;
    call.check_result(result)?;
    let call = call.planned(blueprint, Pass::Backward)?;
    let wants_bias = wants_bias && problem.bias.is_some();
    if wants_bias && !blueprint.gives_bias_gradient(problem, client) {
        return Err(unsupported(format!("the gradient of a bias by {:?}", blueprint.family)));
    }
    if wants_bias && u32::try_from(problem.pair_elements()).is_err() {
        let reason = format!("the gradient of a bias of {} pairs", problem.pair_elements());
        return Err(unsupported(reason));
    }
    let kv = || Buffer::empty(client, problem.kv_elements(), problem.dtype);
    // The portable kernel for queries writes it. On tensor cores it has a kernel of its own.
    let writes_bias = wants_bias && blueprint.family == Family::Portable;
    let mut gradients = AttentionGradients {
        dq: Buffer::empty(client, problem.out_elements(), problem.dtype),
        dk: kv(),
        dv: kv(),
        dbias: writes_bias.then(|| Buffer::empty(client, problem.pair_elements(), F32)),
    };
    match blueprint.family {
        Family::Portable => portable_launch::backward(&call, blueprint, result, &gradients)?,
        #[cfg(feature = "cuda")]
        Family::Tcgen05 => tcgen05_launch::backward(&call, blueprint, result, &gradients)?,
        #[cfg(feature = "cuda")]
        Family::Wgmma if blueprint.atomic => {
            once_launch::backward(&call, blueprint, result, &gradients)?;
        }
        #[cfg(feature = "cuda")]
        Family::Wgmma => wgmma_launch::backward(&call, result, &gradients)?,
        #[cfg(feature = "cuda")]
        Family::Mma => mma_launch::backward(&call, blueprint, result, &gradients)?,
        #[cfg(not(feature = "cuda"))]
        other => return Err(unsupported(format!("the backward pass by {other:?}"))),
    }
    #[cfg(feature = "cuda")]
    if wants_bias && !writes_bias {
        gradients.dbias = Some(mma_launch::bias_gradient(&call, result)?);
    }
    gradients.dbias = match gradients.dbias {
        Some(parts) => Some(summed_parts(client, problem, parts)?),
        None => None,
    };
    Ok(gradients)
}

/// The gradient of a bias, from one for each part of the sequences that share the bias.
fn summed_parts(
    client: &Client,
    problem: &AttentionProblem,
    parts: Buffer,
) -> Result<Buffer, KernelError> {
    let pairs = problem.pairs_of_sequence();
    let count = parts.elements / pairs;
    if count == problem.bias_batches() {
        return Ok(parts);
    }
    let sum = ColumnSumProblem {
        outer: 1,
        rows: count,
        columns: pairs,
        outer_stride: parts.elements,
        row_stride: pairs,
        dtype: F32,
    };
    column_sum(client, &sum, &parts)
}
