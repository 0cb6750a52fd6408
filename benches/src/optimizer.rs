//! An optimizer's step over all of GPT-2's parameters, in few launches and in one each: bytes moved a second.

use crate::{
    Rotated, device, dtype_of,
    gpt2::{TYPES, Types, VOCABULARY, WIDTH, parameters},
    time, verify,
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Gate, MOST_TENSORS, Tuning, Update},
};
use blackburn_reference::storage::Storage;
use criterion::Criterion;
use cubecl::client::Client;

/// An optimizer whose step takes N tensors: parameter, gradient, and states in f32.
pub trait Optimizer<const N: usize> {
    /// What its rows are named after.
    const NAME: &'static str;
    /// A step's numbers.
    type Step: Copy;
    /// The tensors as the kernel takes them.
    type Tensors: From<[Rows; N]> + Into<[Rows; N]>;
    /// The step that is measured.
    const STEP: Self::Step;
    /// Does the steps of several parameters.
    const MANY: Many<Self::Step, Self::Tensors>;

    /// What a parameter's element is after [`STEP`](Self::STEP) from states of zero, and how far off a
    /// device may be that stores it so.
    fn expected(parameter: f64, gradient: f64, stored: Storage) -> [f64; 2];
}

/// Steps of several parameters by plans that are tuned so.
pub type Many<S, T> = fn(
    &Client,
    Vec<Update<S, T>>,
    Option<Gate>,
    Option<Buffer>,
    Tuning,
) -> Result<Vec<T>, KernelError>;

/// A parameter and its gradient, of numbers that are known here too and drawn by `seed`, with states of zero.
fn tensors<const N: usize>(
    client: &Client,
    seed: u64,
    elements: usize,
    types: Types,
) -> ([Rows; N], [Rotated; 2]) {
    let known = [(2 * seed, types.parameter), (2 * seed + 1, types.gradient)]
        .map(|(seed, storage)| Rotated::new(client, seed, elements, dtype_of(storage)));
    let state = || {
        let handle = client.create_from_slice(&vec![0; elements * Storage::F32.bytes()]);
        Buffer { handle, elements, dtype: dtype_of(Storage::F32) }
    };
    let tensor = |which: usize| known.get(which).map_or_else(state, |known| known.buffer.clone());
    (std::array::from_fn(|which| tensor(which).into()), known)
}

/// All parameters in their order, so many `together`.
fn step<O: Optimizer<N>, const N: usize>(
    client: &Client,
    model: Vec<O::Tensors>,
    tuning: Tuning,
    together: usize,
) -> Vec<O::Tensors> {
    let mut stepped = Vec::new();
    let update = |tensors| Update { step: O::STEP, tensors, draw: 0, copy: None };
    let mut all = model.into_iter().map(update);
    loop {
        let some: Vec<_> = all.by_ref().take(together).collect();
        if some.is_empty() {
            return stepped;
        }
        let some = O::MANY(client, some, None, None, tuning);
        stepped.extend(some.expect("the problems are valid"));
    }
}

/// A feed-forward matrix and biases, so many `together`, in place as what is timed is.
fn prove<O: Optimizer<N>, const N: usize>(
    client: &Client,
    types: Types,
    tuning: Tuning,
    together: usize,
) {
    let sizes: Vec<usize> =
        (0..together).map(|which| if which == 0 { 4 * WIDTH * WIDTH } else { WIDTH }).collect();
    // Each of numbers of its own, or they could be mistaken for each other.
    let (before, known): (Vec<_>, Vec<_>) = (1..)
        .zip(&sizes)
        .map(|(seed, elements)| {
            let (tensors, [mut parameter, gradient]) = tensors::<N>(client, seed, *elements, types);
            // Its numbers stay, and nobody holds its memory.
            parameter.buffer = gradient.buffer.clone();
            (tensors.into(), [parameter, gradient])
        })
        .unzip();
    let after = step::<O, N>(client, before, tuning, together);
    for ((elements, [parameter, gradient]), after) in sizes.into_iter().zip(known).zip(after) {
        let of = |i| O::expected(parameter.at(i), gradient.at(i), types.parameter);
        let (expected, bounds): (Vec<f64>, Vec<f64>) =
            (0..elements).map(of).map(|[expected, bound]| (expected, bound)).unzip();
        let [parameter, ..] = &after.into()[..] else { unreachable!("a step has tensors") };
        verify(client, parameter.buffer.clone(), types.parameter, &expected, &bounds);
    }
}

/// What is measured: the plan, and what it could be.
fn tunings(types: Types) -> Vec<(String, Tuning)> {
    let widths = if types.parameter == Storage::F32 { &[4][..] } else { &[4, 8] };
    let mut all = vec![("step".to_string(), Tuning::default())];
    for widest in widths {
        for cubes_a_multiprocessor in [4, 8, 16] {
            let name = format!("vectors of {widest}, {cubes_a_multiprocessor} cubes");
            all.push((name, Tuning { widest: *widest, cubes_a_multiprocessor }));
        }
    }
    all
}

/// Parameters of so many elements each. Nobody else holds these: they are updated in place, as an
/// optimizer's are.
fn model<O: Optimizer<N>, const N: usize>(
    client: &Client,
    elements: &[usize],
    types: Types,
) -> Vec<O::Tensors> {
    elements.iter().map(|elements| tensors::<N>(client, 0, *elements, types).0.into()).collect()
}

/// Measures an optimizer in all types: the plan and what it could be, each in few launches and in one each.
pub fn bench<O: Optimizer<N>, const N: usize>(criterion: &mut Criterion) {
    let states = N - 2;
    let Some(device) = device() else { return };
    let client = device.client();
    for types in TYPES {
        let all = parameters();
        let count: usize = all.iter().sum();
        let Types { parameter, gradient } = types;
        let name = format!("{}/{parameter:?} by {gradient:?}/{count}", O::NAME);
        let mut group = criterion.benchmark_group(name);
        group.throughput(types.bytes(count, states));
        // Made and proven by the first row that is asked for.
        let mut made = None;
        for (name, tuning) in tunings(types) {
            for (name, together) in
                [(name.clone(), MOST_TENSORS), (format!("{name}, one launch each"), 1)]
            {
                let mut is_proven = false;
                group.bench_function(name, |bencher| {
                    if !std::mem::replace(&mut is_proven, true) {
                        prove::<O, N>(&client, types, tuning, together);
                    }
                    let all = made.get_or_insert_with(|| model::<O, N>(&client, &all, types));
                    time(bencher, &client, || {
                        *all = step::<O, N>(&client, std::mem::take(all), tuning, together);
                    });
                });
            }
        }
        drop(made);
        // The two largest alone, of which launches are no part.
        let large = [VOCABULARY * WIDTH; 2];
        group.throughput(types.bytes(large.iter().sum(), states));
        let mut made = None;
        group.bench_function("embedding and head alone", |bencher| {
            let all = made.get_or_insert_with(|| model::<O, N>(&client, &large, types));
            time(bencher, &client, || {
                *all = step::<O, N>(&client, std::mem::take(all), Tuning::default(), 1);
            });
        });
        group.finish();
    }
}
