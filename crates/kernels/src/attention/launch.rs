use super::{
    AttentionBlueprint, AttentionProblem, Pass,
    problem::{Dropout, OP, Pairs, Rows, clamped, invalid, unsupported},
    rules::{
        NumbersLaunch, Options, PairStridesLaunch, RowStridesLaunch, RulesLaunch, SizesLaunch,
    },
};
use crate::{KernelError, buffer::Buffer, matmul::Family};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind, IntKind, UIntKind},
    prelude::*,
};

pub(super) const F32: ElemType = ElemType::Float(FloatKind::F32);

/// What attention reads.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// Queries.
    pub q: &'a Buffer,
    /// Keys.
    pub k: &'a Buffer,
    /// Values.
    pub v: &'a Buffer,
    /// Integers of 8 or 32 bits; pairs of which they are not zero are left out.
    pub mask: Option<&'a Buffer>,
    /// What is added to the scores, in the type of q.
    pub bias: Option<&'a Buffer>,
    /// Where packed sequences begin and the last one ends, as 32-bit integers: `batch + 1` rows of
    /// q, then as many of k and v.
    pub starts: Option<&'a Buffer>,
}

/// What attention returns.
#[derive(Clone, Debug)]
pub struct AttentionOutput {
    /// `heads_q` heads of rows of `head_dim`, ordered as
    /// [`AttentionProblem::order_q`] says.
    pub out: Buffer,
    /// The logarithms of the sums of `exp(score)` in two parts, f32, each by batch, head and query; heads
    /// first with packed sequences too. The first part is each query's largest score, behind all of
    /// them are the logarithms of the sums of `exp(score - largest)`. The logarithm itself is the sum of
    /// both, of which f32 would keep the first alone where that is as large as a mask of -1e9.
    pub lse: Buffer,
}

/// What the backward pass reads besides the inputs.
#[derive(Clone, Copy, Debug)]
pub struct AttentionResult<'a> {
    /// The output.
    pub out: &'a Buffer,
    /// Its logarithms, in two parts.
    pub lse: &'a Buffer,
    /// The gradient of the output.
    pub dout: &'a Buffer,
    /// Where that lies.
    pub dout_rows: Rows,
}

/// Gradients of attention.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// Of the queries, ordered as [`AttentionProblem::order_q`] says.
    pub dq: Buffer,
    /// Of the keys, ordered as [`AttentionProblem::order_kv`] says.
    pub dk: Buffer,
    /// Of the values, as those of the keys.
    pub dv: Buffer,
    /// Of the bias for every pair, f32, `[batch, heads_q, seq_q, seq_kv]`, if asked for: to be
    /// summed over the dimensions that the bias was repeated along.
    pub dbias: Option<Buffer>,
}

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
    let launch = Launch::new(client, problem, inputs)?;
    let output = AttentionOutput {
        out: Buffer::empty(client, problem.out_elements(), problem.dtype),
        lse: Buffer::empty(client, problem.lse_elements(), F32),
    };
    match blueprint.family {
        Family::Portable => super::portable_launch::forward(&launch, blueprint, &output)?,
        #[cfg(feature = "cuda")]
        Family::Wgmma => super::tensor_core::forward(&launch, blueprint, &output)?,
        #[cfg(feature = "cuda")]
        Family::Mma => super::mma_launch::forward(&launch, blueprint, &output)?,
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
    if wants_bias && problem.bias.is_some() && !blueprint.gives_bias_gradient() {
        let plans = AttentionBlueprint::candidates(problem, Pass::Backward, client);
        let giving = plans.into_iter().find(AttentionBlueprint::gives_bias_gradient);
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
    let launch = Launch::new(client, problem, inputs)?;
    launch.check_result(result)?;
    let wants_bias = wants_bias && problem.bias.is_some();
    if wants_bias && !blueprint.gives_bias_gradient() {
        return Err(unsupported(format!("the gradient of a bias by {:?}", blueprint.family)));
    }
    if wants_bias && u32::try_from(problem.pair_elements()).is_err() {
        let reason = format!("the gradient of a bias of {} pairs", problem.pair_elements());
        return Err(unsupported(reason));
    }
    let kv = || Buffer::empty(client, problem.kv_elements(), problem.dtype);
    let gradients = AttentionGradients {
        dq: Buffer::empty(client, problem.out_elements(), problem.dtype),
        dk: kv(),
        dv: kv(),
        dbias: wants_bias.then(|| Buffer::empty(client, problem.pair_elements(), F32)),
    };
    match blueprint.family {
        Family::Portable => {
            super::portable_launch::backward(&launch, blueprint, result, &gradients)?;
        }
        #[cfg(feature = "cuda")]
        Family::Wgmma => super::tensor_core::backward(&launch, result, &gradients)?,
        #[cfg(feature = "cuda")]
        Family::Mma => super::mma_launch::backward(&launch, blueprint, result, &gradients)?,
        #[cfg(not(feature = "cuda"))]
        other => return Err(unsupported(format!("the backward pass by {other:?}"))),
    }
    Ok(gradients)
}

/// A problem that was checked, with its tensors.
pub(super) struct Launch<'a> {
    pub(super) client: &'a Client,
    pub(super) problem: &'a AttentionProblem,
    pub(super) options: Options,
    pub(super) inputs: &'a AttentionInputs<'a>,
}

impl<'a> Launch<'a> {
    fn new(
        client: &'a Client,
        problem: &'a AttentionProblem,
        inputs: &'a AttentionInputs<'a>,
    ) -> Result<Self, KernelError> {
        problem.validate()?;
        let launch = Self { client, problem, options: options(problem), inputs };
        launch.check_inputs()?;
        Ok(launch)
    }

    fn check_inputs(&self) -> Result<(), KernelError> {
        let (problem, inputs) = (self.problem, self.inputs);
        let heads = [problem.heads_q, problem.heads_kv];
        let rows = [problem.rows_q(), problem.rows_kv()];
        check("q", inputs.q, problem.span(problem.q, heads[0], rows[0]), problem.dtype)?;
        check("k", inputs.k, problem.span(problem.k, heads[1], rows[1]), problem.dtype)?;
        check("v", inputs.v, problem.span(problem.v, heads[1], rows[1]), problem.dtype)?;
        check_given("mask", inputs.mask, problem.mask.is_some())?;
        check_given("bias", inputs.bias, problem.bias.is_some())?;
        check_given("starts", inputs.starts, problem.packed.is_some())?;
        if let (Some(mask), Some(pairs)) = (inputs.mask, problem.mask) {
            let is_int = matches!(
                mask.dtype,
                ElemType::UInt(UIntKind::U8 | UIntKind::U32)
                    | ElemType::Int(IntKind::I8 | IntKind::I32)
            );
            if !is_int {
                let expected = "integers of 8 or 32 bits".into();
                return Err(invalid("mask", expected, format!("{:?}", mask.dtype)));
            }
            check("mask", mask, problem.pair_span(pairs), mask.dtype)?;
        }
        if let (Some(bias), Some(pairs)) = (inputs.bias, problem.bias) {
            check("bias", bias, problem.pair_span(pairs), problem.dtype)?;
        }
        if let Some(starts) = inputs.starts {
            let is_int =
                matches!(starts.dtype, ElemType::UInt(UIntKind::U32) | ElemType::Int(IntKind::I32));
            if !is_int || starts.elements != 2 * (problem.batch + 1) {
                let expected = format!("{} integers of 32 bits", 2 * (problem.batch + 1));
                let actual = format!("{} elements of {:?}", starts.elements, starts.dtype);
                return Err(invalid("starts", expected, actual));
            }
        }
        Ok(())
    }

    fn check_result(&self, result: &AttentionResult<'_>) -> Result<(), KernelError> {
        let problem = self.problem;
        let span = problem.span(result.dout_rows, problem.heads_q, problem.rows_q());
        if u32::try_from(span).is_err() {
            return Err(unsupported(format!("dout spans {span} elements, 2^32 or more")));
        }
        check("out", result.out, problem.out_elements(), problem.dtype)?;
        check("dout", result.dout, span, problem.dtype)?;
        check("lse", result.lse, problem.lse_elements(), F32)
    }

    fn sizes(&self, first_batch: usize) -> SizesLaunch {
        let problem = self.problem;
        SizesLaunch::new(
            problem.heads_q as u32,
            (problem.heads_q / problem.heads_kv) as u32,
            problem.seq_q as u32,
            problem.seq_kv as u32,
            problem.batch as u32,
            first_batch as u32,
            problem.rows_q() as u32,
        )
    }

    fn numbers(&self) -> NumbersLaunch {
        let problem = self.problem;
        let side = |side: Option<usize>| clamped(side.unwrap_or(0)) as i32;
        let dropout = problem.dropout.unwrap_or(Dropout { rate: 0.0, seed: 0 });
        NumbersLaunch::new(
            problem.scale,
            problem.softcap.unwrap_or(1.0),
            side(problem.window.left),
            side(problem.window.right),
            dropout.threshold(),
            (1.0 / (1.0 - dropout.rate)) as f32,
            dropout.seed as u32,
            (dropout.seed >> 32) as u32,
        )
    }

    /// For a launch whose first sequence is `first_batch`.
    pub(super) fn rules(&self, first_batch: usize) -> RulesLaunch {
        let problem = self.problem;
        let (sizes, numbers) = (self.sizes(first_batch), self.numbers());
        RulesLaunch::new(sizes, numbers, pairs(problem.mask), pairs(problem.bias))
    }

    /// The mask, and its type; without one, anything.
    pub(super) fn mask(&self) -> (BufferArg, ElemType) {
        let none = (self.inputs.q.arg(1), ElemType::UInt(UIntKind::U32));
        self.inputs.mask.map_or(none, |mask| (mask.arg(1), mask.dtype))
    }

    pub(super) fn bias(&self) -> BufferArg {
        self.inputs.bias.unwrap_or(self.inputs.q).arg(1)
    }

    pub(super) fn starts(&self) -> BufferArg {
        self.inputs.starts.unwrap_or(self.inputs.q).arg(1)
    }

    /// Launches for `tiles` and `heads` of so many sequences, told which is the first: several times where
    /// there are more of them than cubes along z. CUDA and WebGPU have 65535.
    pub(super) fn for_batches(
        &self,
        [tiles, heads, batches]: [usize; 3],
        mut launch: impl FnMut(CubeCount, usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let most = self.client.properties().hardware.max_cube_count;
        let (x, y) = match [tiles, heads].map(u32::try_from) {
            [Ok(x), Ok(y)] if x <= most.0 && y <= most.1 => (x, y),
            _ => return Err(unsupported(format!("{tiles} tiles of {heads} heads"))),
        };
        for first in (0..batches).step_by(most.2 as usize) {
            let z = (batches - first).min(most.2 as usize) as u32;
            launch(CubeCount::Static(x, y, z), first)?;
        }
        Ok(())
    }
}

fn options(problem: &AttentionProblem) -> Options {
    Options {
        left: problem.window.left.is_some(),
        right: problem.window.right.is_some(),
        softcap: problem.softcap.is_some(),
        mask: problem.mask.is_some(),
        bias: problem.bias.is_some(),
        dropout: problem.dropout.is_some_and(|dropout| dropout.rate > 0.0),
        packed: problem.packed.is_some(),
    }
}

/// `AttentionProblem::validate` has seen to it that spans, and with them strides, fit 32 bits.
pub(super) fn rows(rows: Rows) -> RowStridesLaunch {
    RowStridesLaunch::new(rows.batch as u32, rows.head as u32, rows.row as u32)
}

fn pairs(pairs: Option<Pairs>) -> PairStridesLaunch {
    let Pairs { batch, head, row, column } = pairs.unwrap_or_default();
    PairStridesLaunch::new(batch as u32, head as u32, row as u32, column as u32)
}

fn check(
    argument: &'static str,
    buffer: &Buffer,
    span: usize,
    dtype: ElemType,
) -> Result<(), KernelError> {
    if buffer.dtype == dtype && buffer.elements >= span {
        return Ok(());
    }
    Err(KernelError::InvalidProblem {
        op: OP,
        argument,
        expected: format!("at least {span} elements of {dtype:?}"),
        actual: format!("{} elements of {:?}", buffer.elements, buffer.dtype),
    })
}

fn check_given(
    argument: &'static str,
    buffer: Option<&Buffer>,
    expected: bool,
) -> Result<(), KernelError> {
    let say = |given| if given { "a tensor" } else { "none" };
    match buffer.is_some() == expected {
        true => Ok(()),
        false => Err(invalid(argument, say(expected).into(), say(buffer.is_some()))),
    }
}
