//! Batch normalization: bytes moved a second, on images of ResNet-50 at batch 64 by its channels.
//! `cargo xtask bench batch_norm --features cuda`

use blackburn_benches::{device, dtype_of, input, time, verify};
use blackburn_kernels::batch_norm::{
    BatchNormInputs, BatchNormProblem, BatchNormSaved, batch_norm_apply, batch_norm_backward,
    batch_norm_statistics,
};
use blackburn_reference::{
    batch_norm::{Statistics, Sums},
    storage::Storage,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Pixels of all images, and channels: the widest and the narrowest layers.
const SHAPES: [[usize; 2]; 4] = [[200_704, 64], [200_704, 256], [12_544, 1024], [3136, 2048]];
const EPSILON: f64 = 1e-5;

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for storage in [Storage::F32, Storage::Bf16] {
        for [rows, channels] in SHAPES {
            let dtype = dtype_of(storage);
            let problem = BatchNormProblem::contiguous(rows, channels, dtype, dtype, EPSILON);
            let (values, x) = input(&client, 1, rows * channels, storage);
            let [gamma, beta] = [2, 3].map(|seed| input(&client, seed, channels, storage).1);
            let dy = input(&client, 4, rows * channels, storage).1;
            let statistics = || batch_norm_statistics(&client, &problem, &x);
            let made = statistics().expect("the problem is valid");
            let expected = Statistics::of(&values, channels);
            let sums = Sums { additions: rows, merges: rows };
            let bounds = Statistics::bounds(&values, channels, sums);
            verify(&client, made.mean.clone(), Storage::F32, &expected.mean, &bounds.mean);
            let inputs = BatchNormInputs {
                x: x.clone(),
                statistics: made.clone(),
                gamma: gamma.clone(),
                beta,
                residual: None,
                relu: true,
            };
            let apply = || batch_norm_apply(&client, &problem, &inputs);
            let y = apply().expect("the problem is valid");
            let saved = BatchNormSaved { x: x.clone(), statistics: made, gamma, y: Some(y) };

            let mut group =
                criterion.benchmark_group(format!("batch_norm/{storage:?}/{rows}x{channels}"));
            group.throughput(Throughput::Bytes(problem.statistics_bytes() as u64));
            group.bench_function("statistics", |bencher| {
                time(bencher, &client, || statistics().expect("the problem is valid"));
            });
            group.throughput(Throughput::Bytes(problem.apply_bytes(false) as u64));
            group.bench_function("apply", |bencher| {
                time(bencher, &client, || apply().expect("the problem is valid"));
            });
            group.throughput(Throughput::Bytes(problem.backward_bytes(true, false) as u64));
            group.bench_function("backward", |bencher| {
                time(bencher, &client, || {
                    batch_norm_backward(&client, &problem, &saved, &dy, false)
                        .expect("the problem is valid")
                });
            });
            group.finish();
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
