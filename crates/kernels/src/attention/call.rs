//! A problem that was checked, with its tensors, and what every family's launches are given of it.

use super::{
    AttentionBlueprint, AttentionProblem,
    dropout::zero_digits,
    mask_map::{MaskMap, Words, map_strides},
    mask_maps::MaskMaps,
    problem::{Dropout, HeadStrides, OP, Pairs, clamped, invalid, unsupported},
    rules::{
        HeadsLaunch, NumbersLaunch, Options, PairStridesLaunch, RulesLaunch, SizesLaunch,
        StridesLaunch,
    },
};
use crate::{
    KernelError, Pass,
    buffer::{Buffer, F32},
    device::grid,
    random::check_key,
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind, UIntKind},
    prelude::{SequenceArg, *},
};

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
    /// Two words that are combined with dropout's seed when the kernel runs. Backward has to have the same.
    pub key: Option<&'a Buffer>,
    /// Where maps of masks are kept for other calls with the same mask. Without it each call finds its own.
    pub maps: Option<&'a MaskMaps>,
}

impl<'a> AttentionInputs<'a> {
    /// Queries, keys and values, and nothing else.
    pub fn of(q: &'a Buffer, k: &'a Buffer, v: &'a Buffer) -> Self {
        Self { q, k, v, mask: None, bias: None, starts: None, key: None, maps: None }
    }
}

/// What attention returns.
#[derive(Clone, Debug)]
pub struct AttentionOutput {
    /// `heads_q` heads of rows of `head_dim`, ordered as
    /// [`AttentionProblem::order_q`] says.
    pub out: Buffer,
    /// The logarithms of the sums of `exp(score)` in two parts, f32, each by batch, head and query; heads
    /// first with packed sequences too. The first part is each query's largest score, or without a bias
    /// one near it, behind all of them are the logarithms of the sums of `exp(score - largest)`. The logarithm itself is the sum of
    /// both, of which f32 would keep the first alone where that is as large as a mask of -1e9.
    pub lse: Buffer,
}

impl AttentionOutput {
    /// Memory for the output of `problem`, with whatever it held before.
    pub(super) fn empty(client: &Client, problem: &AttentionProblem) -> Self {
        Self {
            out: Buffer::empty(client, problem.out_elements(), problem.dtype),
            lse: Buffer::empty(client, problem.lse_elements(), F32),
        }
    }
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
    pub dout_strides: HeadStrides,
}

impl<'a> AttentionResult<'a> {
    /// All of `output`, and the gradient `dout`, which lies by those strides.
    pub fn of(output: &'a AttentionOutput, dout: &'a Buffer, dout_strides: HeadStrides) -> Self {
        let AttentionOutput { out, lse } = output;
        Self { out, lse, dout, dout_strides }
    }
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
    /// Of the bias for every pair, f32, `[bias_batches, heads_q, seq_q, seq_kv]`, if asked for. It is added up over
    /// [sequences that share the bias](AttentionProblem::bias_batches), and has to be over the other dimensions that the
    /// bias was repeated along.
    pub dbias: Option<Buffer>,
}

/// A problem that was checked, with its tensors.
pub(super) struct Call<'a> {
    pub(super) client: &'a Client,
    pub(super) problem: &'a AttentionProblem,
    pub(super) inputs: &'a AttentionInputs<'a>,
    /// Of the mask, where the plan has one.
    map: Option<MaskMap>,
}

impl<'a> Call<'a> {
    pub(super) fn new(
        client: &'a Client,
        problem: &'a AttentionProblem,
        inputs: &'a AttentionInputs<'a>,
    ) -> Result<Self, KernelError> {
        problem.validate()?;
        let call = Self { client, problem, inputs, map: None };
        call.check_inputs()?;
        Ok(call)
    }

    /// The call, with a map of its mask where the plan has one.
    pub(super) fn planned(
        self,
        blueprint: &AttentionBlueprint,
        pass: Pass,
    ) -> Result<Self, KernelError> {
        if !blueprint.maps_mask {
            return Ok(self);
        }
        let words = Words::of(blueprint, pass);
        let map = match self.inputs.maps {
            Some(maps) => maps.map(&self, words)?,
            None => MaskMap::of(&self, words)?,
        };
        Ok(Self { map, ..self })
    }

    /// The call without the map of its mask, for kernels that the plan's map is not made for.
    #[cfg(feature = "cuda")]
    pub(super) fn unmapped(&self) -> Self {
        Self { map: None, ..*self }
    }

    fn check_inputs(&self) -> Result<(), KernelError> {
        let (problem, inputs) = (self.problem, self.inputs);
        let heads = [problem.heads_q, problem.heads_kv];
        let rows = [problem.rows_q(), problem.rows_kv()];
        for (argument, buffer, strides, side) in [
            ("q", inputs.q, problem.q, 0),
            ("k", inputs.k, problem.k, 1),
            ("v", inputs.v, problem.v, 1),
        ] {
            let span = problem.span(strides, heads[side], rows[side]);
            buffer.check_span(OP, argument, span, problem.dtype)?;
        }
        check_given("mask", inputs.mask, problem.mask.is_some())?;
        check_given("bias", inputs.bias, problem.bias.is_some())?;
        check_given("starts", inputs.starts, problem.packed.is_some())?;
        if let Some(key) = inputs.key {
            check_key(OP, key)?;
        }
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
            mask.check_span(OP, "mask", problem.pair_span(pairs), mask.dtype)?;
        }
        if let (Some(bias), Some(pairs)) = (inputs.bias, problem.bias) {
            bias.check_span(OP, "bias", problem.pair_span(pairs), problem.dtype)?;
        }
        if let Some(starts) = inputs.starts {
            let is_int =
                matches!(starts.dtype, ElemType::UInt(UIntKind::U32) | ElemType::Int(IntKind::I32));
            let count = 2 * (problem.batch + 1);
            if !is_int || starts.elements != count {
                return Err(starts.mismatch(OP, "starts", format!("{count} integers of 32 bits")));
            }
        }
        Ok(())
    }

    pub(super) fn check_result(&self, result: &AttentionResult<'_>) -> Result<(), KernelError> {
        let problem = self.problem;
        let span = problem.span(result.dout_strides, problem.heads_q, problem.rows_q());
        if u32::try_from(span).is_err() {
            return Err(unsupported(format!("dout spans {span} elements, 2^32 or more")));
        }
        result.out.check_span(OP, "out", problem.out_elements(), problem.dtype)?;
        result.dout.check_span(OP, "dout", span, problem.dtype)?;
        result.lse.check_span(OP, "lse", problem.lse_elements(), F32)
    }

    pub(super) fn q<I: Float>(&self) -> HeadsLaunch<I> {
        heads(self.inputs.q, self.problem.q)
    }

    pub(super) fn k<I: Float>(&self) -> HeadsLaunch<I> {
        heads(self.inputs.k, self.problem.k)
    }

    pub(super) fn v<I: Float>(&self) -> HeadsLaunch<I> {
        heads(self.inputs.v, self.problem.v)
    }

    /// For a launch whose first sequence is `first_batch`. What an option does not read has q in its place.
    pub(super) fn rules<I: Float, M: Numeric>(&self, first_batch: usize) -> RulesLaunch<I, M> {
        let (problem, inputs) = (self.problem, self.inputs);
        RulesLaunch {
            mask: inputs.mask.unwrap_or(inputs.q).arg(1),
            map: self.map.as_ref().map_or(inputs.q, |map| &map.buffer).arg(1),
            bias: inputs.bias.unwrap_or(inputs.q).arg(1),
            starts: inputs.starts.unwrap_or(inputs.q).arg(1),
            key: inputs.key.unwrap_or(inputs.q).arg(1),
            sizes: SizesLaunch {
                heads_q: problem.heads_q as u32,
                group: (problem.heads_q / problem.heads_kv) as u32,
                seq_q: problem.seq_q as u32,
                seq_kv: problem.seq_kv as u32,
                batch: problem.batch as u32,
                first_batch: first_batch as u32,
                rows_q: problem.rows_q() as u32,
            },
            numbers: numbers(problem),
            zeros: zeros(problem),
            mask_strides: pairs(problem.mask),
            bias_strides: pairs(problem.bias),
            map_strides: map_strides(self.map.as_ref().map(|map| map.strides).unwrap_or_default()),
            options: Options {
                key: inputs.key.is_some(),
                mapped: self.map.is_some(),
                ..options(problem)
            },
        }
    }

    /// The types of tensors and of the mask; without one, anything.
    pub(super) fn types(&self) -> [ElemType; 2] {
        let mask = self.inputs.mask.map_or(ElemType::UInt(UIntKind::U32), |mask| mask.dtype);
        [self.problem.dtype, mask]
    }

    /// Launches for `tiles` and `heads` of so many sequences, told which is the first: several times where
    /// there are more of them than cubes along z. CUDA and WebGPU have 65535.
    pub(super) fn for_batches(
        &self,
        [tiles, heads, batches]: [usize; 3],
        mut launch: impl FnMut(CubeCount, usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let most = self.client.properties().hardware.max_cube_count.2 as usize;
        for first in (0..batches).step_by(most) {
            launch(grid(OP, self.client, [tiles, heads, (batches - first).min(most)])?, first)?;
        }
        Ok(())
    }
}

/// A tensor of heads as an argument. `AttentionProblem::validate` has seen to it that spans, and with them
/// strides, fit 32 bits.
pub(super) fn heads<I: Float>(memory: &Buffer, strides: HeadStrides) -> HeadsLaunch<I> {
    HeadsLaunch { memory: memory.arg(1), strides: device_strides(strides) }
}

pub(super) fn device_strides(HeadStrides { batch, head, row }: HeadStrides) -> StridesLaunch {
    StridesLaunch { batch: batch as u32, head: head as u32, row: row as u32 }
}

fn numbers(problem: &AttentionProblem) -> NumbersLaunch {
    let side = |side: Option<usize>| clamped(side.unwrap_or(0)) as i32;
    let dropout = problem.dropout.unwrap_or(Dropout::NONE);
    NumbersLaunch {
        scale: problem.scale,
        softcap: problem.softcap.unwrap_or(1.0),
        left: side(problem.window.left),
        right: side(problem.window.right),
        kept: (1.0 / dropout.share_kept()) as f32,
        seed_low: dropout.seed as u32,
        seed_high: (dropout.seed >> 32) as u32,
    }
}

/// The digits of dropout's threshold, if there is dropout.
fn zeros(problem: &AttentionProblem) -> SequenceArg<u32> {
    let dropout = problem.dropout.filter(|_| options(problem).dropout);
    dropout.into_iter().flat_map(|dropout| zero_digits(dropout.threshold())).collect()
}

pub(super) fn options(problem: &AttentionProblem) -> Options {
    Options {
        left: problem.window.left.is_some(),
        right: problem.window.right.is_some(),
        softcap: problem.softcap.is_some(),
        mask: problem.mask.is_some(),
        bias: problem.bias.is_some(),
        dropout: problem.dropout.is_some_and(|dropout| dropout.rate > 0.0),
        packed: problem.packed.is_some(),
        key: false,
        mapped: false,
    }
}

fn pairs(pairs: Option<Pairs>) -> PairStridesLaunch {
    let Pairs { batch, head, row, column } = pairs.unwrap_or_default();
    PairStridesLaunch {
        batch: batch as u32,
        head: head as u32,
        row: row as u32,
        column: column as u32,
    }
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
