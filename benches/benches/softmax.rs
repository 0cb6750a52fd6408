//! Softmax forward and backward, of the rows of attention's scores and of wide ones: bytes moved a second by
//! the kernels alone, and `burn::tensor::activation::softmax` through the provider.
//! `cargo xtask bench softmax --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    buffer::Buffer,
    softmax::{
        SoftmaxGradient, SoftmaxOutputs, SoftmaxProblem, plan_backward, plan_forward, softmax_rows,
        softmax_rows_backward,
    },
};
use blackburn_reference::{
    cross_entropy::Steps,
    softmax::{Bounded, SoftmaxRow},
    softmax_rows::softmax_gradient,
    storage::Storage,
};
use burn::tensor::{Device, Distribution, FloatDType, Tensor, activation};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

/// Rows and elements of a row.
const SHAPES: [(usize, usize); 2] = [(65_536, 4096), (8192, 4096)];

fn bench(criterion: &mut Criterion) {
    // Burn's softmax runs under fusion, as a program's does.
    blackburn::init().expect("the device starts");
    let Some(device) = device() else { return };
    let client = device.client();
    let burn_device = Device::new(device);
    for storage in [Storage::F32, Storage::Bf16] {
        for (rows, classes) in SHAPES {
            let kernels = Kernels::new(&client, rows, classes, storage);
            kernels.prove(&client);
            let mut group =
                criterion.benchmark_group(format!("softmax/{storage:?}/{rows}x{classes}"));
            group.throughput(Throughput::Bytes(kernels.problem.elements_bytes() as u64));
            group.bench_function("forward", |bencher| {
                time(bencher, &client, || kernels.forward(&client));
            });
            let mut step = operation(&burn_device, [rows, classes], storage);
            group.bench_function("forward_of_burn_s_function", |bencher| {
                time(bencher, &client, &mut step);
            });
            let y = kernels.forward(&client);
            group.throughput(Throughput::Bytes(kernels.problem.backward_bytes() as u64));
            group.bench_function("backward", |bencher| {
                time(bencher, &client, || kernels.backward(&client, &y));
            });
            group.finish();
        }
    }
}

struct Kernels {
    problem: SoftmaxProblem,
    storage: Storage,
    x: Rotated,
    dy: Rotated,
}

impl Kernels {
    fn new(client: &Client, rows: usize, classes: usize, storage: Storage) -> Self {
        let dtype = dtype_of(storage);
        let [x, dy] = [1, 2].map(|seed| Rotated::new(client, seed, rows * classes, dtype));
        let problem = SoftmaxProblem { rows, classes, row_stride: classes, dtype, out: dtype };
        Self { problem, storage, x, dy }
    }

    fn forward(&self, client: &Client) -> Buffer {
        softmax_rows(client, &self.problem, SoftmaxOutputs::default(), &self.x.buffer)
            .expect("the problem is valid")
            .y
    }

    fn backward(&self, client: &Client, y: &Buffer) -> Buffer {
        let (dy, stride) = (&self.dy.buffer, self.problem.row_stride);
        softmax_rows_backward(client, &self.problem, &SoftmaxGradient::of(y, dy, stride))
            .expect("the problem is valid")
    }

    /// The first rows.
    fn prove(&self, client: &Client) {
        const PROVED: usize = 64;
        let SoftmaxProblem { classes, row_stride, .. } = self.problem;
        let elements = PROVED * classes;
        let first = |buffer: &Buffer| Buffer { elements, ..buffer.clone() };
        let check = |buffer: &Buffer, expected: Vec<Bounded>| {
            let (expected, bounds): (Vec<f64>, Vec<f64>) = expected.into_iter().unzip();
            verify(client, first(buffer), self.storage, &expected, &bounds);
        };
        let [x, dy] = [&self.x, &self.dy]
            .map(|rotated| (0..elements).map(|i| rotated.at(i)).collect::<Vec<f64>>());
        let plan = plan_forward(client, &self.problem, &self.x.buffer);
        let steps = Steps { additions: plan.additions(classes), rescales: plan.rescales(classes) };
        let rows = x.chunks(classes).map(|x| SoftmaxRow { x, steps });
        let y = self.forward(client);
        check(&y, rows.flat_map(|row| row.softmax(self.storage)).collect());

        let bytes = client.read_one(y.handle.clone()).expect("the device failed during a bench");
        let stored = self.storage.decode(&bytes);
        let plan = plan_backward(client, &self.problem, &y, &self.dy.buffer, row_stride);
        let additions = plan.additions(classes);
        let gradient =
            |(y, dy): (&[f64], &[f64])| softmax_gradient(y, 1.0, dy, additions, self.storage);
        let pairs = stored[..elements].chunks(classes).zip(dy.chunks(classes));
        check(&self.backward(client, &y), pairs.flat_map(gradient).collect());
    }
}

/// Burn's function. It waits for the device, since Burn's streams run what was registered when somebody
/// asks.
fn operation(device: &Device, shape: [usize; 2], storage: Storage) -> impl FnMut() + use<> {
    let dtype = match storage {
        Storage::F32 => FloatDType::F32,
        Storage::F16 => FloatDType::F16,
        Storage::Bf16 => FloatDType::BF16,
    };
    let x = Tensor::<2>::random(shape, Distribution::Default, device).cast(dtype);
    let device = device.clone();
    move || {
        let y = activation::softmax(x.clone(), 1);
        device.sync().expect("the device failed during a bench");
        drop(y);
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
