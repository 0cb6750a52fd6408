//! Rounding to 8 bits by scales of blocks, and back, against f64.

use super::{FORMATS, layer::transposed, problem};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    quantize::{
        Blocks, Fp8Format, Layouts, QuantizeProblem, decode_blocks, padded_row, quantize_blocks,
        scale_words,
    },
};
use blackburn_reference::{
    fp8::Fp8,
    mx::{MxMatrix, SCALED_BY, ScaleRule},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_device, on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Around blocks of 32, groups of 16 bytes and tiles of 128.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (1, 40), (40, 1), (31, 33), (3, 145), (128, 128), (130, 127), (200, 300), (1000, 136)];
const LAYOUTS: [Layouts; 3] = [Layouts::Rows, Layouts::Transposed, Layouts::Both];

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("fp8::blocks_have_their_codes_and_scales_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| codes(client, storage))
        }));
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("fp8::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("every_largest_number_of_a_block_has_its_scale", largest),
        trial("what_is_no_number_spoils_no_block", special_values),
        trial("a_scale_of_a_neighboring_block_is_caught", exchanged_scales),
        trial("bad_arguments_of_blocks_are_named", bad_arguments),
    ]);
    trials
}

/// A matrix as the host reads it, without padding.
#[derive(Debug, PartialEq)]
struct Read {
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Read {
    fn expected(x: &[f64], columns: usize, fp8: Fp8) -> Self {
        let MxMatrix { elements, scales, .. } =
            MxMatrix::quantize_by(ScaleRule::Up, x, columns, fp8);
        Self { codes: elements, scales }
    }

    /// Reads what the device has made, after a check that padding is zero.
    fn of(client: &Client, blocks: &Blocks, [rows, columns]: [usize; 2]) -> Result<Self, Failed> {
        let read = |buffer: &Buffer| {
            client.read_one(buffer.handle.clone()).map_err(|error| error.to_string())
        };
        let (bytes, words) = (read(&blocks.codes)?, read(&blocks.scales)?);
        let pitch = padded_row(columns);
        let mut codes = Vec::new();
        for row in bytes[..rows * pitch].chunks_exact(pitch) {
            if row[columns..].iter().any(|padding| *padding != 0) {
                return Err("padding that is not zero".into());
            }
            codes.extend_from_slice(&row[..columns]);
        }
        let (per_row, across) = (columns.div_ceil(SCALED_BY), columns.div_ceil(128));
        let scale = |row: usize, block: usize| {
            let word = (row / 128 * across + block / 4) * 128 + row % 32 * 4 + row % 128 / 32;
            words[4 * word + block % 4]
        };
        let scales = (0..rows * per_row).map(|at| scale(at / per_row, at % per_row)).collect();
        Ok(Self { codes, scales })
    }
}

/// Numbers of very different size, of which some are subnormal in 8 bits, and some zero.
fn numbers(seed: u64, count: usize, storage: Storage) -> Vec<f64> {
    let mut x = normal(seed, count, 0.02, storage);
    for (at, x) in x.iter_mut().enumerate() {
        let factor = match at % 11 {
            1 | 4 => 1e-3,
            2 => 0.0,
            _ => 2f64.powi(-((at / 29 % 7) as i32)),
        };
        *x = storage.round(*x * factor);
    }
    x
}

fn codes(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (fp8, format) in FORMATS {
        for (i, shape) in SHAPES.into_iter().enumerate() {
            let (rows, columns) = shape;
            let x = numbers(i as u64, rows * columns, storage);
            for layouts in LAYOUTS {
                let problem = QuantizeProblem { layouts, ..problem(shape, storage, format) };
                let made = quantize_blocks(client, &problem, &upload(client, &x, storage))?;
                let asked = (layouts.rows(), layouts.transposed());
                if (made.rows.is_some(), made.transposed.is_some()) != asked {
                    return Err("other layouts than were asked for".into());
                }
                let turned = transposed(&x, columns);
                for (made, x, shape) in
                    [(made.rows, &x, [rows, columns]), (made.transposed, &turned, [columns, rows])]
                {
                    let Some(made) = made else { continue };
                    check(client, &made, x, shape, fp8).map_err(|error| {
                        let error = error.message().unwrap_or("");
                        format!("{shape:?} {format:?} {layouts:?}: {error}")
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// Whether codes and scales are those of x, and have its numbers.
fn check(
    client: &Client,
    made: &Blocks,
    x: &[f64],
    [rows, columns]: [usize; 2],
    fp8: Fp8,
) -> Result<(), Failed> {
    let (read, expected) =
        (Read::of(client, made, [rows, columns])?, Read::expected(x, columns, fp8));
    if let Some(at) = (0..read.scales.len()).find(|at| read.scales[*at] != expected.scales[*at]) {
        let (actual, expected) = (read.scales[at], expected.scales[at]);
        return Err(format!("scale {at} is {actual}, expected {expected}").into());
    }
    if let Some(at) = (0..read.codes.len()).find(|at| read.codes[*at] != expected.codes[*at]) {
        let (actual, expected) = (read.codes[at], expected.codes[at]);
        return Err(format!("code {at} is {actual:#x}, expected {expected:#x}").into());
    }
    let numbers = decode_blocks(client, made, [rows, columns], dtype(Storage::F32))?;
    let numbers = download(client, numbers, Storage::F32)?;
    let dense: Vec<f64> = numbers
        .chunks_exact(padded_row(columns))
        .flat_map(|row| row[..columns].iter().copied())
        .collect();
    let expected = MxMatrix::quantize_by(ScaleRule::Up, x, columns, fp8).decode();
    compare(&dense, &expected, &vec![0.0; dense.len()])?;
    Ok(())
}

/// Each power of two, what is around it, and what is around the formats' largest number times it.
fn largest(client: &Client) -> Result<(), Failed> {
    for (fp8, format) in FORMATS {
        let mut x = Vec::new();
        for exponent in -120..120 {
            for mantissa in [1.0f32, 1.75] {
                let number = mantissa * 2f32.powi(exponent);
                for number in [number.next_down(), number, number.next_up()] {
                    let mut block = [0.25 * number; SCALED_BY];
                    block[exponent.unsigned_abs() as usize % SCALED_BY] = -number;
                    x.extend(block.map(f64::from));
                }
            }
        }
        let columns = 9 * SCALED_BY;
        let shape = [x.len() / columns, columns];
        let problem = problem((shape[0], columns), Storage::F32, format);
        let made = quantize_blocks(client, &problem, &upload(client, &x, Storage::F32))?;
        let made = made.rows.ok_or("no rows")?;
        check(client, &made, &x, shape, fp8)?;
    }
    Ok(())
}

fn special_values(client: &Client) -> Result<(), Failed> {
    for (fp8, format) in FORMATS {
        let mut x = vec![0.5; 2 * SCALED_BY];
        (x[3], x[17], x[18]) = (f64::NAN, f64::INFINITY, f64::NEG_INFINITY);
        let problem = problem((1, x.len()), Storage::F32, format);
        let made = quantize_blocks(client, &problem, &upload(client, &x, Storage::F32))?;
        let read = Read::of(client, &made.rows.ok_or("no rows")?, [1, x.len()])?;
        let values = fp8.decode(&read.codes);
        let wrong = values.iter().zip(&x).position(|(value, x)| value.is_nan() == x.is_finite());
        if wrong.is_some() || read.scales[0] != read.scales[1] {
            return Err(format!("{format:?}: {values:?}, {:?}", read.scales).into());
        }
    }
    Ok(())
}

/// The negative control: scales in another order must not pass.
fn exchanged_scales(client: &Client) -> Result<(), Failed> {
    let (fp8, format) = FORMATS[0];
    let shape = [128, 128];
    let x = numbers(5, 128 * 128, Storage::F32);
    let problem = problem((128, 128), Storage::F32, format);
    let made = quantize_blocks(client, &problem, &upload(client, &x, Storage::F32))?;
    let rows = made.rows.ok_or("no rows")?;
    let words = client.read_one(rows.scales.handle.clone()).map_err(|error| error.to_string())?;
    let mut words = words.to_vec();
    words.rotate_left(1);
    let handle = client.create_from_slice(&words);
    let rotated = Blocks { scales: Buffer { handle, ..rows.scales.clone() }, ..rows };
    match check(client, &rotated, &x, shape, fp8) {
        Err(_) => Ok(()),
        Ok(()) => Err("scales of other blocks went unseen".into()),
    }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let x = upload(client, &[1.0; 12], Storage::F32);
    let good = problem((3, 4), Storage::F32, Fp8Format::E4m3);
    for (problem, expected) in [
        (QuantizeProblem { rows: 4, ..good }, "x"),
        (QuantizeProblem { margin: 1, ..good }, "margin"),
    ] {
        match quantize_blocks(client, &problem, &x) {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == expected => {}
            other => return Err(format!("{problem:?} gave {other:?}").into()),
        }
    }
    let made = quantize_blocks(client, &good, &x)?.rows.ok_or("no rows")?;
    let refused = |made: &Blocks, shape, expected| match decode_blocks(
        client,
        made,
        shape,
        dtype(Storage::F32),
    ) {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == expected => Ok(()),
        other => Err(Failed::from(format!("{shape:?} gave {other:?}"))),
    };
    refused(&made, [4, 4], "codes")?;
    let short = Buffer { elements: scale_words(3, 4) - 1, ..made.scales.clone() };
    refused(&Blocks { scales: short, ..made.clone() }, [3, 4], "scales")?;
    let values = Blocks { codes: x, ..made };
    refused(&values, [3, 4], "codes")
}
