//! Sums of rows: bytes moved a second, on few long rows and on many short ones.
//! `cargo xtask bench row_sum --features cuda`

use blackburn_benches::{device, dtype_of, input, time, verify};
use blackburn_kernels::{
    buffer::Rows,
    row_sum::{row_sum, variants::SHAPES},
};
use blackburn_reference::{column_sum, storage::Storage};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for storage in Storage::ALL {
        for [rows, columns] in SHAPES {
            let (values, buffer) = input(&client, 1, rows * columns, storage);
            let x = Rows { buffer, rows, columns, pitch: columns };
            let of_row = |row: &[f64]| {
                let (sum, magnitudes) = (row.iter().sum(), row.iter().map(|x| x.abs()).sum());
                (sum, column_sum::bound(sum, magnitudes, columns, storage))
            };
            let (expected, bounds): (Vec<f64>, Vec<f64>) =
                values.chunks(columns).map(of_row).unzip();
            let y = row_sum(&client, &x, 1.0).expect("the rows are valid");
            verify(&client, y, storage, &expected, &bounds);

            let mut group =
                criterion.benchmark_group(format!("row_sum/{storage:?}/{rows}x{columns}"));
            let bytes = (rows * (columns + 1) * dtype_of(storage).size()) as u64;
            group.throughput(Throughput::Bytes(bytes));
            group.bench_function("forward", |bencher| {
                time(bencher, &client, || row_sum(&client, &x, 1.0).expect("the rows are valid"));
            });
            group.finish();
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
