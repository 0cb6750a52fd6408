//! Layer normalization forward, and forward with backward, on activations of GPT-2 and on the rows of a
//! wide model: bytes moved a second by the kernels alone, and the operation with its gradient beside
//! Burn's own path.
//! `cargo xtask bench layer_norm --features cuda`

use blackburn_backend::layer_norm::layer_norm;
use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    Pass,
    buffer::Buffer,
    layer_norm::{
        LayerNormBlueprint, LayerNormGradients, LayerNormInputs, LayerNormProblem, LayerNormSaved,
        LayerNormWanted, Norm, layer_norm_backward, layer_norm_forward,
    },
};
use blackburn_reference::{
    layer_norm::{Arithmetic, LayerNorm, Norm as ReferenceNorm},
    random::normal,
    storage::Storage,
};
use burn::{
    nn::LayerNormConfig,
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

/// Rows and width: wide rows, and GPT-2's 8 by 1024 tokens.
const SHAPES: [(usize, usize); 2] = [(65_536, 4096), (8192, 768)];

const EPSILON: f64 = 1e-5;
const WANTED: LayerNormWanted =
    LayerNormWanted { beta: true, residual_bias: false, watched: false };

fn bench(criterion: &mut Criterion) {
    // Burn's own path runs under fusion, as a program's does.
    blackburn::init().expect("the device starts");
    let Some(device) = device() else { return };
    let client = device.client();
    let burn_device = Device::new(device);
    for storage in [Storage::F32, Storage::Bf16] {
        for (rows, width) in SHAPES {
            let kernels = Kernels::new(&client, rows, width, storage);
            kernels.prove(&client);
            let problem = kernels.problem();
            let both_bytes = (problem.forward_bytes() + problem.backward_bytes()) as u64;
            let name = format!("layer_norm/{storage:?}/{rows}x{width}");
            let mut group = criterion.benchmark_group(name);
            group.throughput(Throughput::Bytes(problem.forward_bytes() as u64));
            group.bench_function("forward", |bencher| {
                time(bencher, &client, || kernels.forward(&client));
            });
            group.throughput(Throughput::Bytes(both_bytes));
            group.bench_function("forward_backward", |bencher| {
                time(bencher, &client, || kernels.both(&client));
            });
            for is_ours in [true, false] {
                let subject = if is_ours { "blackburn" } else { "burn" };
                let mut step = operation(&burn_device, [rows, width], storage, is_ours);
                group.bench_function(format!("forward_backward_of_{subject}"), |bencher| {
                    time(bencher, &client, &mut step);
                });
            }
            group.finish();
        }
    }
}

/// Inputs of the kernels.
struct Kernels {
    rows: usize,
    width: usize,
    storage: Storage,
    x: Rotated,
    dy: Rotated,
    gamma: Vec<f64>,
    beta: Vec<f64>,
    inputs: LayerNormInputs,
}

impl Kernels {
    fn new(client: &Client, rows: usize, width: usize, storage: Storage) -> Self {
        let dtype = dtype_of(storage);
        let [x, dy] = [1, 2].map(|seed| Rotated::new(client, seed, rows * width, dtype));
        let [gamma, beta] = [3, 4].map(|seed| normal(seed, width, 1.0, storage));
        let parameter = |values: &[f64]| Buffer {
            handle: client.create_from_slice(&storage.encode(values)),
            elements: width,
            dtype,
        };
        let inputs = LayerNormInputs {
            x: x.buffer.clone(),
            residual: None,
            residual_bias: None,
            dropout: None,
            gamma: parameter(&gamma),
            beta: Some(parameter(&beta)),
            watched: false,
        };
        Self { rows, width, storage, x, dy, gamma, beta, inputs }
    }

    fn problem(&self) -> LayerNormProblem {
        let dtype = dtype_of(self.storage);
        LayerNormProblem {
            norm: Norm::Layer,
            rows: self.rows,
            width: self.width,
            dtype,
            parameter: dtype,
            bias: true,
            residual: false,
            parts: false,
            scaled: true,
            residual_bias: false,
            watched: false,
        }
    }

    fn forward(&self, client: &Client) -> Buffer {
        layer_norm_forward(client, Norm::Layer, &self.inputs, EPSILON)
            .expect("the problem is valid")
            .y
    }

    fn both(&self, client: &Client) -> (Buffer, LayerNormGradients) {
        let output = layer_norm_forward(client, Norm::Layer, &self.inputs, EPSILON)
            .expect("the problem is valid");
        let saved = LayerNormSaved {
            x: self.inputs.x.clone(),
            gamma: self.inputs.gamma.clone(),
            mean: output.mean,
            rstd: output.rstd,
            dropout: None,
        };
        let gradients =
            layer_norm_backward(client, Norm::Layer, &saved, &self.dy.buffer, None, WANTED)
                .expect("the problem is valid");
        (output.y, gradients)
    }

    /// The first rows of y and dx. The sums over all rows would take the reference minutes: tests have
    /// them.
    fn prove(&self, client: &Client) {
        const PROVED: usize = 64;
        let elements = PROVED * self.width;
        let [x, dy] = [&self.x, &self.dy]
            .map(|rotated| (0..elements).map(|i| rotated.at(i)).collect::<Vec<f64>>());
        let op = LayerNorm {
            norm: ReferenceNorm::Layer,
            gamma: &self.gamma,
            beta: Some(&self.beta),
            epsilon: EPSILON,
        };
        let how = |pass| {
            let plan = LayerNormBlueprint::plan(&self.problem(), pass, client)
                .expect("the problem is served");
            Arithmetic { rows: self.storage, parameters: self.storage, additions: plan.additions() }
        };
        let first = |buffer| Buffer { elements, ..buffer };
        let (y, gradients) = self.both(client);
        let bounds = op.forward_bounds(&x, how(Pass::Forward));
        verify(client, first(y), self.storage, &op.forward(&x), &bounds);
        let expected = op.backward(&x, &dy, None);
        let bounds = op.backward_bounds(&x, &dy, None, how(Pass::Backward));
        verify(client, first(gradients.dx), self.storage, &expected.dx, &bounds.dx);
    }
}

/// A step through the operation, ours or Burn's, with its gradients. It waits for the device, since
/// Burn's streams run what was registered when somebody asks: small shapes show the host's time, too.
fn operation(
    device: &Device,
    shape: [usize; 2],
    storage: Storage,
    is_ours: bool,
) -> impl FnMut() + use<> {
    let dtype = match storage {
        Storage::F32 => FloatDType::F32,
        Storage::F16 => FloatDType::F16,
        Storage::Bf16 => FloatDType::BF16,
    };
    let autodiff = device.clone().autodiff();
    let random = || Tensor::<2>::random(shape, Distribution::Default, &autodiff).cast(dtype);
    let x = random().detach().require_grad();
    let dy = random();
    let mut module = LayerNormConfig::new(shape[1]).with_epsilon(EPSILON).init(&autodiff);
    let cast = |tensor: Tensor<1>| tensor.cast(dtype).detach().require_grad();
    module.gamma = module.gamma.map(cast);
    module.beta = module.beta.map(|beta| beta.map(cast));
    let device = device.clone();
    move || {
        let y = if is_ours {
            let beta = module.beta.as_ref().map(|beta| beta.val());
            layer_norm(x.clone(), module.gamma.val(), beta, EPSILON)
        } else {
            module.forward(x.clone())
        };
        let gradients = (y * dy.clone()).sum().backward();
        drop((x.grad(&gradients), module.gamma.val().grad(&gradients)));
        device.sync().expect("the device failed during a bench");
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
