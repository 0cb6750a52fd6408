//! Attention of one new token over a cache whose length is on the device: bytes of keys and values read a second, of
//! eight sequences of 8192 keys with four heads of queries to one of keys.
//! `cargo xtask bench attention_decode --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    attention::{AttentionInputs, attention_decode, decode_variants},
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs as Numbers, AttentionOptions, AttentionPrecision},
    matmul::MatmulPrecision,
    storage::Storage,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::ir::{ElemType, IntKind};

/// Heads of queries to one of keys, new tokens, and elements of a head.
const SHAPE: [usize; 3] = [4, 1, 128];

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for storage in Storage::ALL {
        let problem = decode_variants::problem(SHAPE, dtype_of(storage));
        let rotated = |seed, elements| Rotated::new(&client, seed, elements, problem.dtype);
        let q = rotated(1, problem.out_elements());
        let [k, v] = [2, 3].map(|seed| rotated(seed, problem.kv_elements()));
        let last = i32::try_from(problem.seq_kv - 1).expect("the cache is short");
        let position = Buffer {
            handle: client.create_from_slice(&last.to_le_bytes()),
            elements: 1,
            dtype: ElemType::Int(IntKind::I32),
        };
        let inputs = AttentionInputs::of(&q.buffer, &k.buffer, &v.buffer);
        let decode = || {
            attention_decode(&client, &problem, &inputs, &position).expect("the problem is valid")
        };

        // The heads of queries that share the first head of keys.
        let case = AttentionCase {
            name: "decoding",
            batch: 1,
            heads_q: SHAPE[0],
            heads_kv: 1,
            seq_q: SHAPE[1],
            seq_kv: problem.seq_kv,
            head_dim: SHAPE[2],
            options: AttentionOptions::PLAIN,
        };
        let first = |of: &Rotated, count| (0..count).map(|at| of.at(at)).collect::<Vec<f64>>();
        let numbers = Numbers {
            q: first(&q, case.q_len()),
            k: first(&k, case.kv_len()),
            v: first(&v, case.kv_len()),
            mask: None,
            bias: None,
            dout: Vec::new(),
        };
        let attention = numbers.attention(case);
        let expected = attention.forward();
        let precision = AttentionPrecision::cuda(MatmulPrecision::exact(storage));
        let bounds = attention.forward_bounds(&expected, &precision);
        let out = Buffer { elements: case.q_len(), ..decode().out };
        verify(&client, out, storage, &expected.o, &bounds.o);

        let mut group =
            criterion.benchmark_group(format!("attention_decode/{storage:?}/8x8192x32x8x128"));
        let bytes = 2 * problem.kv_elements() * problem.dtype.size();
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function("forward", |bencher| time(bencher, &client, decode));
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
