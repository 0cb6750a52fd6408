//! Pools: bytes moved a second by the kernels, of a residual network's stem, of a plain half, and of whole images; and
//! a step of Burn's unmodified modules, which run on the kernels where `BLACKBURN_ENABLE=BlackburnPool` is set, and
//! otherwise on Burn's. Images lie as convolutions leave them.
//! `cargo xtask bench pool --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, input, time, verify};
use blackburn_kernels::pool::{
    PoolProblem, PoolWindow, average_pool, average_pool_backward, max_pool, max_pool_backward,
};
use blackburn_reference::{
    pool::{Pool, Windows},
    storage::Storage,
};
use burn::{
    nn::{
        PaddingConfig2d,
        pool::{AdaptiveAvgPool2dConfig, AvgPool2dConfig, MaxPool2dConfig},
    },
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

/// What is taken of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Max,
    Average,
    /// The mean of the whole image.
    Global,
}

/// Images, rows, columns and channels; the window's taps, stride and padding.
const CASES: [(Kind, [usize; 4], [usize; 3]); 5] = [
    (Kind::Max, [256, 112, 112, 64], [3, 2, 1]),
    (Kind::Max, [128, 56, 56, 64], [2, 2, 0]),
    (Kind::Average, [256, 112, 112, 64], [3, 2, 1]),
    (Kind::Average, [128, 56, 56, 64], [2, 2, 0]),
    (Kind::Global, [256, 7, 7, 2048], [7, 7, 0]),
];

fn bench(criterion: &mut Criterion) {
    // Burn's own modules run under fusion, as a program's do.
    blackburn::init().expect("the device starts");
    let Some(device) = device() else { return };
    let client = device.client();
    let burn_device = Device::new(device);
    for storage in [Storage::F32, Storage::Bf16] {
        for (kind, sizes, taps) in CASES {
            prove(&client, kind, sizes, taps, storage);
            let [images, height, width, channels] = sizes;
            let [kernel, stride, _] = taps;
            let name = format!(
                "pool/{storage:?}/{kind:?}{kernel}x{kernel}by{stride}/{images}x{height}x{width}x{channels}"
            );
            kernels(criterion, &client, &name, (kind, sizes, taps), storage);
            let mut step = step(&burn_device, (kind, sizes, taps), storage);
            let mut group = criterion.benchmark_group(name);
            group.bench_function("forward_backward_of_module", |bencher| {
                time(bencher, &client, &mut step);
            });
            group.finish();
        }
    }
}

fn problem(
    sizes: [usize; 4],
    [kernel, stride, padding]: [usize; 3],
    storage: Storage,
) -> PoolProblem {
    let window = PoolWindow { padding: [padding; 2], ..PoolWindow::square(kernel, stride) };
    PoolProblem::contiguous(sizes, window, dtype_of(storage))
}

fn kernels(
    criterion: &mut Criterion,
    client: &Client,
    name: &str,
    (kind, sizes, taps): (Kind, [usize; 4], [usize; 3]),
    storage: Storage,
) {
    let problem = problem(sizes, taps, storage);
    let draw = |seed, elements| Rotated::new(client, seed, elements, dtype_of(storage)).buffer;
    let (x, dy) = (draw(1, problem.inputs()), draw(2, problem.outputs()));
    let is_max = kind == Kind::Max;
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Bytes(problem.forward_bytes(is_max) as u64));
    if is_max {
        let pool = || max_pool(client, &problem, &x, true).expect("the problem is valid");
        let indices = pool().indices.expect("they were asked for");
        group.bench_function("forward_with_indices", |bencher| time(bencher, client, pool));
        group.throughput(Throughput::Bytes(problem.backward_bytes(true) as u64));
        group.bench_function("backward", |bencher| {
            time(bencher, client, || {
                max_pool_backward(client, &problem, &dy, &indices).expect("the problem is valid")
            });
        });
        group.throughput(Throughput::Bytes(problem.forward_bytes(false) as u64));
        group.bench_function("forward", |bencher| {
            time(bencher, client, || {
                max_pool(client, &problem, &x, false).expect("the problem is valid")
            });
        });
    } else {
        group.bench_function("forward", |bencher| {
            time(bencher, client, || {
                average_pool(client, &problem, &x, true).expect("the problem is valid")
            });
        });
        group.throughput(Throughput::Bytes(problem.backward_bytes(false) as u64));
        group.bench_function("backward", |bencher| {
            time(bencher, client, || {
                average_pool_backward(client, &problem, &dy, true).expect("the problem is valid")
            });
        });
    }
    group.finish();
}

/// Of two images, so that the reference is not what takes time.
fn prove(
    client: &Client,
    kind: Kind,
    [_, height, width, channels]: [usize; 4],
    taps: [usize; 3],
    storage: Storage,
) {
    let sizes = [2, height, width, channels];
    let [kernel, stride, padding] = taps.map(|of| [of; 2]);
    let windows = Windows::Walking { kernel, stride, padding, dilation: [1; 2], ceil: false };
    let pool = Pool { sizes, windows };
    let problem = problem(sizes, taps, storage);
    let (values, x) = input(client, 1, problem.inputs(), storage);
    let (gradients, dy) = input(client, 2, problem.outputs(), storage);
    let (dx, expected) = if kind == Kind::Max {
        let made = max_pool(client, &problem, &x, true).expect("the problem is valid");
        let maxima = pool.max(&values);
        let exact = vec![0.0; maxima.values.len()];
        verify(client, made.y, storage, &maxima.values, &exact);
        let indices = made.indices.expect("they were asked for");
        let dx = max_pool_backward(client, &problem, &dy, &indices);
        (dx, pool.max_backward(&gradients, &maxima.indices))
    } else {
        let made = average_pool(client, &problem, &x, true).expect("the problem is valid");
        let means = pool.average(&values, true);
        verify(client, made, storage, &means.values, &means.bounds(storage));
        let dx = average_pool_backward(client, &problem, &dy, true);
        (dx, pool.average_backward(&gradients, true))
    };
    let dx = dx.expect("the problem is valid");
    verify(client, dx, storage, &expected.values, &expected.bounds(storage));
}

/// A step through Burn's unmodified module, with the gradient. It waits for the device, since Burn's streams run what
/// was registered when somebody asks.
fn step(
    device: &Device,
    (kind, sizes, [kernel, stride, padding]): (Kind, [usize; 4], [usize; 3]),
    storage: Storage,
) -> impl FnMut() + use<> {
    let dtype = match storage {
        Storage::F32 => FloatDType::F32,
        Storage::F16 => FloatDType::F16,
        Storage::Bf16 => FloatDType::BF16,
    };
    let autodiff = device.clone().autodiff();
    let random = |sizes: [usize; 4]| {
        let x = Tensor::<4>::random(sizes, Distribution::Default, &autodiff).cast(dtype);
        x.permute([0, 3, 1, 2]).detach()
    };
    let ([kernel, stride], padding) =
        ([[kernel; 2], [stride; 2]], PaddingConfig2d::Explicit(padding, padding, padding, padding));
    let module: Box<dyn Fn(Tensor<4>) -> Tensor<4>> = match kind {
        Kind::Max => {
            let pool = MaxPool2dConfig::new(kernel).with_strides(stride).with_padding(padding);
            let pool = pool.init();
            Box::new(move |x| pool.forward(x))
        }
        Kind::Average => {
            let pool = AvgPool2dConfig::new(kernel).with_strides(stride).with_padding(padding);
            let pool = pool.init();
            Box::new(move |x| pool.forward(x))
        }
        Kind::Global => {
            let pool = AdaptiveAvgPool2dConfig::new([1; 2]).init();
            Box::new(move |x| pool.forward(x))
        }
    };
    let x = random(sizes).require_grad();
    let [images, rows, columns, channels] = {
        let [images, channels, rows, columns] = module(x.clone()).dims();
        [images, rows, columns, channels]
    };
    let dy = random([images, rows, columns, channels]);
    let device = device.clone();
    move || {
        let gradients = (module(x.clone()) * dy.clone()).sum().backward();
        drop(x.grad(&gradients));
        device.sync().expect("the device failed during a bench");
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
