//! Linear layers in 8 bits, on the CPU and on the device that kernels are tested on, against the
//! products of what the 8-bit operands stand for and against exact ones.

use blackburn::fp8::{self, Format, Promotion, Recipe};
use blackburn_reference::{
    activation::Activation,
    column_sum,
    fp8::Fp8,
    linear::{Linear, LinearGradients},
    matmul::{MatmulCase, MatmulPrecision, magnitudes},
    random::normal,
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
    prelude::*,
};
use libtest_mimic::{Completion, Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Rows, inputs, outputs: around groups of 16 bytes and of the tensor cores' tiles, never square.
const SHAPES: [[usize; 3]; 5] =
    [[1, 16, 32], [33, 24, 17], [17, 1, 5], [64, 128, 48], [130, 100, 70]];

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 9] = [
        ("both_passes_are_within_bounds", |device| each_type(device, bounds)),
        ("noise_is_as_low_as_8_bits_allow", |device| each_type(device, noise)),
        ("leading_dimensions_are_kept", leading_dimensions),
        ("gradients_that_nobody_asks_for_are_left_out", partly_tracked),
        ("weights_may_be_wider_than_activations", wide_weights),
        ("an_unmodified_layer_learns", learns),
        ("nan_reaches_its_row_and_a_zero_input_gives_the_bias", special_values),
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
        ] {
            test(device, storage, recipe).map_err(|error| {
                format!("{storage:?} {recipe:?}: {}", error.message().unwrap_or(""))
            })?;
        }
    }
    Ok(())
}

fn reference_format(format: Format) -> Fp8 {
    match format {
        Format::E4m3 => Fp8::E4m3,
        Format::E5m2 => Fp8::E5m2,
    }
}

/// What the tensor is in 8 bits. Scale and product are f32, in which quotients of short numbers often
/// come to lie in the middle between two codes.
fn rounded(values: &[f64], format: Format, margin: u32) -> Vec<f64> {
    let fp8 = reference_format(format);
    let scale = fp8.scale_for(values) * (-f64::from(margin)).exp2();
    let inverse = Storage::F32.round(1.0 / scale);
    values.iter().map(|value| fp8.round(Storage::F32.round(value * scale)) * inverse).collect()
}

/// Numbers for a layer.
struct Case {
    shape: [usize; 3],
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    dy: Vec<f64>,
}

/// What a layer computes.
struct Results {
    y: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
    db: Vec<f64>,
}

impl Case {
    fn new(shape: [usize; 3], storage: Storage) -> Self {
        let [rows, inputs, outputs] = shape;
        let weight_deviation = (inputs as f64).sqrt().recip();
        Self {
            shape,
            x: normal(1, rows * inputs, 1.0, storage),
            weight: normal(2, inputs * outputs, weight_deviation, storage),
            bias: normal(3, outputs, 1.0, storage),
            // Gradients are small.
            dy: normal(4, rows * outputs, 1e-3, storage),
        }
    }

    fn run(&self, device: &Device, storage: Storage, recipe: Recipe) -> Result<Results, Failed> {
        let [rows, inputs, outputs] = self.shape;
        let device = &device.clone().autodiff();
        let x = tensor(&self.x, [rows, inputs], storage, device).require_grad();
        let weight = tensor(&self.weight, [inputs, outputs], storage, device).require_grad();
        let bias = tensor(&self.bias, [outputs], storage, device).require_grad();
        let y = fp8::linear(x.clone(), weight.clone(), Some(bias.clone()), &recipe);
        let out = y.dtype();
        // In f32, so that the gradient that arrives is dy itself.
        let dy = tensor(&self.dy, [rows, outputs], Storage::F32, device);
        let gradients = (y.clone().cast(float(Storage::F32)) * dy).sum().backward();
        if out != x.dtype() {
            return Err(format!("y is {out:?}").into());
        }
        let missing = "a gradient is missing";
        Ok(Results {
            y: values(y.inner())?,
            dx: values(x.grad(&gradients).ok_or(missing)?)?,
            dw: values(weight.grad(&gradients).ok_or(missing)?)?,
            db: values(bias.grad(&gradients).ok_or(missing)?)?,
        })
    }

    /// The layer, with operands of these values.
    fn layer<'a>(&self, x: &'a [f64], weight: &'a [f64], bias: &'a [f64]) -> Linear<'a> {
        let [rows, inputs, outputs] = self.shape;
        let activation = Activation::Identity;
        Linear { rows, inputs, outputs, x, weight, bias: Some(bias), activation }
    }

    /// `y` and the gradients, of the operands as they are or as they are in 8 bits.
    fn expected(&self, recipe: Option<Recipe>) -> (Vec<f64>, LinearGradients) {
        let round = |values: &[f64], format: fn(Recipe) -> Format| match recipe {
            None => values.to_vec(),
            Some(recipe) => rounded(values, format(recipe), recipe.margin),
        };
        let x = round(&self.x, |recipe| recipe.forward);
        let weight = round(&self.weight, |recipe| recipe.forward);
        let dy = round(&self.dy, |recipe| recipe.backward);
        let layer = self.layer(&x, &weight, &self.bias);
        let forward = layer.forward();
        let gradients = layer.backward(&forward.z, &dy);
        (forward.y, gradients)
    }
}

/// What the device adds in: 8-bit tensor cores, or f32.
fn precision(storage: Storage, device: &Device, promoted: bool) -> MatmulPrecision {
    let on_cuda = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    if on_cuda && *device != Device::flex() {
        MatmulPrecision::fp8(storage, promoted.then_some(128))
    } else {
        MatmulPrecision::exact(storage)
    }
}

/// Compares a product with that of what the operands stand for in 8 bits. Scales are f32, so three
/// more factors are off by up to 2.5 units in the last place each.
fn check_product(
    what: &str,
    actual: &[f64],
    expected: &[f64],
    case: &MatmulCase,
    [lhs, rhs]: [&[f64]; 2],
    precision: MatmulPrecision,
) -> Result<(), Failed> {
    const SCALES: f64 = 16.0;
    let bounds: Vec<f64> = precision
        .bounds(expected, &magnitudes(case, lhs, rhs), case.k + 1)
        .iter()
        .zip(magnitudes(case, lhs, rhs))
        .map(|(bound, magnitude)| bound + SCALES * Storage::F32.unit_roundoff() * magnitude)
        .collect();
    compare(actual, expected, &bounds).map_err(|error| format!("{what} of {case}: {error}"))?;
    Ok(())
}

fn bounds(device: &Device, storage: Storage, recipe: Recipe) -> Result<(), Failed> {
    for shape in SHAPES {
        let case = Case::new(shape, storage);
        let actual = case.run(device, storage, recipe)?;
        let (y, gradients) = case.expected(Some(recipe));
        let x = rounded(&case.x, recipe.forward, recipe.margin);
        let weight = rounded(&case.weight, recipe.forward, recipe.margin);
        let dy = rounded(&case.dy, recipe.backward, recipe.margin);
        let layer = case.layer(&x, &weight, &case.bias);
        let promoted = recipe.promotion == Promotion::Always;
        let forward = precision(storage, device, promoted);
        check_product("y", &actual.y, &y, &layer.forward_case(), [&x, &weight], forward)?;
        let promoted = recipe.promotion != Promotion::Never;
        let backward = precision(storage, device, promoted);
        let dgrad = layer.dgrad_case();
        check_product("dx", &actual.dx, &gradients.dx, &dgrad, [&dy, &weight], backward)?;
        let wgrad = layer.wgrad_case();
        check_product("dW", &actual.dw, &gradients.dw, &wgrad, [&x, &dy], backward)?;

        // The gradient of the bias is not rounded to 8 bits, only to the type of y on its way here.
        let [rows, _, outputs] = shape;
        let arrived: Vec<f64> = case.dy.iter().map(|dy| storage.round(*dy)).collect();
        let magnitudes: Vec<f64> = arrived.iter().map(|dy| dy.abs()).collect();
        let db = column_sum::column_sum(&arrived, 1, rows, outputs);
        let bounds: Vec<f64> = db
            .iter()
            .zip(column_sum::column_sum(&magnitudes, 1, rows, outputs))
            .map(|(db, magnitude)| column_sum::bound(*db, magnitude, rows, storage))
            .collect();
        // Without a kernel, sums may be kept in the type itself.
        if storage == Storage::F32 {
            compare(&actual.db, &db, &bounds).map_err(|error| format!("db: {error}"))?;
        }
    }
    Ok(())
}

/// The thresholds that torchao tests its 8-bit layers by.
fn noise(device: &Device, storage: Storage, recipe: Recipe) -> Result<(), Failed> {
    let case = Case::new([128, 192, 96], storage);
    let actual = case.run(device, storage, recipe)?;
    let (y, exact) = case.expected(None);
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
    let all = case.run(device, Storage::F32, Recipe::default())?;
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
        let (expected, _) = case.expected(None);
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
    let (targets, _) = case.expected(None);
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
