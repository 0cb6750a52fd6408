//! Files with torchvision's names, against a plain computation that knows nothing of Burn.

use super::*;
use burn::{
    module::Module,
    tensor::{Device, Tensor, TensorData},
};
use safetensors::{Dtype, tensor::TensorView};
use std::collections::BTreeMap;

/// Tensors by torchvision's names: shape and numbers.
type State = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Numbers from -1 to 1 that look random and depend on the name.
fn numbers(name: &str, count: usize) -> Vec<f32> {
    let mut state =
        name.bytes().fold(1u64, |sum, byte| sum.wrapping_mul(131).wrapping_add(byte.into()));
    let mut draw = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| draw()).collect()
}

/// What torchvision's `resnet18(num_classes=...).state_dict()` has, of another width, written down from its
/// source: `conv1`, `bn1`, four layers of blocks, `fc`.
fn state(config: &ModelConfig) -> State {
    let mut state = State::new();
    let ModelConfig { depth, width, classes } = *config;
    let mut conv = |name: String, [outputs, inputs, kernel]: [usize; 3]| {
        let shape = vec![outputs, inputs, kernel, kernel];
        let scale = (3.0 / (inputs * kernel * kernel) as f32).sqrt();
        let values = numbers(&name, shape.iter().product());
        let values = values.into_iter().map(|value| value * scale).collect();
        state.insert(format!("{name}.weight"), (shape, values));
        // The norm after it: bn1 after conv1, downsample.1 after downsample.0.
        let norm = name.replace("conv", "bn").replace("downsample.0", "downsample.1");
        for (field, least, range) in [
            ("weight", 1.0, 0.5),
            ("bias", 0.0, 0.3),
            ("running_mean", 0.0, 0.5),
            ("running_var", 1.0, 0.6),
        ] {
            let values = numbers(&format!("{norm}.{field}"), outputs);
            let values = values.into_iter().map(|value| least + range * value).collect();
            state.insert(format!("{norm}.{field}"), (vec![outputs], values));
        }
    };
    conv("conv1".into(), [width, 3, 7]);
    let mut inputs = width;
    for (stage, blocks) in depth.blocks().into_iter().enumerate() {
        let planes = width << stage;
        let outputs = if depth.has_bottlenecks() { 4 * planes } else { planes };
        for block in 0..blocks {
            let name = |part: &str| format!("layer{}.{block}.{part}", stage + 1);
            if depth.has_bottlenecks() {
                conv(name("conv1"), [planes, inputs, 1]);
                conv(name("conv2"), [planes, planes, 3]);
                conv(name("conv3"), [outputs, planes, 1]);
            } else {
                conv(name("conv1"), [planes, inputs, 3]);
                conv(name("conv2"), [planes, planes, 3]);
            }
            if block == 0 && (stage > 0 || inputs != outputs) {
                conv(name("downsample.0"), [outputs, inputs, 1]);
            }
            inputs = outputs;
        }
    }
    state.insert("fc.weight".into(), (vec![classes, inputs], numbers("fc", classes * inputs)));
    state.insert("fc.bias".into(), (vec![classes], numbers("fc.bias", classes)));
    state
}

/// An image of `channels` planes of `side` by `side`, in f64.
#[derive(Clone)]
struct Planes {
    channels: usize,
    side: usize,
    values: Vec<f64>,
}

/// The textbook's convolution, and the norm's formula by running statistics.
fn conv_norm(state: &State, conv: &str, norm: &str, x: &Planes, stride: usize) -> Planes {
    let (shape, weight) = &state[&format!("{conv}.weight")];
    let [outputs, inputs, kernel] = [shape[0], shape[1], shape[2]];
    assert_eq!(inputs, x.channels, "{conv}");
    let side = (x.side - 1) / stride + 1;
    let padding = (kernel / 2) as isize;
    let of_norm =
        |field: &str, channel: usize| f64::from(state[&format!("{norm}.{field}")].1[channel]);
    let mut values = Vec::with_capacity(outputs * side * side);
    for output in 0..outputs {
        let scale = of_norm("weight", output) / (of_norm("running_var", output) + 1e-5).sqrt();
        for place in 0..side * side {
            let (row, column) =
                ((place / side * stride) as isize, (place % side * stride) as isize);
            let mut sum = 0.0;
            for tap in 0..inputs * kernel * kernel {
                let (input, within) = (tap / (kernel * kernel), tap % (kernel * kernel));
                let y = row + (within / kernel) as isize - padding;
                let z = column + (within % kernel) as isize - padding;
                let inside = 0..x.side as isize;
                if inside.contains(&y) && inside.contains(&z) {
                    let pixel = (input * x.side + y as usize) * x.side + z as usize;
                    let weight = weight[output * inputs * kernel * kernel + tap];
                    sum += f64::from(weight) * x.values[pixel];
                }
            }
            let mean = of_norm("running_mean", output);
            values.push((sum - mean) * scale + of_norm("bias", output));
        }
    }
    Planes { channels: outputs, side, values }
}

fn relu(mut x: Planes) -> Planes {
    x.values.iter_mut().for_each(|value| *value = value.max(0.0));
    x
}

/// torchvision's `ResNet.forward` of one image.
fn logits(state: &State, depth: Depth, image: Planes) -> Vec<f64> {
    let x = relu(conv_norm(state, "conv1", "bn1", &image, 2));
    // The largest of 3 by 3, in steps of 2.
    let side = x.side.div_ceil(2);
    let largest = |place: usize| {
        let (plane, row, column) = (place / (side * side), place / side % side, place % side);
        let near = |center: usize| (2 * center).saturating_sub(1)..(2 * center + 2).min(x.side);
        let pixels = near(row).flat_map(|row| near(column).map(move |column| (row, column)));
        let values = pixels.map(|(row, column)| x.values[(plane * x.side + row) * x.side + column]);
        values.fold(f64::NEG_INFINITY, f64::max)
    };
    let values = (0..x.channels * side * side).map(largest).collect();
    let mut x = Planes { channels: x.channels, side, values };
    for (stage, blocks) in depth.blocks().into_iter().enumerate() {
        for block in 0..blocks {
            let name = format!("layer{}.{block}", stage + 1);
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let layers = if depth.has_bottlenecks() { 3 } else { 2 };
            // Of a bottleneck, the kernel of 3 by 3 has the stride.
            let strided = if depth.has_bottlenecks() { 2 } else { 1 };
            let mut y = x.clone();
            for layer in 1..=layers {
                let stride = if layer == strided { stride } else { 1 };
                let (conv, norm) = (format!("{name}.conv{layer}"), format!("{name}.bn{layer}"));
                y = conv_norm(state, &conv, &norm, &y, stride);
                y = if layer < layers { relu(y) } else { y };
            }
            let conv = format!("{name}.downsample.0");
            if state.contains_key(&format!("{conv}.weight")) {
                x = conv_norm(state, &conv, &format!("{name}.downsample.1"), &x, stride);
            }
            y.values.iter_mut().zip(&x.values).for_each(|(y, x)| *y += x);
            x = relu(y);
        }
    }
    let plane = x.side * x.side;
    let mean: Vec<f64> = x
        .values
        .chunks(plane)
        .map(|plane| plane.iter().sum::<f64>() / plane.len() as f64)
        .collect();
    let (weight, bias) = (&state["fc.weight"].1, &state["fc.bias"].1);
    let row = |(row, bias): (&[f32], &f32)| {
        f64::from(*bias) + row.iter().zip(&mean).map(|(w, x)| f64::from(*w) * x).sum::<f64>()
    };
    weight.chunks(mean.len()).zip(bias).map(row).collect()
}

fn save(state: &State, name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    let bytes: Vec<(&String, &Vec<usize>, Vec<u8>)> = state
        .iter()
        .map(|(name, (shape, values))| {
            (name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
        })
        .collect();
    let mut tensors: Vec<(String, TensorView<'_>)> = bytes
        .iter()
        .map(|(name, shape, bytes)| {
            let view = TensorView::new(Dtype::F32, (*shape).clone(), bytes).expect("a tensor");
            ((*name).clone(), view)
        })
        .collect();
    // torchvision has such a count for each norm.
    let count = 7i64.to_le_bytes();
    let view = TensorView::new(Dtype::I64, Vec::new(), &count).expect("a tensor");
    tensors.push(("bn1.num_batches_tracked".into(), view));
    safetensors::serialize_to_file(tensors, None, &path).expect("written");
    (folder, path)
}

fn load(path: &Path, config: &ModelConfig, new_head: bool) -> Result<ResNet> {
    let model = ResNet::new(config, &Device::flex());
    Weights::open(path)?.load(model, config, new_head).map(|model| model.valid())
}

#[test]
fn logits_are_those_of_torchvision_s_network() {
    const SIDE: usize = 40;
    for depth in [Depth::D18, Depth::D34, Depth::D50] {
        let config = ModelConfig { depth, width: 8, classes: 5 };
        let state = state(&config);
        let (_folder, path) = save(&state, "model.safetensors");
        assert_eq!(Weights::open(&path).expect("a network").model(), config);
        let model = load(&path, &config, false).expect("weights");
        let image = numbers("image", 3 * SIDE * SIDE);
        let values = image.iter().map(|value| f64::from(*value)).collect();
        let expected = logits(&state, depth, Planes { channels: 3, side: SIDE, values });
        let image = TensorData::new(image, [1, 3, SIDE, SIDE]);
        let output = model.forward(Tensor::from_data(image, &Device::flex()));
        let output: Vec<f32> = output.into_data().iter::<f32>().collect();
        let largest = expected.iter().fold(0f64, |most, value| most.max(value.abs()));
        for (class, (output, expected)) in output.iter().zip(&expected).enumerate() {
            // Roundings of f32, in each of up to 53 layers.
            let error = (f64::from(*output) - expected).abs();
            assert!(
                error < 1e-4 * largest,
                "ResNet-{depth}, class {class}: {output}, expected {expected}"
            );
        }
        assert!(largest > 0.1, "the comparison shows nothing: {expected:?}");
    }
}

#[track_caller]
fn refused(state: &State, config: &ModelConfig, expected: &[&str]) {
    let (_folder, path) = save(state, "model.safetensors");
    let error = format!("{:#}", load(&path, config, false).map(drop).expect_err("refused"));
    assert!(expected.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn files_that_do_not_fit_are_refused_with_the_tensors_names() {
    let config = ModelConfig { depth: Depth::D18, width: 4, classes: 5 };
    let whole = state(&config);
    let with = |change: fn(&mut State)| {
        let mut state = whole.clone();
        change(&mut state);
        state
    };
    let other = ModelConfig { depth: Depth::D34, ..config };
    refused(&whole, &other, &["is of a ResNet-18 of width 4", "--depth 34"]);
    let other = ModelConfig { classes: 3, ..config };
    refused(&whole, &other, &["tells 5 classes apart", "have 3", "--new-head"]);
    let state = with(|state| drop(state.remove("layer3.1.bn2.running_var")));
    refused(&state, &config, &["missing: layer3.1.bn2.running_var"]);
    let state = with(|state| drop(state.insert("aux.weight".into(), (vec![1], vec![0.0]))));
    refused(&state, &config, &["unexpected: aux.weight"]);
    let state =
        with(|state| drop(state.insert("layer1.0.bn1.bias".into(), (vec![2], vec![0.0; 2]))));
    refused(&state, &config, &["layer1.0.bn1.bias (expected [4], got [2])"]);
    let state = with(|state| drop(state.remove("layer1.1.conv1.weight")));
    refused(&state, &config, &["not of a residual network", "[1, 2, 2, 2] blocks"]);
    let state = with(|state| drop(state.remove("fc.weight")));
    refused(&state, &config, &["it has no tensor fc.weight"]);
    let (_folder, path) = save(&whole, "model.pth");
    let error = Weights::open(&path).map(drop).expect_err("refused").to_string();
    assert!(error.contains("expected a .safetensors file"), "{error}");
}

#[test]
fn a_new_head_takes_all_but_the_last_layer() {
    let config = ModelConfig { depth: Depth::D18, width: 4, classes: 5 };
    let state = state(&config);
    let (_folder, path) = save(&state, "model.safetensors");
    let config = ModelConfig { classes: 3, ..config };
    let model = load(&path, &config, true).expect("weights");
    let collected = model.collect(None, Some(Box::new(BurnToPyTorchAdapter)), false);
    let values = |name: &str| -> Vec<f32> {
        let tensor = collected.iter().find(|tensor| torch_name(&tensor.name, Depth::D18) == name);
        let data = burn_store::bridge::to_data(tensor.expect("a tensor")).expect("numbers");
        data.iter::<f32>().collect()
    };
    assert_eq!(values("layer4.1.conv2.weight"), state["layer4.1.conv2.weight"].1);
    assert_eq!(values("fc.bias").len(), 3);
}
