//! Matrix products by the selector's plan: floating-point operations a second, on squares and on
//! GPT-2's layers. `cargo xtask bench matmul --features cuda`

use blackburn_benches::{
    device,
    matmul::{Product, ProductType},
    time,
};
use blackburn_reference::{
    matmul::{Layout, MatmulCase},
    shapes,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    let squares: Vec<MatmulCase> =
        shapes::squares().into_iter().filter(|case| case.m >= 1024).collect();
    let layers = shapes::gpt2_layers(8192);
    let run = [
        (ProductType::Bf16, squares.iter().chain(&layers).copied().collect::<Vec<_>>()),
        (ProductType::F16, squares.clone()),
        (ProductType::Tf32, squares.clone()),
        (
            ProductType::E4m3,
            // As tensor cores take them: k contiguous in both.
            squares.iter().filter(|case| case.rhs == Layout::ColumnMajor).copied().collect(),
        ),
    ];
    for (dtype, cases) in run {
        for case in cases {
            let product = Product::new(&client, case, dtype).expect("the catalogue is served");
            let out = product.run(&client, None).expect("the catalogue is served");
            if let Err(mismatch) = product.verify(&client, &out, 0) {
                panic!("wrong results are not timed: {case}: {mismatch}");
            }
            drop(out);
            let mut group = criterion.benchmark_group(format!("matmul/{dtype:?}"));
            // Criterion's elements are operations here.
            group.throughput(Throughput::Elements(case.flops() as u64));
            group.bench_function(case.name, |bencher| {
                time(bencher, &client, || product.run(&client, None));
            });
            group.finish();
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
