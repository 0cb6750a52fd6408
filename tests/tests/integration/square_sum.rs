//! Sums of squares and overwritten memory on the device.

use blackburn::train::clip::clip_global_norm;
use blackburn_backend::overwrite::{overwrite_float, overwrite_int};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    overwrite::{Overwrite, Rows, overwrite, overwrite_many},
    square_sum::{MOST_TENSORS, PLACES, square_sum},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::{nn::LinearConfig, optim::GradientsParams, prelude::*, tensor::FloatDType};
use cubecl::{client::Client, ir::ElemType};
use libtest_mimic::{Failed, Trial};

/// Around vectors and cubes, odd ones that take scalar loads, and more than all cubes take at once.
const LENGTHS: [usize; 8] = [0, 1, 3, 255, 1024, 1027, 4100, 2_100_000];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        trials.push(Trial::ignorable_test(
            format!("square_sum::sums_are_within_bounds_in_{storage:?}").to_lowercase(),
            move || on_device_with(dtype(storage), |client| sums(client, storage)),
        ));
        trials.push(Trial::ignorable_test(
            format!("square_sum::many_tensors_of_any_layout_are_summed_in_{storage:?}")
                .to_lowercase(),
            move || on_device_with(dtype(storage), |client| many(client, storage)),
        ));
        trials.push(Trial::ignorable_test(
            format!("overwrite::{storage:?}_takes_what_f32_rounds_to").to_lowercase(),
            move || on_device_with(dtype(storage), |client| overwrites(client, storage)),
        ));
        trials.push(Trial::ignorable_test(
            format!("overwrite::many_tensors_in_{storage:?}_are_overwritten_each").to_lowercase(),
            move || on_device_with(dtype(storage), |client| overwrites_many(client, storage)),
        ));
    }
    trials
        .push(Trial::ignorable_test("square_sum::bad_arguments_are_named", || on_device(refusals)));
    let on_burn = |name: &str, test: fn(Device) -> Result<(), Failed>| {
        Trial::ignorable_test(name.to_string(), move || on_burn_device(test))
    };
    trials.push(on_burn("square_sum::a_norm_is_that_of_all_gradients", norm));
    trials.push(on_burn("square_sum::a_norm_is_that_of_many_gradients", norm_of_many));
    trials.push(on_burn("square_sum::a_norm_counts_what_is_expanded", norm_of_expanded));
    trials.push(on_burn("overwrite::all_who_hold_the_memory_see_it", seen_by_all));
    trials.push(on_burn("overwrite::a_dimension_of_size_one_has_any_stride", of_size_one));
    trials.push(on_burn("overwrite::what_lies_between_rows_stays", between_rows));
    trials
}

fn zeros(client: &Client) -> Buffer {
    upload(client, &vec![0.0; PLACES], Storage::F32)
}

fn sums(client: &Client, storage: Storage) -> Result<(), Failed> {
    let mut held = None;
    let mut sum = zeros(client);
    let (mut exact, mut additions) = (0.0, 0);
    for (i, length) in LENGTHS.into_iter().enumerate() {
        let x = normal(i as u64, length, 3.0, storage);
        exact += x.iter().map(|x| x * x).sum::<f64>();
        additions += length.div_ceil(PLACES * 256) + 1;
        // In every other round somebody else holds the sums, which then have to stay.
        let before = i.is_multiple_of(2).then(|| sum.clone());
        sum = square_sum(client, sum, &[upload(client, &x, storage).into()])?;
        held = before.or(held);
    }
    // All of them again, in one launch.
    let all =
        LENGTHS.map(|length| Rows::one(upload(client, &normal(9, length, 3.0, storage), storage)));
    exact += LENGTHS
        .iter()
        .flat_map(|length| normal(9, *length, 3.0, storage))
        .map(|x| x * x)
        .sum::<f64>();
    additions += LENGTHS.map(|length| length.div_ceil(PLACES * 256)).iter().sum::<usize>() + 8;
    sum = square_sum(client, sum, &all)?;
    let found = download(client, sum.clone(), Storage::F32)?;
    let total: f64 = found.iter().sum();
    // All terms are positive: each is rounded once as a square, once an addition of its unit, and
    // where vector and cube meet.
    let bound = (additions as f64 + 1.0 + 8.0 + 8.0) * f64::from(f32::EPSILON) / 2.0 * exact;
    let is_within = (total - exact).abs() <= bound;
    if !is_within {
        return Err(format!("{total} against {exact}, bound {bound}").into());
    }
    let held = held.ok_or("a round holds the sums")?;
    let kept: f64 = download(client, held, Storage::F32)?.iter().sum();
    if kept >= total {
        return Err("sums that somebody held were written to".into());
    }
    for bad in [f64::NAN, f64::INFINITY] {
        let mut x = normal(1, 1000, 1.0, storage);
        x[777] = bad;
        let sum = square_sum(client, zeros(client), &[upload(client, &x, storage).into()])?;
        let total: f64 = download(client, sum.clone(), Storage::F32)?.iter().sum();
        if total.is_nan() != bad.is_nan() || total.is_finite() {
            return Err(format!("{bad} came out as {total}").into());
        }
    }
    Ok(())
}

/// More tensors than a launch takes, of two types, as one row and by short rows with something in between, which
/// stays.
fn overwrites_many(client: &Client, storage: Storage) -> Result<(), Failed> {
    const KEPT: f64 = 7.0;
    let mut all = Vec::new();
    let mut expected = Vec::new();
    for i in 0..40 {
        let source_type = if i % 3 == 0 { Storage::F32 } else { storage };
        let (rows, columns, [from, to]) = match i % 4 {
            0 => (1, 1 + 613 * i, [1 + 613 * i; 2]),
            1 => (900 + i, 3, [4, 8]),
            2 => (17, 12, [16, 12]),
            _ => (5, 1026, [1026, 1032]),
        };
        let drawn = normal(i as u64, rows * columns, 1.0, source_type);
        let laid_out = |pitch: usize, values: Option<&[f64]>| {
            let mut all = vec![KEPT; rows * pitch];
            for (row, values) in values.into_iter().flat_map(|all| all.chunks(columns)).enumerate()
            {
                all[row * pitch..][..columns].copy_from_slice(values);
            }
            all
        };
        let by_rows = |values: &[f64], storage, pitch| {
            let buffer = upload(client, values, storage);
            Rows { buffer, rows, columns, pitch }
        };
        let rounded: Vec<f64> = drawn.iter().map(|x| storage.round(*x)).collect();
        expected.push(laid_out(to, Some(&rounded)));
        let source = by_rows(&laid_out(from, Some(&drawn)), source_type, from);
        all.push(Overwrite::new(by_rows(&laid_out(to, None), storage, to), source));
    }
    overwrite_many(client, &all)?;
    for (i, (one, expected)) in all.into_iter().zip(expected).enumerate() {
        let found = download(client, one.target.buffer, storage)?;
        if found != expected {
            return Err(format!("tensor {i} is not what it is to be").into());
        }
    }
    Ok(())
}

/// More tensors than a launch takes, of two types, some of them by rows with something in between, and
/// with vectors that go beyond the end: to the bound, and twice to the same bits.
fn many(client: &Client, storage: Storage) -> Result<(), Failed> {
    let mut tensors = Vec::new();
    let mut exact = 0.0;
    let mut most = 0;
    for i in 0..2 * MOST_TENSORS + 3 {
        let storage = if i % 5 == 0 { Storage::F32 } else { storage };
        let (rows, columns, pitch) = match i % 4 {
            // As in memory that goes on, and not.
            0 => (1, 1 + 37 * i, 8 * (2 + 37 * i)),
            1 => (1, 1 + 37 * i, 1 + 37 * i),
            2 => (3 + i, 13, 16 + 8 * (i % 3)),
            _ => (5, 3000 + i, 3000 + i + i % 2),
        };
        let values = normal(i as u64, rows * columns, 1.0, storage);
        exact += values.iter().map(|x| x * x).sum::<f64>();
        most = most.max(rows * columns);
        let mut all = vec![f64::NAN; rows * pitch];
        for (row, values) in values.chunks(columns).enumerate() {
            all[row * pitch..][..columns].copy_from_slice(values);
        }
        let mut buffer = upload(client, &all, storage);
        buffer.elements = (rows - 1) * pitch + columns;
        let pitch = if rows == 1 { columns } else { pitch };
        tensors.push(Rows { buffer, rows, columns, pitch });
    }
    let total = |tensors: &[Rows]| -> Result<f64, Failed> {
        let sums = square_sum(client, zeros(client), tensors)?;
        Ok(download(client, sums, Storage::F32)?.iter().sum())
    };
    let found = total(&tensors)?;
    // A square is rounded, and each of the additions that it goes through: those of its unit, of vector
    // and cube, and one a launch.
    let additions = most.div_ceil(256) + 8 + 8 + 12;
    let bound = (additions + 1) as f64 * f64::from(f32::EPSILON) / 2.0 * exact;
    let is_within = (found - exact).abs() <= bound;
    if !is_within {
        return Err(format!("{found} against {exact}, bound {bound}").into());
    }
    if total(&tensors)?.to_bits() != found.to_bits() {
        return Err("the same tensors gave another sum".into());
    }
    let fewer = total(&tensors[..tensors.len() - 1])?;
    if (fewer - exact).abs() <= bound {
        return Err("the control, without the last tensor, is within the bound".into());
    }
    Ok(())
}

fn overwrites(client: &Client, storage: Storage) -> Result<(), Failed> {
    for length in LENGTHS {
        let wide = normal(3, length, 1.0, Storage::F32);
        let target = upload(client, &vec![7.0; length], storage);
        let address = target.clone();
        let source = upload(client, &wide, Storage::F32);
        overwrite(client, &Rows::one(target), &Rows::one(source))?;
        let expected: Vec<f64> = wide.iter().map(|x| storage.round(*x)).collect();
        if download(client, address, storage)? != expected {
            return Err(format!("{length} elements differ").into());
        }
    }
    // Rows with something in between, which stays; by vectors, by vectors and an end, by elements.
    for (columns, from, into) in
        [(8, 12, 16), (11, 12, 16), (11, 11, 12), (1, 1, 3), (600, 604, 600)]
    {
        // More than cubes take at once, on an H200 too.
        const ROWS: usize = 1200;
        let wide = normal(4, ROWS * from, 1.0, Storage::F32);
        let target = upload(client, &vec![7.0; ROWS * into], storage);
        let rows = |buffer: Buffer, pitch| Rows { buffer, rows: ROWS, columns, pitch };
        let source = rows(upload(client, &wide, Storage::F32), from);
        overwrite(client, &rows(target.clone(), into), &source)?;
        let expected: Vec<f64> = (0..ROWS * into)
            .map(|i| match i % into {
                column if column < columns => storage.round(wide[i / into * from + column]),
                _ => 7.0,
            })
            .collect();
        if download(client, target, storage)? != expected {
            return Err(format!("rows of {columns} from {from} into {into} differ").into());
        }
    }
    Ok(())
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let few = upload(client, &[1.0, 2.0], Storage::F32);
    let argument = |result: Result<(), KernelError>| match result {
        Err(KernelError::InvalidProblem { argument, .. }) => Ok(argument),
        other => Err(Failed::from(format!("{other:?}"))),
    };
    let one = Rows::one(few.clone());
    let of_one = std::slice::from_ref(&one);
    assert_eq!(argument(square_sum(client, few.clone(), of_one).map(drop))?, "sums");
    let too_long = Rows { rows: 2, ..one.clone() };
    let overlapping = Rows { rows: 2, columns: 2, pitch: 0, ..one.clone() };
    for bad in [too_long, overlapping] {
        assert_eq!(argument(square_sum(client, zeros(client), &[bad]).map(drop))?, "tensors");
    }
    let integers = Buffer { dtype: ElemType::Int(cubecl::ir::IntKind::I32), ..few.clone() };
    let unsupported = square_sum(client, zeros(client), &[integers.clone().into()]);
    assert!(matches!(unsupported, Err(KernelError::Unsupported { .. })), "{unsupported:?}");
    assert_eq!(
        argument(overwrite(client, &Rows::one(zeros(client)), &Rows::one(few.clone())))?,
        "source"
    );
    assert_eq!(
        argument(overwrite(client, &Rows::one(integers), &Rows::one(few.clone())))?,
        "source"
    );
    let too_long = Rows { rows: 2, ..Rows::one(few) };
    assert_eq!(argument(overwrite(client, &too_long, &too_long))?, "source");
    Ok(())
}

/// Long and odd gradients, one of them strided.
fn norm(device: Device) -> Result<(), Failed> {
    for storage in [Storage::F32, Storage::F16] {
        let model = LinearConfig::new(70, 1031).init(&device);
        let bias = model.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        let [weight, short] = [70 * 1031, 1031].map(|length| normal(5, length, 1.0, storage));
        let exact = weight.iter().chain(&short).map(|x| x * x).sum::<f64>().sqrt();
        let mut gradients = GradientsParams::new();
        let transposed = tensor(&weight, [1031, 70], storage, &device).transpose();
        gradients.register::<2>(model.weight.id, transposed);
        gradients.register::<1>(bias.id, tensor(&short, [1031], storage, &device));
        let found = values(clip_global_norm(&mut gradients, &model, f64::INFINITY))?[0];
        // Some 30 roundings a term, halved by the root, and those of the root itself.
        let bound = 32.0 * f64::from(f32::EPSILON) / 2.0 * exact;
        let is_within = (found - exact).abs() <= bound;
        if !is_within {
            return Err(format!("{storage:?}: {found} against {exact}, bound {bound}").into());
        }
    }
    Ok(())
}

/// More than an operation takes, of both kinds of lengths, whatever the order they come in.
fn norm_of_many(device: Device) -> Result<(), Failed> {
    let layers: Vec<_> =
        (0..25).map(|i| LinearConfig::new(8 + i, 16).with_bias(i % 2 == 0).init(&device)).collect();
    let mut gradients = GradientsParams::new();
    let mut exact = 0.0;
    for (i, layer) in layers.iter().enumerate() {
        let [rows, columns] = layer.weight.dims();
        let weight = normal(20 + i as u64, rows * columns, 1.0, Storage::F32);
        exact += weight.iter().map(|x| x * x).sum::<f64>();
        gradients.register::<2>(
            layer.weight.id,
            tensor(&weight, [rows, columns], Storage::F32, &device),
        );
        if let Some(bias) = &layer.bias {
            exact += 16.0 * 0.25;
            gradients.register::<1>(bias.id, Tensor::full([16], 0.5, &device));
        }
    }
    let found = values(clip_global_norm(&mut gradients, &layers, f64::INFINITY))?[0];
    let bound = 40.0 * f64::from(f32::EPSILON) / 2.0 * exact.sqrt();
    if (found - exact.sqrt()).abs() <= bound {
        return Ok(());
    }
    Err(format!("{found} against {}, bound {bound}", exact.sqrt()).into())
}

/// Broadcast gradients hold one row, or one column, for all: their strides are 0.
fn norm_of_expanded(device: Device) -> Result<(), Failed> {
    let model = LinearConfig::new(6, 40).with_bias(false).init(&device);
    for shape in [[1, 40], [6, 1], [1, 1]] {
        let some = normal(7, shape[0] * shape[1], 1.0, Storage::F32);
        let repeats = (6 * 40 / some.len()) as f64;
        let exact = (repeats * some.iter().map(|x| x * x).sum::<f64>()).sqrt();
        let gradient: Tensor<2> = tensor(&some, shape, Storage::F32, &device);
        let mut gradients = GradientsParams::new();
        gradients.register::<2>(model.weight.id, gradient.expand([6, 40]));
        let found = values(clip_global_norm(&mut gradients, &model, 0.5))?[0];
        let clipped = values(clip_global_norm(&mut gradients, &model, f64::INFINITY))?[0];
        // Each sum has at most ten additions of a term, a square and the root; the factor four roundings
        // and the guard against division by zero.
        let bound = 12.0 * f64::from(f32::EPSILON) * exact;
        if (found - exact).abs() > bound
            || (clipped - 0.5).abs() > 1e-6 + 20.0 * f64::from(f32::EPSILON)
        {
            return Err(format!("{shape:?}: {found} against {exact}, then {clipped}").into());
        }
    }
    Ok(())
}

fn seen_by_all(device: Device) -> Result<(), Failed> {
    let floats = Tensor::<2>::zeros([3, 5], &device).cast(FloatDType::F16);
    let (held, before) = (floats.clone(), values(floats.clone())?);
    let new = Tensor::<2>::full([3, 5], 0.5, &device);
    let after = values(overwrite_float(floats, new))?;
    let integers = Tensor::<1, Int>::from_data([1, 2, 3], &device);
    let held_integers = integers.clone();
    let _new = overwrite_int(integers, Tensor::from_data([4, 5, 6], &device));
    device.flush().map_err(|error| error.to_string())?;
    let seen: Vec<i32> = held_integers.into_data().iter().collect();
    let all_seen = (before, after, values(held)?, seen)
        == (vec![0.0; 15], vec![0.5; 15], vec![0.5; 15], vec![4, 5, 6]);
    if all_seen { Ok(()) } else { Err("a holder does not see what was written".into()) }
}

/// Weights of a depthwise convolution have a dimension of size 1 between others, and its stride may be any.
fn of_size_one(device: Device) -> Result<(), Failed> {
    const ROWS: usize = 32;
    const COLUMNS: usize = 5;
    let memory = Tensor::<3>::zeros([1, ROWS, COLUMNS], &device);
    let turned = memory.clone().swap_dims(0, 1);
    // Now the view is settled.
    device.sync().map_err(|error| error.to_string())?;
    let new = normal(9, ROWS * COLUMNS, 1.0, Storage::F32);
    let source = tensor(&new, [ROWS, 1, COLUMNS], Storage::F32, &device);
    if values(overwrite_float(turned, source))? == new && values(memory)? == new {
        return Ok(());
    }
    Err("the memory does not hold what was written".into())
}

/// Half of each row of a wider tensor, which is a view of its memory, takes what has no gaps.
fn between_rows(device: Device) -> Result<(), Failed> {
    const ROWS: usize = 3;
    const HALF: usize = 128;
    let wide = Tensor::<2>::zeros([ROWS, 2 * HALF], &device);
    let half = wide.clone().slice([0..ROWS, 0..HALF]);
    // Now the view is settled.
    device.sync().map_err(|error| error.to_string())?;
    let new = normal(8, ROWS * HALF, 1.0, Storage::F32);
    let source = tensor(&new, [ROWS, HALF], Storage::F32, &device);
    if values(overwrite_float(half, source))? != new {
        return Err("the rows do not hold what was written".into());
    }
    let expected: Vec<f64> =
        new.chunks(HALF).flat_map(|row| row.iter().copied().chain([0.0; HALF])).collect();
    if values(wide)? != expected {
        return Err("the wider tensor has something else than the new rows and zeros".into());
    }
    Ok(())
}
