//! Normalization of groups of channels: bytes moved a second by the kernels, on images of a U-Net at batch 32 with 32
//! groups, in the order of convolutions and in that of an image; and the operation with its gradient beside Burn's
//! unmodified module, which runs on the kernels too, and keeps more.
//! `cargo xtask bench group_norm --features cuda`

use blackburn_backend::group_norm::{GroupNormCall, group_norm};
use blackburn_benches::{Rotated, device, dtype_of, input, time, verify};
use blackburn_kernels::group_norm::{
    Affine, Form, GroupNormInputs, GroupNormProblem, GroupNormSaved, Order, group_norm_backward,
    group_norm_forward, group_norm_forward_with_parts,
};
use blackburn_reference::{
    group_norm::{GroupNorm, Sums},
    storage::Storage,
};
use burn::{
    nn::GroupNormConfig,
    tensor::{Device, Distribution, FloatDType, Tensor},
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

/// Samples, channels and pixels of the widest and the narrowest layers.
const SHAPES: [[usize; 3]; 3] = [[32, 64, 65_536], [32, 128, 4096], [32, 512, 256]];
const GROUPS: usize = 32;

fn bench(criterion: &mut Criterion) {
    // Burn's own module runs under fusion, as a program's does.
    blackburn::init().expect("the device starts");
    let Some(device) = device() else { return };
    let client = device.client();
    let burn_device = Device::new(device);
    for storage in [Storage::F32, Storage::Bf16] {
        for shape in SHAPES {
            for order in [Order::ChannelsLast, Order::PixelsLast] {
                kernels(criterion, &client, shape, order, storage);
            }
            let [samples, channels, pixels] = shape;
            let name = format!("group_norm/{storage:?}/{samples}x{channels}x{pixels}");
            let mut group = criterion.benchmark_group(name);
            for (subject, is_module) in [("operation", false), ("module", true)] {
                let mut step = step(&burn_device, shape, storage, is_module);
                group.bench_function(format!("forward_backward_of_{subject}"), |bencher| {
                    time(bencher, &client, &mut step);
                });
            }
            group.finish();
        }
    }
}

fn kernels(
    criterion: &mut Criterion,
    client: &Client,
    shape: [usize; 3],
    order: Order,
    storage: Storage,
) {
    let [samples, channels, pixels] = shape;
    let problem = GroupNormProblem::contiguous(shape, GROUPS, order, dtype_of(storage));
    prove(client, order, storage);
    let elements = samples * channels * pixels;
    let images = |seed| Rotated::new(client, seed, elements, dtype_of(storage)).buffer;
    let parameter = |seed| input(client, seed, channels, storage).1;
    let affine = Affine { gamma: parameter(2), beta: parameter(3) };
    let inputs = GroupNormInputs { x: images(1), affine: Some(affine.clone()) };
    let dy = images(4);
    let forward = || group_norm_forward(client, &problem, &inputs).expect("the problem is valid");
    let with_parts =
        || group_norm_forward_with_parts(client, &problem, &inputs).expect("the problem is valid");
    let made = forward();
    let of_x = GroupNormSaved {
        x: inputs.x.clone(),
        form: Form::Input,
        mean: Some(made.mean),
        rstd: made.rstd,
        gamma: Some(affine.gamma),
    };
    let backward =
        || group_norm_backward(client, &problem, &of_x, &dy, true).expect("the problem is valid");
    let name = format!("group_norm/{storage:?}/{samples}x{channels}x{pixels}/{order:?}");
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Bytes(problem.forward_bytes(false) as u64));
    group.bench_function("forward", |bencher| {
        time(bencher, client, &forward);
    });
    group.throughput(Throughput::Bytes(problem.forward_bytes(true) as u64));
    group.bench_function("forward_with_parts", |bencher| {
        time(bencher, client, &with_parts);
    });
    group.throughput(Throughput::Bytes(problem.backward_bytes() as u64));
    group.bench_function("backward", |bencher| {
        time(bencher, client, &backward);
    });
    group.finish();
}

/// Of fewer numbers, so that the reference is not what takes time.
fn prove(client: &Client, order: Order, storage: Storage) {
    // Groups of one channel and pixels alone lie alike in the order of the reference.
    let shape = match order {
        Order::ChannelsLast => [2, 64, 1],
        Order::PixelsLast => [2, 64, 1024],
    };
    let [samples, channels, pixels] = shape;
    let problem = GroupNormProblem::contiguous(shape, GROUPS, order, dtype_of(storage));
    let (values, x) = input(client, 1, samples * channels * pixels, storage);
    let inputs = GroupNormInputs { x, affine: None };
    let made = group_norm_forward(client, &problem, &inputs).expect("the problem is valid");
    let [gamma, beta] = [1.0, 0.0].map(|value| vec![value; channels]);
    let op =
        GroupNorm { gamma: &gamma, beta: &beta, groups: GROUPS, pixels, epsilon: problem.epsilon };
    let exact = op.statistics(&values);
    let sums = Sums { additions: 2 * pixels, merges: 64 };
    let errors = op.statistics_bounds(&values, sums);
    let bounds = op.forward_bounds(&values, &exact, &errors, storage);
    verify(client, made.y, storage, &op.forward(&values, &exact), &bounds);
}

/// A step through the operation or Burn's unmodified module, with its gradients, of images as a convolution leaves
/// them. It waits for the device, since Burn's streams run what was registered when somebody asks.
fn step(
    device: &Device,
    [samples, channels, pixels]: [usize; 3],
    storage: Storage,
    is_module: bool,
) -> impl FnMut() + use<> {
    let dtype = match storage {
        Storage::F32 => FloatDType::F32,
        Storage::F16 => FloatDType::F16,
        Storage::Bf16 => FloatDType::BF16,
    };
    let autodiff = device.clone().autodiff();
    let random = || {
        let shape = [samples, pixels, channels];
        let turned = Tensor::<3>::random(shape, Distribution::Default, &autodiff).cast(dtype);
        turned.swap_dims(1, 2).detach()
    };
    let (x, dy) = (random().require_grad(), random());
    let mut module = GroupNormConfig::new(GROUPS, channels).init(&autodiff);
    let cast = |tensor: Tensor<1>| tensor.cast(dtype).detach().require_grad();
    module.gamma = module.gamma.map(|gamma| gamma.map(cast));
    module.beta = module.beta.map(|beta| beta.map(cast));
    let device = device.clone();
    move || {
        let affine = module.gamma.as_ref().zip(module.beta.as_ref());
        let affine = affine.map(|(gamma, beta)| [gamma.val(), beta.val()]);
        let y = if is_module {
            module.forward(x.clone())
        } else {
            let (groups, epsilon) = (GROUPS, module.epsilon);
            group_norm(GroupNormCall { x: x.clone(), affine: affine.clone(), groups, epsilon })
        };
        let gradients = (y * dy.clone()).sum().backward();
        let of_gamma = affine.and_then(|[gamma, _]| gamma.grad(&gradients));
        drop((x.grad(&gradients), of_gamma));
        device.sync().expect("the device failed during a bench");
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
