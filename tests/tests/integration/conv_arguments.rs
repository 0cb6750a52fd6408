//! What a convolution says of arguments that do not fit, and what it declines.

use super::{Convolution, IMAGE, Lies};
use blackburn_kernels::{
    KernelError,
    conv::{ConvBlueprint, ConvOptions, ConvPass, ConvProblem, conv, conv_with},
    matmul::{F32Precision, TensorLayout},
};
use blackburn_reference::{conv::ConvCase, storage::Storage};
use blackburn_tests::{
    buffers::{dtype, upload},
    on_device,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("conv::{name}"), move || on_device(test))
    };
    vec![
        trial("bad_arguments_are_named", bad_buffers),
        trial("shapes_that_do_not_fit_are_named", bad_shapes),
        trial("what_no_kernel_takes_is_declined", declined),
        trial("plans_for_other_problems_are_refused", bad_plans),
    ]
}

fn named<T: std::fmt::Debug>(name: &str, result: Result<T, KernelError>) -> Result<(), Failed> {
    match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(format!("a bad {name} gave {other:?}").into()),
    }
}

fn bad_buffers(client: &Client) -> Result<(), Failed> {
    let zeros = |elements: usize, storage| upload(client, &vec![0.0; elements], storage);
    for (pass, names) in [
        (ConvPass::Fprop, ["x", "weight"]),
        (ConvPass::Dgrad, ["dy", "weight"]),
        (ConvPass::Wgrad, ["x", "dy"]),
    ] {
        let convolution = Convolution::new(IMAGE, pass, Storage::F32);
        let problem = convolution.problem(Storage::F32)?;
        let [first, second] = convolution.upload(client, &problem);
        for storage in [Storage::F32, Storage::F16] {
            let less = usize::from(storage == Storage::F32);
            let [short, other] = problem.spans().map(|elements| zeros(elements - less, storage));
            named(names[0], conv(client, &problem, &short, &second, None))?;
            named(names[1], conv(client, &problem, &first, &other, None))?;
            let [_, _, [_, channels, _, _]] = problem.shapes();
            let bias = zeros(channels - less, storage);
            named("bias", conv(client, &problem, &first, &second, Some(&bias)))?;
        }
        if pass == ConvPass::Wgrad {
            let bias = zeros(problem.out_channels.max(problem.in_channels), Storage::F32);
            named("bias", conv(client, &problem, &first, &second, Some(&bias)))?;
        }
    }
    Ok(())
}

const X: [usize; 4] = [2, 8, 9, 11];
const W: [usize; 4] = [16, 8, 3, 3];
const Y: [usize; 4] = [2, 16, 7, 9];

/// The three problems of tensors of those shapes.
fn problems(
    [x, w, y]: [[usize; 4]; 3],
    options: ConvOptions,
    storage: Storage,
) -> [Result<ConvProblem, KernelError>; 3] {
    let strides = [x, w, y].map(|shape| Lies::InOrder.strides(shape));
    let layout = |shape, strides| TensorLayout { shape, strides, dtype: dtype(storage) };
    let [x_at, w_at, y_at] =
        [layout(&x, &strides[0]), layout(&w, &strides[1]), layout(&y, &strides[2])];
    let (out, precision) = (dtype(storage), F32Precision::Tf32);
    [
        ConvProblem::fprop(x_at, w_at, options, out, precision),
        ConvProblem::dgrad(y_at, w_at, [x[2], x[3]], options, out, precision),
        ConvProblem::wgrad(x_at, y_at, [w[2], w[3]], options, out, precision),
    ]
}

fn bad_shapes(_: &Client) -> Result<(), Failed> {
    let plain = ConvOptions::default();
    for problem in problems([X, W, Y], plain, Storage::F32) {
        problem?;
    }
    for (argument, options) in [
        ("stride", ConvOptions { stride: [1, 0], ..plain }),
        ("dilation", ConvOptions { dilation: [0, 1], ..plain }),
        ("groups", ConvOptions { groups: 0, ..plain }),
        ("kernel", ConvOptions { dilation: [5, 1], ..plain }),
    ] {
        for problem in problems([X, W, Y], options, Storage::F32) {
            named(argument, problem)?;
        }
    }
    // Channels that three groups do not divide.
    let [fprop, dgrad, wgrad] =
        problems([X, W, Y], ConvOptions { groups: 3, ..plain }, Storage::F32);
    for problem in [fprop, dgrad, wgrad] {
        named("groups", problem)?;
    }
    let [fprop, ..] = problems([X, [16, 7, 3, 3], Y], plain, Storage::F32);
    named("weight", fprop)?;
    let [_, dgrad, _] = problems([X, [15, 8, 3, 3], Y], plain, Storage::F32);
    named("dy", dgrad)?;
    let [_, dgrad, wgrad] = problems([X, W, [2, 16, 7, 8]], plain, Storage::F32);
    named("dy", dgrad)?;
    named("dy", wgrad)?;
    let [_, _, wgrad] = problems([X, W, [3, 16, 7, 9]], plain, Storage::F32);
    named("dy", wgrad)?;
    let x = TensorLayout { shape: &[2, 8, 9], strides: &[72, 9, 1], dtype: dtype(Storage::F32) };
    let precision = F32Precision::Tf32;
    named("x", ConvProblem::fprop(x, x, plain, dtype(Storage::F32), precision))
}

fn declined(_: &Client) -> Result<(), Failed> {
    let is_declined = |problem: Result<ConvProblem, KernelError>| match problem {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(Failed::from(format!("{other:?} is not declined"))),
    };
    let plain = ConvOptions::default();
    let empty = [[0, 8, 9, 11], W, [0, 16, 7, 9]];
    for problem in problems(empty, plain, Storage::F32) {
        is_declined(problem)?;
    }
    // 2^32 elements of x, and as many of y.
    let large = [[1 << 16, 8, 90, 92], W, [1 << 16, 16, 88, 90]];
    for problem in problems(large, plain, Storage::F32) {
        is_declined(problem)?;
    }
    let f16 =
        TensorLayout { shape: &W, strides: &Lies::InOrder.strides(W), dtype: dtype(Storage::F16) };
    let x =
        TensorLayout { shape: &X, strides: &Lies::InOrder.strides(X), dtype: dtype(Storage::F32) };
    is_declined(ConvProblem::fprop(x, f16, plain, dtype(Storage::F32), F32Precision::Tf32))
}

fn bad_plans(client: &Client) -> Result<(), Failed> {
    let convolution = Convolution::new(IMAGE, ConvPass::Fprop, Storage::F32);
    let problem = convolution.problem(Storage::F32)?;
    let [first, second] = convolution.upload(client, &problem);
    let run = |plan: &ConvBlueprint| conv_with(client, &problem, plan, &first, &second, None);
    named("blueprint", run(&ConvBlueprint::Direct { splits: 2 }))?;
    named("blueprint", run(&ConvBlueprint::Direct { splits: 0 }))?;
    named("blueprint", run(&ConvBlueprint::Grouped { splits: 1 }))?;
    let plans = ConvBlueprint::candidates(&problem, client);
    let implicit = plans.iter().find_map(|plan| match plan {
        ConvBlueprint::Implicit(plan) => Some(*plan),
        _ => None,
    });
    let mut implicit = implicit.ok_or("no implicit product")?;
    implicit.splits = 2;
    named("blueprint", run(&ConvBlueprint::Implicit(implicit)))?;
    // A plain product's plan, for what is none.
    let pointwise =
        Convolution::new(ConvCase { kernel: [1; 2], ..IMAGE }, ConvPass::Fprop, Storage::F32);
    let plan = ConvBlueprint::plan(&pointwise.problem(Storage::F32)?, client)?;
    named("blueprint", run(&plan))
}
