//! A linear layer with GELU behind it, of unmodified `burn::nn` modules in bf16: forward, and forward
//! with backward. `cargo xtask bench linear_gelu --features cuda`
//!
//! `BLACKBURN_DISABLE` switches providers off, for comparison with Burn's own kernels.

use blackburn_benches::device;
use burn::{
    nn::{Gelu, Linear, LinearConfig},
    prelude::*,
    tensor::{Distribution, FloatDType},
};
use criterion::{Bencher, Criterion, Throughput, criterion_group, criterion_main};
use std::time::Instant;

/// Tokens, inputs, outputs: GPT-2's feed-forward layer, a wide one, and few tokens.
const SHAPES: [[usize; 3]; 3] = [[8192, 768, 3072], [8192, 4096, 16384], [512, 768, 3072]];

fn bench(criterion: &mut Criterion) {
    if let Err(error) = blackburn::init() {
        panic!("{error}");
    }
    let Some(device) = device() else { return };
    let mut device = Device::new(device);
    device.configure(FloatDType::BF16).expect("no tensor was made before");
    for [tokens, inputs, outputs] in SHAPES {
        let layer: Linear = LinearConfig::new(inputs, outputs).init(&device);
        let x = Tensor::<2>::random([tokens, inputs], Distribution::Default, &device);
        let mut group =
            criterion.benchmark_group(format!("linear_gelu/bf16/{tokens}x{inputs}x{outputs}"));
        let flops = 2 * (tokens * inputs * outputs) as u64;
        group.throughput(Throughput::Elements(flops));
        group.bench_function("linear", |bencher| {
            time(bencher, &device, || layer.forward(x.clone()));
        });
        group.bench_function("forward", |bencher| {
            time(bencher, &device, || Gelu::new().forward(layer.forward(x.clone())));
        });

        let training = device.clone().autodiff();
        let layer: Linear = LinearConfig::new(inputs, outputs).init(&training);
        let x = Tensor::<2>::random([tokens, inputs], Distribution::Default, &training);
        group.throughput(Throughput::Elements(3 * flops));
        group.bench_function("forward_backward", |bencher| {
            time(bencher, &device, || {
                let x = x.clone().require_grad();
                let y = Gelu::new().forward(layer.forward(x.clone()));
                let gradients = y.backward();
                let dx = x.grad(&gradients);
                let dw = layer.weight.grad(&gradients);
                let db = layer.bias.as_ref().and_then(|bias| bias.grad(&gradients));
                (dx, dw, db)
            });
        });
        group.finish();
    }
}

/// Times `compute`, which is flushed each time: Burn would merge iterations otherwise.
fn time<T>(bencher: &mut Bencher<'_>, device: &Device, mut compute: impl FnMut() -> T) {
    bencher.iter_custom(|iterations| {
        device.sync().expect("the device failed during a bench");
        let start = Instant::now();
        for _ in 0..iterations {
            let result = compute();
            device.flush().expect("the device failed during a bench");
            drop(result);
        }
        device.sync().expect("the device failed during a bench");
        start.elapsed()
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
