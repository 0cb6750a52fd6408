//! Gradients of slices: each number where it belongs, whatever the slice, and added to other gradients.

use blackburn_kernels::{
    KernelError,
    region::{Region, write_region},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    buffers::{download, upload},
    on_burn_device, on_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::{
    nn::LinearConfig,
    prelude::*,
    tensor::{Slice, activation::softmax, s},
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let on_burn = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("slice_gradient::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let mut trials = vec![
        on_burn("a_gradient_that_others_hold_stays_as_it_is", shared),
        on_burn("attention_of_slices_has_its_sums_on_the_kernels", attention),
        Trial::ignorable_test("slice_gradient::bad_arguments_are_named", || {
            on_device(bad_arguments)
        }),
    ];
    let name = "slice_gradient::every_slice_has_its_gradient";
    trials.extend(trials_in(name, &Storage::ALL, every_slice));
    trials
}

const SHAPE: [usize; 3] = [4, 6, 24];

/// Slices of a tensor of [`SHAPE`], together.
fn slices() -> Vec<(&'static str, Vec<[Slice; 3]>)> {
    let all = || Slice::full();
    let stepped = |first: isize, step| Slice::new(first, None, step);
    vec![
        ("thirds of rows", [0..8, 8..16, 16..24].map(|range| s![.., .., range]).to_vec()),
        ("rows that no vector divides", vec![s![.., .., 0..5], s![.., .., 5..24]]),
        ("planes", vec![s![1..2, .., ..], s![3.., .., ..]]),
        ("parts that lie on each other", vec![s![0..3, 1..4, 2..20], s![1..4, 2..6, 10..24]]),
        (
            "every second of two dimensions",
            [[0, 0], [0, 1], [1, 0], [1, 1]]
                .map(|[a, b]| [stepped(a, 2), stepped(b, 2), all()])
                .to_vec(),
        ),
        ("every third element", vec![[all(), all(), stepped(1, 3)]]),
        ("from the end on", vec![[all(), stepped(0, -1), all()]]),
        ("one element", vec![s![2..3, 5..6, 7..8]]),
    ]
}

/// Sums of whole numbers, which every type holds: gradients are equal, not near.
fn every_slice(device: &Device, storage: Storage) -> Result<(), Failed> {
    let training = device.clone().autodiff();
    for (name, slices) in slices() {
        for turned in [false, true] {
            let x: Tensor<3> = tensor(&vec![0.0; 576], SHAPE, storage, &training);
            let x = x.require_grad();
            // Turned, what is sliced lies across memory.
            let whole =
                |x: Tensor<3>| if turned { x.swap_dims(0, 1).swap_dims(0, 1) * 1.0 } else { x };
            let mut loss: Tensor<1> = Tensor::zeros([1], &training);
            let mut expected = vec![0.0; 576];
            let sliced = whole(x.clone());
            for (number, slice) in slices.iter().enumerate() {
                let part = sliced.clone().slice(*slice);
                let weights: Vec<f64> = (0..part.dims().iter().product::<usize>())
                    .map(|at| ((at + number) % 7) as f64)
                    .collect();
                let weight = tensor(&weights, part.dims(), storage, &training);
                loss = loss + (part * weight).sum().cast(burn::tensor::DType::F32);
                for (at, weight) in places(slice).into_iter().zip(weights) {
                    expected[at] += weight;
                }
            }
            let gradient = x.grad(&loss.backward()).ok_or("no gradient")?;
            let gradient = values(gradient)?;
            if let Some(at) = (0..576).find(|at| gradient[*at] != expected[*at]) {
                return Err(format!(
                    "{name}, turned {turned}: element {at} is {} and not {}",
                    gradient[at], expected[at]
                )
                .into());
            }
        }
    }
    Ok(())
}

/// The elements of a slice, in its order.
fn places(slice: &[Slice; 3]) -> Vec<usize> {
    let along = |dim: usize| -> Vec<usize> { slice[dim].into_iter_of(SHAPE[dim]) };
    let mut all = Vec::new();
    for a in along(0) {
        for b in along(1) {
            all.extend(along(2).into_iter().map(|c| (a * SHAPE[1] + b) * SHAPE[2] + c));
        }
    }
    all
}

trait Places {
    fn into_iter_of(self, size: usize) -> Vec<usize>;
}

impl Places for Slice {
    fn into_iter_of(self, size: usize) -> Vec<usize> {
        let range = self.to_range(size);
        let step = self.step.unsigned_abs();
        if self.step < 0 {
            range.rev().step_by(step).collect()
        } else {
            range.step_by(step).collect()
        }
    }
}

/// Another gradient that is read again may not be written to.
fn shared(device: &Device) -> Result<(), Failed> {
    let training = device.clone().autodiff();
    let x: Tensor<2> = tensor(&vec![1.0; 32], [4, 8], F32, &training);
    let x = x.require_grad();
    // The gradient of `doubled` is that of both of its readers, and is read by two more.
    let doubled = x.clone() * 2.0;
    let part = doubled.clone().slice(s![.., 0..4]);
    let loss = (doubled.clone() * doubled).sum() + part.sum();
    let gradients = loss.backward();
    let first = values(x.grad(&gradients).ok_or("no gradient")?)?;
    let expected: Vec<f64> = (0..32).map(|at| if at % 8 < 4 { 10.0 } else { 8.0 }).collect();
    if first != expected { Err(format!("{first:?}").into()) } else { Ok(()) }
}

/// A projection to queries, keys and values that is sliced in three, as windows of images have it. Burn finds an order for
/// all of its gradients: each runs on a kernel, and none on Burn's reduction, which gives each sum one unit.
fn attention(device: &Device) -> Result<(), Failed> {
    const HEADS: usize = 3;
    const WIDTH: usize = 24;
    let training = device.clone().autodiff();
    let project = LinearConfig::new(WIDTH, 3 * WIDTH).init(&training);
    let numbers = normal(1, 6 * 7 * WIDTH, 1.0, F32);
    let x: Tensor<3> = tensor(&numbers, [6, 7, WIDTH], F32, &training);
    let forward = || {
        let all = project.forward(x.clone()).reshape([6, 7, 3, HEADS, WIDTH / HEADS]);
        let all = all.permute([2, 0, 3, 1, 4]);
        let part =
            |at: usize| all.clone().slice(s![at..at + 1, .., .., .., ..]).squeeze_dim::<4>(0);
        let (q, k, v) = (part(0), part(1), part(2));
        let weights = softmax(q.matmul(k.transpose()), 3);
        weights.matmul(v).swap_dims(1, 2).reshape([6, 7, WIDTH])
    };
    let step = || -> Result<Vec<f64>, Failed> {
        let out: Tensor<3> = forward();
        let gradients = (out.clone() * out).sum().backward();
        let bias = project.bias.as_ref().ok_or("no bias")?;
        values(bias.grad(&gradients).ok_or("no gradient")?)
    };
    step()?;
    let (_, of_forward) = blocks_of(device, || values(forward()))?;
    let (bias, blocks) = blocks_of(device, step)?;
    let count = |blocks: &[Block]| {
        let kernels = blocks.iter().flat_map(|block| &block.kernels);
        kernels.filter(|kernel| kernel.contains("blackburn_kernels::region::")).count()
    };
    // Slices are copied by that kernel, too.
    let ours = count(&blocks) - count(&of_forward);
    // Sums over a few numbers, such as that of the loss, are Burn's where they are fused.
    if ours != 3 || blocks.iter().any(|block| block.operations == 1 && is_burns_sum(&block.kernels))
    {
        return Err(format!("{ours} gradients of slices on the kernel of 3: {blocks:#?}").into());
    }
    // Of keys the bias moves no weight, so that its gradient is nothing but rounding.
    let [of_queries, of_values] = [0, 2 * WIDTH].map(|first| &bias[first..first + WIDTH]);
    if of_queries.iter().chain(of_values).all(|number| number.abs() < 1e-3) {
        return Err(format!("gradients of the bias: {bias:?}").into());
    }
    Ok(())
}

fn is_burns_sum(kernels: &[&str]) -> bool {
    kernels.iter().any(|kernel| {
        kernel.contains("cubek_reduce") || kernel.contains("burn_cubecl::kernel::reduce")
    })
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let [source, target] = [6, 24].map(|elements| upload(client, &vec![1.0; elements], F32));
    let right = Region {
        shape: vec![2, 3],
        source_strides: vec![3, 1],
        target_strides: vec![12, 2],
        source_start: 0,
        start: 1,
        adds: true,
    };
    write_region(client, &right, &source, &target)?;
    let sum: f64 = download(client, target.clone(), F32)?.iter().sum();
    if sum != 30.0 {
        return Err(format!("24 ones and 6 more sum up to {sum}").into());
    }
    let half = upload(client, &[1.0; 6], Storage::F16);
    for (argument, region, source) in [
        ("source_strides", Region { source_strides: vec![1], ..right.clone() }, &source),
        ("target_strides", Region { target_strides: vec![12, 2, 1], ..right.clone() }, &source),
        ("source", Region { source_strides: vec![4, 1], ..right.clone() }, &source),
        ("target", Region { start: 8, ..right.clone() }, &source),
        ("target", right.clone(), &half),
    ] {
        match write_region(client, &region, source, &target) {
            Err(KernelError::InvalidProblem { argument: named, .. }) if named == argument => {}
            other => return Err(format!("{argument}: {other:?}").into()),
        }
    }
    // Of nothing, nothing is launched.
    let nothing = Region { shape: vec![0, 3], start: 99, ..right };
    Ok(write_region(client, &nothing, &source, &target)?)
}
