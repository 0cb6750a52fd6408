//! Attention: lengths, heads, orders in memory, masks, biases, windows and the rest of its options.

use crate::{
    buffers::{download, dtype, lse_of, upload},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    Pass,
    attention::{
        self as kernel, AttentionBlueprint, AttentionInputs as Tensors, AttentionProblem,
        AttentionResult, HeadStrides, Order, Pairs, attention_backward_with, attention_forward,
        attention_forward_with,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{
        AttentionCase, AttentionInputs, AttentionOptions, Dropout, PairShape, Roundings, Window,
    },
    storage::Storage,
};
use cubecl::ir::{ElemType, UIntKind};

const SHAPES: [PairShape; 5] =
    [PairShape::Keys, PairShape::Shared, PairShape::PerBatch, PairShape::PerHead, PairShape::Full];

pub(super) const ORDERS: [Order; 2] = [Order::HeadsFirst, Order::PositionsFirst];

/// Where rows of heads lie.
pub(super) struct Placed {
    pub(super) layout: Layout,
    pub(super) rows: HeadStrides,
}

impl Placed {
    /// Rows in that order, with `padding` behind each run of a head or of a position.
    pub(super) fn new(
        [batch, heads, seq, head_dim]: [usize; 4],
        order: Order,
        padding: usize,
    ) -> Self {
        let dims: &[usize] = match order {
            Order::HeadsFirst => &[0, 1, 2, 3],
            Order::PositionsFirst => &[0, 2, 1, 3],
        };
        let layout = Layout::ordered(&[batch, heads, seq, head_dim], dims, padding);
        let [batch, head, row] = [0, 1, 2].map(|dim| layout.strides[dim]);
        Self { rows: HeadStrides { batch, head, row }, layout }
    }
}

/// What is compiled for a plan.
struct Planned {
    storage: Storage,
    /// Whether products of f32 keep all bits.
    full_f32: bool,
    head_dim: usize,
    orders: [Order; 2],
    mask_bytes: usize,
    /// Which of the plans that the device has.
    blueprints: [usize; 2],
    padding: usize,
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let planned = Planned {
        storage: draw.plan("type", &on.storages),
        full_f32: draw.planned("full-f32", 2),
        head_dim: draw
            .plan("head_dim", &[64, 128, 64, 128, 32, 80, 96, 16, 256, 40, 1, 24, 7, 192]),
        orders: [draw.plan("order", &ORDERS), draw.plan("order-kv", &ORDERS)],
        mask_bytes: draw.plan("mask-bytes", &[4, 4, 1]),
        blueprints: [
            draw.plan("forward", &[0, 0, 1, 2, 3]),
            draw.plan("backward", &[0, 0, 1, 2, 3]),
        ],
        padding: draw.plan("padding", &[0, 0, 8, 3]),
    };
    let options = options(draw, planned.head_dim, true);
    // Products of the pairs: few cases are large.
    let budget = if draw.holds("large", 200) { 1 << 22 } else { 1 << 17 };
    let batch = draw.size("batch", 1..=3);
    let heads_kv = draw.size("heads_kv", 1..=3);
    let heads_q = heads_kv * draw.size("group", 1..=3);
    let pairs = (budget / (batch * heads_q * planned.head_dim)).max(4);
    let seq_q = draw.size("seq_q", 1..=pairs.min(520));
    let seq_kv = draw.size("seq_kv", 1..=(pairs / seq_q).clamp(1, 1100));
    let (name, head_dim) = ("drawn", planned.head_dim);
    let case = AttentionCase { name, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options };
    run(on, draw, check, &planned, case)
}

/// With those that tell pairs apart, or without.
pub(super) fn options(draw: &mut Draw, head_dim: usize, by_pairs: bool) -> AttentionOptions {
    let plain = draw.planned("plain", 3);
    let has = |draw: &mut Draw, name: &str, one_in| !plain && draw.planned(name, one_in);
    let mut options = AttentionOptions {
        causal: draw.planned("causal", 2),
        mask: (by_pairs && has(draw, "mask", 3)).then_some(PairShape::Full),
        bias: (by_pairs && has(draw, "bias", 3)).then_some(PairShape::Full),
        ..AttentionOptions::PLAIN
    };
    let windowed = has(draw, "windowed", 3);
    let capped = has(draw, "capped", 4);
    let drops = by_pairs && has(draw, "drops", 4);
    let side = |draw: &mut Draw, name: &str| {
        let is_bounded = !draw.holds("unbounded", 3);
        let keys = draw.size(name, 1..=200) - 1;
        is_bounded.then_some(keys)
    };
    if windowed {
        options.window = Some(Window { left: side(draw, "left"), right: side(draw, "right") });
    }
    options.softcap = capped.then(|| draw.number("softcap", 0.5, 30.0));
    options.dropout = drops.then(|| {
        let rate = draw.number("rate", 0.0, 0.9);
        Dropout { rate, seed: draw.seed() }
    });
    if options.mask.is_some() {
        options.mask = Some(draw.one_of("mask-shape", &SHAPES));
        options.dead_rows = draw.holds("dead-rows", 3);
        options.documents = draw.holds("documents", 2);
    }
    if options.bias.is_some() {
        options.bias = Some(draw.one_of("bias-shape", &SHAPES));
    }
    if draw.holds("scaled", 4) {
        options.scale = Some(draw.number("scale", 0.01, 2.0 / (head_dim as f64).sqrt()));
    }
    options
}

pub(super) fn problem(
    case: &AttentionCase,
    storage: Storage,
    [order_q, order_kv]: [Order; 2],
    [q, k, v]: [&Placed; 3],
) -> AttentionProblem {
    let options = &case.options;
    let window = options.window.unwrap_or(Window { left: None, right: None });
    let right = if options.causal { Some(0) } else { window.right };
    let pairs = |shape: PairShape| {
        let [batch, heads, rows, keys] = case.pair_dims(shape);
        let stride = |size: usize, stride| if size == 1 { 0 } else { stride };
        Pairs {
            batch: stride(batch, heads * rows * keys),
            head: stride(heads, rows * keys),
            row: stride(rows, keys),
            column: 1,
        }
    };
    AttentionProblem {
        heads_kv: case.heads_kv,
        q: q.rows,
        k: k.rows,
        v: v.rows,
        order_q,
        order_kv,
        scale: case.scale() as f32,
        window: kernel::Window { left: window.left, right },
        softcap: options.softcap.map(|cap| cap as f32),
        dropout: options.dropout.map(|d| kernel::Dropout { rate: d.rate, seed: d.seed }),
        mask: options.mask.map(pairs),
        bias: options.bias.map(pairs),
        ..AttentionProblem::dense(
            [case.batch, case.heads_q, case.seq_q, case.head_dim],
            case.seq_kv,
            dtype(storage),
        )
    }
}

fn run(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    planned: &Planned,
    case: AttentionCase,
) -> Result<(), Stop> {
    let (client, storage) = (&on.client, planned.storage);
    let mut inputs = AttentionInputs::generate(&case, draw.seed(), storage);
    // An infinite score is as good as masked, or takes all of a row: no element is finite behind it.
    for (name, values) in [("q", &mut inputs.q), ("k", &mut inputs.k), ("dout", &mut inputs.dout)] {
        draw.spoil_by(name, values, &[f64::NAN]);
    }
    let [of_q, of_kv] = [(case.heads_q, case.seq_q), (case.heads_kv, case.seq_kv)]
        .map(|(heads, seq)| [case.batch, heads, seq, case.head_dim]);
    // Elsewhere, buffers hold words.
    let mask_bytes = if on.is_cuda() { planned.mask_bytes } else { 4 };
    let padding = planned.padding;
    let [q, dout] = [(); 2].map(|()| Placed::new(of_q, planned.orders[0], padding));
    let [k, v] = [(); 2].map(|()| Placed::new(of_kv, planned.orders[1], padding));
    let problem = AttentionProblem {
        full_f32: planned.full_f32,
        ..problem(&case, storage, planned.orders, [&q, &k, &v])
    };
    let mut send = |name: &str, values: &[f64], placed: &Placed| {
        place(on, draw, name, (values, &placed.layout), storage)
    };
    let q_buffer = send("q", &inputs.q, &q);
    let k_buffer = send("k", &inputs.k, &k);
    let v_buffer = send("v", &inputs.v, &v);
    let dout_buffer = send("dout", &inputs.dout, &dout);
    let mask = inputs.mask.as_deref().map(|mask| integers(on, mask, mask_bytes));
    let bias = inputs.bias.as_deref().map(|bias| upload(client, bias, storage));
    let tensors = Tensors {
        mask: mask.as_ref(),
        bias: bias.as_ref(),
        ..Tensors::of(&q_buffer, &k_buffer, &v_buffer)
    };
    if draw.holds("contradiction", 60) {
        return contradictions(on, draw, check, &problem, &tensors);
    }
    let plan = |pass: Pass, which: usize| {
        let mut plans = AttentionBlueprint::candidates(&problem, pass, client);
        plans.retain(|plan| on.takes(plan.family));
        plans
            .get(which % plans.len().max(1))
            .copied()
            .ok_or_else(|| Stop::Declined(format!("no plan for heads of {}", problem.head_dim)))
    };
    let attention = inputs.attention(case);
    // Heads may be small: errors of the naive computation then are by luck.
    let precision = on.attention(storage, planned.full_f32).with_roundings(Roundings::Counted);
    let by = plan(Pass::Forward, planned.blueprints[0])?;
    let output = attention_forward_with(client, &problem, &by, &tensors)?;
    let forward = attention.forward();
    let bounds = attention.forward_bounds(&forward, &precision);
    let of = |what: &str, plan: &AttentionBlueprint| format!("{what} by {plan:?}");
    let lse = lse_of(&download(client, output.lse.clone(), Storage::F32)?);
    check.compare(&of("lse", &by), lse, &forward.lse, &bounds.lse)?;
    let dense_q = Placed::new(of_q, planned.orders[0], 0).layout;
    let out = dense_q.gather(&download(client, output.out.clone(), storage)?);
    check.compare(&of("out", &by), out, &forward.o, &bounds.o)?;

    let by = match plan(Pass::Backward, planned.blueprints[1]) {
        // What a family serves in one pass alone was examined.
        Err(Stop::Declined(_)) => return Ok(()),
        planned => planned?,
    };
    let result = AttentionResult::of(&output, &dout_buffer, dout.rows);
    let gives_dbias = by.gives_bias_gradient(&problem, client) && bias.is_some();
    let made = attention_backward_with(client, &problem, &by, &tensors, &result, gives_dbias)?;
    let backward = attention.backward(&inputs.dout);
    let bounds = attention.backward_bounds(&backward, &inputs.dout, &precision);
    let spoilt = spoilt_heads(&case, &inputs);
    let dense_kv = Placed::new(of_kv, planned.orders[1], 0).layout;
    for (what, gradient, layout, expected, bounds) in [
        ("dq", made.dq, &dense_q, &backward.dq, &bounds.dq),
        ("dk", made.dk, &dense_kv, &backward.dk, &bounds.dk),
        ("dv", made.dv, &dense_kv, &backward.dv, &bounds.dv),
    ] {
        let mut actual = layout.gather(&download(client, gradient, storage)?);
        let [_, heads, seq, _] = if what == "dq" { of_q } else { of_kv };
        let (head, group) = (seq * case.head_dim, heads / case.heads_kv);
        forgive(&mut actual, expected, |i| spoilt.contains(&(i / head / group)));
        check.compare(&of(what, &by), actual, expected, bounds)?;
    }
    match (made.dbias, backward.dbias, bounds.dbias) {
        (Some(actual), Some(expected), Some(bounds)) if gives_dbias => {
            let mut actual = summed(&case, &download(client, actual, Storage::F32)?);
            forgive(&mut actual, &expected, |_| !spoilt.is_empty());
            check.compare(&of("dbias", &by), actual, &expected, &bounds)
        }
        (None, ..) if !gives_dbias => Ok(()),
        (other, ..) => Err(format!("the gradient of the bias is {other:?}").into()),
    }
}

/// The heads of keys that a NaN belongs to, counted over all sequences.
fn spoilt_heads(case: &AttentionCase, inputs: &AttentionInputs) -> Vec<usize> {
    let (of_q, of_kv) = (case.seq_q * case.head_dim * case.group(), case.seq_kv * case.head_dim);
    let heads = |values: &[f64], size: usize| -> Vec<usize> {
        let places = values.iter().enumerate().filter(|(_, value)| value.is_nan());
        places.map(|(place, _)| place / size).collect()
    };
    [heads(&inputs.q, of_q), heads(&inputs.dout, of_q), heads(&inputs.k, of_kv)].concat()
}

/// A pair that is left out has a weight of zero, and zero times NaN is NaN in products over whole tiles, as it is
/// in a program of plain operations: within its head, a NaN may reach gradients beyond what sees it.
fn forgive(actual: &mut [f64], expected: &[f64], may: impl Fn(usize) -> bool) {
    for (i, (actual, expected)) in actual.iter_mut().zip(expected).enumerate() {
        if actual.is_nan() && may(i) {
            *actual = *expected;
        }
    }
}

/// A mask in integers of that many bytes.
fn integers(on: &Target, mask: &[bool], bytes: usize) -> Buffer {
    let element = |masked: &bool| u32::from(*masked).to_le_bytes()[..bytes].to_vec();
    let memory: Vec<u8> = mask.iter().flat_map(element).collect();
    let kind = if bytes == 1 { UIntKind::U8 } else { UIntKind::U32 };
    Buffer {
        handle: on.client.create_from_slice(&memory),
        elements: mask.len(),
        dtype: ElemType::UInt(kind),
    }
}

/// A tensor of all pairs, summed to the shape of the bias.
fn summed(case: &AttentionCase, pairs: &[f64]) -> Vec<f64> {
    let Some(shape) = case.options.bias else { return Vec::new() };
    let [batch, heads, rows, keys] = case.pair_dims(shape);
    let mut sums = vec![0.0; batch * heads * rows * keys];
    for (at, value) in pairs.iter().enumerate() {
        let (row, key) = (at / case.seq_kv, at % case.seq_kv);
        let (head, row) = (row / case.seq_q, row % case.seq_q);
        let (b, head) = (head / case.heads_q, head % case.heads_q);
        let index = (b % batch * heads + head % heads) * rows + row % rows;
        sums[index * keys + key % keys] += value;
    }
    sums
}

/// Problems and tensors that do not go together, and sizes of 0.
fn contradictions(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    problem: &AttentionProblem,
    tensors: &Tensors<'_>,
) -> Result<(), Stop> {
    let what = draw.one_of(
        "what",
        &["heads", "queries", "keys", "batch", "short q", "short v", "type of k", "scale"],
    );
    let short = |buffer: &Buffer| Buffer { elements: problem.head_dim - 1, ..buffer.clone() };
    let (short_q, short_v) = (short(tensors.q), short(tensors.v));
    let other = ElemType::UInt(UIntKind::U32);
    let other_k = Buffer { dtype: other, ..tensors.k.clone() };
    let (problem, tensors) = match what {
        "heads" => {
            let heads_kv = problem.heads_q + 1;
            (AttentionProblem { heads_kv, ..*problem }, *tensors)
        }
        "queries" => (AttentionProblem { seq_q: 0, ..*problem }, *tensors),
        "keys" => (AttentionProblem { seq_kv: 0, ..*problem }, *tensors),
        "batch" => (AttentionProblem { batch: 0, ..*problem }, *tensors),
        "short q" => (*problem, Tensors { q: &short_q, ..*tensors }),
        "short v" => (*problem, Tensors { v: &short_v, ..*tensors }),
        "type of k" => (*problem, Tensors { k: &other_k, ..*tensors }),
        _ => (AttentionProblem { scale: f32::NAN, ..*problem }, *tensors),
    };
    check.refuses(what, attention_forward(&on.client, &problem, &tensors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cases::cases, groups::Extent};
    use blackburn_kernels::Family;

    #[test]
    fn options_that_cases_are_told_are_asked_for() {
        const NAMES: [&str; 7] =
            ["mask", "mask-shape", "documents", "bias", "windowed", "capped", "drops"];
        for family in Family::ALL {
            for extent in [Extent::Full, Extent::Quick] {
                let all = cases("attention", family, Storage::F32, extent);
                assert!(!all.is_empty());
                for (index, told) in all.iter().enumerate() {
                    let mut draw = Draw::of(told, 0);
                    let _ = options(&mut draw, 64, true);
                    let mut in_vain = draw.unheeded();
                    in_vain.retain(|choice| {
                        NAMES.iter().any(|name| choice.starts_with(&format!("{name}=")))
                    });
                    assert!(in_vain.is_empty(), "case {index} of {family}: {in_vain:?}");
                }
            }
        }
    }
}
