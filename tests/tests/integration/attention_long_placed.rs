//! Tensors of attention in memory as modules lay them out, and all plans that read them.

use crate::attention::{F32, integers, layouts::positions_first, problem};
use blackburn_kernels::{
    Family, Pass,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, AttentionProblem, AttentionResult,
        HeadStrides, Order, attention_backward_with, attention_forward_with,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs},
    storage::Storage,
};
use blackburn_tests::buffers::lse_of;
use blackburn_tests::buffers::{download, upload};
use cubecl::client::Client;
use libtest_mimic::Failed;

/// Tensor cores' plans where there are any, else the first: of f16 the one that is fastest, which is
/// what a type may make a difference to.
fn plans(
    client: &Client,
    problem: &AttentionProblem,
    pass: Pass,
    storage: Storage,
) -> Result<Vec<AttentionBlueprint>, Failed> {
    let mut plans = AttentionBlueprint::candidates(problem, pass, client);
    if client.name() == "cuda" && storage != Storage::F32 {
        plans.retain(|plan| plan.family != Family::Portable);
    }
    if plans.is_empty() {
        return Err(format!("no plan on tensor cores for {pass:?}").into());
    }
    if storage != Storage::Bf16 {
        plans.truncate(1);
    }
    Ok(plans)
}

/// A problem with its tensors on the device.
pub(super) struct Placed {
    pub(super) problem: AttentionProblem,
    pub(super) q: Buffer,
    pub(super) k: Buffer,
    pub(super) v: Buffer,
    pub(super) dout: Buffer,
    pub(super) mask: Option<Buffer>,
    pub(super) bias: Option<Buffer>,
    pub(super) starts: Option<Buffer>,
}

impl Placed {
    /// With `joined`, heads lie side by side, and queries, keys and values in one tensor where there are
    /// as many of each: what a linear layer for all three gives, and its heads brought forward.
    pub(super) fn new(
        client: &Client,
        case: &AttentionCase,
        inputs: &AttentionInputs,
        storage: Storage,
        joined: bool,
    ) -> Self {
        let send = |values: &[f64]| upload(client, values, storage);
        let mask = inputs.mask.as_deref().map(|mask| {
            let words = mask.iter().map(|masked| u32::from(*masked));
            integers(client, &words.collect::<Vec<_>>())
        });
        let bias = inputs.bias.as_deref().map(send);
        let mut placed = Self {
            problem: problem(case, storage),
            q: send(&inputs.q),
            k: send(&inputs.k),
            v: send(&inputs.v),
            dout: send(&inputs.dout),
            mask,
            bias,
            starts: None,
        };
        if joined {
            placed.join(client, case, inputs, storage);
        }
        placed
    }

    fn join(
        &mut self,
        client: &Client,
        case: &AttentionCase,
        inputs: &AttentionInputs,
        storage: Storage,
    ) {
        let d = case.head_dim;
        let (of_q, of_kv) = ([case.heads_q, case.seq_q, d], [case.heads_kv, case.seq_kv, d]);
        let swapped_q = positions_first(&inputs.q, of_q);
        let swapped_k = positions_first(&inputs.k, of_kv);
        let swapped_v = positions_first(&inputs.v, of_kv);
        self.dout = upload(client, &positions_first(&inputs.dout, of_q), storage);
        let (columns_q, columns_kv) = (case.heads_q * d, case.heads_kv * d);
        // Queries have a tensor of their own where there are others than keys.
        let with_q = case.seq_q == case.seq_kv;
        let parts: Vec<(&[f64], usize)> = [(&swapped_q[..], columns_q)]
            .into_iter()
            .filter(|_| with_q)
            .chain([(&swapped_k[..], columns_kv), (&swapped_v[..], columns_kv)])
            .collect();
        let width: usize = parts.iter().map(|(_, columns)| columns).sum();
        let rows = case.batch * case.seq_kv;
        let mut tensor = Vec::with_capacity(rows * width);
        for row in 0..rows {
            for (values, columns) in &parts {
                tensor.extend_from_slice(&values[row * columns..][..*columns]);
            }
        }
        let whole = upload(client, &tensor, storage);
        let part = |first: usize| Buffer {
            handle: whole.handle.clone().offset_start((first * storage.bytes()) as u64),
            elements: whole.elements - first,
            dtype: whole.dtype,
        };
        let in_part = |seq: usize| HeadStrides { batch: seq * width, head: d, row: width };
        let before_k = width - 2 * columns_kv;
        (self.k, self.v) = (part(before_k), part(before_k + columns_kv));
        (self.problem.k, self.problem.v) = (in_part(case.seq_kv), in_part(case.seq_kv));
        if with_q {
            self.q = part(0);
            self.problem.q = in_part(case.seq_q);
        } else {
            self.q = upload(client, &swapped_q, storage);
            self.problem.q = Order::PositionsFirst.strides(case.heads_q, case.seq_q, d);
        }
        self.problem.order_q = Order::PositionsFirst;
        self.problem.order_kv = Order::PositionsFirst;
    }

    fn tensors(&self) -> Tensors<'_> {
        Tensors {
            mask: self.mask.as_ref(),
            bias: self.bias.as_ref(),
            starts: self.starts.as_ref(),
            ..Tensors::of(&self.q, &self.k, &self.v)
        }
    }

    /// Both passes by every plan, each twice: what the second gives has to be the same bits, but for a dq that
    /// is added up in no order.
    pub(super) fn run(
        &self,
        client: &Client,
        storage: Storage,
        mut judge: impl FnMut(&Computed, &str) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let problem = &self.problem;
        let read = |buffer: &Buffer| download(client, buffer.clone(), storage);
        let mut first = None;
        for plan in plans(client, problem, Pass::Forward, storage)? {
            let run = || attention_forward_with(client, problem, &plan, &self.tensors());
            let (output, again) = (run()?, run()?);
            let lse = lse_of(&download(client, output.lse.clone(), F32)?);
            let computed = Computed::Forward { out: read(&output.out)?, lse };
            if !is_same(client, &[&output.out, &output.lse], &[&again.out, &again.lse])? {
                return Err(format!("{plan:?} gave other bits the second time").into());
            }
            judge(&computed, &format!("by {plan:?}"))?;
            first.get_or_insert(output);
        }
        let output = first.ok_or("no plan for the forward pass")?;
        let result = AttentionResult::of(&output, &self.dout, problem.out());
        for plan in plans(client, problem, Pass::Backward, storage)? {
            let run =
                || attention_backward_with(client, problem, &plan, &self.tensors(), &result, false);
            let (g, again) = (run()?, run()?);
            let dq_is_same = !plan.is_deterministic() || is_same(client, &[&g.dq], &[&again.dq])?;
            if !dq_is_same || !is_same(client, &[&g.dk, &g.dv], &[&again.dk, &again.dv])? {
                return Err(format!("{plan:?} gave other gradients the second time").into());
            }
            let (dq, dk, dv) = (read(&g.dq)?, read(&g.dk)?, read(&g.dv)?);
            judge(&Computed::Backward { dq, dk, dv }, &format!("by {plan:?}"))?;
        }
        Ok(())
    }
}

/// What a plan computed.
pub(super) enum Computed {
    Forward { out: Vec<f64>, lse: Vec<f64> },
    Backward { dq: Vec<f64>, dk: Vec<f64>, dv: Vec<f64> },
}

fn is_same(client: &Client, a: &[&Buffer], b: &[&Buffer]) -> Result<bool, Failed> {
    let bytes = |buffer: &Buffer| {
        client.read_one(buffer.handle.clone()).map_err(|error| Failed::from(error.to_string()))
    };
    for (a, b) in a.iter().zip(b) {
        // NaN is compared by its bits, too.
        if bytes(a)?[..] != bytes(b)?[..] {
            return Ok(false);
        }
    }
    Ok(true)
}
