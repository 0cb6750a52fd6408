//! Attention of a few queries over a cache of keys and values, and new ones put into it.

use super::attention::{ORDERS, Placed, options, problem};
use crate::{
    buffers::{download, dtype, lse_of, upload_behind, upload_integers},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    Family,
    attention::{
        AppendProblem, AppendTensors, AttentionBlueprint, AttentionInputs as Tensors,
        AttentionProblem, attention_append, attention_decode_with, attention_forward_with,
        decode_variants::plans,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionPrecision, Roundings},
    softmax::Bounded,
    storage::Storage,
};

const F32: Storage = Storage::F32;
/// What decides how many vectors a row has, and with gaps how wide they are.
const HEAD_DIMS: [usize; 10] = [64, 128, 80, 96, 32, 256, 16, 40, 33, 7];
const GAPS: [usize; 4] = [0, 0, 8, 3];

pub(super) fn decode(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let head_dim = draw.plan("head_dim", &HEAD_DIMS);
    let orders = [draw.plan("order", &ORDERS), draw.plan("order-kv", &ORDERS)];
    let padding = draw.plan("padding", &GAPS);
    // Of 16 rows is the tile of tensor cores.
    let tile_q = draw.plan("tile", &[8, 4, 2, 1, 16, 16]);
    // Whether the length is a number on the device.
    let placed = !draw.planned("known", 3);
    let options = options(draw, head_dim, false);
    let budget = if draw.holds("large", 200) { 1 << 21 } else { 1 << 17 };
    let batch = draw.size("batch", 1..=3);
    let heads_kv = draw.size("heads_kv", 1..=3);
    let heads_q = heads_kv * draw.size("group", 1..=8);
    let seq_q = draw.size("seq_q", 1..=16);
    let most = (budget / (batch * heads_q * seq_q * head_dim)).clamp(1, 600);
    let capacity = draw.size("capacity", seq_q..=seq_q + most);
    let split = draw.size("split", capacity.div_ceil(40)..=capacity);
    let lengths = lengths(draw, [batch, capacity], placed);

    // Each sequence has a reference of its own, because lengths differ.
    let name = "drawn";
    let of = |seq_kv| AttentionCase {
        name,
        batch: 1,
        heads_q,
        heads_kv,
        seq_q,
        seq_kv,
        head_dim,
        options,
    };
    let mut drawn = |length: &usize| {
        let case = of(*length);
        (case, AttentionInputs::generate(&case, draw.seed(), storage))
    };
    let mut sequences: Sequences = (0..batch).map(|i| drawn(&lengths[i % lengths.len()])).collect();
    let first = &mut sequences[0].1;
    for (name, values) in [("q", &mut first.q), ("k", &mut first.k)] {
        draw.spoil_by(name, values, &[f64::NAN]);
    }
    let whole = AttentionCase { batch, ..of(capacity) };
    let q = Placed::new([batch, heads_q, seq_q, head_dim], orders[0], padding);
    let kv = Placed::new([batch, heads_kv, capacity, head_dim], orders[1], padding);
    let problem = problem(&whole, storage, orders, [&q, &kv, &kv]);
    // All of the memory behind a sequence's last key holds NaN.
    let all = |part: fn(&AttentionInputs) -> &[f64]| -> Vec<f64> {
        let of_sequence = |(case, inputs): &(AttentionCase, AttentionInputs)| {
            widened(part(inputs), [case.seq_kv, capacity].map(|keys| keys * head_dim))
        };
        sequences.iter().flat_map(of_sequence).collect()
    };
    let queries: Vec<f64> = sequences.iter().flat_map(|(_, inputs)| inputs.q.clone()).collect();
    let mut send = |name: &str, values: &[f64], placed: &Placed| {
        place(on, draw, name, (values, &placed.layout), storage)
    };
    let q_buffer = send("q", &queries, &q);
    let k_buffer = send("k", &all(|inputs| &inputs.k), &kv);
    let v_buffer = send("v", &all(|inputs| &inputs.v), &kv);
    let tensors = Tensors::of(&q_buffer, &k_buffer, &v_buffer);
    let on_tensor_cores = tile_q == 16
        && on.takes(Family::Mma)
        && plans(client, &problem).iter().any(|plan| plan.family == Family::Mma);
    let plan = AttentionBlueprint {
        family: if on_tensor_cores { Family::Mma } else { Family::Portable },
        tile_q,
        tile_kv: split,
        atomic: false,
        split: true,
        maps_mask: false,
    };
    let first_query = |length: &usize| *length as i32 - seq_q as i32;
    let position = upload_integers(client, &lengths.iter().map(first_query).collect::<Vec<_>>());
    if draw.holds("contradiction", 60) {
        let more = upload_integers(client, &vec![0; batch + 1]);
        let result = attention_decode_with(client, &problem, &plan, &tensors, &more);
        check.refuses("a position too many", result)?;
        let empty = AttentionProblem { seq_kv: 0, ..problem };
        let result = attention_decode_with(client, &empty, &plan, &tensors, &position);
        return check.refuses("no room", result);
    }
    let output = if placed {
        attention_decode_with(client, &problem, &plan, &tensors, &position)?
    } else {
        let known = AttentionProblem { seq_kv: lengths[0], ..problem };
        attention_forward_with(client, &known, &plan, &tensors)?
    };
    let precision = on.attention(storage, true).with_roundings(Roundings::Counted);
    let [of_lse, of_out] = expected(&sequences, &precision);
    let lse = lse_of(&download(client, output.lse, F32)?);
    check.within("lse", lse, &of_lse)?;
    let dense = Placed::new([batch, heads_q, seq_q, head_dim], orders[0], 0).layout;
    let out = dense.gather(&download(client, output.out, storage)?);
    check.within("out", out, &of_out)
}

/// Sequences with their numbers.
type Sequences = Vec<(AttentionCase, AttentionInputs)>;

/// The logarithms of sums and the outputs of all sequences.
fn expected(sequences: &Sequences, precision: &AttentionPrecision) -> [Vec<Bounded>; 2] {
    let mut all = [vec![], vec![]];
    for (case, inputs) in sequences {
        let attention = inputs.attention(*case);
        let forward = attention.forward();
        let bounds = attention.forward_bounds(&forward, precision);
        all[0].extend(forward.lse.into_iter().zip(bounds.lse));
        all[1].extend(forward.o.into_iter().zip(bounds.o));
    }
    all
}

/// Keys of all sequences, or of each, up to the last query. Where they are fewer than queries, the first queries stand
/// before the first key.
fn lengths(draw: &mut Draw, [batch, capacity]: [usize; 2], may_differ: bool) -> Vec<usize> {
    let mut lengths = vec![draw.size("length", 1..=capacity)];
    if draw.holds("differ", 2) && may_differ {
        lengths.extend((1..batch).map(|_| draw.place(capacity) + 1));
    }
    lengths
}

/// Each run of `from` numbers with NaN behind it, to `to` numbers.
fn widened(values: &[f64], [from, to]: [usize; 2]) -> Vec<f64> {
    let wide = |run: &[f64]| [run, &vec![f64::NAN; to - from]].concat();
    values.chunks_exact(from).flat_map(wide).collect()
}

pub(super) fn append(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let head_dim = draw.plan("head_dim", &HEAD_DIMS);
    let [cached, new] = ["order", "order-new"].map(|name| draw.plan(name, &ORDERS));
    let paddings = ["padding", "padding-new"].map(|name| draw.plan(name, &GAPS));
    let batch = draw.size("batch", 1..=4);
    let heads = draw.size("heads", 1..=5);
    let seq = draw.size("seq", 1..=40);
    let capacity = draw.size("capacity", 1..=200);
    // Some stand before the first place or reach beyond the last.
    let mut somewhere = || draw.place(capacity + 2 * seq) as i32 - seq as i32;
    let mut at: Vec<i32> = (0..batch).map(|_| somewhere()).collect();
    if draw.holds("inside", 2) {
        at.iter_mut().for_each(|at| *at = (*at).clamp(0, capacity.saturating_sub(seq) as i32));
    }
    if draw.holds("shared", 2) {
        at.truncate(1);
    }
    let cached = Placed::new([batch, heads, capacity, head_dim], cached, paddings[0]);
    let new = Placed::new([batch, heads, seq, head_dim], new, paddings[1]);
    let problem = AppendProblem {
        batch,
        heads,
        seq,
        capacity,
        head_dim,
        dtype: dtype(storage),
        cached: [cached.rows; 2],
        new: [new.rows; 2],
    };
    let mut before = || draw.normal(cached.layout.span() + 8, 1.0, storage);
    let before = [before(), before()];
    let mut rows = || draw.normal(batch * heads * seq * head_dim, 1.0, storage);
    let rows = [rows(), rows()];
    let front = draw.one_of("front", on.offsets());
    let memory = [0, 1].map(|i| upload_behind(client, front, &before[i], storage));
    let mut send = |name: &str, i: usize| place(on, draw, name, (&rows[i], &new.layout), storage);
    let sent = [send("k", 0), send("v", 1)];
    let position = upload_integers(client, &at);
    let tensors = AppendTensors {
        cached: [&memory[0], &memory[1]],
        new: [&sent[0], &sent[1]],
        position: &position,
    };
    if draw.holds("contradiction", 60) {
        let short = Buffer { elements: head_dim - 1, ..memory[1].clone() };
        let tensors = AppendTensors { cached: [&memory[0], &short], ..tensors };
        return check.refuses("a short cache", attention_append(client, &problem, &tensors));
    }
    attention_append(client, &problem, &tensors)?;
    for (i, (what, memory)) in ["keys", "values"].into_iter().zip(memory).enumerate() {
        // All of the memory: what is not named stays as it is.
        let after = appended(&problem, &cached.layout, [&before[i], &rows[i]], &at);
        check.exactly(what, download(client, memory, storage)?, &after, storage)?;
    }
    Ok(())
}

/// The memory of a cache after `rows` were put into it, at `positions`: one for all sequences, or one for each.
fn appended(
    problem: &AppendProblem,
    layout: &Layout,
    [memory, rows]: [&[f64]; 2],
    positions: &[i32],
) -> Vec<f64> {
    let AppendProblem { heads, seq, capacity, head_dim, .. } = *problem;
    let mut memory = memory.to_vec();
    let mut kept = layout.gather(&memory);
    let of_heads = kept.chunks_exact_mut(capacity * head_dim);
    for (head, (kept, new)) in of_heads.zip(rows.chunks_exact(seq * head_dim)).enumerate() {
        let first = positions[head / heads % positions.len()];
        for (token, row) in new.chunks_exact(head_dim).enumerate() {
            let place = usize::try_from(first + token as i32).ok();
            if let Some(place) = place.filter(|place| *place < capacity) {
                kept[place * head_dim..][..head_dim].copy_from_slice(row);
            }
        }
    }
    layout.put(&kept, &mut memory);
    memory
}
