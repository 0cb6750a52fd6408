//! Problems that cover the plans: see [`variants`](crate::variants).

use super::{
    AttentionBlueprint, AttentionInputs, AttentionProblem, AttentionResult, Dropout, HeadStrides,
    Order, Pairs, Window, attention_backward_with, attention_forward_with, decode_variants,
};
use crate::{
    Family, KernelError, Pass,
    buffer::{Buffer, F32},
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind, UIntKind},
};

const BATCH: usize = 2;
const HEADS: usize = 4;
const SEQ: usize = 1024;

/// Options that are compiled apart, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Options {
    /// None.
    Plain,
    /// Keys up to the query's own.
    Causal,
    /// Causal, over sequences that follow each other.
    Packed,
    /// Causal, with weights left out at random.
    Dropout,
    /// Causal, with a mask.
    Mask,
    /// A mask that all heads share, so that it can be mapped.
    SharedMask,
    /// The same, with weights left out at random: what a transformer trains with.
    SharedMaskDropout,
    /// A bias and bounded scores.
    Bias,
    /// A window on both sides, bounded scores, a mask, a bias and dropout.
    Everything,
}

impl Options {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Causal => "causal",
            Self::Packed => "packed",
            Self::Dropout => "dropout",
            Self::Mask => "mask",
            Self::SharedMask => "shared_mask",
            Self::SharedMaskDropout => "shared_mask_dropout",
            Self::Bias => "bias",
            Self::Everything => "everything",
        }
    }

    /// Attention with these options over `heads` of that size.
    pub fn problem(self, head_dim: usize, dtype: ElemType) -> AttentionProblem {
        let plain = AttentionProblem::dense([BATCH, HEADS, SEQ, head_dim], SEQ, dtype);
        let causal = AttentionProblem { window: Window { left: None, right: Some(0) }, ..plain };
        let dropout = Some(Dropout { rate: 0.1, seed: 1 });
        let pairs = Pairs { batch: HEADS * SEQ * SEQ, head: SEQ * SEQ, row: SEQ, column: 1 };
        let shared = Pairs { batch: SEQ * SEQ, head: 0, ..pairs };
        match self {
            Self::Plain => plain,
            Self::Causal => causal,
            Self::Packed => {
                let all = BATCH * SEQ;
                let rows =
                    HeadStrides { batch: 0, ..Order::HeadsFirst.strides(HEADS, all, head_dim) };
                AttentionProblem { q: rows, k: rows, v: rows, packed: Some([all; 2]), ..causal }
            }
            Self::Dropout => AttentionProblem { dropout, ..causal },
            Self::Mask => AttentionProblem { mask: Some(pairs), ..causal },
            Self::SharedMask => AttentionProblem { mask: Some(shared), ..plain },
            Self::SharedMaskDropout => AttentionProblem { mask: Some(shared), dropout, ..plain },
            Self::Bias => AttentionProblem { bias: Some(pairs), softcap: Some(30.0), ..plain },
            Self::Everything => AttentionProblem {
                window: Window { left: Some(128), right: Some(0) },
                softcap: Some(30.0),
                dropout,
                mask: Some(pairs),
                bias: Some(pairs),
                ..plain
            },
        }
    }
}

/// Heads of each size that tensor cores are planned for apart, with the options that are checked there.
pub const ON_TENSOR_CORES: [(Options, &[usize]); 9] = [
    (Options::Plain, &[32, 64, 96, 128, 256]),
    (Options::Causal, &[64, 128, 256]),
    (Options::Packed, &[64, 128]),
    (Options::Dropout, &[64, 128]),
    (Options::Mask, &[64, 128]),
    (Options::SharedMask, &[64, 128]),
    (Options::SharedMaskDropout, &[64, 128]),
    (Options::Bias, &[64, 128]),
    (Options::Everything, &[64, 128]),
];

/// What numbers of f32 are checked with that are multiplied as TF32.
pub const TF32: [(Options, usize); 4] = [
    (Options::Plain, 64),
    (Options::Causal, 128),
    (Options::Causal, 256),
    (Options::Everything, 64),
];

/// What ordinary arithmetic is checked with: heads for each number of rows of a unit.
pub const PORTABLE: [(Options, usize); 4] = [
    (Options::Causal, 64),
    (Options::Causal, 128),
    (Options::SharedMask, 64),
    (Options::Everything, 256),
];

/// Both passes of each problem by every plan of tensor cores, and by the first of ordinary arithmetic.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    let [f32, f16, bf16] = FLOATS;
    let on_tensor_cores = |family| family != Family::Portable;
    let by_arithmetic = |family| family == Family::Portable;
    let mut all = Vec::new();
    for (options, heads) in ON_TENSOR_CORES {
        for head_dim in heads {
            all.extend(passes(client, options, *head_dim, bf16, on_tensor_cores));
        }
    }
    all.extend(passes(client, Options::Causal, 128, f16, on_tensor_cores));
    for (options, head_dim) in TF32 {
        all.extend(passes(client, options, head_dim, f32, on_tensor_cores));
    }
    for (options, head_dim) in PORTABLE {
        all.extend(passes(client, options, head_dim, bf16, by_arithmetic));
    }
    for float in [f32, f16] {
        all.extend(passes(client, Options::Causal, 64, float, by_arithmetic));
    }
    all.extend(decode_variants::variants(client));
    all
}

fn passes(
    client: &Client,
    options: Options,
    head_dim: usize,
    (dtype, dtype_name): (ElemType, &str),
    is_asked: impl Fn(Family) -> bool,
) -> Vec<Variant> {
    let problem = AttentionProblem { full_f32: false, ..options.problem(head_dim, dtype) };
    let mut all = Vec::new();
    for pass in [Pass::Forward, Pass::Backward] {
        let mut plans = AttentionBlueprint::candidates(&problem, pass, client);
        plans.retain(|plan| is_asked(plan.family));
        // Smaller tiles are the same code, but where more keys or queries are more warpgroups.
        plans.dedup_by_key(|plan| {
            (
                plan.family,
                plan.split,
                plan.maps_mask,
                plan.atomic.then_some(plan.tile_kv),
                plan.is_wide(),
            )
        });
        for plan in plans {
            let name = format!("{dtype_name}_{head_dim}_{}", options.name());
            all.push(Variant::new(name, plan.promises(&problem), move |client| {
                launch(client, &problem, pass, &plan)
            }));
        }
    }
    all
}

fn launch(
    client: &Client,
    problem: &AttentionProblem,
    pass: Pass,
    plan: &AttentionBlueprint,
) -> Result<(), KernelError> {
    let pairs = |dtype| Buffer::empty(client, problem.pair_elements(), dtype);
    let mask = problem.mask.map(|_| pairs(ElemType::UInt(UIntKind::U8)));
    let bias = problem.bias.map(|_| pairs(problem.dtype));
    let starts = problem
        .packed
        .map(|_| Buffer::empty(client, 2 * (problem.batch + 1), ElemType::Int(IntKind::I32)));
    let key = problem.dropout.map(|_| Buffer::empty(client, 2, ElemType::UInt(UIntKind::U32)));
    // As many heads of keys as of queries, over sequences of the same length.
    let tensor = Buffer::empty(client, problem.out_elements(), problem.dtype);
    let inputs = AttentionInputs {
        mask: mask.as_ref(),
        bias: bias.as_ref(),
        starts: starts.as_ref(),
        key: key.as_ref(),
        ..AttentionInputs::of(&tensor, &tensor, &tensor)
    };
    if pass == Pass::Forward {
        return attention_forward_with(client, problem, plan, &inputs).map(drop);
    }
    let lse = Buffer::empty(client, problem.lse_elements(), F32);
    let result =
        AttentionResult { out: &tensor, lse: &lse, dout: &tensor, dout_strides: problem.out() };
    let wants_bias = plan.gives_bias_gradient(problem, client);
    attention_backward_with(client, problem, plan, &inputs, &result, wants_bias).map(drop)
}
