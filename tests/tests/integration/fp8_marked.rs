//! Unmodified layers whose weights are marked, against the operation that is called by name.

use blackburn::{
    fp8::{self, Recipe},
    train::precision::{Masters, Precision, PrecisionPolicy},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    on_burn_device, run_alone,
    tensors::{float, tensor, values},
};
use burn::{
    nn::{Linear, LinearConfig},
    prelude::*,
    tensor::{activation::gelu, module::linear},
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs a test alone: others watch what Burn runs at the same time.
const ALONE: &str = "BLACKBURN_TEST_MARKS_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 4] = [
        ("a_marked_layer_computes_what_is_called_by_name", layers),
        ("what_follows_a_product_is_done_to_it", followed),
        ("other_memory_is_left_alone", unmarked),
        ("a_policy_marks_linear_layers", policy),
    ];
    let trial = |(name, test): (&str, Test)| {
        let name = format!("fp8::marked::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(ALONE) {
                Some(_) => test(&device),
                None => run_alone(&name, &[(ALONE, "1")]).map(drop),
            })
        })
    };
    tests.map(trial).into()
}

/// Batches, rows, inputs, outputs.
const SHAPES: [[usize; 4]; 4] = [[1, 1, 16, 32], [1, 33, 24, 17], [3, 20, 64, 48], [2, 65, 48, 48]];

/// What a layer computes.
struct Results {
    y: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
}

/// What `forward` makes of x and a weight, and its gradients.
fn run(
    [batches, rows, inputs, outputs]: [usize; 4],
    storage: Storage,
    device: &Device,
    forward: impl Fn(Tensor<3>, Tensor<2>, Option<Tensor<1>>) -> Tensor<3>,
) -> Result<Results, Failed> {
    let device = &device.clone().autodiff();
    let random = |seed, elements, deviation| normal(seed, elements, deviation, storage);
    let x = random(1, batches * rows * inputs, 1.0);
    let x = tensor(&x, [batches, rows, inputs], storage, device).require_grad();
    let weight = random(2, inputs * outputs, (inputs as f64).sqrt().recip());
    let weight = tensor(&weight, [inputs, outputs], storage, device).require_grad();
    let bias = tensor(&random(3, outputs, 1.0), [outputs], storage, device);
    let y = forward(x.clone(), weight.clone(), Some(bias));
    let dy = random(4, batches * rows * outputs, 1e-3);
    let dy = tensor(&dy, [batches, rows, outputs], storage, device);
    let gradients = (y.clone() * dy).sum().backward();
    let missing = "a gradient is missing";
    Ok(Results {
        y: values(y.inner())?,
        dx: values(x.grad(&gradients).ok_or(missing)?)?,
        dw: values(weight.grad(&gradients).ok_or(missing)?)?,
    })
}

/// How far apart two results are, as a share of the largest number.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let largest = a.iter().fold(f64::MIN_POSITIVE, |largest, a| largest.max(a.abs()));
    let farthest = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    farthest / largest
}

/// Sums of the same products in another order, rounded once.
fn same(what: &str, actual: &Results, expected: &Results, storage: Storage) -> Result<(), Failed> {
    let bound = 2.0 * storage.unit_roundoff() + 256.0 * Storage::F32.unit_roundoff();
    for (name, a, b) in [
        ("y", &actual.y, &expected.y),
        ("dx", &actual.dx, &expected.dx),
        ("dW", &actual.dw, &expected.dw),
    ] {
        let distance = distance(b, a);
        if distance.is_nan() || distance > bound {
            return Err(format!("{what}: {name} is {distance:.2e} off, bound {bound:.2e}").into());
        }
    }
    Ok(())
}

/// Rounding to 8 bits shows, so that the comparison tells it from nothing done.
fn differs(what: &str, actual: &Results, exact: &Results) -> Result<(), Failed> {
    const LEAST: f64 = 0.004;
    for (name, a, b) in
        [("y", &actual.y, &exact.y), ("dx", &actual.dx, &exact.dx), ("dW", &actual.dw, &exact.dw)]
    {
        let distance = distance(b, a);
        if distance < LEAST {
            return Err(format!("{what}: {name} is as without a mark, {distance:.2e} off").into());
        }
    }
    Ok(())
}

fn each(
    device: &Device,
    test: impl Fn(&str, [usize; 4], Storage, Recipe) -> Result<(), Failed>,
) -> Result<(), Failed> {
    for storage in Storage::ALL.into_iter().filter(|s| device.supports_dtype(float(*s))) {
        for recipe in [Recipe::hybrid(), Recipe::e4m3().with_margin(1)] {
            for shape in SHAPES {
                test(&format!("{storage:?} {shape:?} {recipe:?}"), shape, storage, recipe)?;
            }
        }
    }
    Ok(())
}

fn layers(device: &Device) -> Result<(), Failed> {
    each(device, |what, shape, storage, recipe| {
        let by_name = run(shape, storage, device, |x, w, b| fp8::linear(x, w, b, &recipe))?;
        let by_mark = run(shape, storage, device, |x, w, b| linear(x, fp8::mark(w, &recipe), b))?;
        let exact = run(shape, storage, device, linear)?;
        same(what, &by_mark, &by_name, storage)?;
        differs(what, &by_mark, &exact)
    })
}

/// GELU, and a residual.
fn followed(device: &Device) -> Result<(), Failed> {
    each(device, |what, shape, storage, recipe| {
        let ends = |y: Tensor<3>| gelu(y.clone()) + y;
        let by_name = run(shape, storage, device, |x, w, b| ends(fp8::linear(x, w, b, &recipe)))?;
        let by_mark =
            run(shape, storage, device, |x, w, b| ends(linear(x, fp8::mark(w, &recipe), b)))?;
        // GELU's gradient is computed in the storage type and rounded between operations.
        let loose = if storage == Storage::F32 { 1e-4 } else { 64.0 * storage.unit_roundoff() };
        for (a, b) in [(&by_mark.y, &by_name.y), (&by_mark.dx, &by_name.dx)] {
            let distance = distance(b, a);
            if distance.is_nan() || distance > loose.max(0.02) {
                return Err(format!("{what}: {distance:.2e} off").into());
            }
        }
        Ok(())
    })
}

fn unmarked(device: &Device) -> Result<(), Failed> {
    let recipe = Recipe::hybrid();
    let shape = SHAPES[2];
    let alone = run(shape, Storage::F32, device, linear)?;
    let beside = run(shape, Storage::F32, device, |x, weight, bias| {
        // Another weight with the same numbers, and another input.
        let other = fp8::mark(weight.clone() * 1.0, &recipe);
        let _ = values(linear(x.clone() * 1.0, other, None).inner());
        linear(x, weight, bias)
    })?;
    same("beside a marked layer", &beside, &alone, Storage::F32)
}

fn policy(device: &Device) -> Result<(), Failed> {
    if !device.supports_dtype(float(Storage::Bf16)) {
        let model = LinearConfig::new(4, 4).init(device);
        let policy = PrecisionPolicy::new(Precision::Fp8(Recipe::hybrid()));
        return match policy.apply(model) {
            Err(error) if error.to_string().contains("fp8 is not among what") => Ok(()),
            other => Err(format!("{other:?}").into()),
        };
    }
    let recipe = Recipe::hybrid();
    let training = &device.clone().autodiff();
    for masters in [Masters::F32, Masters::None] {
        let policy = PrecisionPolicy::new(Precision::Fp8(recipe)).with_masters(masters);
        let layer = LinearConfig::new(64, 48).init(training);
        let plain = PrecisionPolicy::new(Precision::Bf16).apply(layer.clone())?;
        let layer = policy.apply(layer)?;
        let x =
            || tensor(&normal(5, 32 * 64, 1.0, Storage::Bf16), [32, 64], Storage::Bf16, training);
        let y = layer.forward(x());
        let gradients = y.clone().cast(float(Storage::F32)).sum().backward();
        let by_name = values(fp8::linear_forward(&plain, x(), &recipe).inner())?;
        let y = values(y.inner())?;
        let bound = 2.0 * Storage::Bf16.unit_roundoff();
        let (close, exact) =
            (distance(&by_name, &y), distance(&values(plain.forward(x()).inner())?, &y));
        if close.is_nan() || close > bound || exact <= bound {
            return Err(format!("{masters:?}: {close:.2e} off, {exact:.2e} from bf16").into());
        }
        if layer.weight.grad(&gradients).is_none() {
            return Err(format!("{masters:?}: no gradient").into());
        }
        // Left out, it is bf16's to the bit.
        let model = policy.without_fp8("weight").apply(LinearConfig::new(64, 48).init(training))?;
        let report = policy_report(&model);
        if report.contains("fp8") {
            return Err(report.into());
        }
    }
    Ok(())
}

fn policy_report(model: &Linear) -> String {
    let policy = PrecisionPolicy::new(Precision::Fp8(Recipe::hybrid())).without_fp8("weight");
    policy.report(model).layers.iter().map(|row| row.computed.clone()).collect()
}
