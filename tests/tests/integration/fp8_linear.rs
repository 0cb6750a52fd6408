//! Linear layers in 8 bits, on the CPU and on the device that kernels are tested on, against the
//! products of what the 8-bit operands stand for and against exact ones.

use super::layer::{Case, End, Results, check};
use blackburn::{
    fp8::{self, Promotion, Recipe},
    train::scaler::GradScalerConfig,
};
use blackburn_reference::{
    storage::Storage,
    tolerance::{compare, sqnr_db},
};
use blackburn_tests::{
    on_burn_device,
    tensors::{float, tensor, values},
};
use burn::{
    module::Param,
    nn::{Linear as Layer, LinearConfig},
    optim::GradientsParams,
    prelude::*,
    tensor::module::linear,
};
use libtest_mimic::{Completion, Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Rows, inputs, outputs: around groups of 16 bytes and of the tensor cores' tiles, never square.
const SHAPES: [[usize; 3]; 5] =
    [[1, 16, 32], [33, 24, 17], [17, 1, 5], [64, 128, 48], [130, 100, 70]];

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 11] = [
        ("both_passes_are_within_bounds", |device| each_type(device, bounds)),
        ("noise_is_as_low_as_8_bits_allow", |device| each_type(device, noise)),
        ("leading_dimensions_are_kept", leading_dimensions),
        ("gradients_that_nobody_asks_for_are_left_out", partly_tracked),
        ("weights_may_be_wider_than_activations", wide_weights),
        ("an_unmodified_layer_learns", learns),
        ("nan_reaches_its_row_and_a_zero_input_gives_the_bias", special_values),
        ("infinity_makes_nan_of_what_it_reaches", infinities),
        ("an_overflow_is_seen_by_the_loss_scaler", overflow),
        ("empty_inputs_give_empty_outputs", empty),
        ("bad_arguments_are_named", bad_arguments),
    ];
    let mut trials = Vec::new();
    for (name, test) in tests {
        trials.push(Trial::ignorable_test(format!("fp8::linear::{name}"), move || {
            on_burn_device(|device| test(&device))
        }));
        trials.push(Trial::ignorable_test(format!("fp8::linear::{name}_on_the_cpu"), move || {
            test(&Device::flex()).map(|()| Completion::Completed)
        }));
    }
    trials
}

fn each_type(
    device: &Device,
    test: fn(&Device, Storage, Recipe) -> Result<(), Failed>,
) -> Result<(), Failed> {
    for storage in Storage::ALL {
        if !device.supports_dtype(float(storage)) {
            continue;
        }
        for recipe in [
            Recipe::hybrid(),
            Recipe::e4m3().with_margin(1),
            Recipe::hybrid().with_promotion(Promotion::Never),
            Recipe::hybrid().with_promotion(Promotion::Always),
            Recipe::mxfp8(),
        ] {
            test(device, storage, recipe).map_err(|error| {
                format!("{storage:?} {recipe:?}: {}", error.message().unwrap_or(""))
            })?;
        }
    }
    Ok(())
}

fn bounds(device: &Device, storage: Storage, recipe: Recipe) -> Result<(), Failed> {
    for shape in SHAPES {
        let case = Case::new(shape, storage);
        let actual = by_name(&case, device, storage, recipe)?;
        let expected = case.in_eight_bits(device, storage, recipe, End::Plain);
        let exact = case.exact(End::Plain);
        for result in check(&actual, &expected, &exact) {
            result.map_err(|error| format!("{shape:?}: {}", error.message().unwrap_or("")))?;
        }
        case.check_bias(&actual.db, storage)?;
        // The negative control: what rounds nothing to 8 bits.
        let plain = case.run(device, storage, |x, weight, bias| linear(x, weight, Some(bias)))?;
        if let Some(at) = check(&plain, &expected, &exact).iter().position(Result::is_ok) {
            return Err(format!("{shape:?}: result {at} passes without 8 bits").into());
        }
    }
    Ok(())
}

/// The layer, by the operation.
fn by_name(
    case: &Case,
    device: &Device,
    storage: Storage,
    recipe: Recipe,
) -> Result<Results, Failed> {
    case.run(device, storage, |x, weight, bias| fp8::linear(x, weight, Some(bias), &recipe))
}

/// The thresholds that torchao tests its 8-bit layers by.
fn noise(device: &Device, storage: Storage, recipe: Recipe) -> Result<(), Failed> {
    let case = Case::new([128, 192, 96], storage);
    let actual = by_name(&case, device, storage, recipe)?;
    let (y, exact) = case.exact(End::Plain);
    let bias = |i: usize| case.bias[i % case.shape[2]];
    let product = |y: &[f64]| y.iter().enumerate().map(|(i, y)| y - bias(i)).collect::<Vec<_>>();
    let at_least = |what: &str, db: f64, least: f64| {
        // NaN is not enough either.
        if db >= least { Ok(()) } else { Err(Failed::from(format!("{what}: {db:.1} dB"))) }
    };
    at_least("product", sqnr_db(&product(&actual.y), &product(&y)), 25.0)?;
    at_least("y", sqnr_db(&actual.y, &y), 18.0)?;
    at_least("dx", sqnr_db(&actual.dx, &exact.dx), 17.0)?;
    at_least("dW", sqnr_db(&actual.dw, &exact.dw), 17.0)?;
    at_least("db", sqnr_db(&actual.db, &exact.db), 30.0)?;
    // The negative control: a dropped scale, or one that is a power of two off, is not noise.
    let off: Vec<f64> = actual.dw.iter().map(|dw| 2.0 * dw).collect();
    match sqnr_db(&off, &exact.dw) {
        db if db < 17.0 => Ok(()),
        db => Err(format!("twice the gradient passes with {db:.1} dB").into()),
    }
}

fn leading_dimensions(device: &Device) -> Result<(), Failed> {
    let case = Case::new([30, 24, 17], Storage::F32);
    let recipe = Recipe::default();
    let weight: Tensor<2> = tensor(&case.weight, [24, 17], Storage::F32, device);
    let x: Tensor<2> = tensor(&case.x, [30, 24], Storage::F32, device);
    let flat = fp8::linear(x.clone(), weight.clone(), None, &recipe);
    let deep = fp8::linear(x.clone().reshape([2, 3, 5, 24]), weight.clone(), None, &recipe);
    if deep.dims() != [2, 3, 5, 17] {
        return Err(format!("{:?}", deep.dims()).into());
    }
    if values(deep)? != values(flat.clone())? {
        return Err("another rank gives other numbers".into());
    }
    // Views: columns of a wider tensor, and a transposed weight.
    let wide = Tensor::cat(vec![x.clone(), x], 1).slice([0..30, 24..48]);
    let turned = weight.transpose().reshape([17, 24]).transpose();
    if values(fp8::linear(wide, turned, None, &recipe))? != values(flat)? {
        return Err("views give other numbers".into());
    }
    Ok(())
}

fn partly_tracked(device: &Device) -> Result<(), Failed> {
    let [rows, inputs, outputs] = [12, 20, 9];
    let case = Case::new([rows, inputs, outputs], Storage::F32);
    let all = by_name(&case, device, Storage::F32, Recipe::default())?;
    let device = &device.clone().autodiff();
    let dy: Tensor<2> = tensor(&case.dy, [rows, outputs], Storage::F32, device);
    for (track_x, track_weight) in [(true, false), (false, true), (false, false)] {
        let x: Tensor<2> = tensor(&case.x, [rows, inputs], Storage::F32, device);
        let x = x.set_require_grad(track_x);
        let weight: Tensor<2> = tensor(&case.weight, [inputs, outputs], Storage::F32, device);
        let weight = weight.set_require_grad(track_weight);
        let y = fp8::linear(x.clone(), weight.clone(), None, &Recipe::default());
        if !track_x && !track_weight {
            let bias: Tensor<1> = tensor(&case.bias, [outputs], Storage::F32, device);
            if values((y + bias.unsqueeze()).inner())?.len() != all.y.len() {
                return Err("an untracked layer has another size".into());
            }
            continue;
        }
        let gradients = (y * dy.clone()).sum().backward();
        for (tensor, tracked, expected) in [(x, track_x, &all.dx), (weight, track_weight, &all.dw)]
        {
            match tensor.grad(&gradients) {
                Some(gradient) if tracked && values(gradient.clone())? == *expected => {}
                None if !tracked => {}
                other => return Err(format!("tracked {tracked}: {other:?}").into()),
            }
        }
    }
    Ok(())
}

/// Masters in f32, activations in 16 bits.
fn wide_weights(device: &Device) -> Result<(), Failed> {
    let halves = [Storage::F16, Storage::Bf16].into_iter();
    for storage in halves.filter(|storage| device.supports_dtype(float(*storage))) {
        let case = Case::new([16, 32, 24], Storage::F32);
        let device = &device.clone().autodiff();
        let x: Tensor<2> = tensor(&case.x, [16, 32], Storage::F32, device);
        let x = x.cast(float(storage)).require_grad();
        let weight = tensor(&case.weight, [32, 24], Storage::F32, device).require_grad();
        let bias = tensor(&case.bias, [24], Storage::F32, device).require_grad();
        let y = fp8::linear(x.clone(), weight.clone(), Some(bias.clone()), &Recipe::default());
        let gradients = y.clone().sum().backward();
        let dtypes = [
            Some(y.dtype()),
            x.grad(&gradients).map(|dx| dx.dtype()),
            weight.grad(&gradients).map(|dw| dw.dtype()),
            bias.grad(&gradients).map(|db| db.dtype()),
        ];
        let (half, full) = (Some(x.dtype()), Some(weight.dtype()));
        if dtypes != [half, half, full, full] {
            return Err(format!("{dtypes:?}").into());
        }
        let (expected, _) = case.exact(End::Plain);
        let db = sqnr_db(&values(y.inner())?, &expected);
        if db < 18.0 {
            return Err(format!("{storage:?}: {db:.1} dB").into());
        }
    }
    Ok(())
}

/// Steps along the gradient bring an unmodified layer near the one that made the targets.
fn learns(device: &Device) -> Result<(), Failed> {
    let [rows, inputs, outputs] = [64, 16, 8];
    let case = Case::new([rows, inputs, outputs], Storage::F32);
    let (targets, _) = case.exact(End::Plain);
    let device = &device.clone().autodiff();
    let x: Tensor<2> = tensor(&case.x, [rows, inputs], Storage::F32, device);
    let targets: Tensor<2> = tensor(&targets, [rows, outputs], Storage::F32, device);
    let mut layer: Layer = LinearConfig::new(inputs, outputs).init(device);
    let mut losses = Vec::new();
    for _ in 0..40 {
        let y = fp8::linear_forward(&layer, x.clone(), &Recipe::hybrid());
        let loss = (y - targets.clone()).square().mean();
        let gradients = loss.backward();
        let missing = "a parameter has no gradient";
        let step = |gradient: Tensor<2>| Tensor::from_inner(gradient * 2.0);
        let weight = layer.weight.val();
        let dw = step(weight.grad(&gradients).ok_or(missing)?);
        layer.weight = Param::from_tensor((weight - dw).detach());
        let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?.val();
        let db = Tensor::from_inner(bias.grad(&gradients).ok_or(missing)? * 2.0);
        layer.bias = Some(Param::from_tensor((bias - db).detach()));
        losses.push(values(loss.inner())?[0]);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    // What 8 bits leave of the targets' variance is a hundredth or less.
    if last < 0.01 * first { Ok(()) } else { Err(format!("{losses:?}").into()) }
}

fn special_values(device: &Device) -> Result<(), Failed> {
    let mut x = vec![0.5; 3 * 16];
    x[16] = f64::NAN;
    let weight = [0.25; 16 * 2];
    let weight: Tensor<2> = tensor(&weight, [16, 2], Storage::F32, device);
    let input: Tensor<2> = tensor(&x, [3, 16], Storage::F32, device);
    let y = values(fp8::linear(input, weight.clone(), None, &Recipe::default()))?;
    if [y[0], y[1], y[4], y[5]] != [2.0; 4] || !y[2].is_nan() || !y[3].is_nan() {
        return Err(format!("NaN in the second row gave {y:?}").into());
    }
    let bias: Tensor<1> = tensor(&[3.0, -4.0], [2], Storage::F32, device);
    let zeros = Tensor::<2>::zeros([2, 16], device);
    let y = values(fp8::linear(zeros, weight, Some(bias), &Recipe::default()))?;
    if y != [3.0, -4.0, 3.0, -4.0] {
        return Err(format!("zeros gave {y:?}").into());
    }
    Ok(())
}

/// As a conversion without saturation has it. Rows and columns without one stay finite.
fn infinities(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    for infinity in [f64::INFINITY, f64::NEG_INFINITY] {
        let with = |len: usize, value: f64, at: usize| {
            let mut values = vec![value; len];
            values[at] = infinity;
            values
        };
        let leaf = |values: &[f64], shape: [usize; 2]| {
            tensor::<2>(values, shape, Storage::F32, device).require_grad()
        };
        let run = |x: &[f64], weight: &[f64], dy: &[f64]| -> Result<[Vec<f64>; 3], Failed> {
            let (x, weight) = (leaf(x, [3, 16]), leaf(weight, [16, 2]));
            let y = fp8::linear(x.clone(), weight.clone(), None, &Recipe::default());
            let dy: Tensor<2> = tensor(dy, [3, 2], Storage::F32, device);
            let gradients = (y.clone() * dy).sum().backward();
            let gradient = |of: Tensor<2>| -> Result<Vec<f64>, Failed> {
                values(of.grad(&gradients).ok_or("no gradient")?)
            };
            Ok([values(y.inner())?, gradient(x)?, gradient(weight)?])
        };
        let nan = |len: usize, is_nan: fn(usize) -> bool, value: f64| -> Vec<f64> {
            (0..len).map(|i| if is_nan(i) { f64::NAN } else { value }).collect()
        };
        let check = |what: &str, actual: &[f64], expected: Vec<f64>| {
            // Two scales and their inverses.
            let bounds: Vec<f64> =
                expected.iter().map(|v| 16.0 * Storage::F32.unit_roundoff() * v).collect();
            compare(actual, &expected, &bounds)
                .map_err(|error| Failed::from(format!("{infinity} in {what}: {error}")))
                .map(drop)
        };
        // In the second row of x: its row of y, and its column of x^T dy.
        let [y, dx, dw] = run(&with(48, 0.5, 16), &[0.25; 32], &[0.5; 6])?;
        check("x, y", &y, nan(6, |i| i / 2 == 1, 2.0))?;
        check("x, dx", &dx, nan(48, |_| false, 0.25))?;
        check("x, dW", &dw, nan(32, |i| i / 2 == 0, 0.75))?;
        // In the second column of the weight.
        let [y, dx, dw] = run(&[0.5; 48], &with(32, 0.25, 1), &[0.5; 6])?;
        check("W, y", &y, nan(6, |i| i % 2 == 1, 2.0))?;
        check("W, dx", &dx, nan(48, |i| i % 16 == 0, 0.25))?;
        check("W, dW", &dw, nan(32, |_| false, 0.75))?;
        // In what comes back: second row, second column.
        let [_, dx, dw] = run(&[0.5; 48], &[0.25; 32], &with(6, 0.5, 3))?;
        check("dy, dx", &dx, nan(48, |i| i / 16 == 1, 0.25))?;
        check("dy, dW", &dw, nan(32, |i| i % 2 == 1, 0.75))?;
    }
    Ok(())
}

/// A gradient that overflows on its way into the layer: the step is left out.
fn overflow(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let layer: Layer = LinearConfig::new(16, 4).with_bias(false).init(device);
    for (share, skipped) in [(1.0, 0), (f64::from(f32::MAX), 1)] {
        let mut scaler = GradScalerConfig::default().init(device)?;
        let x = Tensor::<2>::ones([3, 16], device);
        let loss = fp8::linear_forward(&layer, x, &Recipe::default()).mul_scalar(share).sum();
        let gradients = scaler.scale(loss).backward();
        let mut gradients = GradientsParams::from_grads(gradients, &layer);
        scaler.unscale(&mut gradients, &layer)?;
        scaler.update()?;
        let found = scaler.state().skipped_steps;
        if found != skipped {
            return Err(format!("{found} steps left out with a factor of {share:e}").into());
        }
    }
    Ok(())
}

fn empty(device: &Device) -> Result<(), Failed> {
    let x = Tensor::<3>::zeros([2, 0, 16], device);
    let weight = Tensor::<2>::ones([16, 4], device);
    let y = fp8::linear(x, weight, Some(Tensor::ones([4], device)), &Recipe::default());
    if y.dims() == [2, 0, 4] { Ok(()) } else { Err(format!("{:?}", y.dims()).into()) }
}

fn bad_arguments(device: &Device) -> Result<(), Failed> {
    let x = || Tensor::<2>::ones([3, 16], device);
    let weight = || Tensor::<2>::ones([16, 4], device);
    let says = |call: &dyn Fn() -> Tensor<2>, expected: &str| {
        let panic = match catch_unwind(AssertUnwindSafe(call)) {
            Ok(y) => return Err(Failed::from(format!("no panic, but {:?}", y.dims()))),
            Err(panic) => panic,
        };
        match panic.downcast_ref::<String>() {
            Some(message) if message.contains(expected) => Ok(()),
            other => Err(format!("{other:?} does not say {expected:?}").into()),
        }
    };
    let recipe = Recipe::default();
    says(&|| fp8::linear(x(), weight().transpose(), None, &recipe), "`x`: expected 4 in the last")?;
    let bias = || Some(Tensor::<1>::ones([3], device));
    says(&|| fp8::linear(x(), weight(), bias(), &recipe), "`bias`: expected 4 elements")?;
    let margin = recipe.with_margin(17);
    says(&|| fp8::linear(x(), weight(), None, &margin), "`recipe`: expected a margin of at most 16")
}
