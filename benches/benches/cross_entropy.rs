//! Cross-entropy over GPT-2's vocabulary: the kernels' bytes a second, and loss and gradient as a program
//! calls them, by `blackburn::cross_entropy` and by Burn's unmodified module of logits that are cast to f32.
//! `BLACKBURN_DISABLE=BlackburnSoftmax` leaves the module to Burn's own kernels.
//! `cargo xtask bench cross_entropy --features cuda`

use blackburn::{
    cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy},
    prelude::*,
};
use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    buffer::Buffer,
    cross_entropy::{
        CrossEntropyBlueprint, CrossEntropyProblem, cross_entropy_backward, cross_entropy_forward,
    },
    softmax::{SoftmaxProblem, picked_backward, softmax_shifted, softmax_sums},
};
use blackburn_reference::{
    cross_entropy::{CrossEntropy, Steps},
    storage::Storage,
};
use burn::{
    nn::loss::CrossEntropyLossConfig,
    tensor::{Distribution, FloatDType},
};
use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
    prelude::CubeElement,
};

/// A batch of 8 sequences of 1024 tokens.
const ROWS: usize = 8192;
const CLASSES: usize = 50_257;
const STORAGE: Storage = Storage::Bf16;

/// Rows that are compared with the reference before anything is timed.
const PROVEN: usize = 64;

fn target(row: usize) -> usize {
    row * 7919 % CLASSES
}

fn problem() -> CrossEntropyProblem {
    CrossEntropyProblem {
        rows: ROWS,
        classes: CLASSES,
        row_stride: CLASSES,
        dtype: dtype_of(STORAGE),
        ignore_index: None,
        smoothing: 0.0,
    }
}

fn bench(criterion: &mut Criterion) {
    // Providers have to be registered before Burn's first operation.
    blackburn::init().expect("the device starts");
    let Some(device) = device() else { return };
    let client = device.client();
    let mut group =
        criterion.benchmark_group(format!("cross_entropy/{STORAGE:?}/{ROWS}x{CLASSES}"));
    bench_kernels(&mut group, &client);
    let device = burn::tensor::Device::new(device).autodiff();
    bench_losses(&mut group, &client, &device);
    group.finish();
}

fn bench_kernels(group: &mut BenchmarkGroup<'_, WallTime>, client: &Client) {
    let problem = problem();
    let logits = Rotated::new(client, 1, ROWS * CLASSES, dtype_of(STORAGE));
    let targets: Vec<i32> = (0..ROWS).map(|row| target(row) as i32).collect();
    let targets = Buffer {
        handle: client.create_from_slice(i32::as_bytes(&targets)),
        elements: ROWS,
        dtype: ElemType::Int(IntKind::I32),
    };
    let grads = Buffer {
        handle: client.create_from_slice(&Storage::F32.encode(&[1.0; ROWS])),
        elements: ROWS,
        dtype: dtype_of(Storage::F32),
    };
    let forward = || {
        cross_entropy_forward(client, &problem, &logits.buffer, &targets)
            .expect("the problem is valid")
    };
    let output = forward();
    let backward = |logits: Buffer| {
        cross_entropy_backward(client, &problem, logits, &targets, &output.lse, &grads, None)
            .expect("the problem is valid")
    };
    prove(client, &logits, output.loss.clone(), backward(logits.buffer.clone()));

    group.throughput(Throughput::Bytes(problem.forward_bytes() as u64));
    group.bench_function("forward", |bencher| time(bencher, client, forward));
    group.throughput(Throughput::Bytes(problem.backward_bytes() as u64));
    group.bench_function("backward", |bencher| {
        time(bencher, client, || backward(logits.buffer.clone()));
    });
    // Over itself, as in training: what the numbers are does not matter to the time.
    let mut own = Some(Rotated::new(client, 2, ROWS * CLASSES, dtype_of(STORAGE)).buffer);
    group.bench_function("backward_in_place", |bencher| {
        time(bencher, client, || {
            own = own.take().map(backward);
        });
    });
    bench_steps(group, client, &logits, &targets, &grads);
}

/// What the unmodified module's operations become: sums of the logits and, in f32, what logits lack to the
/// largest; of that the gradient in the logits' type.
fn bench_steps(
    group: &mut BenchmarkGroup<'_, WallTime>,
    client: &Client,
    logits: &Rotated,
    targets: &Buffer,
    grads: &Buffer,
) {
    let forward = SoftmaxProblem {
        rows: ROWS,
        classes: CLASSES,
        row_stride: CLASSES,
        dtype: dtype_of(STORAGE),
        out: dtype_of(Storage::F32),
    };
    let backward = SoftmaxProblem { dtype: forward.out, out: forward.dtype, ..forward };
    let sums = || {
        softmax_sums(client, &forward, &logits.buffer, Some(targets)).expect("the problem is valid")
    };
    let of_rows = sums();
    let shifted = || {
        softmax_shifted(client, &forward, logits.buffer.clone(), &of_rows.peak)
            .expect("the problem is valid")
    };
    let kept = shifted();
    let gradient = || {
        picked_backward(client, &backward, kept.clone(), &of_rows.sum, targets, grads)
            .expect("the problem is valid")
    };
    group.throughput(Throughput::Bytes(forward.sums_bytes() as u64));
    group.bench_function("softmax_sums", |bencher| time(bencher, client, sums));
    group.throughput(Throughput::Bytes(forward.elements_bytes() as u64));
    group.bench_function("softmax_shifted", |bencher| time(bencher, client, shifted));
    group.bench_function("picked_backward", |bencher| time(bencher, client, gradient));
}

/// The first and the last rows.
fn prove(client: &Client, logits: &Rotated, loss: Buffer, gradient: Buffer) {
    let blueprint = CrossEntropyBlueprint::plan(&problem(), &logits.buffer, client);
    let steps =
        Steps { additions: blueprint.additions(CLASSES), rescales: blueprint.rescales(CLASSES) };
    for first in [0, ROWS - PROVEN] {
        let rows = first..first + PROVEN;
        let (mut losses, mut loss_bounds) = (Vec::new(), Vec::new());
        let (mut gradients, mut gradient_bounds) = (Vec::new(), Vec::new());
        for row in rows {
            let asked = CrossEntropy { target: Some(target(row)), smoothing: 0.0 };
            let of_row: Vec<f64> =
                (0..CLASSES).map(|class| logits.at(row * CLASSES + class)).collect();
            losses.push(asked.loss(&of_row));
            loss_bounds.push(asked.loss_bound(&of_row, steps));
            gradients.extend(asked.gradient(&of_row, 1.0));
            gradient_bounds.extend(asked.gradient_bounds(&of_row, 1.0, steps, STORAGE));
        }
        let part = |whole: &Buffer, row: usize, elements: usize| {
            let size = whole.dtype.size() as u64;
            let handle = whole.handle.clone().offset_start(row as u64 * size);
            let rest = (whole.elements - row - elements) as u64;
            Buffer { handle: handle.offset_end(rest * size), elements, dtype: whole.dtype }
        };
        verify(client, part(&loss, first, PROVEN), Storage::F32, &losses, &loss_bounds);
        let gradient = part(&gradient, first * CLASSES, PROVEN * CLASSES);
        verify(client, gradient, STORAGE, &gradients, &gradient_bounds);
    }
}

/// Logits that a program made, their loss, and the gradient that goes back to them.
fn bench_losses(group: &mut BenchmarkGroup<'_, WallTime>, client: &Client, device: &Device) {
    let drawn = Tensor::<2>::random([ROWS, CLASSES], Distribution::Default, device)
        .cast(FloatDType::BF16)
        .detach();
    let targets: Vec<i32> = (0..ROWS).map(|row| target(row) as i32).collect();
    let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [ROWS]), device);
    let criterion = CrossEntropyLossConfig::new().init(device);
    let ours = |logits: Tensor<2>| {
        let options = CrossEntropyOptions::default();
        cross_entropy(logits, targets.clone(), options, Reduction::Mean)
    };
    let module =
        |logits: Tensor<2>| criterion.forward(logits.cast(FloatDType::F32), targets.clone());
    let run = |loss: &dyn Fn(Tensor<2>) -> Tensor<1>| {
        let logits = drawn.clone().require_grad();
        let gradients = loss(logits.clone()).backward();
        let gradient = logits.grad(&gradients);
        // Or iterations would be joined.
        device.flush().expect("the device failed during a bench");
        gradient
    };
    let losses: [(&str, &dyn Fn(Tensor<2>) -> Tensor<1>); 2] =
        [("forward_backward", &ours), ("forward_backward_module", &module)];
    for (name, loss) in losses {
        group.throughput(Throughput::Bytes(
            (problem().forward_bytes() + problem().backward_bytes()) as u64,
        ));
        group.bench_function(name, |bencher| time(bencher, client, || run(loss)));
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
