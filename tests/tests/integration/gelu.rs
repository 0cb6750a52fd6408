//! GELU and its gradient on the device, against f64.

#[path = "gelu_module.rs"]
mod module;
#[path = "gelu_sum.rs"]
mod sum;

use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    gelu::{gelu_backward, gelu_forward},
};
use blackburn_reference::{gelu, random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_device, on_device_with,
};
use cubecl::{client::Client, ir::ElemType};
use libtest_mimic::{Failed, Trial};

/// Around vector and cube sizes: 1 and odd numbers take scalar loads, 256 * 4 is one full cube of
/// f32 vectors, and 70,001 needs many cubes.
const LENGTHS: [usize; 9] = [1, 2, 3, 255, 256, 1023, 1024, 1028, 70_001];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("gelu::{what}_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name("forward_is_within_bounds"), move || {
            on_device_with(dtype(storage), |client| each_length(client, storage, check_forward))
        }));
        trials.push(Trial::ignorable_test(name("backward_is_within_bounds"), move || {
            on_device_with(dtype(storage), |client| each_length(client, storage, check_backward))
        }));
    }
    trials.extend([
        Trial::ignorable_test("gelu::a_planted_fault_is_caught", || on_device(planted_fault)),
        Trial::ignorable_test("gelu::special_values_come_out_as_the_maths_has_them", || {
            on_device(special_values)
        }),
        Trial::ignorable_test("gelu::empty_tensors_give_empty_tensors", || on_device(empty)),
        Trial::ignorable_test("gelu::bad_arguments_are_named", || on_device(bad_arguments)),
    ]);
    trials.extend(sum::trials());
    trials.extend(module::trials());
    trials
}

pub(crate) fn erf_error(client: &Client, storage: Storage) -> f64 {
    gelu::erf_error(client.name() == "cuda", storage)
}

type Check = fn(&Client, Storage, &[f64]) -> Result<(), Failed>;

fn each_length(client: &Client, storage: Storage, check: Check) -> Result<(), Failed> {
    for length in LENGTHS {
        check(client, storage, &normal(length as u64, length, 2.0, storage))
            .map_err(|error| format!("{length} elements: {}", error.message().unwrap_or("")))?;
    }
    Ok(())
}

fn check_forward(client: &Client, storage: Storage, x: &[f64]) -> Result<(), Failed> {
    let y = gelu_forward(client, &upload(client, x, storage))?;
    let expected: Vec<f64> = x.iter().map(|x| gelu::gelu(*x)).collect();
    let bounds: Vec<f64> =
        x.iter().map(|x| gelu::forward_bound(*x, storage, erf_error(client, storage))).collect();
    compare(&download(client, y, storage)?, &expected, &bounds)?;
    Ok(())
}

fn check_backward(client: &Client, storage: Storage, x: &[f64]) -> Result<(), Failed> {
    let dy = normal(99, x.len(), 1.0, storage);
    let dx = gelu_backward(client, &upload(client, x, storage), &upload(client, &dy, storage))?;
    let pairs = || x.iter().zip(&dy);
    let expected: Vec<f64> = pairs().map(|(x, dy)| dy * gelu::gelu_derivative(*x)).collect();
    let bounds: Vec<f64> = pairs()
        .map(|(x, dy)| gelu::backward_bound(*x, *dy, storage, erf_error(client, storage)))
        .collect();
    compare(&download(client, dx, storage)?, &expected, &bounds)?;
    Ok(())
}

/// The negative control: one element less than a hundredth off must not pass.
fn planted_fault(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = normal(5, 1024, 2.0, storage);
    let y = gelu_forward(client, &upload(client, &x, storage))?;
    let mut actual = download(client, y, storage)?;
    actual[1023] *= 1.001;
    let expected: Vec<f64> = x.iter().map(|x| gelu::gelu(*x)).collect();
    let bounds: Vec<f64> =
        x.iter().map(|x| gelu::forward_bound(*x, storage, erf_error(client, storage))).collect();
    match compare(&actual, &expected, &bounds) {
        Err(mismatch) if mismatch.index == 1023 && mismatch.count == 1 => Ok(()),
        other => Err(format!("a fault in the last element went unseen: {other:?}").into()),
    }
}

fn special_values(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = [0.0, -0.0, 40.0, -40.0];
    let y = download(client, gelu_forward(client, &upload(client, &x, storage))?, storage)?;
    if y != [0.0, 0.0, 40.0, 0.0] {
        return Err(format!("gelu of {x:?} came out as {y:?}").into());
    }
    let ones = upload(client, &[1.0; 4], storage);
    let dx = gelu_backward(client, &upload(client, &x, storage), &ones)?;
    let dx = download(client, dx, storage)?;
    if dx != [0.5, 0.5, 1.0, 0.0] {
        return Err(format!("gelu' of {x:?} came out as {dx:?}").into());
    }
    Ok(())
}

fn empty(client: &Client) -> Result<(), Failed> {
    let nothing = Buffer::empty(client, 0, dtype(Storage::F32));
    let y = gelu_forward(client, &nothing)?;
    let dx = gelu_backward(client, &nothing, &nothing)?;
    if (y.elements, dx.elements) == (0, 0) { Ok(()) } else { Err("elements from nothing".into()) }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let x = upload(client, &[1.0; 4], Storage::F32);
    let shorter = upload(client, &[1.0; 3], Storage::F32);
    match gelu_backward(client, &x, &shorter) {
        Err(error @ KernelError::InvalidProblem { argument: "dy", .. })
            if error.to_string().contains("4 elements") => {}
        other => return Err(format!("a dy of another length gave {other:?}").into()),
    }
    let integers = Buffer { dtype: ElemType::Int(cubecl::ir::IntKind::I32), ..x };
    match gelu_forward(client, &integers) {
        Err(KernelError::Unsupported { op: "gelu_forward", .. }) => Ok(()),
        other => Err(format!("integers gave {other:?}").into()),
    }
}
