//! A matrix of bf16 in 8 bits, in both layouts: bytes moved a second, on what the layers of a Llama of 1.1 billion
//! multiply, with its largest magnitude to be found and with that told by the kernel before.
//! `cargo xtask bench quantize --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time};
use blackburn_kernels::{
    quantize::{Fp8Format, Layouts, QuantizeBlueprint, QuantizeProblem, Quantized, quantize_with},
    swiglu::swiglu_forward_watched,
};
use blackburn_reference::{fp8::Fp8, storage::Storage};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

/// 8 sequences of 2048 tokens by the width between the layers and that of tokens; a weight.
const SHAPES: [(usize, usize); 3] = [(16_384, 5632), (16_384, 2048), (2048, 2048)];
const STORAGE: Storage = Storage::Bf16;

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for (rows, columns) in SHAPES {
        let problem = QuantizeProblem {
            rows,
            columns,
            input: dtype_of(STORAGE),
            format: Fp8Format::E4m3,
            margin: 0,
            layouts: Layouts::Both,
        };
        let plan = QuantizeBlueprint::plan(&problem, &client);
        let [gate, up] =
            [1, 2].map(|seed| Rotated::new(&client, seed, problem.elements(), problem.input));
        let (x, magnitudes) = swiglu_forward_watched(&client, &gate.buffer, &up.buffer)
            .expect("the problem is valid");
        let run = |known| {
            quantize_with(&client, &problem, plan, &x, known).expect("the problem is valid")
        };
        prove(&client, columns, &x.handle, &run(Some(&magnitudes)));
        let mut group = criterion.benchmark_group(format!("quantize/BF16/{rows}x{columns}"));
        group.throughput(Throughput::Bytes(problem.bytes() as u64));
        group.bench_function("forward", |bencher| time(bencher, &client, || run(None)));
        let read_once = problem.bytes() - problem.elements() * STORAGE.bytes();
        group.throughput(Throughput::Bytes(read_once as u64));
        group.bench_function("forward magnitude known", |bencher| {
            time(bencher, &client, || run(Some(&magnitudes)));
        });
        group.finish();
    }
}

/// The codes of the matrix are those of its numbers by its scale, and the transpose has the first row's in its first
/// column. The tests have every code.
fn prove(client: &Client, columns: usize, x: &cubecl::server::Handle, quantized: &Quantized) {
    let read = |handle: &cubecl::server::Handle| {
        client.read_one(handle.clone()).expect("the device failed during a bench")
    };
    let values = STORAGE.decode(&read(x));
    let scale = Storage::F32.decode(&read(&quantized.scale.handle));
    let most = values.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    assert!(scale[1] == most, "the largest magnitude is {most}, not {}", scale[1]);
    let [codes, transposed] = [&quantized.codes, &quantized.transposed]
        .map(|copy| read(&copy.as_ref().expect("both layouts were asked for").handle));
    let pitch = transposed.len() / columns;
    for (column, value) in values[..columns].iter().enumerate() {
        let code = codes[column];
        let back = Fp8::E4m3.decode(&[code])[0] * scale[0];
        let bound =
            value.abs() * 2.0 * Fp8::E4m3.unit_roundoff() + 2.0 * Fp8::E4m3.underflow() * scale[0];
        assert!((back - value).abs() <= bound, "{value} became {back}");
        assert!(transposed[column * pitch] == code, "the transpose has another code");
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
