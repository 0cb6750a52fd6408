//! `SwiGLU` and its gradients on the device, against f64.

use blackburn::nn::swiglu as op;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    swiglu::{
        SwigluGradients, swiglu_backward, swiglu_backward_watched, swiglu_forward,
        swiglu_forward_watched,
    },
};
use blackburn_reference::{random::normal, storage::Storage, swiglu, tolerance::compare};
use blackburn_tests::{
    buffers::{download, dtype, largest_magnitude, upload},
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::{nn::SwiGluConfig, prelude::*};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::{Failed, Trial};

/// Around vector and cube sizes: 1 and odd numbers take scalar loads, 256 * 4 is one full cube of
/// f32 vectors, and 70,001 needs many cubes.
const LENGTHS: [usize; 8] = [1, 2, 3, 255, 1023, 1024, 1028, 70_001];

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("swiglu::both_passes_are_within_bounds_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| {
                LENGTHS.into_iter().try_for_each(|length| {
                    check(client, storage, &Inputs::random(length, storage))
                        .map_err(|error| format!("{length} elements: {error}").into())
                })
            })
        }));
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("swiglu::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("magnitudes_are_the_largest_of_what_is_written", watched),
        trial("a_planted_fault_is_caught", planted_fault),
        trial("gates_far_from_zero_are_shut_or_open", far_gates),
        trial("nan_reaches_its_own_element_alone", nan),
        trial("empty_tensors_give_empty_tensors", empty),
        trial("bad_arguments_are_named", bad_arguments),
    ]);
    let tests: [(&str, Test); 2] = [
        ("the_operation_has_both_gradients", gradients),
        ("a_module_is_gated_by_its_inner_layer", module),
    ];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(format!("swiglu::{name}"), move || {
            on_burn_device(|device| {
                test(&Device::flex())?;
                test(&device)
            })
        })
    }));
    trials
}

struct Inputs {
    gate: Vec<f64>,
    up: Vec<f64>,
    dy: Vec<f64>,
}

impl Inputs {
    fn random(length: usize, storage: Storage) -> Self {
        let seed = length as u64;
        Self {
            gate: normal(seed, length, 3.0, storage),
            up: normal(seed + 1, length, 2.0, storage),
            dy: normal(seed + 2, length, 1.0, storage),
        }
    }

    /// y, and the gradients of gate and up.
    fn on_device(&self, client: &Client, storage: Storage) -> Result<[Vec<f64>; 3], String> {
        let [gate, up, dy] =
            [&self.gate, &self.up, &self.dy].map(|values| upload(client, values, storage));
        let y = swiglu_forward(client, &gate, &up).map_err(|error| error.to_string())?;
        let SwigluGradients { dgate, dup } =
            swiglu_backward(client, &gate, &up, &dy).map_err(|error| error.to_string())?;
        let read = |buffer| download(client, buffer, storage);
        Ok([read(y)?, read(dgate)?, read(dup)?])
    }

    /// y and the gradients of gate and up, each with its bounds.
    fn expected(&self, storage: Storage) -> [(Vec<f64>, Vec<f64>); 3] {
        let each = |element: &dyn Fn(f64, f64, f64) -> (f64, f64)| {
            let operands = self.gate.iter().zip(&self.up).zip(&self.dy);
            operands.map(|((gate, up), dy)| element(*gate, *up, *dy)).unzip()
        };
        let gradient = |at: usize| {
            each(&|gate, up, dy| {
                (
                    swiglu::swiglu_gradients(gate, up, dy)[at],
                    swiglu::backward_bounds(gate, up, dy, storage)[at],
                )
            })
        };
        let y = |gate, up, _| (swiglu::swiglu(gate, up), swiglu::forward_bound(gate, up, storage));
        [each(&y), gradient(0), gradient(1)]
    }

    fn compare(&self, actual: &[Vec<f64>; 3], storage: Storage) -> Result<(), String> {
        let expected = self.expected(storage);
        for ((name, actual), (expected, bounds)) in
            ["y", "dgate", "dup"].into_iter().zip(actual).zip(&expected)
        {
            compare(actual, expected, bounds).map_err(|mismatch| format!("{name}: {mismatch}"))?;
        }
        Ok(())
    }
}

fn check(client: &Client, storage: Storage, inputs: &Inputs) -> Result<(), String> {
    let results = inputs.on_device(client, storage)?;
    inputs.compare(&results, storage)?;
    check_watched(client, storage, inputs, &results)
}

/// What kernels that tell magnitudes make of the inputs of `plain`, which has y and the gradients.
fn check_watched(
    client: &Client,
    storage: Storage,
    inputs: &Inputs,
    plain: &[Vec<f64>; 3],
) -> Result<(), String> {
    let [gate, up, dy] =
        [&inputs.gate, &inputs.up, &inputs.dy].map(|values| upload(client, values, storage));
    let told = |error: KernelError| error.to_string();
    let (y, of_y) = swiglu_forward_watched(client, &gate, &up).map_err(told)?;
    let (SwigluGradients { dgate, dup }, [of_gate, of_up]) =
        swiglu_backward_watched(client, &gate, &up, &dy).map_err(told)?;
    for ((watched, magnitudes), plain) in
        [(y, of_y), (dgate, of_gate), (dup, of_up)].into_iter().zip(plain)
    {
        if download(client, watched, storage)? != *plain {
            return Err("other numbers if watched".into());
        }
        let exact = plain.iter().fold(0.0f64, |most, value| most.max(value.abs()));
        let told = largest_magnitude(client, &magnitudes)?;
        if told != exact {
            return Err(format!("a largest magnitude of {exact} became {told}"));
        }
    }
    Ok(())
}

/// By cubes that come back for more; of what is no number; of nothing.
fn watched(client: &Client) -> Result<(), Failed> {
    // Wherever the largest numbers are: at each unit of a cube, and far apart, since a unit takes vectors that are, two at
    // once.
    let long = 2_000_000;
    let far_apart = [0, 1, 2, 3, 5, 7].map(|eighth| eighth * long / 8);
    let of_cube = (3..1024).step_by(4).map(|place| (1024, place));
    let of_cubes = far_apart.into_iter().chain([long - 1]).map(|place| (long, place));
    for (length, place) in of_cube.chain(of_cubes) {
        let mut inputs = Inputs::random(length, Storage::F32);
        (inputs.gate[place], inputs.up[place], inputs.dy[place]) = (100.0, 100.0, 100.0);
        let plain = inputs.on_device(client, Storage::F32)?;
        check_watched(client, Storage::F32, &inputs, &plain)?;
    }
    let storage = Storage::F32;
    let [gate, up] = [[1.0, f64::NAN], [f64::INFINITY, 1.0]].map(|it| upload(client, &it, storage));
    let (_, of_y) = swiglu_forward_watched(client, &gate, &up)?;
    if !largest_magnitude(client, &of_y)?.is_nan() {
        return Err("NaN is not the largest".into());
    }
    let nothing = Buffer::empty(client, 0, dtype(storage));
    match swiglu_forward_watched(client, &nothing, &nothing) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(format!("magnitudes of nothing are {other:?}").into()),
    }
}

/// The negative control: gradients of gate and up that are exchanged, and a last element that is a thousandth
/// off.
fn planted_fault(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let inputs = Inputs::random(1024, storage);
    let [y, dgate, dup] = inputs.on_device(client, storage)?;
    let mut off = y.clone();
    off[1023] *= 1.001;
    for faulty in [[y, dup.clone(), dgate.clone()], [off, dgate, dup]] {
        if inputs.compare(&faulty, storage).is_ok() {
            return Err("a fault went unseen".into());
        }
    }
    Ok(())
}

fn far_gates(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let inputs =
        Inputs { gate: vec![-200.0, -90.0, 0.0, 90.0], up: vec![2.0; 4], dy: vec![1.0; 4] };
    check(client, storage, &inputs)?;
    let [y, dgate, dup] = inputs.on_device(client, storage)?;
    let expected = [[0.0, 180.0], [1.0, 2.0], [0.0, 90.0]];
    let found = [y, dgate, dup].map(|of| [of[2], of[3]]);
    if found == expected { Ok(()) } else { Err(format!("{found:?}, not {expected:?}").into()) }
}

fn nan(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    for argument in 0..3 {
        let mut inputs = Inputs::random(1024, storage);
        [&mut inputs.gate, &mut inputs.up, &mut inputs.dy][argument][7] = f64::NAN;
        let results = inputs.on_device(client, storage)?;
        // y does not depend on dy, nor the gradient of up on up.
        let reached = [[true, true, true], [true, true, false], [false, true, true]][argument];
        for (values, reached) in results.iter().zip(reached) {
            let found: Vec<usize> = (0..values.len()).filter(|at| values[*at].is_nan()).collect();
            if found != if reached { vec![7] } else { vec![] } {
                return Err(format!("NaN in argument {argument} came out at {found:?}").into());
            }
        }
    }
    Ok(())
}

fn empty(client: &Client) -> Result<(), Failed> {
    let nothing = Buffer::empty(client, 0, dtype(Storage::F32));
    let y = swiglu_forward(client, &nothing, &nothing)?;
    let SwigluGradients { dgate, dup } = swiglu_backward(client, &nothing, &nothing, &nothing)?;
    match [y.elements, dgate.elements, dup.elements] {
        [0, 0, 0] => Ok(()),
        other => Err(format!("{other:?} elements from nothing").into()),
    }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let x = upload(client, &[1.0; 4], Storage::F32);
    let shorter = upload(client, &[1.0; 3], Storage::F32);
    match swiglu_forward(client, &x, &shorter) {
        Err(error @ KernelError::InvalidProblem { argument: "up", .. })
            if error.to_string().contains("3 elements") => {}
        other => return Err(format!("an up of another length gave {other:?}").into()),
    }
    match swiglu_backward(client, &x, &x, &shorter) {
        Err(KernelError::InvalidProblem { argument: "dy", .. }) => {}
        other => return Err(format!("a dy of another length gave {other:?}").into()),
    }
    let integers = Buffer { dtype: ElemType::Int(IntKind::I32), ..x };
    match swiglu_forward(client, &integers, &integers) {
        Err(KernelError::Unsupported { op: "swiglu_forward", .. }) => Ok(()),
        other => Err(format!("integers gave {other:?}").into()),
    }
}

/// Both gradients, and each where the other operand has none.
fn gradients(device: &Device) -> Result<(), Failed> {
    const DIMS: [usize; 3] = [3, 5, 7];
    let storage = Storage::F32;
    let device = device.clone().autodiff();
    let inputs = Inputs::random(DIMS.iter().product(), storage);
    for [of_gate, of_up] in [[true, true], [true, false], [false, true]] {
        let leaf = |numbers: &[f64], is_tracked: bool| {
            let leaf: Tensor<3> = tensor(numbers, DIMS, storage, &device);
            if is_tracked { leaf.require_grad() } else { leaf }
        };
        let (gate, up) = (leaf(&inputs.gate, of_gate), leaf(&inputs.up, of_up));
        let y = op::swiglu(gate.clone(), up.clone());
        let grads = (y.clone() * leaf(&inputs.dy, false)).sum().backward();
        let gradient = |leaf: &Tensor<3>, at: usize| match leaf.grad(&grads) {
            Some(gradient) => values(gradient),
            // What has no gradient is taken to be right, so that the others can be compared.
            None => Ok(inputs.expected(storage)[at].0.clone()),
        };
        if [of_gate, of_up] != [gate.grad(&grads).is_some(), up.grad(&grads).is_some()] {
            return Err("a gradient is missing, or one was not asked for".into());
        }
        inputs.compare(&[values(y)?, gradient(&gate, 1)?, gradient(&up, 2)?], storage)?;
    }
    Ok(())
}

fn module(device: &Device) -> Result<(), Failed> {
    let storage = Storage::F32;
    let module = SwiGluConfig::new(8, 6).with_bias(true).init(device);
    let x: Tensor<2> = tensor(&normal(3, 4 * 8, 1.0, storage), [4, 8], storage, device);
    let gate = values(module.linear_inner.forward(x.clone()))?;
    let up = values(module.linear_outer.forward(x.clone()))?;
    let pairs = || gate.iter().zip(&up).map(|(gate, up)| (*gate, *up));
    let expected: Vec<f64> = pairs().map(|(gate, up)| swiglu::swiglu(gate, up)).collect();
    let bounds: Vec<f64> =
        pairs().map(|(gate, up)| swiglu::forward_bound(gate, up, storage)).collect();
    compare(&values(op::forward(&module, x))?, &expected, &bounds)?;
    Ok(())
}
