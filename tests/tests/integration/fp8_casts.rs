//! How often unmodified layers with marked weights cast, and that nobody multiplies codes of other numbers.

use super::layer::{Case, End, check};
use blackburn::{
    fp8::{self, Recipe, Tally},
    train::{graph::GradientGraph, precision::PrecisionPolicy},
};
use blackburn_backend::{
    layer_norm::add_rms_norm,
    overwrite::overwrite_float,
    steps::{
        Together,
        adamw::{self, Step, Tensors},
    },
    swiglu::swiglu,
};
use blackburn_kernels::{DeviceProfile, matmul::MatmulBlueprint};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    on_burn_device_and_client, run_alone,
    tensors::{tensor, values},
};
use burn::{
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    prelude::*,
    tensor::module::linear,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs a test alone: others would be counted, too.
const ALONE: &str = "BLACKBURN_TEST_CASTS_HERE";

type Test = fn(&Device, &Client) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 10] = [
        ("each_matrix_of_a_layer_is_cast_once", |device, _| once(device)),
        ("layers_share_the_cast_of_their_input", |device, _| shared(device)),
        ("codes_for_the_forward_pass_go_with_the_next_input", let_go),
        ("codes_of_another_recipe_are_not_taken", |device, _| other_recipe(device)),
        ("what_was_overwritten_is_cast_anew", |device, _| overwritten(device)),
        ("kernels_tell_the_largest_magnitude_of_what_is_cast", |device, _| told(device)),
        ("a_step_leaves_a_marked_parameter_where_it_is", |device, _| stepped(device)),
        ("replays_are_passes_that_run", |device, _| replayed(device)),
        ("marks_that_no_product_meets_are_counted", |device, _| unmet(device)),
        ("infinity_and_nan_stay_in_both_layouts", |device, _| special_values(device)),
    ];
    let trial = |(name, test): (&str, Test)| {
        let name = format!("fp8::casts::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device_and_client(|device, client| match env::var_os(ALONE) {
                Some(_) => test(device, client),
                None => run_alone(&name, &[(ALONE, "1")]).map(drop),
            })
        })
    };
    tests.map(trial).into()
}

const STORAGE: Storage = Storage::F32;
/// Rows, inputs, outputs.
const SHAPE: [usize; 3] = [65, 48, 40];

/// What was asked of the device while `work` ran.
fn counted<R>(device: &Device, work: impl FnOnce() -> Result<R, Failed>) -> Result<Tally, Failed> {
    let before = Tally::now();
    work()?;
    device.sync().map_err(|error| error.to_string())?;
    Ok(Tally::now().since(before))
}

fn expect(what: &str, tally: Tally, products: u64, casts: u64) -> Result<(), Failed> {
    let is_all = tally.share() == 1.0 && (tally.declined, tally.unmet) == (0, 0);
    match (tally.products, tally.casts) == (products, casts) && is_all {
        true => Ok(()),
        false => Err(format!("{what}: expected {casts} casts, got {tally:?}").into()),
    }
}

/// Weights that nothing is multiplied by, between layers whose weights are read.
fn unmet(device: &Device) -> Result<(), Failed> {
    let recipe = Recipe::hybrid();
    let case = Case::new(SHAPE, STORAGE);
    let product = || {
        case.run(device, STORAGE, |x, weight, bias| {
            linear(x, fp8::mark(weight, &recipe), Some(bias))
        })
    };
    let number = |marks: usize| {
        counted(device, || {
            for _ in 0..marks {
                let weight = Tensor::<2>::ones([48, 40], device);
                fp8::mark(weight, &recipe).into_data();
            }
            // Memory that was let go of is looked for when the next weight is marked and read.
            product()?;
            product()
        })
    };
    for marks in [0, 3] {
        let tally = number(marks)?;
        if (tally.unmet, tally.products) != (marks as u64, 6) {
            return Err(format!("{marks} marks in vain: {tally:?}").into());
        }
    }
    Ok(())
}

/// Both with two dimensions, and with three, where the gradient of the weight is summed over the batch.
fn once(device: &Device) -> Result<(), Failed> {
    let recipe = Recipe::hybrid();
    let case = Case::new(SHAPE, STORAGE);
    let [rows, inputs, outputs] = SHAPE;
    let flat = counted(device, || {
        case.run(device, STORAGE, |x, weight, bias| {
            linear(x, fp8::mark(weight, &recipe), Some(bias))
        })
    })?;
    expect("two dimensions", flat, 3, 3)?;
    let batches = 5;
    let batched = counted(device, || {
        case.run(device, STORAGE, |x, weight, bias| {
            let x = x.reshape([batches, rows / batches, inputs]);
            linear(x, fp8::mark(weight, &recipe), Some(bias)).reshape([rows, outputs])
        })
    })?;
    expect("three dimensions", batched, 3, 3)?;
    let flops = 3 * 2 * (rows * inputs * outputs) as u64;
    if (flat.flops, batched.flops) != (flops, flops) {
        return Err(format!("expected {flops}, got {} and {}", flat.flops, batched.flops).into());
    }
    // The negative control: without a mark nothing is cast.
    let plain =
        counted(device, || case.run(device, STORAGE, |x, w, bias| linear(x, w, Some(bias))))?;
    match (plain.casts, plain.products, plain.other_flops) {
        (0, 0, other) if other == flops => Ok(()),
        _ => Err(format!("without a mark: {plain:?}").into()),
    }
}

/// Three layers with an input, and a weight that two inputs go through.
fn shared(device: &Device) -> Result<(), Failed> {
    let recipe = &Recipe::hybrid();
    let device = &device.clone().autodiff();
    let [rows, inputs, outputs] = SHAPE;
    let x = |seed| {
        let numbers = normal(seed, rows * inputs, 1.0, STORAGE);
        tensor::<2>(&numbers, [rows, inputs], STORAGE, device).require_grad()
    };
    let weight = |seed| {
        let numbers = normal(seed, inputs * outputs, 0.1, STORAGE);
        tensor::<2>(&numbers, [inputs, outputs], STORAGE, device).require_grad()
    };
    let plain = &device.clone().without_autodiff();
    let of_input = counted(plain, || {
        let (x, weights) = (x(1), [2, 3, 4].map(weight));
        let [q, k, v] = weights.clone().map(|w| linear(x.clone(), fp8::mark(w, recipe), None));
        // Each has a gradient of its own.
        let gradients = (q.square() + k.powi_scalar(3) + v.tanh()).sum().backward();
        let missing = "a gradient is missing";
        values(x.grad(&gradients).ok_or(missing)?)?;
        weights.into_iter().try_for_each(|weight| {
            values(weight.grad(&gradients).ok_or(missing)?)?;
            Ok(())
        })
    })?;
    expect("an input of three layers", of_input, 9, 1 + 3 + 3)?;
    let of_weight = counted(plain, || {
        let weight = weight(5);
        let marked = fp8::mark(weight.clone(), recipe);
        let [a, b] = [6, 7].map(|seed| linear(x(seed), marked.clone(), None));
        let gradients = (a.square() + b.tanh()).sum().backward();
        values(weight.grad(&gradients).ok_or("the weight has no gradient")?)
    })?;
    // Two inputs, one weight, two gradients of outputs.
    match (of_weight.casts, of_weight.declined) {
        (5, 0) => Ok(()),
        _ => Err(format!("a weight for two inputs: {of_weight:?}").into()),
    }
}

/// An input is multiplied, then another one, then the first again, which has lost the codes that the forward pass
/// alone reads: models would have them of all layers at once. Where the backward pass reads the same codes, they wait.
fn let_go(device: &Device, client: &Client) -> Result<(), Failed> {
    let [rows, inputs, outputs] = SHAPE;
    let numbers = |seed, shape: [usize; 2]| {
        tensor::<2>(&normal(seed, shape[0] * shape[1], 1.0, STORAGE), shape, STORAGE, device)
    };
    let [first, second] = [1, 2].map(|seed| numbers(seed, [rows, inputs]));
    let weight = fp8::mark(numbers(3, [inputs, outputs]), &Recipe::hybrid());
    let tally = counted(device, || {
        for x in [&first, &first, &second, &first] {
            values(linear(x.clone(), weight.clone(), None))?;
        }
        Ok(())
    })?;
    let casts = if MatmulBlueprint::needs_fp8_along_k(DeviceProfile::of(client)) { 3 } else { 2 };
    expect("one input behind the other", tally, 4, 1 + casts)
}

/// Two layers with an input, each with a rounding of its own.
fn other_recipe(device: &Device) -> Result<(), Failed> {
    let case = Case::new(SHAPE, STORAGE);
    let [rows, inputs, outputs] = SHAPE;
    let x = || tensor::<2>(&case.x, [rows, inputs], STORAGE, device);
    let weight = || tensor::<2>(&case.weight, [inputs, outputs], STORAGE, device);
    let product = |x: Tensor<2>, recipe| values(linear(x, fp8::mark(weight(), recipe), None));
    let recipes = [Recipe::hybrid(), Recipe::hybrid().with_margin(7)];
    let shared = x();
    // At once: another input in between would take the codes away.
    let [first, second] = recipes.each_ref().map(|recipe| product(shared.clone(), recipe));
    for (recipe, together) in recipes.iter().zip([first?, second?]) {
        if together != product(x(), recipe)? {
            return Err(format!("{recipe:?}: the input has codes of another recipe").into());
        }
    }
    // The negative control: the recipes differ in what they give.
    match product(x(), &recipes[0])? == product(x(), &recipes[1])? {
        true => Err("both recipes give the same".into()),
        false => Ok(()),
    }
}

/// Inputs and weights that are overwritten behind the stream's back, as those of recordings are.
fn overwritten(device: &Device) -> Result<(), Failed> {
    let recipe = &Recipe::hybrid();
    let [rows, inputs, outputs] = SHAPE;
    let x = |seed| {
        let numbers = normal(seed, rows * inputs, 1.0, STORAGE);
        tensor::<2>(&numbers, [rows, inputs], STORAGE, device)
    };
    let weight = |seed| {
        let numbers = normal(seed, inputs * outputs, 0.1, STORAGE);
        tensor::<2>(&numbers, [inputs, outputs], STORAGE, device)
    };
    let product = |x: Tensor<2>, weight: Tensor<2>| values(linear(x, weight, None));
    let expected = |x, weight| product(x, fp8::mark(weight, recipe));
    let (input, parameter) = (x(1), weight(2));
    let marked = fp8::mark(parameter.clone(), recipe);
    let before = product(input.clone(), marked.clone())?;
    if before != expected(x(1), weight(2))? {
        return Err("the same numbers give others".into());
    }
    // Read, so that Burn does not run the product along with what overwrites.
    let input = overwrite_float(input, x(3));
    values(input.clone())?;
    let after = product(input.clone(), marked.clone())?;
    if after == before || after != expected(x(3), weight(2))? {
        return Err("an input has its old codes".into());
    }
    let parameter = overwrite_float(parameter, weight(4));
    values(parameter)?;
    let after = product(input, marked)?;
    if after != expected(x(3), weight(4))? {
        return Err("a weight has its old codes".into());
    }
    Ok(())
}

/// A norm and an activation make what is multiplied, and the gradients of it. The same numbers in other memory have the
/// same codes, of magnitudes that are looked for.
fn told(device: &Device) -> Result<(), Failed> {
    let recipe = &Recipe::hybrid();
    let device = &device.clone().autodiff();
    let [rows, inputs, outputs] = SHAPE;
    let run = |moved: fn(Tensor<2>) -> Tensor<2>| {
        let leaf = |seed, shape: [usize; 2], deviation| {
            let numbers = normal(seed, shape[0] * shape[1], deviation, STORAGE);
            tensor::<2>(&numbers, shape, STORAGE, device).require_grad()
        };
        let (x, residual) = (leaf(1, [rows, inputs], 30.0), leaf(2, [rows, inputs], 1.0));
        let first = leaf(3, [inputs, inputs], 0.1);
        let gates = [4, 5].map(|seed| leaf(seed, [inputs, outputs], 0.1));
        let last = leaf(6, [outputs, inputs], 0.1);
        let gamma = leaf(7, [1, inputs], 1.0).reshape([inputs]);
        let by =
            |x: Tensor<2>, weight: &Tensor<2>| linear(x, fp8::mark(weight.clone(), recipe), None);
        let addend = moved(by(residual.clone(), &first));
        let (_, normalized) = add_rms_norm(x.clone(), addend, gamma, 1e-5);
        let normalized = moved(normalized);
        let [gate, up] = gates.each_ref().map(|weight| moved(by(normalized.clone(), weight)));
        let y = by(moved(swiglu(gate, up)), &last);
        let gradients = y.clone().powi_scalar(2).sum().backward();
        let mut all = vec![values(y.inner())?];
        for tensor in [&x, &residual, &first, &last].into_iter().chain(&gates) {
            all.push(values(tensor.grad(&gradients).ok_or("a gradient is missing")?)?);
        }
        Ok::<_, Failed>(all)
    };
    let plain = &device.clone().without_autodiff();
    let (mut of_kernels, mut of_others) = (Vec::new(), Vec::new());
    let told = counted(plain, || {
        of_kernels = run(|tensor| tensor)?;
        Ok(())
    })?;
    // Behind a product that Burn's fusion makes, in both passes.
    let untold = counted(plain, || {
        of_others = run(|tensor| tensor.clone() * tensor.ones_like())?;
        Ok(())
    })?;
    if of_kernels != of_others {
        return Err("what a kernel told changed a result".into());
    }
    of_a_part(device)?;
    // The norm and the activation, both gradients of the activation, and that of the residual.
    match (told.read_once, untold.read_once, told.casts, told.declined) {
        (5, 0, casts, 0) if casts == untold.casts => Ok(()),
        _ => Err(format!("told {told:?}, untold {untold:?}").into()),
    }
}

/// Rows without the largest number are cast by their own scale.
fn of_a_part(device: &Device) -> Result<(), Failed> {
    let [rows, inputs, outputs] = SHAPE;
    let numbers = |seed, shape: [usize; 2]| {
        tensor::<2>(&normal(seed, shape[0] * shape[1], 1.0, STORAGE), shape, STORAGE, device)
    };
    let weight = fp8::mark(numbers(1, [inputs, outputs]), &Recipe::hybrid());
    let product = |x: Tensor<2>| values(linear(x, weight.clone(), None));
    // Seven eighths of the rows are a hundredth of what they would be.
    let few = rows - rows / 8;
    let small = numbers(2, [few, inputs]) * 0.01;
    let gate = Tensor::cat(vec![small, numbers(3, [rows - few, inputs]) * 100.0], 0);
    // Known while the whole is held. Read, so that Burn does not run the product along with what was before.
    let whole = swiglu(gate.clone(), gate);
    values(whole.clone())?;
    let part = product(whole.clone().slice([0..few, 0..inputs]))?;
    let copy =
        tensor::<2>(&values(whole.slice([0..few, 0..inputs]))?, [few, inputs], STORAGE, device);
    let expected = product(copy)?;
    match part.iter().zip(&expected).find(|(part, expected)| part != expected) {
        None => Ok(()),
        Some((part, expected)) => {
            Err(format!("{part} in place of {expected}: a part was cast by the scale of the whole")
                .into())
        }
    }
}

/// The optimizer writes into a parameter whose codes are kept. It is marked afterwards, without another mark.
fn stepped(device: &Device) -> Result<(), Failed> {
    let [rows, inputs, outputs] = SHAPE;
    let numbers = |seed, shape: [usize; 2], deviation| {
        tensor::<2>(&normal(seed, shape[0] * shape[1], deviation, STORAGE), shape, STORAGE, device)
    };
    let shape = [inputs, outputs];
    let x = numbers(1, [rows, inputs], 1.0);
    let parameter = numbers(2, shape, 0.1);
    drop(fp8::mark(parameter.clone(), &Recipe::hybrid()));
    let product = |weight: &Tensor<2>| values(linear(x.clone(), weight.clone(), None));
    let before = product(&parameter)?;
    let zeros = || numbers(3, shape, 1.0) * 0.0;
    let step =
        Step { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-8, weight_decay: 0.0, rate: 0.1, time: 1 };
    let tensors =
        Tensors { parameter, gradient: numbers(4, shape, 1.0), first: zeros(), second: zeros() };
    let parameter = adamw::step(tensors, step, None, None, &Together::default()).parameter;
    let numbers = values(parameter.clone())?;
    let after = counted(device, || {
        let after = product(&parameter)?;
        let copy = tensor(&numbers, shape, STORAGE, device);
        let expected = values(linear(x.clone(), fp8::mark(copy, &Recipe::hybrid()), None))?;
        match after == before || after != expected {
            true => Err("the product is not that of the new weight in 8 bits".into()),
            false => Ok(()),
        }
    })?;
    // Of x there are codes until the step; of both weights there are none.
    expect("after a step", after, 2, 3)
}

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    second: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        let [_, inputs, outputs] = SHAPE;
        let layer = |seed, from: usize, to: usize| {
            let mut layer = LinearConfig::new(from, to).with_bias(false).init(device);
            layer.weight = layer.weight.map(|old| {
                let weight = normal(seed, from * to, 0.1, STORAGE);
                tensor(&weight, [from, to], STORAGE, &old.device()).detach().require_grad()
            });
            layer
        };
        Self { first: layer(1, inputs, outputs), second: layer(2, outputs, inputs) }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let weight = |layer: &Linear| fp8::mark(layer.weight.val(), &Recipe::hybrid());
        let hidden = linear(Tensor::from_inner(x), weight(&self.first), None).tanh();
        linear(hidden, weight(&self.second), None).powi_scalar(2).mean()
    }
}

/// Inputs and weights of a recording lie where they lay before, with other numbers.
fn replayed(device: &Device) -> Result<(), Failed> {
    let [rows, inputs, _] = SHAPE;
    let training = &device.clone().autodiff();
    let pass = |network: &Network, x: Tensor<2>| {
        let loss = network.loss(x);
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), network))
    };
    let train = |mut graph: GradientGraph<Network, Tensor<2>, Tensor<1>>| {
        let mut network = Network::new(training);
        let mut optimizer = SgdConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..12 {
            let numbers = normal(10 + step, rows * inputs, 1.0 + step as f64, STORAGE);
            let x = tensor(&numbers, [rows, inputs], STORAGE, device);
            let (loss, gradients) = graph.run(&network, x, pass)?;
            network = optimizer.step(1e-2, network, gradients);
            losses.extend(values(loss)?);
        }
        Ok::<_, Failed>((losses, graph.is_recorded()))
    };
    let policy = PrecisionPolicy::default();
    let (ran, _) = train(GradientGraph::disabled(policy.clone()))?;
    let (replayed, is_recorded) = train(GradientGraph::new(policy))?;
    // What updates a weight may round otherwise behind a pass that ran, which can turn a code at most. Codes of
    // another step's numbers change a loss by 1e-3 and more.
    let is_same = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs();
    match is_recorded {
        false => Err("nothing was recorded".into()),
        true if replayed.iter().zip(&ran).all(is_same) => Ok(()),
        true => Err(format!("{replayed:?} in place of {ran:?}").into()),
    }
}

/// A result, its name and columns, and which places are reached by what is not finite.
type Check<'a> = (&'a str, &'a [f64], usize, &'a dyn Fn(usize, usize) -> bool);

/// What is not finite in x reaches its row of y and, by the transpose, its row of dW; in dy, its row of dx and
/// its column of dW. Nothing finite comes of it, and all else stays finite.
fn special_values(device: &Device) -> Result<(), Failed> {
    let [rows, inputs, outputs] = SHAPE;
    let recipe = Recipe::hybrid();
    for special in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        let mut case = Case::new(SHAPE, STORAGE);
        case.x[3 * inputs + 5] = special;
        let layer = |x: Tensor<2>, weight: Tensor<2>, bias: Tensor<1>| {
            linear(x, fp8::mark(weight, &recipe), Some(bias))
        };
        let of_x = case.run(device, STORAGE, layer)?;
        let mut case = Case::new(SHAPE, STORAGE);
        case.dy[7 * outputs + 11] = special;
        let of_dy = case.run(device, STORAGE, layer)?;
        let checks: [Check<'_>; 6] = [
            ("y", &of_x.y, outputs, &|row, _| row == 3),
            ("dx", &of_x.dx, inputs, &|_, _| false),
            ("dW", &of_x.dw, outputs, &|row, _| row == 5),
            ("y", &of_dy.y, outputs, &|_, _| false),
            ("dx", &of_dy.dx, inputs, &|row, _| row == 7),
            ("dW", &of_dy.dw, outputs, &|_, column| column == 11),
        ];
        for (name, actual, columns, is_reached) in checks {
            let is_wrong = |(at, number): (usize, &f64)| {
                number.is_finite() == is_reached(at / columns, at % columns)
            };
            if let Some(at) = actual.iter().enumerate().position(is_wrong) {
                return Err(format!("{special}: {name}[{at}] is {}", actual[at]).into());
            }
        }
    }
    // The same case without one is within bounds: the shape says nothing by itself.
    let case = Case::new([rows, inputs, outputs], STORAGE);
    let run = case.run(device, STORAGE, |x, weight, bias| {
        linear(x, fp8::mark(weight, &recipe), Some(bias))
    })?;
    let expected = case.in_eight_bits(device, STORAGE, recipe, End::Plain);
    check(&run, &expected, &case.exact(End::Plain)).into_iter().collect()
}
