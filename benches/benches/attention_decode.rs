//! Attention of a few new tokens over a cache whose length is on the device: bytes of keys and values read a second, of
//! eight sequences with eight heads of keys, by each plan that divides keys among cubes.
//! `cargo xtask bench attention_decode --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    attention::{AttentionInputs, attention_decode_with, decode_variants},
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs as Numbers, AttentionOptions, AttentionPrecision},
    matmul::MatmulPrecision,
    storage::Storage,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::ir::{ElemType, IntKind};

/// Of which every type is timed; of others only bf16.
const EVERY_TYPE: [usize; 3] = [4, 1, 128];

fn bench(criterion: &mut Criterion) {
    for shape in decode_variants::SHAPES {
        for storage in Storage::ALL {
            if storage == Storage::Bf16 || shape == EVERY_TYPE {
                decoding(criterion, shape, storage);
            }
        }
    }
}

fn decoding(criterion: &mut Criterion, shape: [usize; 3], storage: Storage) {
    let Some(device) = device() else { return };
    let client = device.client();
    let problem = decode_variants::problem(shape, dtype_of(storage));
    let rotated = |seed, elements| Rotated::new(&client, seed, elements, problem.dtype);
    let q = rotated(1, problem.out_elements());
    let [k, v] = [2, 3].map(|seed| rotated(seed, problem.kv_elements()));
    let [group, seq_q, head_dim] = shape;
    let first = i32::try_from(problem.seq_kv - seq_q).expect("the cache is short");
    let position = Buffer {
        handle: client.create_from_slice(&first.to_le_bytes()),
        elements: 1,
        dtype: ElemType::Int(IntKind::I32),
    };
    let inputs = AttentionInputs::of(&q.buffer, &k.buffer, &v.buffer);

    // The heads of queries that share the first head of keys.
    let case = AttentionCase {
        name: "decoding",
        batch: 1,
        heads_q: group,
        heads_kv: 1,
        seq_q,
        seq_kv: problem.seq_kv,
        head_dim,
        options: AttentionOptions { causal: true, ..AttentionOptions::PLAIN },
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
    let precision = AttentionPrecision::cuda(MatmulPrecision::tensor_core(storage));
    let bounds = attention.forward_bounds(&expected, &precision);

    let heads = [problem.heads_q, problem.heads_kv];
    let sizes = [problem.batch, seq_q, problem.seq_kv, heads[0], heads[1], head_dim];
    let sizes = sizes.map(|size| size.to_string()).join("x");
    let mut benches = criterion.benchmark_group(format!("attention_decode/{storage:?}/{sizes}"));
    let bytes = 2 * problem.kv_elements() * problem.dtype.size();
    benches.throughput(Throughput::Bytes(bytes as u64));
    for (place, plan) in decode_variants::plans(&client, &problem).into_iter().enumerate() {
        let decode = || {
            attention_decode_with(&client, &problem, &plan, &inputs, &position)
                .expect("the problem is valid")
        };
        let out = Buffer { elements: case.q_len(), ..decode().out };
        verify(&client, out, storage, &expected.o, &bounds.o);
        let name = if place == 0 {
            "forward".into()
        } else {
            format!("forward_by_{:?}", plan.family).to_lowercase()
        };
        benches.bench_function(name, |bencher| time(bencher, &client, decode));
    }
    benches.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
