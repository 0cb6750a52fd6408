//! Whole modules: what the kernels make of them, against Burn's CPU backend.

use super::{F32, expect_products, trial};
use blackburn::nn::{
    flash,
    transformer::{TransformerCache, TransformerEncoderInput as FlashInput},
};
use blackburn_reference::random::normal;
use blackburn_tests::{
    blocks::{Block, blocks_of},
    tensors::{tensor, values},
};
use burn::{
    module::{ModuleMapper, ModuleVisitor, Param},
    nn::{
        Linear, LinearConfig,
        activation::{Activation, ActivationConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    prelude::*,
    tensor::Gradients,
};
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial("a_perceptron_has_the_gradients_of_the_cpu", |device| {
            [ActivationConfig::Relu, ActivationConfig::Gelu].into_iter().try_for_each(
                |activation| {
                    let tolerance = tolerance(&activation);
                    let module = Perceptron::new(activation);
                    compare_modules(device, module, 6, tolerance).map(|_| ())
                },
            )
        }),
        trial("a_residual_perceptron_has_the_gradients_of_the_cpu", |device| {
            let tolerance = tolerance(&ActivationConfig::Gelu);
            let blocks = compare_modules(device, Residual::new(), LAYERS * 6, tolerance)?;
            expect_gelus(&blocks, LAYERS)
        }),
        trial("a_transformer_layer_has_the_gradients_of_the_cpu", |device| {
            [ActivationConfig::Relu, ActivationConfig::Gelu].into_iter().try_for_each(
                |activation| {
                    let tolerance = tolerance(&activation);
                    let gelus = usize::from(matches!(activation, ActivationConfig::Gelu));
                    // Forward: q, k, v, scores, context, output, and two of the feed-forward part.
                    let blocks = compare_modules(device, encoder(activation), 3 * 8, tolerance)?;
                    expect_gelus(&blocks, gelus)
                },
            )
        }),
        trial("flash_attention_in_a_transformer_has_the_gradients_of_the_cpu", |device| {
            let tolerance = tolerance(&ActivationConfig::Relu);
            let module = Flash { blocks: encoder(ActivationConfig::Relu) };
            // As above, but for the products of attention itself.
            compare_modules(device, module, 3 * 6, tolerance).map(|_| ())
        }),
        trial("decoding_with_a_cache_is_a_forward_over_all", cached),
        trial("a_part_that_is_left_out_is_caught", left_out),
    ]
}

const WIDTH: usize = 24;
const HIDDEN: usize = 40;
const TOKENS: [usize; 2] = [2, 9];

/// How far two computations in f32 may be from each other, relative to a tensor's largest number.
///
/// A product of a hundred terms errs by 1e-5 at most. On CUDA operands are cut to 11 bits, an error
/// of 1e-3 that grows through a few products in a row. Where GELU is differentiated, the CPU takes
/// the derivative of the tanh form, up to 1e-3 off, and the kernel that of GELU.
fn tolerance(activation: &ActivationConfig) -> f64 {
    let on_cuda = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    match activation {
        _ if on_cuda => 1e-2,
        ActivationConfig::Gelu => 3e-3,
        _ => 1e-4,
    }
}

/// A module from tokens to tokens.
trait Tokens: Module {
    fn tokens(&self, x: Tensor<3>) -> Tensor<3>;
}

#[derive(Module, Debug)]
struct Perceptron {
    first: Linear,
    activation: Activation,
    second: Linear,
}

impl Perceptron {
    fn new(activation: ActivationConfig) -> Self {
        let device = Device::flex().autodiff();
        let perceptron = Self {
            first: LinearConfig::new(WIDTH, HIDDEN).init(&device),
            activation: activation.init(&device),
            second: LinearConfig::new(HIDDEN, WIDTH).init(&device),
        };
        away_from_kinks(perceptron, &activation)
    }
}

impl Tokens for Perceptron {
    fn tokens(&self, x: Tensor<3>) -> Tensor<3> {
        self.second.forward(self.activation.forward(self.first.forward(x)))
    }
}

const LAYERS: usize = 3;

/// Perceptrons that add to their input.
#[derive(Module, Debug)]
struct Residual {
    layers: Vec<Perceptron>,
}

impl Residual {
    fn new() -> Self {
        Self { layers: (0..LAYERS).map(|_| Perceptron::new(ActivationConfig::Gelu)).collect() }
    }
}

impl Tokens for Residual {
    fn tokens(&self, x: Tensor<3>) -> Tensor<3> {
        self.layers.iter().fold(x, |x, layer| x.clone() + layer.tokens(x))
    }
}

fn encoder(activation: ActivationConfig) -> TransformerEncoder {
    let config = TransformerEncoderConfig::new(WIDTH, HIDDEN, 3, 1)
        .with_dropout(0.0)
        .with_activation(activation.clone());
    away_from_kinks(config.init(&Device::flex().autodiff()), &activation)
}

/// With `Relu`, biases hidden units far to one side or the other: at its kink the slightest error turns
/// a gradient on or off, and of 720 numbers around zero one may well be close enough.
fn away_from_kinks<M: Module>(module: M, activation: &ActivationConfig) -> M {
    if !matches!(activation, ActivationConfig::Relu) {
        return module;
    }
    struct Biases;
    impl ModuleMapper for Biases {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if param.shape().as_slice() != [HIDDEN] {
                return param;
            }
            // Weights and inputs of these modules leave six standard deviations to zero.
            param.map(|bias| {
                let sides = (0..HIDDEN).map(|unit| if unit % 2 == 0 { 3.5f32 } else { -3.5 });
                let sides = TensorData::new(sides.collect(), bias.shape());
                Tensor::from_data(sides, &bias.device()).require_grad()
            })
        }
    }
    module.map(&mut Biases)
}

impl Tokens for TransformerEncoder {
    fn tokens(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(TransformerEncoderInput::new(x))
    }
}

/// An unmodified encoder on causal flash attention.
#[derive(Module, Debug)]
struct Flash {
    blocks: TransformerEncoder,
}

impl Tokens for Flash {
    fn tokens(&self, x: Tensor<3>) -> Tensor<3> {
        flash::transformer_encoder(&self.blocks, FlashInput::new(x).causal())
    }
}

/// A prompt of five tokens, and then the others one by one.
fn cached(device: &Device) -> Result<(), Failed> {
    let module = Flash { blocks: encoder(ActivationConfig::Relu).valid().fork(device) };
    let [batch, seq] = TOKENS;
    let x = normal(1, batch * seq * WIDTH, 1.0, F32);
    let x = tensor(&x, [batch, seq, WIDTH], F32, device);
    let mut cache = TransformerCache::new(1, seq);
    let mut part = |tokens: std::ops::Range<usize>| {
        let input = FlashInput::new(x.clone().slice([0..batch, tokens]));
        flash::transformer_encoder_cached(&module.blocks, input, &mut cache)
    };
    let mut parts = vec![part(0..5)];
    parts.extend((5..seq).map(|token| part(token..token + 1)));
    let expected = values(module.tokens(x.clone()))?;
    let actual = values(Tensor::cat(parts, 1))?;
    agree(&[actual], &[expected], tolerance(&ActivationConfig::Relu))
}

/// The output, the gradient of the input, and then those of all parameters.
fn results<M: Tokens>(module: &M, device: &Device) -> Result<Vec<Vec<f64>>, Failed> {
    let elements = TOKENS[0] * TOKENS[1] * WIDTH;
    let shape = [TOKENS[0], TOKENS[1], WIDTH];
    let x = tensor(&normal(1, elements, 1.0, F32), shape, F32, device).require_grad();
    let factors = tensor(&normal(2, elements, 1.0, F32), shape, F32, device);
    let y = module.tokens(x.clone());
    let gradients = (y.clone() * factors).sum().backward();
    let dx = x.grad(&gradients).ok_or("the input has no gradient")?;
    let mut parameters = ParameterGradients { gradients: &gradients, found: Ok(Vec::new()) };
    module.visit(&mut parameters);
    let mut results = vec![values(y)?, values(dx)?];
    results.extend(parameters.found?);
    Ok(results)
}

struct ParameterGradients<'a> {
    gradients: &'a Gradients,
    found: Result<Vec<Vec<f64>>, Failed>,
}

impl ModuleVisitor for ParameterGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(found) = &mut self.found else { return };
        let gradient = param.val().grad(self.gradients).ok_or("a parameter has no gradient");
        match gradient.map_err(Failed::from).and_then(values) {
            Ok(gradient) => found.push(gradient),
            Err(error) => self.found = Err(error),
        }
    }
}

/// Whether all of `actual` are within `tolerance` of `expected`, relative to the largest number of
/// each.
fn agree(actual: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) -> Result<(), Failed> {
    if actual.len() != expected.len() {
        return Err(format!("{} gradients for {}", actual.len(), expected.len()).into());
    }
    // Of all tensors: gradients that cancel out, as those of keys' biases, are nothing but rounding.
    let most = expected.iter().flatten().fold(0.0f64, |most, e| most.max(e.abs()));
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let largest = expected.iter().fold(most * 1e-2, |largest, e| largest.max(e.abs()));
        let errors = actual.iter().zip(expected).map(|(a, e)| (a - e).abs());
        // `max` would pass over NaN.
        let worst = errors.fold(0.0f64, |worst, e| if e > worst || e.is_nan() { e } else { worst });
        if worst.is_nan() || worst > tolerance * largest {
            let message = format!("result {i} is off by {worst:e}, its numbers reach {largest:e}");
            return Err(message.into());
        }
    }
    Ok(())
}

fn compare_modules<M: Tokens>(
    device: &Device,
    module: M,
    least_products: usize,
    tolerance: f64,
) -> Result<Vec<Block>, Failed> {
    let device = device.clone().autodiff();
    let expected = results(&module, &Device::flex().autodiff())?;
    let module = module.fork(&device);
    let (actual, blocks) = blocks_of(&device, || results(&module, &device))?;
    expect_products(&blocks, least_products)?;
    agree(&actual, &expected, tolerance)?;
    Ok(blocks)
}

/// Whether so many GELUs ran on the kernels, forward and backward.
fn expect_gelus(blocks: &[Block], least: usize) -> Result<(), Failed> {
    let launches = |name: &str| {
        let kernels = blocks.iter().flat_map(|block| &block.kernels);
        kernels.filter(|kernel| kernel.ends_with(name)).count()
    };
    // Tests that run at the same time may add some.
    match ["GeluForwardKernel", "GeluBackwardKernel"].map(launches) {
        found if found.iter().all(|launches| *launches >= least) => Ok(()),
        found => Err(format!("{found:?} GELUs ran on the kernels, not {least}: {blocks:?}").into()),
    }
}

/// The negative control: without the bias of one layer, results must not pass.
fn left_out(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let module = Perceptron::new(ActivationConfig::Relu);
    let expected = results(&module, &Device::flex().autodiff())?;
    let mut module = module.fork(&device);
    module.first.bias = None;
    let actual = results(&module, &device)?;
    // The bias itself has no gradient then; what is left has to differ.
    let expected: Vec<Vec<f64>> =
        expected.into_iter().enumerate().filter(|(i, _)| *i != 3).map(|(_, v)| v).collect();
    match agree(&actual, &expected, tolerance(&ActivationConfig::Gelu)) {
        Err(_) => Ok(()),
        Ok(()) => Err("a bias that was left out went unseen".into()),
    }
}
