//! Judging whole modules by the plain computation: the same formula, in the same type and on the same
//! device, with no provider of Blackburn's or Burn's, so that each operation runs by itself.
//!
//! Both are compared with the formula in f64. What kernels make of a module may err by twice what the
//! plain computation errs by at worst in the same tensor, and one unit in the last place of the largest
//! number: in its type, or in that which products cut it to, TF32 where CUDA multiplies f32. Plain products
//! may be more exact than that: Burn picks for each shape whether it runs on tensor cores.
//!
//! The largest error of one plain computation says little where a few elements err far more than the others.
//! An example is a gradient whose large terms cancel out, in a tensor of small gradients. Of two numbers that
//! are normally distributed, one is more than twice the other in 30 % of all cases. So gradients are drawn
//! [`DRAWS`] times, and the largest error over all draws counts: a normal number is more than twice the largest
//! of 16 in 0.13 % of all cases. What is computed once, such as a step of a training, has the errors of its like
//! in all layers of an attention taken together instead.
//!
//! A tensor's size, of which one unit in the last place is taken, is that of its like in all layers of an
//! attention: the gradient of a key's bias is zero, as a sum of terms as large as theirs that cancel out.
//!
//! Providers are settled once a process, so the plain computation has a process of its own: the test
//! runs there too, says how far off each tensor is, and judges nothing.

use crate::{on_burn_device_with, run_alone};
use blackburn_backend::providers;
use blackburn_reference::{matmul::MatmulPrecision, storage::Storage, tolerance::compare};
use burn::tensor::Device;
use libtest_mimic::{Failed, Trial};
use std::{collections::BTreeMap, env};

/// Over how many draws the plain computation's errors are taken: see the module.
pub const DRAWS: u64 = 16;

/// Set in the process that computes plainly.
const PLAIN: &str = "BLACKBURN_TEST_PLAIN";
/// What that process starts the line with that it ends with.
const MARK: &str = "errors of the plain computation:";

/// Tensors by name.
pub type Tensors = Vec<(String, Vec<f64>)>;

/// The largest error of each tensor of each subject, by their names.
type Errors = BTreeMap<String, BTreeMap<String, f64>>;

/// What a test in one type says of its subjects.
#[derive(Debug)]
pub struct Judge {
    storage: Storage,
    /// One unit in the last place, relative to a number.
    unit: f64,
    is_plain: bool,
    errors: Errors,
}

/// A test of modules in `storage`, which gives a [`Judge`] its subjects; ignored where the device does
/// not compute in that type.
pub fn trial(
    name: String,
    storage: Storage,
    test: impl Fn(&Device, &mut Judge) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name.clone(), move || {
        on_burn_device_with(storage, |device, client| {
            let is_plain = env::var_os(PLAIN).is_some();
            let errors = if is_plain { Errors::new() } else { plain_errors(&name)? };
            let unit = match (storage, client.name()) {
                (Storage::F32, "cuda") => MatmulPrecision::tf32().operand_error,
                _ => 2.0 * storage.unit_roundoff(),
            };
            let mut judge = Judge { storage, unit, is_plain, errors };
            test(device, &mut judge)?;
            if is_plain {
                eprintln!("{MARK}{}", serde_json::to_string(&judge.errors)?);
            }
            Ok(())
        })
    })
}

/// What the test of that name says in a process without providers.
fn plain_errors(name: &str) -> Result<Errors, Failed> {
    let variables = [(PLAIN, "1"), ("BLACKBURN_DISABLE", &providers::names().join(","))];
    let output = run_alone(name, &variables)?;
    let log = String::from_utf8_lossy(&output.stderr);
    let errors = log.lines().find_map(|line| line.strip_prefix(MARK));
    let errors = errors.ok_or_else(|| format!("no errors were reported: {log}"))?;
    Ok(serde_json::from_str(errors)?)
}

impl Judge {
    /// Whether this process computes plainly.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Whether what `served` computes is close enough to `exact`, where `plain` says how close that is.
    ///
    /// # Errors
    ///
    /// The worst number of the first tensor that is off.
    pub fn check(
        &mut self,
        subject: &str,
        exact: &Tensors,
        plain: impl FnOnce() -> Result<Tensors, Failed>,
        served: impl FnOnce() -> Result<Tensors, Failed>,
    ) -> Result<(), Failed> {
        if !self.is_plain {
            return self.within(subject, exact, &served()?);
        }
        self.note(subject, &plain()?, exact)?;
        let noted = self.errors.entry(subject.into()).or_default();
        let own = noted.clone();
        for (name, error) in noted {
            let alike = own.iter().filter(|(other, _)| group(other) == group(name));
            *error = alike.fold(0.0, |worst, (_, error)| worst.max(*error));
        }
        Ok(())
    }

    /// As [`check`](Self::check), with the largest error over [`DRAWS`] plain computations. `plain` gives what
    /// the plain computation makes of a draw, and what is exact; draw 0 is the one that `served` computes.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn check_drawn(
        &mut self,
        subject: &str,
        exact: &Tensors,
        plain: impl Fn(u64) -> Result<[Tensors; 2], Failed>,
        served: impl FnOnce() -> Result<Tensors, Failed>,
    ) -> Result<(), Failed> {
        if !self.is_plain {
            return self.within(subject, exact, &served()?);
        }
        (0..DRAWS).try_for_each(|draw| {
            let [plain, exact] = plain(draw)?;
            self.note(subject, &plain, &exact)
        })
    }

    /// Keeps the errors of a plain computation that are larger than those before.
    fn note(&mut self, subject: &str, plain: &Tensors, exact: &Tensors) -> Result<(), Failed> {
        expect_alike(plain, exact)?;
        let noted = self.errors.entry(subject.into()).or_default();
        for ((name, plain), (_, exact)) in plain.iter().zip(exact) {
            let errors = plain.iter().zip(exact).map(|(p, e)| (p - e).abs());
            // `max` would pass over NaN.
            let worst = errors.fold(0f64, |w, e| if e > w || e.is_nan() { e } else { w });
            if !worst.is_finite() {
                let message = format!("{subject}: plainly computed, {name} is off by {worst}");
                return Err(message.into());
            }
            let noted = noted.entry(name.clone()).or_default();
            *noted = noted.max(worst);
        }
        Ok(())
    }

    /// The negative control: whether what `faulty` computes, which is `subject` with a fault, is found
    /// to be wrong.
    ///
    /// # Errors
    ///
    /// A fault that passes.
    pub fn expect_caught(
        &self,
        subject: &str,
        fault: &str,
        exact: &Tensors,
        faulty: impl FnOnce() -> Result<Tensors, Failed>,
    ) -> Result<(), Failed> {
        if self.is_plain {
            return Ok(());
        }
        match self.within(subject, exact, &faulty()?) {
            Err(_) => Ok(()),
            Ok(()) => Err(format!("{subject}: {fault} passes").into()),
        }
    }

    /// As [`expect_caught`](Self::expect_caught), of each tensor by itself: the others are as they should be.
    /// Left out are the output, which a fault of gradients leaves alone, and tensors that are zero.
    ///
    /// # Errors
    ///
    /// A tensor whose fault passes.
    pub fn expect_gradients_caught(
        &self,
        subject: &str,
        fault: &str,
        exact: &Tensors,
        faulty: impl FnOnce() -> Result<Tensors, Failed>,
    ) -> Result<(), Failed> {
        /// What f64 leaves of terms that cancel out.
        const ZERO: f64 = 1e-12;

        if self.is_plain {
            return Ok(());
        }
        for (i, (name, faulty)) in faulty()?.into_iter().enumerate() {
            if name == "output" || exact[i].1.iter().all(|x| x.abs() < ZERO) {
                continue;
            }
            let fault = format!("{fault}, in {name}");
            let mut one = exact.clone();
            one[i].1 = faulty;
            self.expect_caught(subject, &fault, exact, || Ok(one))?;
        }
        Ok(())
    }

    fn within(&self, subject: &str, exact: &Tensors, actual: &Tensors) -> Result<(), Failed> {
        let errors = self.errors.get(subject);
        let errors = errors.ok_or_else(|| format!("{subject} was not computed plainly"))?;
        expect_alike(actual, exact)?;
        for ((name, actual), (_, expected)) in actual.iter().zip(exact) {
            let plain = errors[name];
            let alike = exact.iter().filter(|(other, _)| group(other) == group(name));
            let largest = alike.flat_map(|(_, e)| e).fold(0f64, |most, e| most.max(e.abs()));
            let bound = 2.0 * plain + self.unit * largest + self.storage.underflow();
            compare(actual, expected, &vec![bound; expected.len()]).map_err(|error| {
                format!("{subject} in {:?}, {name} ({plain:e} plainly): {error}", self.storage)
            })?;
        }
        Ok(())
    }
}

/// Tensors with the same group are as large as each other, or made of terms that are: weights, and biases, of the
/// layers of an attention.
fn group(name: &str) -> String {
    let is_projection = |part: &&str| ["query", "key", "value", "output"].contains(part);
    let parts: Vec<&str> = name.split('.').collect();
    let projection = parts.iter().rev().nth(1).filter(|part| is_projection(part));
    match projection {
        Some(_) => format!("{}.{}", parts[..parts.len() - 2].join("."), parts[parts.len() - 1]),
        None => name.to_string(),
    }
}

fn expect_alike(actual: &Tensors, exact: &Tensors) -> Result<(), Failed> {
    let shape = |tensors: &Tensors| -> Vec<(String, usize)> {
        tensors.iter().map(|(name, values)| (name.clone(), values.len())).collect()
    };
    let (actual, exact) = (shape(actual), shape(exact));
    if actual == exact {
        return Ok(());
    }
    Err(format!("tensors {actual:?}, where {exact:?} are expected").into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        modules::{Tokens, seeded, widened},
        textbook::{AttentionRules, Function, Textbook},
    };
    use burn::{
        nn::{
            activation::ActivationConfig,
            transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
        },
        tensor::{FloatDType, Tensor},
    };

    const BF16: Storage = Storage::Bf16;
    const WIDTH: usize = 24;
    const HIDDEN: usize = 40;

    struct Layer {
        module: TransformerEncoder,
        tokens: Tokens,
    }

    impl Layer {
        /// A layer whose tokens have a first number that is far larger than the others, and large weights behind
        /// it, so that a few gradients err far more than the others.
        fn new() -> Self {
            let config = TransformerEncoderConfig::new(WIDTH, HIDDEN, 3, 1)
                .with_dropout(0.0)
                .with_activation(ActivationConfig::Relu);
            let module =
                seeded(config.init(&Device::flex().autodiff()), BF16, |path, _, numbers| {
                    if path.ends_with("linear_inner.weight") {
                        let units = numbers[..HIDDEN].iter_mut().enumerate();
                        units.for_each(|(unit, weight)| *weight = [1.0, -1.0][unit % 2]);
                    }
                });
            let mut tokens = Tokens::new([2, 9, WIDTH], 0.5, BF16);
            for (row, token) in tokens.x.chunks_mut(WIDTH).enumerate() {
                token[0] = if row % 5 < 2 { 3.0 } else { -3.0 };
            }
            Self { module, tokens }
        }

        fn by_formula(&self, formulas: Textbook, draw: u64, dtype: FloatDType) -> Tensors {
            let rules = AttentionRules { heads: 3, heads_kv: 3, ..AttentionRules::default() };
            let forward = |module: &TransformerEncoder, x: Tensor<3>| {
                formulas.encoder_layer(&module.layers[0], Function::Relu, &rules, x)
            };
            let module = match dtype {
                FloatDType::F64 => widened(&self.module).unwrap(),
                _ => self.module.clone(),
            };
            let device = Device::flex().autodiff();
            self.tokens.drawn(draw, BF16).results(&module, dtype, &device, forward).unwrap()
        }

        fn exact(&self, draw: u64) -> Tensors {
            self.by_formula(Textbook::default(), draw, FloatDType::F64)
        }

        /// How many of so many draws are out of bounds as Burn's module computes them in bf16.
        fn out_of_bounds(&self, judge: &Judge, draws: u64) -> usize {
            let device = Device::flex().autodiff();
            let is_out = |draw: &u64| {
                let forward = |module: &TransformerEncoder, x| {
                    module.forward(TransformerEncoderInput::new(x))
                };
                let tokens = self.tokens.drawn(*draw, BF16);
                let made = tokens.results(&self.module, FloatDType::BF16, &device, forward);
                judge.within("layer", &self.exact(*draw), &made.unwrap()).is_err()
            };
            (0..draws).filter(is_out).count()
        }

        /// A judge that knows the plain computation of that many draws.
        fn judge(&self, formulas: Textbook, draws: u64) -> Judge {
            let unit = 2.0 * BF16.unit_roundoff();
            let mut judge = Judge { storage: BF16, unit, is_plain: true, errors: Errors::new() };
            for draw in 0..draws {
                let plain = self.by_formula(formulas, draw, FloatDType::BF16);
                judge.note("layer", &plain, &self.exact(draw)).unwrap();
            }
            Judge { is_plain: false, ..judge }
        }
    }

    #[test]
    fn what_burns_module_computes_in_bf16_is_within_bounds_for_every_draw() {
        let layer = Layer::new();
        let formulas = Textbook::default().with_norms_of_burn();
        assert_eq!(layer.out_of_bounds(&layer.judge(formulas, DRAWS), 64), 0);
        // Norms in f32 round less than Burn's, and one draw knows too little of large errors.
        assert!(layer.out_of_bounds(&layer.judge(Textbook::default(), 1), 64) > 0);
    }

    #[test]
    fn a_lost_sequence_is_found_in_each_gradient() {
        let layer = Layer::new();
        let judge = layer.judge(Textbook::default().with_norms_of_burn(), DRAWS);
        let lost = Layer { tokens: layer.tokens.without_last_sequence(), ..Layer::new() };
        let [exact, faulty] = [&layer, &lost].map(|layer| layer.exact(0));
        judge.expect_gradients_caught("layer", "a lost sequence", &exact, || Ok(faulty)).unwrap();
        let none = judge.expect_gradients_caught("layer", "nothing", &exact, || Ok(exact.clone()));
        assert!(none.is_err());
    }
}
