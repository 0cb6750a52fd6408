//! Sums of columns and of rows, and of squares.

use crate::{
    buffers::{download, dtype, upload},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    buffer::{Buffer, Rows},
    column_sum::{self as kernel, ColumnSumProblem},
    row_sum::row_sum as kernel_of_rows,
    square_sum::{PLACES, square_sum as kernel_of_squares},
};
use blackburn_reference::{column_sum as reference, storage::Storage};

const F32: Storage = Storage::F32;

pub(super) fn column_sum(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let most = if draw.holds("large", 200) { 1 << 20 } else { 1 << 16 };
    let columns = draw.multiple("columns", 2..=3000, step);
    let outer = draw.size("outer", 1..=5);
    let rows = draw.size("rows", 1..=(most / columns / outer).max(1));
    let empty = draw.holds("empty", 100);
    let rows = if empty { 0 } else { rows };
    let pitch = columns + draw.one_of("apart", &[0, 0, step, 3 * step]);
    let between = draw.one_of("between", &[0, 0, pitch]);
    let strides = vec![rows * pitch + between, pitch, 1];
    let layout = Layout { shape: vec![outer, rows, columns], strides };
    let mut x = draw.normal(outer * rows * columns, 1.0, storage);
    draw.spoil("x", &mut x);
    let problem = ColumnSumProblem::new(&layout.shape, &layout.strides, 1..2, dtype(storage));
    if empty {
        return check.refuses("an empty sum", problem);
    }
    let problem = problem?;
    let buffer = place(on, draw, "x", (&x, &layout), storage);
    if draw.holds("contradiction", 60) {
        let short = Buffer { elements: problem.span() - 1, ..buffer };
        return check.refuses("a short x", kernel::column_sum(client, &problem, &short));
    }
    let y = download(client, kernel::column_sum(client, &problem, &buffer)?, storage)?;
    let magnitudes: Vec<f64> = x.iter().map(|x| x.abs()).collect();
    let expected = reference::column_sum(&x, outer, rows, columns);
    if draw.has_whole_numbers() {
        return check.exactly("y", y, &expected, storage);
    }
    let bounds: Vec<f64> = expected
        .iter()
        .zip(reference::column_sum(&magnitudes, outer, rows, columns))
        .map(|(y, magnitude)| reference::bound(*y, magnitude, rows, storage))
        .collect();
    check.compare("y", y, &expected, &bounds)
}

/// Rows that may lie apart, and their numbers.
fn rows(on: &Target, draw: &mut Draw, storage: Storage) -> (Rows, Vec<f64>) {
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let columns = draw.multiple("columns", 1..=5000, step);
    let rows = draw.size("rows", 1..=((1 << 15) / columns).max(1));
    let pitch = columns + draw.one_of("apart", &[0, 0, step, 3 * step]);
    let x = draw.normal(rows * columns, 1.0, storage);
    let layout = Layout::rows(rows, columns, pitch);
    let buffer = upload(&on.client, &layout.scatter(&x, pitch - columns), storage);
    (Rows { buffer, rows, columns, pitch }, x)
}

pub(super) fn row_sum(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let (tensor, x) = rows(on, draw, storage);
    let columns = tensor.columns;
    let is_mean = draw.holds("mean", 2);
    let factor = if is_mean { 1.0 / columns as f64 } else { 1.0 };
    let y = download(&on.client, kernel_of_rows(&on.client, &tensor, factor as f32)?, storage)?;
    let sums: Vec<f64> = x.chunks(columns).map(|row| factor * row.iter().sum::<f64>()).collect();
    if draw.has_whole_numbers() && !is_mean {
        return check.exactly("y", y, &sums, storage);
    }
    let bound = |(sum, row): (&f64, &[f64])| {
        let magnitudes = factor * row.iter().map(|x| x.abs()).sum::<f64>();
        // A rounding of the factor and one of the product are two terms more.
        reference::bound(*sum, magnitudes, columns + 2, storage)
    };
    let bounds: Vec<f64> = sums.iter().zip(x.chunks(columns)).map(bound).collect();
    check.compare("y", y, &sums, &bounds)
}

/// What clipping adds up: squares, in sums that are added up at the end.
pub(super) fn square_sum(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let (tensor, x) = rows(on, draw, storage);
    let zeros = upload(&on.client, &[0.0; PLACES], F32);
    let sums = kernel_of_squares(&on.client, zeros, &[tensor])?;
    let found: f64 = download(&on.client, sums, F32)?.iter().sum();
    let exact: f64 = x.iter().map(|x| x * x).sum();
    if draw.has_whole_numbers() {
        return check.compare("sum", vec![found], &[exact], &[0.0]);
    }
    // All terms are positive. Each is rounded once as a square, and once with each addition that it goes through: those
    // of its unit, of which a cube has 256, of vector and cube, and of the sums.
    let roundings = (1 + x.len().div_ceil(256) + 8 + 8 + 12) as f64;
    check.compare("sum", vec![found], &[exact], &[roundings * F32.unit_roundoff() * exact])
}
