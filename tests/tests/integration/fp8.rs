//! Rounding to 8 bits on the device, against f64, and linear layers that compute with it.

#[path = "fp8_blocks.rs"]
mod blocks;
#[path = "fp8_casts.rs"]
mod casts;
#[path = "fp8_layer.rs"]
mod layer;
#[path = "fp8_linear.rs"]
mod linear;
#[path = "fp8_marked.rs"]
mod marked;

use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    quantize::{
        Fp8Format, Layouts, QuantizeBlueprint, QuantizeProblem, Quantized, decode, padded_row,
        quantize, quantize_with,
    },
};
use blackburn_reference::{fp8::Fp8, random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::{Failed, Trial};

/// Around vectors, groups of 16 bytes, and tiles of 64 by 128; the last ones take many cubes.
const SHAPES: [(usize, usize); 10] = [
    (1, 1),
    (1, 40),
    (40, 1),
    (3, 17),
    (16, 8),
    (63, 127),
    (64, 128),
    (65, 132),
    (200, 300),
    (1000, 136),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let mut add = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("fp8::{what}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            }));
        };
        add("codes_are_the_nearest_ones", nearest);
        add("codes_have_their_numbers", decoded);
        add("special_values_keep_their_meaning", special_values);
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("fp8::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("ties_go_to_the_even_code_in_every_binade", ties),
        trial("every_plan_gives_the_same_bits", plans),
        trial("a_margin_halves_the_codes_numbers", margin),
        trial("a_dropped_scale_is_caught", dropped_scale),
        trial("bad_arguments_are_named", bad_arguments),
    ]);
    trials.extend(blocks::trials());
    trials.extend(linear::trials());
    trials.extend(marked::trials());
    trials.extend(casts::trials());
    trials
}

const FORMATS: [(Fp8, Fp8Format); 2] = [(Fp8::E4m3, Fp8Format::E4m3), (Fp8::E5m2, Fp8Format::E5m2)];

fn problem(
    (rows, columns): (usize, usize),
    storage: Storage,
    format: Fp8Format,
) -> QuantizeProblem {
    QuantizeProblem {
        rows,
        columns,
        input: dtype(storage),
        format,
        margin: 0,
        layouts: Layouts::Both,
    }
}

/// A matrix in 8 bits as the host reads it.
struct Read {
    /// Row by row, without padding.
    codes: Vec<u8>,
    /// What codes are multiplied by.
    inverse_scale: f64,
    amax: f64,
}

/// Reads what the device has made, after a check that padding is zero and that the transpose is one.
fn read(client: &Client, problem: &QuantizeProblem, made: Quantized) -> Result<Read, Failed> {
    let (rows, columns) = (problem.rows, problem.columns);
    let scale = download(client, made.scale, Storage::F32)?;
    let matrix = |codes: Option<Buffer>, rows: usize, columns: usize| {
        let Some(codes) = codes else { return Ok(None) };
        let pitch = padded_row(columns);
        let length = codes.elements;
        let bytes = client.read_one(codes.handle).map_err(|error| error.to_string())?;
        if length != rows * pitch {
            return Err(Failed::from(format!("{length} codes for {rows} rows of {pitch}")));
        }
        let mut dense = Vec::new();
        for row in bytes[..length].chunks_exact(pitch) {
            if row[columns..].iter().any(|padding| *padding != 0) {
                return Err("padding that is not zero".into());
            }
            dense.extend_from_slice(&row[..columns]);
        }
        Ok(Some(dense))
    };
    let codes = matrix(made.codes, rows, columns)?;
    let turned = matrix(made.transposed, columns, rows)?.map(|turned| {
        (0..rows * columns).map(|i| turned[i % columns * rows + i / columns]).collect::<Vec<_>>()
    });
    let asked = (problem.layouts.rows(), problem.layouts.transposed());
    if (codes.is_some(), turned.is_some()) != asked {
        return Err("other layouts than were asked for".into());
    }
    if codes.is_some() && turned.is_some() && codes != turned {
        return Err("the transpose has other codes".into());
    }
    let codes = codes.or(turned).ok_or("no codes")?;
    Ok(Read { codes, inverse_scale: scale[0], amax: scale[1] })
}

fn run(
    client: &Client,
    problem: &QuantizeProblem,
    x: &[f64],
    storage: Storage,
) -> Result<Read, Failed> {
    read(client, problem, quantize(client, problem, &upload(client, x, storage))?)
}

/// Whether each code is the nearest to `scale x`, or as near as can be told from a product in f32.
///
/// The scale is a quotient in f32 (up to 2.5 units in the last place off by WGSL's rules), the
/// product is rounded once: together 6 roundings of f32, on either side of a tie.
fn check_codes(read: &Read, x: &[f64], scale: f64, fp8: Fp8) -> Result<(), Failed> {
    let relative = 12.0 * Storage::F32.unit_roundoff();
    let scaled: Vec<f64> = x.iter().map(|x| x * scale).collect();
    let bounds: Vec<f64> = scaled
        .iter()
        .map(|v| {
            let nearest = (fp8.round(*v) - v).abs();
            nearest + relative * v.abs() + Storage::F32.underflow()
        })
        .collect();
    compare(&fp8.decode(&read.codes), &scaled, &bounds)?;
    let inverse = 1.0 / scale;
    if (read.inverse_scale - inverse).abs() > relative * inverse {
        return Err(format!("1 / scale is {}, not {inverse}", read.inverse_scale).into());
    }
    Ok(())
}

fn nearest(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (fp8, format) in FORMATS {
        for (i, shape) in SHAPES.into_iter().enumerate() {
            let elements = shape.0 * shape.1;
            let mut x = normal(i as u64, elements, 0.02, storage);
            // Some that are subnormal in 8 bits, or zero.
            x.iter_mut().skip(1).step_by(3).for_each(|x| *x = storage.round(*x * 1e-3));
            x.iter_mut().skip(2).step_by(11).for_each(|x| *x = 0.0);
            for layouts in [Layouts::Rows, Layouts::Transposed, Layouts::Both] {
                let problem = QuantizeProblem { layouts, ..problem(shape, storage, format) };
                let named = |error: Failed| {
                    format!("{shape:?} {format:?} {layouts:?}: {}", error.message().unwrap_or(""))
                };
                let read = run(client, &problem, &x, storage).map_err(named)?;
                let amax = x.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
                if read.amax != amax {
                    return Err(format!("{shape:?}: amax is {}, not {amax}", read.amax).into());
                }
                check_codes(&read, &x, fp8.scale_for(&x), fp8).map_err(named)?;
            }
        }
    }
    Ok(())
}

/// All numbers of a format, the middles between them, and the f32 values around those; the largest
/// number makes the scale 1.
fn ties(client: &Client) -> Result<(), Failed> {
    for (fp8, format) in FORMATS {
        let codes: Vec<u8> = (0..=fp8.encode(&[fp8.max_finite()])[0]).collect();
        let numbers = fp8.decode(&codes);
        let mut x = numbers.clone();
        for pair in numbers.windows(2) {
            let middle = (0.5 * (pair[0] + pair[1])) as f32;
            x.extend([middle.next_down(), middle, middle.next_up()].map(f64::from));
        }
        x.extend(x.clone().iter().map(|x| -x));
        let read = run(client, &problem((1, x.len()), Storage::F32, format), &x, Storage::F32)?;
        let expected = fp8.encode(&x);
        for ((x, actual), expected) in x.iter().zip(&read.codes).zip(&expected) {
            if actual != expected {
                return Err(
                    format!("{format:?}: {x:e} is {actual:#x}, expected {expected:#x}").into()
                );
            }
        }
    }
    Ok(())
}

/// NaN and infinity are NaN, and the scale is 1 where there is none to choose.
fn special_values(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (_, format) in FORMATS {
        let cases: [(&[f64], &[u8]); 3] = [
            (&[0.0, -0.0, 0.0], &[0, 0x80, 0]),
            (&[f64::INFINITY, 0.0, f64::NEG_INFINITY], &[0x7f, 0, 0x7f]),
            (&[0.0, f64::NAN, f64::INFINITY], &[0, 0x7f, 0x7f]),
        ];
        for (x, expected) in cases {
            let read = run(client, &problem((1, 3), storage, format), x, storage)?;
            if read.codes != expected || read.inverse_scale != 1.0 {
                let (codes, inverse) = (read.codes, read.inverse_scale);
                return Err(format!("{x:?} came out as {codes:x?} times {inverse}").into());
            }
            let amax = x.iter().fold(0.0, |a: f64, x| if *x <= a { a } else { x.abs() });
            if read.amax != amax && !(read.amax.is_nan() && x.iter().any(|x| x.is_nan())) {
                return Err(format!("amax of {x:?} is {}", read.amax).into());
            }
        }
    }
    Ok(())
}

fn decoded(client: &Client, storage: Storage) -> Result<(), Failed> {
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    for (fp8, format) in FORMATS {
        let buffer = Buffer {
            handle: client.create_from_slice(&codes),
            elements: codes.len(),
            dtype: format.dtype(),
        };
        let values = decode(client, &buffer, dtype(storage))?;
        let values = download(client, values, storage)?;
        compare(&values, &fp8.decode(&codes), &vec![0.0; codes.len()])
            .map_err(|error| format!("{format:?}: {error}"))?;
    }
    Ok(())
}

/// One cube or many, scalar loads or vectors, the GPU's conversion or integer arithmetic.
fn plans(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = normal(3, 200 * 300, 1.0, storage);
    for (_, format) in FORMATS {
        let problem = problem((200, 300), storage, format);
        let x = upload(client, &x, storage);
        let plan = QuantizeBlueprint::plan(&problem, client);
        if plan.amax_cubes < 2 || plan.cast_cubes < 2 || plan.vector_size < 2 {
            return Err(format!("{plan:?} has nothing to differ from").into());
        }
        // First the one whose cubes come back for other tiles: later ones get memory that still holds the
        // right codes.
        let plans = [
            QuantizeBlueprint { cast_cubes: 1, ..plan },
            plan,
            plan,
            QuantizeBlueprint { amax_cubes: 1, ..plan },
            QuantizeBlueprint { vector_size: 1, ..plan },
            QuantizeBlueprint { hardware: false, ..plan },
        ];
        let results = plans
            .into_iter()
            .map(|plan| {
                read(client, &problem, quantize_with(client, &problem, plan, &x, None)?)
                    .map(|read| (plan, read.codes, read.inverse_scale.to_bits()))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let (_, codes, scale) = &results[0];
        for (plan, other_codes, other_scale) in &results[1..] {
            if (other_codes, other_scale) != (codes, scale) {
                return Err(format!("{format:?} differs by {plan:?}").into());
            }
        }
    }
    Ok(())
}

fn margin(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = normal(4, 33 * 20, 1.0, storage);
    for (fp8, format) in FORMATS {
        let problem = QuantizeProblem { margin: 1, ..problem((33, 20), storage, format) };
        let read = run(client, &problem, &x, storage)?;
        check_codes(&read, &x, 0.5 * fp8.scale_for(&x), fp8)?;
    }
    Ok(())
}

/// The negative control: codes of values that were not scaled must not pass.
fn dropped_scale(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = normal(5, 64 * 64, 1e-3, storage);
    let (fp8, format) = FORMATS[0];
    let mut read = run(client, &problem((64, 64), storage, format), &x, storage)?;
    read.codes = fp8.encode(&x);
    match check_codes(&read, &x, fp8.scale_for(&x), fp8) {
        Err(_) => Ok(()),
        Ok(()) => Err("codes without a scale went unseen".into()),
    }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = upload(client, &[1.0; 12], storage);
    let good = problem((3, 4), storage, Fp8Format::E4m3);
    let refused = |problem: QuantizeProblem, expected: &str| match quantize(client, &problem, &x) {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == expected => Ok(()),
        other => Err(Failed::from(format!("{problem:?} gave {other:?}"))),
    };
    refused(QuantizeProblem { rows: 4, ..good }, "x")?;
    refused(QuantizeProblem { margin: 17, ..good }, "margin")?;
    let declined = |problem: QuantizeProblem| match quantize(client, &problem, &x) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(Failed::from(format!("{problem:?} gave {other:?}"))),
    };
    declined(QuantizeProblem { rows: 0, ..good })?;
    declined(QuantizeProblem { input: ElemType::Int(IntKind::I32), ..good })?;
    let plan = QuantizeBlueprint { vector_size: 3, ..QuantizeBlueprint::plan(&good, client) };
    match quantize_with(client, &good, plan, &x, None) {
        Err(KernelError::InvalidProblem { argument: "blueprint", .. }) => {}
        other => return Err(format!("vectors of 3 for 4 columns gave {other:?}").into()),
    }
    match decode(client, &x, dtype(storage)) {
        Err(KernelError::InvalidProblem { argument: "codes", .. }) => Ok(()),
        other => Err(format!("floats as codes gave {other:?}").into()),
    }
}
