//! Copies of parts of tensors and of permuted tensors, to the bit.

use blackburn_kernels::region::{Region, write_region};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::blocks_of,
    buffers::{download, dtype, upload},
    on_device_with,
    tensors::{tensor, values},
    trials_in,
};
use burn::{
    prelude::*,
    tensor::{Slice, s},
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = Storage::ALL
        .map(|storage| {
            let name = format!("copies::regions_go_where_they_belong_in_{storage:?}");
            Trial::ignorable_test(name.to_lowercase(), move || {
                on_device_with(dtype(storage), |client| regions(client, storage))
            })
        })
        .into();
    trials.extend(trials_in("copies::programs_read_what_they_wrote", &Storage::ALL, programs));
    trials
}

/// A region by its shape, where the source has its elements, and where that begins; the target is contiguous.
type Part = (&'static str, &'static [usize], &'static [usize], usize);

const PARTS: [Part; 14] = [
    ("a matrix", &[70, 130], &[130, 1], 0),
    ("a transposed matrix", &[64, 64], &[1, 64], 0),
    ("odd squares", &[65, 67], &[1, 65], 0),
    ("an odd number of rows, in pairs", &[65, 66], &[1, 70], 0),
    ("columns with gaps", &[127, 34], &[1, 128], 0),
    ("few columns", &[500, 3], &[1, 500], 0),
    ("from the middle on", &[40, 32], &[1, 64], 6),
    ("from an odd place on", &[40, 32], &[1, 64], 7),
    ("channels behind pixels", &[3, 5, 7, 32], &[1120, 7, 1, 35], 0),
    ("heads in front of tokens", &[2, 3, 5, 16], &[240, 16, 48, 1], 0),
    ("windows", &[2, 3, 4, 5, 6, 8], &[2880, 960, 48, 192, 8, 1], 0),
    ("every second of two dimensions", &[6, 5, 8], &[320, 16, 1], 8),
    ("a row, repeated", &[20, 24], &[0, 1], 24),
    ("one element", &[1, 1], &[7, 9], 5),
];

fn regions(client: &Client, storage: Storage) -> Result<(), Failed> {
    // Memory goes on behind what is read, so that it ends within a vector of some parts and not of others.
    for ((name, shape, strides, start), behind) in
        PARTS.into_iter().flat_map(|part| [(part, 0), (part, 1)])
    {
        let places = places(shape, strides, start);
        let held = places.iter().max().map_or(0, |last| last + 1) + behind;
        let numbers = normal(1, held, 1.0, storage);
        let mut dense = vec![1; shape.len()];
        for dim in (0..shape.len() - 1).rev() {
            dense[dim] = dense[dim + 1] * shape[dim + 1];
        }
        let region = Region {
            shape: shape.to_vec(),
            source_strides: strides.to_vec(),
            target_strides: dense,
            source_start: start,
            start: 0,
            adds: false,
        };
        let source = upload(client, &numbers, storage);
        let target = upload(client, &vec![0.5; places.len()], storage);
        write_region(client, &region, &source, &target.clone())?;
        let found = download(client, target, storage)?;
        let expected: Vec<f64> = places.iter().map(|place| numbers[*place]).collect();
        if let Some(at) = found.iter().zip(&expected).position(|(found, exact)| found != exact) {
            return Err(format!("{name}, at {at}: {} for {}", found[at], expected[at]).into());
        }
    }
    Ok(())
}

/// Where the elements of a region lie, in order.
fn places(shape: &[usize], strides: &[usize], start: usize) -> Vec<usize> {
    shape.iter().zip(strides).fold(vec![start], |outer, (size, stride)| {
        let along = |first: &usize| (0..*size).map(|at| first + at * stride).collect::<Vec<_>>();
        outer.iter().flat_map(along).collect()
    })
}

type Program = fn(Tensor<4>) -> Tensor<4>;

/// Slices of a tensor of 2 x 12 x 8 x 24, and how many copies the kernel makes for each, where that is the same on every
/// device: memory may be bound from other places on.
const PROGRAMS: [(&str, Program, Option<usize>); 6] = [
    ("a part of two dimensions", |x| x.slice(s![1..2, 3..11, .., ..]), None),
    ("columns", |x| x.slice(s![.., .., .., 5..16]), Some(1)),
    ("every second of two dimensions", every_second, Some(1)),
    (
        "of dimensions that changed places",
        |x| x.swap_dims(1, 3).slice(s![.., 5..9, .., 1..]),
        Some(1),
    ),
    ("from the end on", |x| x.slice([all(), all(), all(), Slice::new(0, None, -1)]), Some(0)),
    ("rolled", |x| x.roll(&[-3, -3], &[1, 3]), None),
];

fn all() -> Slice {
    Slice::full()
}

fn every_second(x: Tensor<4>) -> Tensor<4> {
    let from = |first| Slice::new(first, None, 2);
    x.slice([all(), from(1), from(0), all()])
}

fn programs(device: &Device, storage: Storage) -> Result<(), Failed> {
    let numbers = normal(1, 2 * 12 * 8 * 24, 1.0, storage);
    for (name, program, copies) in PROGRAMS {
        let on = |device: &Device| tensor::<4>(&numbers, [2, 12, 8, 24], storage, device);
        let expected = values(program(on(&Device::flex())))?;
        let x = on(device);
        device.sync()?;
        let (found, blocks) = blocks_of(device, || values(program(x.clone())))?;
        if found != expected {
            return Err(format!("{name}: other numbers").into());
        }
        let kernels = blocks.iter().flat_map(|block| &block.kernels);
        let ours = kernels.filter(|kernel| kernel.contains("blackburn_kernels::region::")).count();
        if copies.is_some_and(|copies| copies != ours) {
            return Err(
                format!("{name}: {ours} copies by the kernel of {copies:?}: {blocks:?}").into()
            );
        }
    }
    Ok(())
}
