//! Rotary positions and their gradient, of heads in both orders and of rows that lie apart.

use crate::{
    buffers::{download, dtype, upload, upload_behind},
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::{
    Pass,
    attention::{HeadStrides, Order},
    rotary::{RotaryProblem, rotary},
};
use blackburn_reference::{
    rotary::{Rotation, table},
    storage::Storage,
};

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let positions_first = draw.planned("positions-first", 2);
    let step = if draw.planned("aligned", 2) { 8 } else { 2 };
    let padding = if draw.holds("padding", 3) { step } else { 0 };
    let head_dim = draw.multiple("head_dim", 2..=128, step);
    let batch = draw.size("batch", 1..=17);
    let heads = draw.size("heads", 1..=9);
    let seq = draw.size("seq", 1..=(1 << 13) / (batch * heads * head_dim).min(1 << 12));
    let seq = if draw.holds("empty", 100) { 0 } else { seq };
    let start = draw.place(5);
    let positions = start + seq + draw.place(3);
    let order = if positions_first { Order::PositionsFirst } else { Order::HeadsFirst };
    // What lies behind each row where rows are padded.
    let strides = order.strides(heads, seq, head_dim + padding);
    let problem = RotaryProblem {
        batch,
        heads,
        seq,
        head_dim,
        dtype: dtype(storage),
        strides,
        order,
        start,
        positions,
    };
    let places = |HeadStrides { batch, head, row }: HeadStrides| {
        (0..problem.elements()).map(move |at| {
            let (of_row, column) = (at / head_dim, at % head_dim);
            let (position, of_head, sequence) =
                (of_row % seq, of_row / seq % heads, of_row / seq / heads);
            sequence * batch + of_head * head + position * row + column
        })
    };
    let mut x = draw.normal(problem.elements(), 2.0, storage);
    draw.spoil("x", &mut x);
    let mut memory = vec![f64::NAN; problem.span()];
    places(strides).zip(&x).for_each(|(place, x)| memory[place] = *x);
    let factors = table(positions, head_dim, 10_000.0);
    let by = upload(client, &factors, Storage::F32).into();
    let front = draw.one_of("front", on.offsets());
    if draw.holds("contradiction", 60) {
        let beyond = RotaryProblem { start: positions, seq: seq + 1, ..problem };
        let x = upload(client, &memory, storage);
        return check
            .refuses("rows beyond the table", rotary(client, &beyond, Pass::Forward, x, &by));
    }
    for pass in [Pass::Forward, Pass::Backward] {
        let gradient = pass == Pass::Backward;
        let rotation = Rotation { table: &factors, head_dim, start, gradient };
        let (expected, bounds) = rotation.of(&x, seq, storage);
        let x = upload_behind(client, front, &memory, storage);
        // Half of them in place, where they lie as the result does.
        let held = draw.holds("held", 2).then(|| x.clone());
        let y = rotary(client, &problem, pass, x, &by)?;
        let y = download(client, y, storage)?;
        let y = places(problem.out_strides()).map(|place| y[place]).collect();
        check.compare(if gradient { "dx" } else { "y" }, y, &expected, &bounds)?;
        drop(held);
    }
    Ok(())
}
