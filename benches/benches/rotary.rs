//! Rotary positions forward and backward: bytes moved a second, on the queries of a Llama of 1.1 billion, by heads
//! behind a linear layer and by heads in order. `cargo xtask bench rotary --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    Pass,
    attention::Order,
    buffer::{Buffer, Rows},
    rotary::{RotaryProblem, rotary},
};
use blackburn_reference::{
    rotary::{Rotation, table},
    storage::Storage,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Sequences, heads, positions and columns.
const SHAPE: [usize; 4] = [8, 32, 2048, 64];

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    let [batch, heads, seq, head_dim] = SHAPE;
    let factors = table(seq, head_dim, 10_000.0);
    let by = Rows::from(Buffer {
        handle: client.create_from_slice(&Storage::F32.encode(&factors)),
        elements: factors.len(),
        dtype: dtype_of(Storage::F32),
    });
    for storage in Storage::ALL {
        for order in [Order::PositionsFirst, Order::HeadsFirst] {
            let problem = RotaryProblem {
                batch,
                heads,
                seq,
                head_dim,
                dtype: dtype_of(storage),
                strides: order.strides(heads, seq, head_dim),
                order,
                start: 0,
                positions: seq,
            };
            let x = Rotated::new(&client, 1, problem.elements(), problem.dtype);
            // x is held, so that the result has memory of its own.
            let turn = |pass: Pass| {
                rotary(&client, &problem, pass, x.buffer.clone(), &by)
                    .expect("the problem is valid")
            };
            // The first sequence, or as much of it as lies in front of its other heads.
            let [proved_heads, proved] = match order {
                Order::PositionsFirst => [heads, heads * seq * head_dim],
                Order::HeadsFirst => [1, seq * head_dim],
            };
            for pass in [Pass::Forward, Pass::Backward] {
                let gradient = pass == Pass::Backward;
                let rotation = Rotation { table: &factors, head_dim, start: 0, gradient };
                let (mut expected, mut bounds) = (vec![0.0; proved], vec![0.0; proved]);
                for head in 0..proved_heads {
                    let place = |at: usize| match order {
                        Order::HeadsFirst => at,
                        Order::PositionsFirst => {
                            (at / head_dim * heads + head) * head_dim + at % head_dim
                        }
                    };
                    let rows: Vec<f64> = (0..seq * head_dim).map(|at| x.at(place(at))).collect();
                    let (y, error) = rotation.of(&rows, seq, storage);
                    for (at, (y, error)) in y.into_iter().zip(error).enumerate() {
                        (expected[place(at)], bounds[place(at)]) = (y, error);
                    }
                }
                let y = Buffer { elements: proved, ..turn(pass) };
                verify(&client, y, storage, &expected, &bounds);
            }

            let name = format!("rotary/{storage:?}/{order:?}/{batch}x{heads}x{seq}x{head_dim}");
            let mut group = criterion.benchmark_group(name);
            group.throughput(Throughput::Bytes(problem.bytes() as u64));
            for pass in [Pass::Forward, Pass::Backward] {
                group.bench_function(pass.to_string(), |bencher| {
                    time(bencher, &client, || turn(pass));
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
