//! GELU forward and backward: bytes moved a second, on the activations of GPT-2's feed-forward layers and on
//! wide rows; and the gradient with that of the bias in front of GELU, by one kernel and by two.
//! `cargo xtask bench gelu --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, input, time, verify};
use blackburn_kernels::{
    buffer::Buffer,
    column_sum::{ColumnSumBlueprint, ColumnSumProblem},
    elementwise::ElementwiseProblem,
    gelu::{GeluGradients, GeluSumBlueprint, gelu_backward, gelu_backward_sum_with, gelu_forward},
};
use blackburn_reference::{
    gelu::{self, erf_error},
    storage::Storage,
};
use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use cubecl::client::Client;

/// 8192 tokens by four times GPT-2's width: larger than caches.
const SHAPE: (usize, usize) = (8192, 3072);

/// Those of the figures for softmax and norms.
const WIDE: (usize, usize) = (65_536, 4096);

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    let (rows, columns) = SHAPE;
    let elements = rows * columns;
    for storage in Storage::ALL {
        let (values, x) = input(&client, 1, elements, storage);
        let (grads, dy) = input(&client, 2, elements, storage);
        let expected: Vec<f64> = values.iter().map(|x| gelu::gelu(*x)).collect();
        let bounds: Vec<f64> = values
            .iter()
            .map(|x| gelu::forward_bound(*x, storage, erf_error(true, storage)))
            .collect();
        let y = gelu_forward(&client, &x).expect("the problem is valid");
        verify(&client, y, storage, &expected, &bounds);
        let pairs = || values.iter().zip(&grads);
        let expected: Vec<f64> = pairs().map(|(x, dy)| dy * gelu::gelu_derivative(*x)).collect();
        let bounds: Vec<f64> = pairs()
            .map(|(x, dy)| gelu::backward_bound(*x, *dy, storage, erf_error(true, storage)))
            .collect();
        let dx = gelu_backward(&client, &x, &dy).expect("the problem is valid");
        verify(&client, dx, storage, &expected, &bounds);

        let problem = ElementwiseProblem { elements, dtype: dtype_of(storage) };
        let mut group = criterion.benchmark_group(format!("gelu/{storage:?}/{rows}x{columns}"));
        group.throughput(Throughput::Bytes(problem.bytes(2) as u64));
        group.bench_function("forward", |bencher| {
            time(bencher, &client, || gelu_forward(&client, &x).expect("the problem is valid"));
        });
        group.throughput(Throughput::Bytes(problem.bytes(3) as u64));
        group.bench_function("backward", |bencher| {
            time(bencher, &client, || {
                gelu_backward(&client, &x, &dy).expect("the problem is valid")
            });
        });
        bench_sums(&mut group, &client, storage, [(&values, &x), (&grads, &dy)]);
        group.finish();
        bench_wide(criterion, &client, storage);
    }
}

/// Both passes on wide rows, of which the first elements are proved.
fn bench_wide(criterion: &mut Criterion, client: &Client, storage: Storage) {
    const PROVED: usize = 1 << 18;
    let (rows, columns) = WIDE;
    let (elements, dtype) = (rows * columns, dtype_of(storage));
    let [x, dy] = [3, 4].map(|seed| Rotated::new(client, seed, elements, dtype));
    let forward = || gelu_forward(client, &x.buffer).expect("the problem is valid");
    let backward = || gelu_backward(client, &x.buffer, &dy.buffer).expect("the problem is valid");
    let check = |result: Buffer, expected: &dyn Fn(usize) -> (f64, f64)| {
        let (expected, bounds): (Vec<f64>, Vec<f64>) = (0..PROVED).map(expected).unzip();
        verify(client, Buffer { elements: PROVED, ..result }, storage, &expected, &bounds);
    };
    check(forward(), &|i| {
        (gelu::gelu(x.at(i)), gelu::forward_bound(x.at(i), storage, erf_error(true, storage)))
    });
    check(backward(), &|i| {
        let (x, dy) = (x.at(i), dy.at(i));
        (
            dy * gelu::gelu_derivative(x),
            gelu::backward_bound(x, dy, storage, erf_error(true, storage)),
        )
    });
    let problem = ElementwiseProblem { elements, dtype };
    let mut group = criterion.benchmark_group(format!("gelu/{storage:?}/{rows}x{columns}"));
    group.throughput(Throughput::Bytes(problem.bytes(2) as u64));
    group.bench_function("forward", |bencher| time(bencher, client, forward));
    group.throughput(Throughput::Bytes(problem.bytes(3) as u64));
    group.bench_function("backward", |bencher| time(bencher, client, backward));
    group.finish();
}

/// The gradient and the sums of its columns, of x and dy here and on the device. Bytes are those that
/// have to be moved, whichever plan moves more.
fn bench_sums(
    group: &mut BenchmarkGroup<'_, WallTime>,
    client: &Client,
    storage: Storage,
    [(values, x), (grads, dy)]: [(&[f64], &Buffer); 2],
) {
    let (rows, columns) = SHAPE;
    let dtype = dtype_of(storage);
    let sums = ColumnSumProblem::new(&[rows, columns], &[columns, 1], 0..1, dtype)
        .expect("the problem is valid");
    let column = |column: usize| {
        let of = |values: &[f64]| -> Vec<f64> {
            values.iter().copied().skip(column).step_by(columns).collect()
        };
        of(values).into_iter().zip(of(grads))
    };
    let sum = |c| column(c).map(|(x, dy)| dy * gelu::gelu_derivative(x)).sum();
    let expected: Vec<f64> = (0..columns).map(sum).collect();
    let fused = GeluSumBlueprint::Fused(ColumnSumBlueprint::plan(&sums, client));
    let problem = ElementwiseProblem { elements: rows * columns, dtype };
    group.throughput(Throughput::Bytes((problem.bytes(3) + columns * dtype.size()) as u64));
    for (name, plan, terms) in [
        ("backward_with_sums_in_one_kernel", fused, Storage::F32),
        ("backward_with_sums_in_two_kernels", GeluSumBlueprint::Separate, storage),
    ] {
        let run =
            || gelu_backward_sum_with(client, columns, plan, x, dy).expect("the problem is valid");
        let GeluGradients { dx, db } = run();
        let bound =
            |c| gelu::backward_sum_bound(column(c), terms, storage, erf_error(true, storage));
        let bounds: Vec<f64> = (0..columns).map(bound).collect();
        verify(client, db, storage, &expected, &bounds);
        let pairs = || values.iter().zip(grads);
        let gradients: Vec<f64> = pairs().map(|(x, dy)| dy * gelu::gelu_derivative(*x)).collect();
        let bounds: Vec<f64> = pairs()
            .map(|(x, dy)| gelu::backward_bound(*x, *dy, storage, erf_error(true, storage)))
            .collect();
        verify(client, dx, storage, &gradients, &bounds);
        group.bench_function(name, |bencher| time(bencher, client, run));
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
