//! Whole modules: outputs and gradients of what the kernels make of them, by the formulas.

use super::products;
use blackburn::nn::{
    flash,
    transformer::{TransformerCache, TransformerEncoderInput as FlashInput},
};
use blackburn_reference::storage::Storage;
use blackburn_tests::{
    blocks::{Block, blocks_of},
    modules::{Tokens, seeded, widened},
    plain::{self, Judge, Tensors},
    tensors::{float, values},
    textbook::{AttentionRules, Fault, Function, Textbook},
};
use burn::{
    nn::{
        Linear, LinearConfig,
        activation::{Activation, ActivationConfig},
        attention::generate_autoregressive_mask,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    prelude::*,
    tensor::FloatDType,
};
use libtest_mimic::{Failed, Trial};

type Test = fn(Storage, &Device, &mut Judge) -> Result<(), Failed>;

pub(super) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 3] = [
        ("perceptrons_are_within_bounds", perceptrons),
        ("transformer_layers_are_within_bounds", encoders),
        ("decoding_with_a_cache_is_a_forward_over_all", cached),
    ];
    let trials = tests.into_iter().flat_map(|(name, test)| {
        Storage::ALL.map(|storage| {
            let name = format!("linear::{name}_in_{storage:?}").to_lowercase();
            plain::trial(name, storage, move |device, judge| test(storage, device, judge))
        })
    });
    trials.collect()
}

const WIDTH: usize = 24;
const HIDDEN: usize = 40;
const HEADS: usize = 3;
const SHAPE: [usize; 3] = [2, 9, WIDTH];
const LAYERS: usize = 3;

#[derive(Module, Debug)]
struct Perceptron {
    linear_inner: Linear,
    activation: Activation,
    linear_outer: Linear,
}

impl Perceptron {
    fn new(function: Function) -> Self {
        let device = Device::flex().autodiff();
        Self {
            linear_inner: LinearConfig::new(WIDTH, HIDDEN).init(&device),
            activation: config_of(function).init(&device),
            linear_outer: LinearConfig::new(HIDDEN, WIDTH).init(&device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.linear_outer.forward(self.activation.forward(self.linear_inner.forward(x)))
    }

    fn by_formula(&self, formulas: Textbook, function: Function, x: Tensor<3>) -> Tensor<3> {
        formulas.perceptron([&self.linear_inner, &self.linear_outer], function, x)
    }
}

fn config_of(function: Function) -> ActivationConfig {
    match function {
        Function::Relu => ActivationConfig::Relu,
        Function::Gelu => ActivationConfig::Gelu,
    }
}

/// Perceptrons that add to their input.
#[derive(Module, Debug)]
struct Residual {
    layers: Vec<Perceptron>,
}

/// A module, what it computes and is to compute, and what runs where it does.
struct Subject<M> {
    name: &'static str,
    module: M,
    tokens: Tokens,
    storage: Storage,
    forward: fn(&M, Tensor<3>) -> Tensor<3>,
    by_formula: fn(&M, Textbook, Tensor<3>) -> Tensor<3>,
    products: usize,
    gelus: usize,
    faults: &'static [Fault],
}

impl<M: Module> Subject<M> {
    fn check(&self, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
        let Self { name, module, tokens, storage, forward, by_formula, .. } = self;
        let exact = |tokens: &Tokens, formulas: Textbook| {
            let forward = |module: &M, x| by_formula(module, formulas, x);
            tokens.results(&widened(module)?, FloatDType::F64, &Device::flex().autodiff(), forward)
        };
        let truth = exact(tokens, Textbook::default())?;
        let device = &device.clone().autodiff();
        let on_device = || module.clone().fork(device);
        let plain = |draw: u64| {
            let tokens = tokens.drawn(draw, *storage);
            let forward = |module: &M, x| by_formula(module, Textbook::default(), x);
            let plain = tokens.results(&on_device(), float(*storage), device, forward)?;
            Ok([plain, exact(&tokens, Textbook::default())?])
        };
        let served = || {
            let module = on_device();
            let work = || tokens.results(&module, float(*storage), device, forward);
            let (results, blocks) = blocks_of(device, work)?;
            self.expect_kernels(&blocks)?;
            Ok(results)
        };
        judge.check_drawn(name, &truth, plain, served)?;
        let lost = || exact(&tokens.without_last_sequence(), Textbook::default());
        judge.expect_gradients_caught(name, "a lost sequence", &truth, lost)?;
        self.faults.iter().try_for_each(|fault| {
            let faulty = || exact(tokens, Textbook::with(*fault));
            judge.expect_caught(name, &format!("{fault:?}"), &truth, faulty)
        })
    }

    /// Whether all products and GELUs ran on the kernels, forward and backward.
    fn expect_kernels(&self, blocks: &[Block]) -> Result<(), Failed> {
        let gelus = |names: &[&str]| {
            let kernels = blocks.iter().flat_map(|block| &block.kernels);
            kernels.filter(|kernel| names.iter().any(|name| kernel.ends_with(name))).count()
        };
        let found = [
            products(blocks)?,
            gelus(&["GeluForwardKernel"]),
            gelus(&["GeluBackwardKernel", "GeluBackwardSumKernel"]),
        ];
        if found == [self.products, self.gelus, self.gelus] {
            return Ok(());
        }
        let expected = format!("{} products and {} GELUs", self.products, self.gelus);
        Err(format!("{}: {expected} ran as {found:?}: {blocks:?}", self.name).into())
    }
}

/// Tokens whose first number is 3 or -3, by turns of two and three tokens.
fn two_sided(storage: Storage) -> Tokens {
    let mut tokens = Tokens::new(SHAPE, 0.5, storage);
    for (row, token) in tokens.x.chunks_mut(WIDTH).enumerate() {
        token[0] = if row % 5 < 2 { 3.0 } else { -3.0 };
    }
    tokens
}

/// Weights that carry a token's first number to hidden units, to one side for even units and to the
/// other for odd ones. At `Relu`'s kink the slightest error turns a gradient on or off; so every unit
/// is far from it, on for some tokens and off for others.
fn to_both_sides(path: &str, _dims: &[usize], numbers: &mut [f64]) {
    if path.ends_with("linear_inner.weight") {
        let units = numbers[..HIDDEN].iter_mut().enumerate();
        units.for_each(|(unit, weight)| *weight = if unit % 2 == 0 { 1.0 } else { -1.0 });
    }
}

/// Whether hidden units are on for some tokens, off for others, and far from the kink.
fn expect_two_sides(hidden: Tensor<3>) -> Result<(), Failed> {
    /// Many times what 16 bits round of numbers about 3.
    const MARGIN: f64 = 0.25;
    let hidden = values(hidden)?;
    let nearest = hidden.iter().fold(f64::INFINITY, |nearest, z| nearest.min(z.abs()));
    let both = (0..HIDDEN).all(|unit| {
        let of_unit = || hidden.iter().skip(unit).step_by(HIDDEN);
        of_unit().any(|z| *z > 0.0) && of_unit().any(|z| *z < 0.0)
    });
    match nearest > MARGIN && both {
        true => Ok(()),
        false => Err(format!("hidden units come as close as {nearest} to the kink").into()),
    }
}

fn perceptrons(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let perceptron = seeded(Perceptron::new(Function::Relu), storage, to_both_sides);
    let wide = widened(&perceptron)?;
    let x = two_sided(storage).tensor(FloatDType::F64, &Device::flex().autodiff());
    expect_two_sides(Textbook::default().linear(&wide.linear_inner, x))?;
    Subject {
        name: "a perceptron with ReLU",
        module: perceptron,
        tokens: two_sided(storage),
        storage,
        forward: Perceptron::forward,
        by_formula: |module, formulas, x| module.by_formula(formulas, Function::Relu, x),
        products: 6,
        gelus: 0,
        faults: &[Fault::Bias, Fault::ColumnMask],
    }
    .check(device, judge)?;

    let subject = Subject {
        name: "a perceptron with GELU",
        module: seeded(Perceptron::new(Function::Gelu), storage, |_, _, _| ()),
        tokens: Tokens::new(SHAPE, 1.0, storage),
        storage,
        forward: Perceptron::forward,
        by_formula: |module, formulas, x| module.by_formula(formulas, Function::Gelu, x),
        products: 6,
        gelus: 1,
        faults: &[Fault::Bias],
    };
    subject.check(device, judge)?;

    let layers = (0..LAYERS).map(|_| Perceptron::new(Function::Gelu)).collect();
    Subject {
        name: "residual perceptrons",
        module: seeded(Residual { layers }, storage, |_, _, _| ()),
        tokens: Tokens::new(SHAPE, 1.0, storage),
        storage,
        forward: |module, x| module.layers.iter().fold(x, |x, l| x.clone() + l.forward(x)),
        by_formula: |module, formulas, x| {
            let add = |x: Tensor<3>, layer: &Perceptron| {
                x.clone() + layer.by_formula(formulas, Function::Gelu, x)
            };
            module.layers.iter().fold(x, add)
        },
        products: LAYERS * 6,
        gelus: LAYERS,
        faults: &[Fault::Bias],
    }
    .check(device, judge)
}

fn encoder(function: Function, norm_first: bool) -> TransformerEncoder {
    TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 1)
        .with_dropout(0.0)
        .with_norm_first(norm_first)
        .with_activation(config_of(function))
        .init(&Device::flex().autodiff())
}

fn rules(causal: bool) -> AttentionRules {
    AttentionRules { heads: HEADS, heads_kv: HEADS, causal, ..AttentionRules::default() }
}

fn by_formula(
    module: &TransformerEncoder,
    formulas: Textbook,
    function: Function,
    causal: bool,
    x: Tensor<3>,
) -> Tensor<3> {
    let layers = module.layers.iter();
    layers.fold(x, |x, layer| formulas.encoder_layer(layer, function, &rules(causal), x))
}

fn encoders(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let relu = seeded(encoder(Function::Relu, false), storage, to_both_sides);
    let layer = &widened(&relu)?.layers[0];
    let x = two_sided(storage).tensor(FloatDType::F64, &Device::flex().autodiff());
    let formulas = Textbook::default();
    let found = formulas.attention((&layer.mha).into(), &rules(false), x.clone(), x.clone());
    let normalized = formulas.norm(&layer.norm_1, x + found);
    expect_two_sides(formulas.linear(&layer.pwff.linear_inner, normalized))?;
    Subject {
        name: "a layer with ReLU, norms last",
        module: relu,
        tokens: two_sided(storage),
        storage,
        forward: |module, x| module.forward(TransformerEncoderInput::new(x)),
        by_formula: |module, formulas, x| {
            by_formula(module, formulas.with_norms_of_burn(), Function::Relu, false, x)
        },
        // Forward: q, k, v, scores, context, output, and two of the feed-forward part.
        products: 3 * 8,
        gelus: 0,
        faults: &[Fault::Bias, Fault::ColumnMask, Fault::Scale, Fault::Mean],
    }
    .check(device, judge)?;

    let gelu = || seeded(encoder(Function::Gelu, true), storage, |_, _, _| ());
    Subject {
        name: "a layer with GELU, norms first, under a causal mask",
        module: gelu(),
        tokens: Tokens::new(SHAPE, 1.0, storage),
        storage,
        forward: |module, x| {
            let [batch, seq, _] = x.dims();
            let device = x.device().without_autodiff();
            let mask = generate_autoregressive_mask(batch, seq, &device);
            module.forward(TransformerEncoderInput::new(x).mask_attn(mask))
        },
        by_formula: |module, formulas, x| {
            by_formula(module, formulas.with_norms_of_burn(), Function::Gelu, true, x)
        },
        products: 3 * 8,
        gelus: 1,
        faults: &[Fault::Bias, Fault::LateKey, Fault::Scale, Fault::Mean],
    }
    .check(device, judge)?;

    Subject {
        name: "a layer on causal flash attention",
        module: gelu(),
        tokens: Tokens::new(SHAPE, 1.0, storage),
        storage,
        forward: |module, x| flash::transformer_encoder(module, FlashInput::new(x).causal()),
        by_formula: |module, formulas, x| by_formula(module, formulas, Function::Gelu, true, x),
        // As above, but for the products of attention itself.
        products: 3 * 6,
        gelus: 1,
        faults: &[Fault::Bias, Fault::LateKey, Fault::Scale, Fault::Mean],
    }
    .check(device, judge)
}

/// A prompt of five tokens, and then the others one by one.
fn cached(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let [batch, seq, _] = SHAPE;
    let module = seeded(encoder(Function::Gelu, false), storage, |_, _, _| ());
    let tokens = Tokens::new(SHAPE, 1.0, storage);
    let output =
        |y: Tensor<3>| -> Result<Tensors, Failed> { Ok(vec![("output".into(), values(y)?)]) };
    let exact = |formulas: Textbook| {
        let x = tokens.tensor(FloatDType::F64, &Device::flex().autodiff());
        output(by_formula(&widened(&module)?, formulas, Function::Gelu, true, x))
    };
    let x = tokens.tensor(float(storage), device);
    let plain = || {
        let module = module.valid().fork(device);
        output(by_formula(&module, Textbook::default(), Function::Gelu, true, x.clone()))
    };
    let served = || {
        let module = module.valid().fork(device);
        let mut cache = TransformerCache::new(1, seq);
        let mut part = |tokens: std::ops::Range<usize>| {
            let input = FlashInput::new(x.clone().slice([0..batch, tokens]));
            flash::transformer_encoder_cached(&module, input, &mut cache)
        };
        let mut parts = vec![part(0..5)];
        parts.extend((5..seq).map(|token| part(token..token + 1)));
        output(Tensor::cat(parts, 1))
    };
    let truth = exact(Textbook::default())?;
    let name = "decoding";
    judge.check(name, &truth, plain, served)?;
    judge.expect_caught(name, "a key too many", &truth, || exact(Textbook::with(Fault::LateKey)))
}
