//! Column sums: bytes moved a second, on the gradients whose sums are GPT-2's bias gradients.
//! `cargo xtask bench column_sum --features cuda`

use blackburn_benches::{device, dtype_of, input, time, verify};
use blackburn_kernels::column_sum::{ColumnSumProblem, column_sum};
use blackburn_reference::{column_sum as reference, storage::Storage};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// 8192 tokens by GPT-2's width, and by four times it.
const SHAPES: [(usize, usize); 2] = [(8192, 768), (8192, 3072)];

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for storage in Storage::ALL {
        for (rows, columns) in SHAPES {
            let (values, x) = input(&client, 1, rows * columns, storage);
            let problem =
                ColumnSumProblem::new(&[rows, columns], &[columns, 1], 0..1, dtype_of(storage))
                    .expect("the problem is valid");
            let magnitudes: Vec<f64> = values.iter().map(|x| x.abs()).collect();
            let expected = reference::column_sum(&values, 1, rows, columns);
            let bounds: Vec<f64> = expected
                .iter()
                .zip(reference::column_sum(&magnitudes, 1, rows, columns))
                .map(|(y, magnitude)| reference::bound(*y, magnitude, rows, storage))
                .collect();
            let y = column_sum(&client, &problem, &x).expect("the problem is valid");
            verify(&client, y, storage, &expected, &bounds);

            let mut group =
                criterion.benchmark_group(format!("column_sum/{storage:?}/{rows}x{columns}"));
            group.throughput(Throughput::Bytes(problem.bytes() as u64));
            group.bench_function("forward", |bencher| {
                time(bencher, &client, || {
                    column_sum(&client, &problem, &x).expect("the problem is valid")
                });
            });
            group.finish();
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
