//! Problems that cover the plans over a cache: see [`variants`](crate::variants).

use super::{
    AppendProblem, AppendTensors, AttentionBlueprint, AttentionInputs, AttentionProblem, Order,
    Window, attention_append, attention_decode_with, attention_forward_with,
};
use crate::{
    DeviceProfile, KernelError, Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};

/// Sequences, keys that the cache has room for, and heads of keys.
const SIZES: [usize; 3] = [8, 8192, 8];

/// Heads of queries to one of keys, queries, and elements of a row: a tile of each number of rows, and rows of each
/// number of vectors.
pub const SHAPES: [[usize; 3]; 8] = [
    [1, 1, 64],
    [2, 1, 128],
    [4, 1, 64],
    [4, 1, 128],
    [8, 1, 128],
    [1, 16, 80],
    [4, 1, 96],
    [4, 2, 256],
];

/// Queries over a cache, causal: `group` heads of them to one of keys.
pub fn problem([group, seq_q, head_dim]: [usize; 3], dtype: ElemType) -> AttentionProblem {
    let [batch, capacity, heads_kv] = SIZES;
    let rows = Order::HeadsFirst.strides(heads_kv, capacity, head_dim);
    AttentionProblem {
        heads_kv,
        k: rows,
        v: rows,
        window: Window { left: None, right: Some(0) },
        ..AttentionProblem::dense([batch, group * heads_kv, seq_q, head_dim], capacity, dtype)
    }
}

/// With a length on the device and with one that the host knows; and new tokens put into a cache.
pub(super) fn variants(client: &Client) -> Vec<Variant> {
    let [f32, f16, bf16] = FLOATS;
    let mut all: Vec<_> = SHAPES.iter().flat_map(|shape| decoding(client, *shape, bf16)).collect();
    for float in [f32, f16] {
        all.extend(decoding(client, [4, 1, 128], float));
    }
    all.extend(FLOATS.map(|(dtype, name)| {
        let promises = [("attention_append", Promise::registers(40))];
        Variant::new(format!("{name}_append"), promises, move |client| append(client, dtype))
    }));
    all
}

/// By each plan that divides keys.
fn decoding(
    client: &Client,
    shape: [usize; 3],
    (dtype, name): (ElemType, &str),
) -> impl Iterator<Item = Variant> {
    let problem = problem(shape, dtype);
    let [group, seq_q, head_dim] = shape;
    plans(client, &problem).into_iter().map(move |plan| {
        let name =
            format!("{name}_{head_dim}_decode_{group}_heads_{seq_q}_queries_by_{:?}", plan.family);
        Variant::new(name.to_lowercase(), plan.promises(&problem), move |client| {
            let q = Buffer::empty(client, problem.out_elements(), dtype);
            let k = Buffer::empty(client, problem.kv_elements(), dtype);
            let inputs = AttentionInputs::of(&q, &k, &k);
            attention_forward_with(client, &problem, &plan, &inputs)?;
            attention_decode_with(client, &problem, &plan, &inputs, &position(client)).map(drop)
        })
    })
}

/// The plans of such a problem, the one expected to be fastest first.
pub fn plans(client: &Client, problem: &AttentionProblem) -> Vec<AttentionBlueprint> {
    AttentionBlueprint::splitting(problem, DeviceProfile::of(client))
}

fn append(client: &Client, dtype: ElemType) -> Result<(), KernelError> {
    let [batch, capacity, heads] = SIZES;
    let (seq, head_dim) = (1, 128);
    let empty = |seq| Buffer::empty(client, batch * heads * seq * head_dim, dtype);
    let (cached, new) = (empty(capacity), empty(seq));
    let problem = AppendProblem {
        batch,
        heads,
        seq,
        capacity,
        head_dim,
        dtype,
        cached: [Order::HeadsFirst.strides(heads, capacity, head_dim); 2],
        new: [Order::PositionsFirst.strides(heads, seq, head_dim); 2],
    };
    let tensors = AppendTensors {
        cached: [&cached, &empty(capacity)],
        new: [&new, &new],
        position: &position(client),
    };
    attention_append(client, &problem, &tensors)
}

fn position(client: &Client) -> Buffer {
    Buffer::empty(client, 1, ElemType::Int(IntKind::I32))
}
