//! Unmodified layers whose weights are marked, against the products of operands in 8 bits in f64.

use super::layer::{Case, End, check};
use blackburn::{
    fp8::{self, Recipe},
    train::{
        memory::MemoryMonitor,
        precision::{Masters, Precision, PrecisionPolicy},
    },
};
use blackburn_reference::{
    activation::Activation,
    matmul::{Layout, MatmulCase, MatmulPrecision, magnitudes, matmul},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    on_burn_device, run_alone,
    tensors::{float, tensor, values},
};
use burn::{
    nn::{Linear, LinearConfig},
    prelude::*,
    tensor::{
        activation::{gelu, relu},
        module::linear,
    },
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs a test alone: others watch what Burn runs at the same time.
const ALONE: &str = "BLACKBURN_TEST_MARKS_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 7] = [
        ("a_marked_layer_computes_what_8_bits_give", layers),
        ("what_follows_a_product_is_done_to_it", followed),
        ("other_memory_is_left_alone", unmarked),
        ("what_an_operation_makes_in_marked_memory_is_not_marked", taken_over),
        ("inputs_are_let_go_of", released),
        ("a_marked_cast_of_a_parameter_computes_in_8_bits", cast),
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

/// Batches, rows of each, inputs, outputs.
const SHAPES: [[usize; 4]; 4] = [[1, 1, 16, 32], [1, 33, 24, 17], [3, 20, 64, 48], [2, 65, 48, 48]];

/// Those with a scale for a whole tensor.
fn recipes() -> [Recipe; 2] {
    [Recipe::hybrid(), Recipe::e4m3().with_margin(1)]
}

/// Every type of the device, recipe and shape.
fn each(
    device: &Device,
    recipes: &[Recipe],
    test: impl Fn([usize; 4], Storage, Recipe) -> Result<(), Failed>,
) -> Result<(), Failed> {
    for storage in Storage::ALL.into_iter().filter(|s| device.supports_dtype(float(*s))) {
        for recipe in recipes.iter().copied() {
            for shape in SHAPES {
                test(shape, storage, recipe).map_err(|error| {
                    let error = error.message().unwrap_or("");
                    format!("{storage:?} {shape:?} {recipe:?}: {error}")
                })?;
            }
        }
    }
    Ok(())
}

fn layers(device: &Device) -> Result<(), Failed> {
    let recipes = [recipes().as_slice(), &[Recipe::mxfp8()]].concat();
    each(device, &recipes, |shape, storage, recipe| {
        in_eight_bits(device, shape, storage, recipe, End::Plain, |y| y)
    })
}

/// An activation, and a residual. In 16 bits, where operations of Burn's round what is in between, the gradient
/// of GELU would be known too badly to round it to 8 bits.
fn followed(device: &Device) -> Result<(), Failed> {
    each(device, &recipes(), |shape, storage, recipe| {
        let ends =
            |activation: fn(Tensor<3>) -> Tensor<3>| move |y: Tensor<3>| activation(y.clone()) + y;
        let end = End::Residual(Activation::Relu);
        in_eight_bits(device, shape, storage, recipe, end, ends(relu))?;
        if storage != Storage::F32 {
            return Ok(());
        }
        let end = End::Residual(Activation::Gelu);
        in_eight_bits(device, shape, storage, recipe, end, ends(gelu))
    })
}

/// Whether a layer with a marked weight, and what follows it, is what 8 bits give, in both passes, and one
/// without a mark is not.
fn in_eight_bits(
    device: &Device,
    [batches, rows, inputs, outputs]: [usize; 4],
    storage: Storage,
    recipe: Recipe,
    end: End,
    ends: impl Fn(Tensor<3>) -> Tensor<3>,
) -> Result<(), Failed> {
    let case = Case::new([batches * rows, inputs, outputs], storage);
    let run = |mark: &dyn Fn(Tensor<2>) -> Tensor<2>| {
        case.run(device, storage, |x, weight, bias| {
            let x = x.reshape([batches, rows, inputs]);
            ends(linear(x, mark(weight), Some(bias))).reshape([batches * rows, outputs])
        })
    };
    let expected = case.in_eight_bits(device, storage, recipe, end);
    let exact = case.exact(end);
    for result in check(&run(&|weight| fp8::mark(weight, &recipe))?, &expected, &exact) {
        result.map_err(|error| format!("{end:?}: {}", error.message().unwrap_or("")))?;
    }
    // The negative control: an ignored mark.
    match check(&run(&|weight| weight)?, &expected, &exact).iter().position(Result::is_ok) {
        Some(at) => Err(format!("result {at} passes without a mark").into()),
        None => Ok(()),
    }
}

fn unmarked(device: &Device) -> Result<(), Failed> {
    let recipe = Recipe::hybrid();
    let case = Case::new([60, 64, 48], Storage::F32);
    let alone = case.run(device, Storage::F32, |x, weight, bias| linear(x, weight, Some(bias)))?;
    let beside = case.run(device, Storage::F32, |x, weight, bias| {
        // Another weight with the same numbers, and another input.
        let other = fp8::mark(weight.clone() * 1.0, &recipe);
        let _ = values(linear(x.clone() * 1.0, other, Some(bias.clone())).inner());
        linear(x, weight, Some(bias))
    })?;
    for (name, beside, alone) in
        [("y", beside.y, alone.y), ("dx", beside.dx, alone.dx), ("dW", beside.dw, alone.dw)]
    {
        if beside != alone {
            return Err(format!("{name} differs beside a marked layer").into());
        }
    }
    Ok(())
}

/// Operations write into the memory of what they are the last to read. What they make there has no mark.
fn taken_over(device: &Device) -> Result<(), Failed> {
    let recipe = Recipe::hybrid();
    let training = &device.clone().autodiff();
    let [rows, inputs, outputs] = [33, 64, 48];
    let random = |seed, shape: [usize; 2]| normal(seed, shape[0] * shape[1], 1.0, Storage::F32);
    let (x, weight) = (random(1, [rows, inputs]), random(2, [inputs, outputs]));
    let dy = random(3, [rows, outputs]);
    let put = |values: &[f64], shape| tensor::<2>(values, shape, Storage::F32, training);
    let case = |m, n, k, lhs| MatmulCase {
        name: "taken over",
        batch: 1,
        m,
        n,
        k,
        lhs,
        rhs: Layout::RowMajor,
    };
    let check = |what: &str, case: &MatmulCase, lhs: &[f64], rhs: &[f64], actual: Tensor<2>| {
        let magnitudes = magnitudes(case, lhs, rhs);
        let expected = matmul(case, lhs, rhs);
        let precision = precision();
        let bounds = precision.bounds(&expected, &magnitudes, case.k);
        compare(&values(actual)?, &expected, &bounds)
            .map_err(|error| Failed::from(format!("{what}: {error}")))
            .map(drop)
    };
    type Operation = (&'static str, fn(Tensor<2>) -> Tensor<2>, fn(f64) -> f64);
    let operations: [Operation; 3] = [
        ("doubled", |x| x * 2.0, |x| 2.0 * x),
        ("rectified", relu, |x| x.max(0.0)),
        ("negated", |x| -x, |x| -x),
    ];
    for (name, operation, exact) in operations {
        // An input of a marked layer, whose gradient nobody asks for.
        let input = put(&x, [rows, inputs]);
        let marked = fp8::mark(put(&weight, [inputs, outputs]), &recipe);
        let first = values(linear(input.clone(), marked, None).inner())?;
        let made = operation(input);
        let other = put(&weight, [inputs, outputs]).require_grad();
        let y = linear(made, other.clone(), None);
        let gradients = (y * put(&dy, [rows, outputs])).sum().backward();
        let made: Vec<f64> = x.iter().map(|x| exact(*x)).collect();
        let wgrad = case(inputs, outputs, rows, Layout::ColumnMajor);
        let dw = other.grad(&gradients).ok_or("the weight has no gradient")?;
        check(&format!("an input {name}"), &wgrad, &made, &dy, dw)?;

        // A marked weight that is nobody else's.
        let marked = fp8::mark(put(&weight, [inputs, outputs]), &recipe);
        let second = linear(put(&x, [rows, inputs]), marked.clone(), None);
        if values(second.inner())? != first {
            return Err("the same layer gives other numbers".into());
        }
        let made: Vec<f64> = weight.iter().map(|weight| exact(*weight)).collect();
        let y = linear(put(&x, [rows, inputs]), operation(marked), None);
        let forward = case(rows, outputs, inputs, Layout::RowMajor);
        check(&format!("a weight {name}"), &forward, &x, &made, y.inner())?;

        // One that has not been multiplied, so that its mark alone holds it.
        let marked = fp8::mark(put(&weight, [inputs, outputs]), &recipe);
        let y = linear(put(&x, [rows, inputs]), operation(marked), None);
        check(&format!("an unused weight {name}"), &forward, &x, &made, y.inner())?;
    }
    Ok(())
}

/// A mark holds the memory of an input no longer than others do, and until the next marked product.
fn released(device: &Device) -> Result<(), Failed> {
    let [rows, inputs, outputs] = [4096, 64, 16];
    let bytes = (rows * inputs * 4) as u64;
    let weight = fp8::mark(Tensor::<2>::ones([inputs, outputs], device), &Recipe::hybrid());
    let mut monitor = MemoryMonitor::new(device);
    let mut in_use = Vec::new();
    for step in 0..12 {
        // Numbers of its own: one that all elements share would be all of its memory.
        let x = tensor(
            &normal(step, rows * inputs, 1.0, Storage::F32),
            [rows, inputs],
            Storage::F32,
            device,
        );
        values(linear(x, weight.clone(), None))?;
        device.sync().map_err(|error| error.to_string())?;
        in_use.push(monitor.read().ok_or("the device's pools report")?.in_use_bytes);
    }
    // One that waits for the next product.
    match in_use[11].saturating_sub(in_use[2]) {
        more if more <= bytes => Ok(()),
        more => Err(format!("{more} bytes more in use, inputs have {bytes}: {in_use:?}").into()),
    }
}

/// Of products in f32 without a mark: TF32 on CUDA.
fn precision() -> MatmulPrecision {
    if env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda") {
        MatmulPrecision::tf32()
    } else {
        MatmulPrecision::exact(Storage::F32)
    }
}

/// What a policy makes of a layer, in each type of 16 bits that the device has: policies have bf16 alone.
fn cast(device: &Device) -> Result<(), Failed> {
    let recipe = Recipe::hybrid();
    let training = &device.clone().autodiff();
    for storage in [Storage::F16, Storage::Bf16] {
        if !device.supports_dtype(float(storage)) {
            continue;
        }
        let layer = LinearConfig::new(64, 48).init(training);
        let x = || tensor(&normal(5, 32 * 64, 1.0, storage), [32, 64], storage, training);
        let bias = layer.bias.as_ref().ok_or("no bias")?;
        // They are drawn when they are first asked for.
        let (weight, bias) = (layer.weight.val(), bias.val());
        let weight = || weight.clone().cast(float(storage));
        let bias = || Some(bias.clone().cast(float(storage)));
        let run = |y: Tensor<2>| {
            let gradients = y.clone().cast(float(Storage::F32)).sum().backward();
            (y.inner(), layer.weight.grad(&gradients))
        };
        let read = |(y, dw): (Tensor<2>, Option<Tensor<2>>)| -> Result<[Vec<f64>; 2], Failed> {
            Ok([values(y)?, values(dw.ok_or("no gradient")?)?])
        };
        // None is read before the last one is queued, as in a model. Burn has to put these in order: x is cast, the
        // weight is cast and marked, the bias is cast.
        let input = x();
        let marked = fp8::mark(weight().reshape([64, 48]), &recipe).reshape([64, 48]);
        let marked = run(linear(input, marked, bias()));
        let by_name = run(fp8::linear(x(), weight(), bias(), &recipe));
        let unmarked = run(linear(x(), weight(), bias()));
        let [marked, by_name, unmarked] = [read(marked)?, read(by_name)?, read(unmarked)?];
        for (at, name) in ["y", "dW"].into_iter().enumerate() {
            expect_8_bits(storage, &marked[at], &by_name[at], &unmarked[at])
                .map_err(|error| format!("{storage:?}, {name}{error}"))?;
        }
    }
    Ok(())
}

/// Whether `actual` is `eight_bits` and not `sixteen_bits`.
fn expect_8_bits(
    storage: Storage,
    actual: &[f64],
    eight_bits: &[f64],
    sixteen_bits: &[f64],
) -> Result<(), String> {
    // The same codes in the same kernel. At most the bias, up to 1/8 by its initialization, is added
    // to what was rounded already.
    let bounds: Vec<f64> =
        eight_bits.iter().map(|y| storage.unit_roundoff() * (2.0 * y.abs() + 0.125)).collect();
    compare(actual, eight_bits, &bounds).map_err(|error| format!(": {error}"))?;
    match compare(actual, sixteen_bits, &bounds) {
        Ok(_) => Err(" is that of 16 bits".into()),
        Err(_) => Ok(()),
    }
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
        let by_name = fp8::linear_forward(&plain, x(), &recipe);
        let of_name = by_name.clone().cast(float(Storage::F32)).sum().backward();
        let by_bf16 = plain.forward(x());
        let of_bf16 = by_bf16.clone().cast(float(Storage::F32)).sum().backward();
        let missing = "no gradient";
        let dw = values(layer.weight.grad(&gradients).ok_or(missing)?)?;
        let dw_by = |module: &Linear, gradients| -> Result<Vec<f64>, Failed> {
            values(module.weight.grad(gradients).ok_or(missing)?)
        };
        for (name, actual, eight_bits, sixteen_bits) in [
            ("y", values(y.inner())?, values(by_name.inner())?, values(by_bf16.inner())?),
            ("dW", dw, dw_by(&plain, &of_name)?, dw_by(&plain, &of_bf16)?),
        ] {
            expect_8_bits(Storage::Bf16, &actual, &eight_bits, &sixteen_bits)
                .map_err(|error| format!("{masters:?}, {name}{error}"))?;
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
