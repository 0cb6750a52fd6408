//! Size 0 on the device: no rows, no columns, no tokens, no sequences. The result is empty, or what sums
//! and products of nothing are, and so are the gradients; or an error names what was empty.

use blackburn::{
    attention::{AttentionOptions, attention, attention_packed},
    cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy},
    nn::{
        dropout, embedding, flash, loss, norm, transformer::TransformerEncoderInput as FlashInput,
    },
};
use blackburn_tests::{on_burn_device, tensors::values};
use burn::{
    module::Param,
    nn::{
        DropoutConfig, EmbeddingConfig, Gelu, LayerNormConfig, Linear, LinearConfig,
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamWConfig, GradientsParams, SgdConfig},
    prelude::*,
    tensor::{
        activation::{log_softmax, softmax},
        module,
        ops::AttentionModuleOptions,
    },
};
use libtest_mimic::{Completion, Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test, bool); 13] = [
        ("linear_layers_of_no_rows", linear_layers, false),
        ("products_of_nothing", products, true),
        ("activations_of_nothing", activations, false),
        ("norms_of_no_rows", norms, true),
        ("losses_of_no_rows", losses, true),
        ("embeddings_of_no_ids", embeddings, true),
        ("dropout_of_nothing", dropouts, true),
        ("attention_of_nothing", attentions, true),
        ("attention_to_no_keys", no_keys, true),
        ("packed_sequences_of_nothing", packed, true),
        ("attention_of_burn_of_nothing", burns_attention, true),
        ("encoders_of_nothing", encoders, false),
        ("optimizers_of_empty_parameters", optimizers, true),
    ];
    // Burn's CPU backend ends the process at a product of no rows, and has no maximum of no columns.
    let trials = tests.into_iter().flat_map(|(name, test, is_for_cpu)| {
        let on_cpu = Trial::ignorable_test(format!("empty::{name}_on_the_cpu"), move || {
            test(&Device::flex()).map(|()| Completion::Completed)
        });
        let on_device = Trial::ignorable_test(format!("empty::{name}"), move || {
            on_burn_device(|device| {
                test(&device)?;
                // What comes after is served as ever.
                all_are("five ones", ones([5], &device), [5], 1.0)
            })
        });
        [Some(on_device), is_for_cpu.then_some(on_cpu)].into_iter().flatten()
    });
    trials.collect()
}

/// Whether `tensor` has these dimensions, and every number in it is `number`.
fn all_are<const D: usize>(
    what: &str,
    tensor: Tensor<D>,
    dims: [usize; D],
    number: f64,
) -> Result<(), Failed> {
    let got = tensor.dims();
    let numbers = values(tensor)?;
    let is_it = |x: &f64| *x == number || (x.is_nan() && number.is_nan());
    if got == dims && numbers.len() == dims.iter().product::<usize>() && numbers.iter().all(is_it) {
        return Ok(());
    }
    Err(format!("{what} {dims:?} is {got:?} of {numbers:?}, and not of {number}").into())
}

/// What a test of Burn's own operations says, or nothing where Burn 0.22.1 refuses them: it overflows where
/// it runs an operation on a tensor without elements by itself, in builds that check for that, and has no
/// maximum of no columns. A read says so, and gives no number.
fn unless_burn_refuses(result: Result<(), Failed>) -> Result<(), Failed> {
    const REFUSALS: [&str; 2] = ["attempt to subtract with overflow", "ReduceAxisTooSmall"];
    match result {
        Err(error) if error.message().is_some_and(|e| REFUSALS.iter().any(|r| e.contains(r))) => {
            Ok(())
        }
        result => result,
    }
}

fn zeros<const D: usize>(
    what: &str,
    tensor: Option<Tensor<D>>,
    dims: [usize; D],
) -> Result<(), Failed> {
    all_are(what, tensor.ok_or_else(|| format!("no {what}"))?, dims, 0.0)
}

/// From the host: what follows an operation that makes them may run one by one, as Burn has it.
fn ones<const D: usize>(dims: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::ones::<f32, _>(dims), device)
}

fn leaf<const D: usize>(dims: [usize; D], device: &Device) -> Tensor<D> {
    ones(dims, &device.clone().autodiff()).require_grad()
}

fn linear_layers(device: &Device) -> Result<(), Failed> {
    let autodiff = &device.clone().autodiff();
    let layer = LinearConfig::new(24, 16).init(autodiff);
    fn layer_of<const D: usize>(
        layer: &Linear,
        dims: [usize; D],
        device: &Device,
    ) -> Result<(), Failed> {
        let x = leaf(dims, device);
        // With an activation, as blocks of a model have it.
        let y = Gelu::new().forward(layer.forward(x.clone()));
        let mut out = dims;
        out[D - 1] = 16;
        all_are("y", y.clone().inner(), out, 0.0)?;
        let gradients = y.sum().backward();
        zeros("dx", x.grad(&gradients), dims)?;
        zeros("dw", layer.weight.val().grad(&gradients), [24, 16])?;
        let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        zeros("db", bias.val().grad(&gradients), [16])
    }
    layer_of(&layer, [0, 24], device)?;
    layer_of(&layer, [0, 5, 24], device)?;
    layer_of(&layer, [2, 0, 24], device)
}

/// No rows, no columns, and nothing between them.
fn products(device: &Device) -> Result<(), Failed> {
    for [m, k, n] in [[0, 4, 5], [3, 4, 0], [3, 0, 5]] {
        let (a, b) = (leaf([m, k], device), leaf([k, n], device));
        let y = a.clone().matmul(b.clone());
        all_are("y", y.clone().inner(), [m, n], 0.0)?;
        let gradients = y.sum().backward();
        zeros("da", a.grad(&gradients), [m, k])?;
        zeros("db", b.grad(&gradients), [k, n])?;
    }
    let y = ones([0, 3, 4], device).matmul(ones([0, 4, 5], device));
    all_are("a product of no matrices", y, [0, 3, 5], 0.0)
}

fn activations(device: &Device) -> Result<(), Failed> {
    type Function = fn(Tensor<2>) -> Tensor<2>;
    let functions: [(&str, Function); 3] = [
        ("gelu", |x| Gelu::new().forward(x)),
        ("softmax", |x| softmax(x, 1)),
        ("log_softmax", |x| log_softmax(x, 1)),
    ];
    for (name, function) in functions {
        for dims in [[0, 40], [3, 0], [0, 0]] {
            let both_ways = || {
                let x = leaf(dims, device);
                let y = function(x.clone());
                all_are(name, y.clone().inner(), dims, 0.0)?;
                let gradients = y.sum().backward();
                zeros(name, x.grad(&gradients), dims)
            };
            match dims[1] {
                0 => unless_burn_refuses(both_ways())?,
                _ => both_ways()?,
            }
        }
    }
    Ok(())
}

fn norms(device: &Device) -> Result<(), Failed> {
    let module = LayerNormConfig::new(8).init(&device.clone().autodiff());
    let both_ways = |name, forward: &dyn Fn(Tensor<2>) -> Tensor<2>| {
        let x = leaf([0, 8], device);
        let y = forward(x.clone());
        all_are(name, y.clone().inner(), [0, 8], 0.0)?;
        let gradients = y.sum().backward();
        zeros(name, x.grad(&gradients), [0, 8])?;
        zeros(name, module.gamma.val().grad(&gradients), [8])?;
        let beta = module.beta.as_ref().ok_or("LayerNormConfig gives a beta")?;
        zeros(name, beta.val().grad(&gradients), [8])
    };
    unless_burn_refuses(both_ways("burn::nn", &|x| module.forward(x)))?;
    both_ways("blackburn::nn", &|x| norm::layer_norm(&module, x))?;
    let (x, residual) = (leaf([2, 0, 8], device), leaf([2, 0, 8], device));
    let (sum, y) = norm::add_layer_norm(&module, x.clone(), residual.clone());
    let gradients = (sum + y).sum().backward();
    zeros("dx", x.grad(&gradients), [2, 0, 8])?;
    zeros("dresidual", residual.grad(&gradients), [2, 0, 8])
}

fn no_targets(device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(Vec::<i32>::new(), [0]), device)
}

fn losses(device: &Device) -> Result<(), Failed> {
    let autodiff = &device.clone().autodiff();
    let module = CrossEntropyLossConfig::new().init(autodiff);
    let x = leaf([0, 9], device);
    let loss = module.forward(x.clone(), no_targets(autodiff));
    // The mean of nothing has no value.
    all_are("the mean", loss.clone().inner(), [1], f64::NAN)?;
    zeros("logits", x.grad(&loss.backward()), [0, 9])?;
    for reduction in [Reduction::Mean, Reduction::Sum] {
        let loss = || {
            let options = CrossEntropyOptions::default();
            cross_entropy(x.clone(), no_targets(autodiff), options, reduction)
        };
        refused(loss, "`logits`: expected at least 1 in every dimension, got shape [0, 9]")?;
    }
    let head = LinearConfig::new(8, 9).init(autodiff);
    let loss =
        || loss::linear_cross_entropy(&module, &head, leaf([0, 8], device), no_targets(autodiff));
    refused(loss, "`x`: expected at least 1 in every dimension, got shape [0, 8]")
}

/// Whether `work` ends with a message that says so.
fn refused<T>(work: impl FnOnce() -> T, expected: &str) -> Result<(), Failed> {
    let Err(panic) = catch_unwind(AssertUnwindSafe(work)) else {
        return Err(format!("nothing was refused, where {expected} was expected").into());
    };
    match panic.downcast_ref::<String>() {
        Some(message) if message.contains(expected) => Ok(()),
        other => Err(format!("{other:?}, where {expected} was expected").into()),
    }
}

fn embeddings(device: &Device) -> Result<(), Failed> {
    let autodiff = &device.clone().autodiff();
    let module = EmbeddingConfig::new(7, 6).init(autodiff);
    for dims in [[0, 5], [2, 0]] {
        for is_ours in [false, true] {
            let ids = || {
                let ids = TensorData::new(Vec::<i32>::new(), dims);
                Tensor::<2, Int>::from_data(ids, autodiff)
            };
            let y = match is_ours {
                true => embedding::embedding(&module, ids()),
                false => module.forward(ids()),
            };
            all_are("rows", y.clone().inner(), [dims[0], dims[1], 6], 0.0)?;
            zeros("table", module.weight.val().grad(&y.sum().backward()), [7, 6])?;
        }
    }
    Ok(())
}

fn dropouts(device: &Device) -> Result<(), Failed> {
    let module = DropoutConfig::new(0.5).init();
    let x = leaf([0, 6], device);
    let y = dropout::dropout(&module, x.clone());
    zeros("dropout", x.grad(&y.sum().backward()), [0, 6])?;
    let (x, residual) = (leaf([3, 0], device), leaf([3, 0], device));
    let y = dropout::add_dropout(&module, residual.clone(), x.clone());
    let gradients = y.sum().backward();
    zeros("dropout of what is added", x.grad(&gradients), [3, 0])?;
    zeros("residual", residual.grad(&gradients), [3, 0])
}

fn causal() -> AttentionOptions {
    AttentionOptions { causal: true, ..AttentionOptions::default() }
}

/// No sequences, no queries, no heads.
fn attentions(device: &Device) -> Result<(), Failed> {
    for dims in [[0, 2, 5, 8], [2, 2, 0, 8], [2, 0, 5, 8]] {
        let x = || ones(dims, device);
        let expected = "`q`: expected at least 1 in every dimension";
        refused(|| attention(x(), x(), x(), causal()), expected)?;
    }
    Ok(())
}

fn no_keys(device: &Device) -> Result<(), Failed> {
    let (q, k) = (ones([2, 2, 5, 8], device), || ones([2, 2, 0, 8], device));
    let expected = "`k`: expected at least 1 in every dimension";
    refused(|| attention(q, k(), k(), AttentionOptions::default()), expected)
}

fn packed(device: &Device) -> Result<(), Failed> {
    let x = || ones([0, 2, 8], device);
    let expected = "`q`: expected at least 1 in every dimension";
    refused(|| attention_packed(x(), x(), x(), &[0, 0], &[0, 0], causal()), expected)
}

fn burns_attention(device: &Device) -> Result<(), Failed> {
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    for dims in [[0, 2, 5, 8], [2, 2, 0, 8]] {
        let x = ones(dims, device);
        let y = module::attention(x.clone(), x.clone(), x, None, None, options);
        all_are("o", y, dims, 0.0)?;
    }
    Ok(())
}

fn encoders(device: &Device) -> Result<(), Failed> {
    let autodiff = &device.clone().autodiff();
    for norm_first in [false, true] {
        let module = TransformerEncoderConfig::new(16, 24, 2, 1)
            .with_dropout(0.0)
            .with_norm_first(norm_first)
            .init(autodiff);
        for dims in [[0, 5, 16], [2, 0, 16]] {
            let both_ways = || {
                let x = leaf(dims, device);
                let y = module.forward(TransformerEncoderInput::new(x.clone()));
                all_are("tokens", y.clone().inner(), dims, 0.0)?;
                let gradients = y.sum().backward();
                zeros("tokens", x.grad(&gradients), dims)?;
                let weight = module.layers[0].mha.query.weight.val();
                zeros("weights of queries", weight.grad(&gradients), [16, 16])
            };
            // With Burn's norms.
            unless_burn_refuses(both_ways())?;
            let input = FlashInput::new(ones(dims, autodiff)).causal();
            let expected = "expected at least 1 in every dimension";
            refused(|| flash::transformer_encoder(&module, input), expected)?;
        }
    }
    Ok(())
}

/// A layer without inputs, beside one with some.
fn optimizers(device: &Device) -> Result<(), Failed> {
    let autodiff = &device.clone().autodiff();
    let model = Linear {
        weight: Param::from_tensor(ones([0, 4], autodiff)),
        bias: Some(Param::from_tensor(ones([4], autodiff))),
    };
    let y = model.forward(ones([3, 0], autodiff));
    all_are("the bias, and nothing", y.inner(), [3, 4], 1.0)?;
    let gradients = || {
        let loss = model.forward(ones([3, 0], autodiff)).sum();
        GradientsParams::from_grads(loss.backward(), &model)
    };
    let stepped = [
        AdamWConfig::new().with_weight_decay(0.0).init().step(0.5, model.clone(), gradients()),
        SgdConfig::new().init().step(0.5, model.clone(), gradients()),
    ];
    // AdamW's first step is of the rate's length but for its epsilon, and the gradient is 3.
    for (model, expected) in stepped.into_iter().zip([0.5, -0.5]) {
        all_are("weight", model.weight.val().inner(), [0, 4], 0.0)?;
        let bias = values(model.bias.ok_or("the bias is gone")?.val().inner())?;
        if bias.len() != 4 || bias.iter().any(|b| (b - expected).abs() > 1e-4) {
            return Err(format!("biases of {expected} are {bias:?}").into());
        }
    }
    Ok(())
}
