//! A long short-term memory: the kernels against f64, and Burn's module on them.

use blackburn::nn::recurrent;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    lstm::{LstmProblem, lstm_backward, lstm_forward},
    matmul::F32Precision,
};
use blackburn_reference::{
    lstm::{Bounded, Gradients, Lstm},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::blocks_of,
    buffers::{download, dtype, upload},
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::{
    module::{Module, ModuleMapper, Param},
    nn::LstmConfig,
    prelude::*,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

/// Steps, batch and hidden features: one of each, odd ones, whole vectors, and more units than a cube has.
const SIZES: [[usize; 3]; 5] = [[1, 1, 1], [4, 3, 5], [3, 2, 33], [5, 4, 16], [2, 9, 64]];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("lstm::kernels_are_within_bounds_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| {
                SIZES.iter().try_for_each(|sizes| {
                    kernels(client, *sizes, false, storage)?;
                    kernels(client, *sizes, true, storage)
                })
            })
        }));
    }
    trials.push(Trial::ignorable_test("lstm::bad_arguments_are_named", || on_device(refusals)));
    trials.push(Trial::ignorable_test("lstm::a_module_runs_on_the_kernels_as_on_the_cpu", || {
        on_burn_device(|device| module(&device))
    }));
    trials
}

fn problem([steps, batch, hidden]: [usize; 3], reverse: bool, storage: Storage) -> LstmProblem {
    let f32_precision = F32Precision::Full;
    LstmProblem { steps, batch, hidden, reverse, dtype: dtype(storage), f32_precision }
}

fn kernels(
    client: &Client,
    sizes: [usize; 3],
    reverse: bool,
    storage: Storage,
) -> Result<(), Failed> {
    let [steps, batch, hidden] = sizes;
    let state = batch * hidden;
    let projected = normal(1, steps * 4 * state, 1.0, storage);
    let weight = normal(2, hidden * 4 * hidden, 0.5, storage);
    let (h, c) = (normal(3, state, 0.5, storage), normal(4, state, 1.0, F32));
    let dout = normal(5, (steps + 1) * state, 1.0, storage);
    let reference =
        Lstm { sizes, reverse, projected: &projected, weight: &weight, h: &h, c: &c, storage };
    let expected = reference.forward();
    let problem = problem(sizes, reverse, storage);

    let of = |numbers: &[f64]| upload(client, numbers, storage);
    let (of_weight, of_c) = (of(&weight), upload(client, &c, F32));
    let made = lstm_forward(client, &problem, &of(&projected), &of_weight, [&of(&h), &of_c])?;
    let near = |what: &str, made: Buffer, storage, expected: &[Bounded]| {
        let (exact, bounds): (Vec<f64>, Vec<f64>) =
            expected.iter().map(|number| (number.exact, number.bound)).unzip();
        compare(&download(client, made, storage)?, &exact, &bounds)
            .map(drop)
            .map_err(|error| Failed::from(format!("{what} of {sizes:?}, {reverse}: {error}")))
    };
    near("out", made.out, storage, &expected.out)?;

    let found = lstm_backward(client, &problem, &made.saved, &of_weight, &of(&dout))?;
    let Gradients { dprojected, dweight, dh, dc } = reference.backward(&expected, &dout);
    near("dprojected", found.dprojected, storage, &dprojected)?;
    near("dweight", found.dweight, storage, &dweight)?;
    near("dh", found.dh, storage, &dh)?;
    near("dc", found.dc, F32, &dc)
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let of = |elements| upload(client, &vec![0.0; elements], F32);
    let problem = problem([2, 3, 4], false, F32);
    let run = |[projected, weight, h, c]: [usize; 4]| {
        lstm_forward(client, &problem, &of(projected), &of(weight), [&of(h), &of(c)])
    };
    for (name, lengths) in [
        ("projected", [95, 64, 12, 12]),
        ("weight", [96, 63, 12, 12]),
        ("h", [96, 64, 11, 12]),
        ("c", [96, 64, 12, 13]),
    ] {
        match run(lengths) {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => {}
            other => return Err(format!("a bad {name} gave {other:?}").into()),
        }
    }
    let empty = LstmProblem { steps: 0, ..problem };
    match lstm_forward(client, &empty, &of(1), &of(64), [&of(12), &of(12)]) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(format!("no steps gave {other:?}").into()),
    }
}

/// Draws each parameter anew, as on any device.
struct Drawn<'a>(u64, &'a Device);

impl ModuleMapper for Drawn<'_> {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        parameter.map(|old| {
            let shape: [usize; D] = old.dims();
            let drawn = normal(self.0, shape.iter().product(), 0.4, F32);
            tensor(&drawn, shape, F32, self.1).require_grad()
        })
    }
}

/// Hidden states, and gradients of the input and of all weights.
fn trained(device: &Device, reverse: bool) -> Result<Vec<Vec<f64>>, Failed> {
    let device = device.clone().autodiff();
    let module = LstmConfig::new(6, 8, true).with_reverse(reverse).init(&device);
    let module = module.map(&mut Drawn(10, &device));
    let x = tensor(&normal(1, 3 * 5 * 6, 1.0, F32), [3, 5, 6], F32, &device).require_grad();
    let (y, state) = recurrent::lstm(&module, x.clone(), None);
    let loss = y.clone().powf_scalar(2.0).sum() + (state.cell * 3.0).sum() + state.hidden.sum();
    let gradients = loss.backward();
    let missing = "a gradient is missing";
    let mut all = vec![values(y)?, values(x.grad(&gradients).ok_or(missing)?)?];
    for gate in [&module.input_gate, &module.output_gate, &module.cell_gate] {
        for linear in [&gate.input_transform, &gate.hidden_transform] {
            all.push(values(linear.weight.grad(&gradients).ok_or(missing)?)?);
            let bias = linear.bias.as_ref().ok_or("no bias")?;
            all.push(values(bias.grad(&gradients).ok_or(missing)?)?);
        }
    }
    Ok(all)
}

fn module(device: &Device) -> Result<(), Failed> {
    for reverse in [false, true] {
        let (ours, blocks) = blocks_of(device, || trained(device, reverse))?;
        let theirs = trained(&Device::flex(), reverse)?;
        for (at, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let largest = theirs.iter().fold(0.0f64, |most, value| most.max(value.abs()));
            // TF32 rounds factors to 11 bits.
            let bound = 8.0 * Storage::F16.unit_roundoff() * largest;
            compare(ours, theirs, &vec![bound; theirs.len()])
                .map_err(|error| format!("tensor {at}, {reverse}: {error}"))?;
        }
        let kernels: Vec<_> = blocks.iter().flat_map(|block| &block.kernels).collect();
        for name in ["lstm_cell", "lstm_cell_backward"] {
            let is_it = |kernel: &&&str| {
                kernel.to_lowercase().replace('_', "").contains(&name.replace('_', ""))
            };
            if !kernels.iter().any(is_it) {
                return Err(format!("{name} did not run: {kernels:?}").into());
            }
        }
    }
    Ok(())
}
