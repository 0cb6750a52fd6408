//! Matrices in 8 bits, their transposes, and back.

use crate::{
    buffers::{download, dtype, upload, upload_behind},
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    quantize::{
        Fp8Format, Layouts, QuantizeProblem, decode_blocks, padded_row, quantize, quantize_blocks,
    },
};
use blackburn_reference::{
    fp8::Fp8,
    mx::{MxMatrix, ScaleRule},
    storage::Storage,
};

const F32: Storage = Storage::F32;

/// What is drawn for either kind of scales.
struct Drawn {
    storage: Storage,
    fp8: Fp8,
    problem: QuantizeProblem,
    x: Vec<f64>,
}

impl Drawn {
    fn new(on: &Target, draw: &mut Draw, margins: &[u32]) -> Self {
        let storage = draw.plan("type", &on.storages);
        let is_e4m3 = draw.planned("e4m3", 2);
        let (fp8, format) =
            if is_e4m3 { (Fp8::E4m3, Fp8Format::E4m3) } else { (Fp8::E5m2, Fp8Format::E5m2) };
        let layouts = draw.plan("layouts", &[Layouts::Rows, Layouts::Transposed, Layouts::Both]);
        let step = if draw.planned("aligned", 2) { 16 } else { 1 };
        let columns = draw.multiple("columns", 1..=3000, step);
        let most = if draw.holds("large", 200) { 1 << 18 } else { 1 << 14 };
        let rows = draw.size("rows", 1..=(most / columns).max(1));
        let empty = draw.holds("empty", 100);
        let rows = if empty { 0 } else { rows };
        let margin = draw.one_of("margin", margins);
        let deviation = draw.one_of("deviation", &[1.0, 0.02, 100.0]);
        let mut x = draw.normal(rows * columns, deviation, storage);
        // Some that are subnormal in 8 bits, or zero.
        x.iter_mut().skip(1).step_by(3).for_each(|x| *x = storage.round(*x * 1e-3));
        x.iter_mut().skip(2).step_by(11).for_each(|x| *x = 0.0);
        let input = dtype(storage);
        let problem = QuantizeProblem { rows, columns, input, format, margin, layouts };
        Self { storage, fp8, problem, x }
    }
}

/// By one scale for the whole matrix.
pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let Drawn { storage, fp8, problem, x } = Drawn::new(on, draw, &[0, 0, 1, 3]);
    let QuantizeProblem { rows, columns, margin, layouts, .. } = problem;
    let empty = rows == 0;
    let front = draw.one_of("front", on.offsets());
    let buffer = upload_behind(client, front, &x, storage);
    if empty {
        return check.refuses("an empty matrix", quantize(client, &problem, &buffer));
    }
    if draw.holds("contradiction", 60) {
        let short = upload(client, &x[1..], storage);
        return check.refuses("a short x", quantize(client, &problem, &short));
    }
    let made = quantize(client, &problem, &buffer)?;
    let scale = fp8.scale_for(&x) * (-f64::from(margin)).exp2();
    let amax = x.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
    // The scale is a quotient in f32 (up to 2.5 units in the last place off by WGSL's rules), the product is
    // rounded once: together 6 roundings of f32, on either side of a tie.
    let relative = 12.0 * F32.unit_roundoff();
    let kept = download(client, made.scale, F32)?;
    check.compare("scale", kept, &[1.0 / scale, amax], &[relative / scale, 0.0])?;

    let scaled: Vec<f64> = x.iter().map(|x| x * scale).collect();
    let bound = |v: &f64| (fp8.round(*v) - v).abs() + relative * v.abs() + F32.underflow();
    let turned = |values: &[f64]| -> Vec<f64> {
        (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
    };
    let bounds: Vec<f64> = scaled.iter().map(bound).collect();
    for (what, codes, is_turned) in
        [("codes", made.codes, false), ("transposed", made.transposed, true)]
    {
        let asked = if is_turned { layouts.transposed() } else { layouts.rows() };
        let Some(codes) = codes.filter(|_| asked) else {
            if asked {
                return Err(format!("{what} were asked for").into());
            }
            continue;
        };
        let width = if is_turned { rows } else { columns };
        let values = fp8.decode(&unpadded(on, codes, width)?);
        if is_turned {
            check.compare(what, values, &turned(&scaled), &turned(&bounds))?;
        } else {
            check.compare(what, values, &scaled, &bounds)?;
        }
    }
    Ok(())
}

/// By scales of blocks.
pub(super) fn blocks(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let Drawn { storage, fp8, problem, x } = Drawn::new(on, draw, &[0]);
    let QuantizeProblem { rows, columns, .. } = problem;
    let front = draw.one_of("front", on.offsets());
    let buffer = upload_behind(client, front, &x, storage);
    if rows == 0 {
        return check.refuses("an empty matrix", quantize_blocks(client, &problem, &buffer));
    }
    let made = quantize_blocks(client, &problem, &buffer)?;
    let turned: Vec<f64> = (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect();
    for (what, made, x, [rows, columns]) in [
        ("rows", made.rows, &x, [rows, columns]),
        ("transposed", made.transposed, &turned, [columns, rows]),
    ] {
        let Some(made) = made else { continue };
        let matrix = MxMatrix::quantize_by(ScaleRule::Up, x, columns, fp8);
        // Codes and numbers: scales are powers of two, so that nothing is rounded twice.
        let codes = fp8.decode(&unpadded(on, made.codes.clone(), columns)?);
        check.compare(what, codes, &fp8.decode(&matrix.elements), &vec![0.0; x.len()])?;
        let numbers = decode_blocks(client, &made, [rows, columns], dtype(F32))?;
        let numbers = download(client, numbers, F32)?;
        let rows = numbers.chunks_exact(padded_row(columns));
        let dense: Vec<f64> = rows.flat_map(|row| row[..columns].iter().copied()).collect();
        check.compare(what, dense, &matrix.decode(), &vec![0.0; x.len()])?;
    }
    Ok(())
}

/// Codes without the padding of their rows, which is zero.
fn unpadded(on: &Target, codes: Buffer, width: usize) -> Result<Vec<u8>, Stop> {
    let length = codes.elements;
    let bytes = on.client.read_one(codes.handle).map_err(|error| error.to_string())?;
    let mut dense = Vec::new();
    for row in bytes[..length].chunks_exact(padded_row(width)) {
        if row[width..].iter().any(|padding| *padding != 0) {
            return Err("padding that is not zero".into());
        }
        dense.extend_from_slice(&row[..width]);
    }
    Ok(dense)
}
