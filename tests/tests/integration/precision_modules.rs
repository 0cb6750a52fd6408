//! Modules whose tables and states Burn keeps in f32, under policies of 16 and 8 bits on the device.

use blackburn::{
    nn::{positions, recurrent},
    train::precision::{Precision, PrecisionPolicy, full_precision},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    on_burn_device,
    tensors::{tensor, values},
};
use burn::{
    module::{ModuleVisitor, Param},
    nn::{
        BiLstm, BiLstmConfig, Gru, GruConfig, Linear, LinearConfig, Lstm, LstmConfig,
        PositionalEncoding, PositionalEncodingConfig, RotaryEncoding, RotaryEncodingConfig,
    },
    optim::GradientsParams,
    prelude::*,
    tensor::DType,
};
use libtest_mimic::{Completion, Failed, Trial};

const BATCH: usize = 4;
const SEQ: usize = 8;
const WIDTH: usize = 32;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for precision in [Precision::Bf16, Precision::F16, Precision::Fp8(Default::default())] {
        for (name, init) in MODULES {
            trials.push(Trial::ignorable_test(
                format!("precision_modules::{name}_trains_in_{precision}"),
                move || trial(precision, init),
            ));
        }
    }
    trials
}

type Init = fn(&Device) -> Middle;

const MODULES: [(&str, Init); 5] = [
    ("rotary", |device| Middle::Rotary(RotaryEncodingConfig::new(SEQ, WIDTH).init(device))),
    ("sinusoidal", |device| {
        let config = PositionalEncodingConfig::new(WIDTH).with_max_sequence_size(SEQ);
        Middle::Sinusoidal(config.init(device))
    }),
    ("lstm", |device| Middle::Lstm(LstmConfig::new(WIDTH, WIDTH, true).init(device))),
    ("bi_lstm", |device| Middle::BiLstm(BiLstmConfig::new(WIDTH, WIDTH / 2, true).init(device))),
    ("gru", |device| Middle::Gru(GruConfig::new(WIDTH, WIDTH, true).init(device))),
];

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "one of them is made a test")]
enum Middle {
    Rotary(RotaryEncoding),
    Sinusoidal(PositionalEncoding),
    Lstm(Lstm),
    BiLstm(BiLstm),
    Gru(Gru),
}

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    middle: Middle,
    last: Linear,
}

impl Network {
    /// By the functions that take any type, or by Burn's own code.
    fn forward(&self, x: Tensor<3>, by_drop_ins: bool) -> Tensor<3> {
        let x = self.first.forward(x);
        let x = match (&self.middle, by_drop_ins) {
            (Middle::Rotary(module), true) => positions::rotary(module, x, 0),
            (Middle::Rotary(module), false) => module.forward(x),
            (Middle::Sinusoidal(module), true) => positions::sinusoidal(module, x),
            (Middle::Sinusoidal(module), false) => module.forward(x),
            (Middle::Lstm(module), true) => recurrent::lstm(module, x, None).0,
            (Middle::Lstm(module), false) => module.forward(x, None).0,
            (Middle::BiLstm(module), true) => recurrent::bi_lstm(module, x, None).0,
            (Middle::BiLstm(module), false) => module.forward(x, None).0,
            (Middle::Gru(module), true) => recurrent::gru(module, x, None),
            (Middle::Gru(module), false) => module.forward(x, None),
        };
        self.last.forward(x)
    }
}

fn trial(precision: Precision, init: Init) -> Result<Completion, Failed> {
    let mut unsupported = None;
    let completed = on_burn_device(|device| {
        if !precision.is_supported(&device) {
            unsupported = Some(format!("no {precision} on {device:?}"));
            return Ok(());
        }
        trains(precision, init, &device.autodiff())
    })?;
    Ok(unsupported.map_or(completed, Completion::ignored_with))
}

/// Forward and backward against Burn's own code in f32.
fn trains(precision: Precision, init: Init, device: &Device) -> Result<(), Failed> {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let model = Network { first: linear(), middle: init(device), last: linear() };
    let numbers = normal(1, BATCH * SEQ * WIDTH, 1.0, Storage::Bf16);
    let x: Tensor<3> = tensor(&numbers, [BATCH, SEQ, WIDTH], Storage::F32, device);
    let exact = run(&model, x.clone(), false)?;

    let policy = PrecisionPolicy::new(precision);
    // The control: such modules are refused where nobody says that they are taken care of.
    match policy.apply(model.clone()) {
        Ok(_) => return Err("a module that fails in this precision was taken".into()),
        Err(error) if error.to_string().contains("blackburn::nn::") => {}
        Err(error) => return Err(error.into()),
    }
    let policy = policy.with_drop_ins();
    let model = policy.apply(model)?;
    let found = run(&model, policy.input(x), true)?;

    // Signal to noise: 25 dB in 16 bits; in 8, 18 of a layer's output and 17 of weights' gradients.
    let least = match precision.recipe() {
        None => [25.0, 25.0],
        Some(_) => [18.0, 17.0],
    };
    for (what, least, found, exact) in
        [("outputs", least[0], &found[0], &exact[0]), ("gradients", least[1], &found[1], &exact[1])]
    {
        if found.len() != exact.len() {
            return Err(format!("{} {what} instead of {}", found.len(), exact.len()).into());
        }
        let noise: f64 = found.iter().zip(exact).map(|(a, b)| (a - b).powi(2)).sum();
        let signal: f64 = exact.iter().map(|x| x * x).sum();
        let ratio = 10.0 * (signal / noise).log10();
        // NaN is not above it either.
        let is_within = ratio >= least;
        if !is_within {
            return Err(format!("{what} have {ratio:.1} dB, expected {least}").into());
        }
    }
    Ok(())
}

/// Outputs, and the gradients of all parameters.
fn run(model: &Network, x: Tensor<3>, by_drop_ins: bool) -> Result<[Vec<f64>; 2], Failed> {
    let given = x.dtype();
    let y = model.forward(x, by_drop_ins);
    if y.dtype() != given {
        return Err(format!("outputs in {:?} of inputs in {given:?}", y.dtype()).into());
    }
    let y = full_precision(y);
    let factors = normal(2, BATCH * SEQ * WIDTH, 1.0, Storage::Bf16);
    let factors: Tensor<3> = tensor(&factors, y.dims(), Storage::F32, &y.device());
    let loss = (y.clone() * factors).mean();
    let gradients = GradientsParams::from_grads(loss.backward(), model);
    let mut all = All { gradients: &gradients, found: Vec::new(), wrong: None };
    model.visit(&mut all);
    match all.wrong {
        Some(wrong) => Err(wrong.into()),
        None => Ok([values(y)?, all.found]),
    }
}

/// Gradients, which reach the masters in f32.
struct All<'a> {
    gradients: &'a GradientsParams,
    found: Vec<f64>,
    wrong: Option<String>,
}

impl ModuleVisitor for All<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match self.gradients.get::<D>(param.id) {
            Some(gradient) if gradient.dtype() == DType::F32 => match values(gradient) {
                Ok(values) => self.found.extend(values),
                Err(error) => self.wrong = Some(format!("{error:?}")),
            },
            Some(gradient) => self.wrong = Some(format!("a gradient in {:?}", gradient.dtype())),
            None => self.wrong = Some("a parameter without a gradient".into()),
        }
    }
}
