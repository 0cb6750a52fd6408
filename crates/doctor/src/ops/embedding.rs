//! Gradients of embeddings.

use crate::{
    buffers::{download, upload, upload_integers},
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    embedding::{embedding_backward, embedding_backward_onto},
};
use blackburn_reference::storage::Storage;

/// What is in the table before: rows that no index names keep it.
const BEFORE: f64 = 0.25;

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let step = if draw.planned("aligned", 2) { 4 } else { 1 };
    let columns = draw.multiple("columns", 1..=1200, step);
    let places = draw.size("places", 1..=((1 << 15) / columns).max(8));
    let places = if draw.holds("empty", 100) { 0 } else { places };
    let rows = draw.size("rows", 1..=((1 << 16) / columns).max(8));
    // All rows alike, a few of them, one of them, or some that there are not.
    let few = draw.one_of("named", &[rows, rows, 3, 1]).min(rows);
    let beyond = draw.holds("beyond", 6);
    let index: Vec<i32> = (0..places)
        .map(|_| match draw.place(9) {
            0 if beyond => -1,
            1 if beyond => rows as i32,
            _ => draw.place(few) as i32,
        })
        .collect();
    let mut dy = draw.normal(places * columns, 1.0, storage);
    draw.spoil("dy", &mut dy);

    let adds = draw.planned("adds", 2);
    let run = if adds { embedding_backward_onto } else { embedding_backward };

    let (of_index, of_dy) = (upload_integers(client, &index), upload(client, &dy, storage));
    let dw = upload(client, &vec![BEFORE; rows * columns], storage);
    if draw.holds("contradiction", 60) {
        let longer = Buffer { elements: of_dy.elements + 1, ..of_dy };
        let result = run(client, &of_index, &longer, &dw, columns);
        return check.refuses("a longer dy", result);
    }
    run(client, &of_index, &of_dy, &dw, columns)?;

    let before = if adds { BEFORE } else { 0.0 };
    let mut sums = vec![(before, before, 0usize); rows * columns];
    for (row, dy) in index.iter().zip(dy.chunks(columns)) {
        let Some(row) = usize::try_from(*row).ok().filter(|row| *row < rows) else { continue };
        for (sum, dy) in sums[row * columns..].iter_mut().zip(dy) {
            *sum = (sum.0 + dy, sum.1 + dy.abs(), sum.2 + 1);
        }
    }
    let expected: Vec<f64> =
        sums.iter().map(|(sum, _, terms)| if *terms == 0 { BEFORE } else { *sum }).collect();
    let dw = download(client, dw, storage)?;
    if draw.has_whole_numbers() {
        return check.exactly("dw", dw, &expected, storage);
    }
    // Each addition in f32 errs by half an epsilon of what was added up until then, at most of all
    // magnitudes; then one rounding to storage.
    let bound = |(sum, magnitude, terms): &(f64, f64, usize)| {
        let added = (terms + usize::from(adds)) as f64 * Storage::F32.unit_roundoff() * magnitude;
        added + storage.unit_roundoff() * (sum.abs() + added) + storage.underflow()
    };
    let bounds: Vec<f64> = sums.iter().map(bound).collect();
    check.compare("dw", dw, &expected, &bounds)
}
