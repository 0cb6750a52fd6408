//! Every module of `burn::nn`, and of `blackburn::nn` under the same names, in every precision: forward and backward
//! within the bounds of `blackburn_tests::verdict`, or refused with what to do. And records of each in the other.

use blackburn::train::{
    precision::{Precision, PrecisionPolicy, Recipe},
    trainer::{Trainer, TrainerConfig},
};
use blackburn_tests::{
    is_on_cuda, on_burn_device,
    programs::{Outcome, Program, Setting},
    verdict::Exact,
};
use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Device, Tensor},
};
use libtest_mimic::{Completion, Failed, Trial};

/// The same programs over the modules at a path.
macro_rules! programs_of {
    ($name:ident, $($nn:ident)::+) => {
        mod $name {
            use blackburn_tests::programs::Program;

            mod activations {
                use $($nn)::+ as nn;
                include!("nn_programs/activations.rs");
            }
            mod layers {
                use $($nn)::+ as nn;
                include!("nn_programs/layers.rs");
            }
            mod losses {
                use $($nn)::+ as nn;
                include!("nn_programs/losses.rs");
            }
            mod sequences {
                use $($nn)::+ as nn;
                include!("nn_programs/sequences.rs");
            }

            /// One program after the other.
            pub(super) fn programs() -> Vec<Box<dyn Program>> {
                let all = [
                    layers::programs(),
                    activations::programs(),
                    sequences::programs(),
                    losses::programs(),
                ];
                all.into_iter().flatten().collect()
            }
        }
    };
}

programs_of!(of_burn, burn::nn);
programs_of!(of_blackburn, blackburn::nn);

/// Whose modules a program is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Modules {
    Burns,
    Blackburns,
}

impl Modules {
    fn programs(self) -> Vec<Box<dyn Program>> {
        match self {
            Self::Burns => of_burn::programs(),
            Self::Blackburns => of_blackburn::programs(),
        }
    }

    /// Whether the policy has to refuse the program in 16 bits, which Burn's own code would fail in.
    fn has_constants(self, program: &str) -> bool {
        let known = [
            "GaussianNoise",
            "Rnn",
            "BiRnn",
            "Lstm",
            "BiLstm",
            "Gru",
            "BiGru",
            "RotaryEncoding",
            "PositionalEncoding",
            "Llama",
            "Nested",
        ];
        self == Self::Burns && known.contains(&program)
    }

    /// Whether Burn's own code fails on GPUs, whatever the precision.
    fn fails_on_gpus(self, program: &str) -> bool {
        self == Self::Burns && program == "DeformConv2d"
    }

    /// Whether roundings to 8 bits may add up to as much as the largest gradient, so that a bound would say nothing.
    fn is_deep_for_8_bits(self, program: &str) -> bool {
        let known = ["TransformerDecoder", "TransformerEncoder with PRelu", "Llama"];
        known.contains(&program)
    }

    /// Whether a visitor is not shown what makes Burn's own code fail in 16 bits.
    fn hides_constants(self, program: &str) -> bool {
        self == Self::Burns && program == "TransformerEncoder with PRelu"
    }
}

const PRECISIONS: [Precision; 4] =
    [Precision::F32, Precision::Bf16, Precision::F16, Precision::Fp8(Recipe::hybrid())];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (name, modules) in [("burns", Modules::Burns), ("blackburns", Modules::Blackburns)] {
        for precision in PRECISIONS {
            trials.push(Trial::ignorable_test(
                format!("nn_matrix::{name}_modules_are_within_bounds_in_{precision}_on_the_cpu"),
                move || every_program(modules, precision, &Device::flex()),
            ));
            trials.push(Trial::ignorable_test(
                format!("nn_matrix::{name}_modules_are_within_bounds_in_{precision}"),
                move || {
                    let mut completion = Completion::Completed;
                    let found = on_burn_device(|device| {
                        completion = every_program(modules, precision, &device)?;
                        Ok(())
                    })?;
                    Ok(match found {
                        Completion::Completed => completion,
                        ignored => ignored,
                    })
                },
            ));
        }
    }
    trials.push(Trial::test("nn_matrix::records_go_both_ways", records));
    trials.push(Trial::test("nn_matrix::a_planted_fault_is_found", planted_fault));
    trials
        .push(Trial::ignorable_test("nn_matrix::a_trainer_advises_on_burns_modules_alone", || {
            on_burn_device(|device| advice(&device.autodiff()))
        }));
    trials
}

/// Runs all programs, and tells all that are wrong.
fn every_program(
    modules: Modules,
    precision: Precision,
    device: &Device,
) -> Result<Completion, Failed> {
    let device = device.clone().autodiff();
    let policy = PrecisionPolicy::new(precision);
    if !device.clone().without_autodiff().supports_dtype(precision.dtype()) {
        return Ok(Completion::ignored_with(format!("no {precision} on {device:?}")));
    }
    let setting =
        Setting { device, policy, casts_for_loss: modules == Modules::Burns, noise: None };
    let programs = modules.programs();
    let wrong: Vec<String> = programs
        .iter()
        .filter_map(|program| {
            let error = one_program(modules, &**program, &setting).err()?;
            Some(format!("{}: {}", program.name(), error.message().unwrap_or_default()))
        })
        .collect();
    if wrong.is_empty() {
        return Ok(Completion::Completed);
    }
    Err(format!("{} of {} programs:\n{}", wrong.len(), programs.len(), wrong.join("\n")).into())
}

/// Whether a program is right, or fails in a way that is known. One that is right by now needs no drop-in.
fn one_program(modules: Modules, program: &dyn Program, setting: &Setting) -> Result<(), Failed> {
    let is_gpu = setting.device.clone().without_autodiff() != Device::flex();
    match judged(modules, program, setting) {
        Ok(()) if is_gpu && modules.fails_on_gpus(program.name()) => {
            Err("Burn's own code is right by now".into())
        }
        Err(_) if is_gpu && modules.fails_on_gpus(program.name()) => Ok(()),
        judged => judged,
    }
}

fn judged(modules: Modules, program: &dyn Program, setting: &Setting) -> Result<(), Failed> {
    let precision = setting.policy.precision();
    // On GPUs, GELU's gradient is the derivative of what it computes. On the CPU, which says what is exact here, Burn's
    // is that of the tanh approximation, up to a thousandth off.
    let is_more_exact = program.name() == "Gelu" && precision == Precision::F32;
    if is_more_exact && setting.device.clone().without_autodiff() != Device::flex() {
        return Ok(());
    }
    let is_16_bits = !matches!(precision, Precision::F32 | Precision::Tf32);
    let outcome = match program.run(setting) {
        Err(error) if is_16_bits && modules.hides_constants(program.name()) => {
            // Burn says nothing that would help; the module's documentation does.
            return if error.message().is_some_and(|text| text.contains("panicked")) {
                Ok(())
            } else {
                Err(error)
            };
        }
        outcome => outcome?,
    };
    match outcome {
        Outcome::Ran(_) if is_16_bits && modules.has_constants(program.name()) => {
            Err("Burn's module was taken, whose constants are in f32".into())
        }
        Outcome::Ran(found)
            if precision.recipe().is_some() && modules.is_deep_for_8_bits(program.name()) =>
        {
            let mut numbers = found.iter().flat_map(|(_, numbers)| numbers);
            match numbers.all(|number| number.is_finite()) {
                true => Ok(()),
                false => Err("numbers are not finite".into()),
            }
        }
        Outcome::Ran(found) => {
            let is_cuda =
                is_on_cuda() && setting.device.clone().without_autodiff() != Device::flex();
            // There, products of f32 are TF32's unless a program asks for more.
            let found_in = match precision {
                Precision::F32 if is_cuda => Precision::Tf32,
                other => other,
            };
            Exact::of(program, found_in)?.judge(program, found_in, &found)
        }
        Outcome::Refused(reason) if !precision.is_supported(&setting.device) => {
            // The precision, and what the device has instead.
            let is_told = reason.contains(&precision.to_string()) && reason.contains("f32");
            if is_told { Ok(()) } else { Err(reason.into()) }
        }
        Outcome::Refused(reason) if is_16_bits && modules.has_constants(program.name()) => {
            // What is wrong, and what to do.
            let is_told = reason.contains("blackburn::nn::") && reason.contains("keep_type");
            if is_told { Ok(()) } else { Err(reason.into()) }
        }
        Outcome::Refused(reason) => Err(format!("refused: {reason}").into()),
    }
}

/// What each module computes by parameters that came from the other's record.
fn records() -> Result<(), Failed> {
    let burns = Modules::Burns.programs();
    let blackburns = Modules::Blackburns.programs();
    if burns.len() != blackburns.len() {
        return Err("there are not as many programs of both".into());
    }
    let setting = Setting {
        device: Device::flex().autodiff(),
        policy: PrecisionPolicy::new(Precision::F32),
        casts_for_loss: false,
        noise: None,
    };
    for (burn, blackburn) in burns.iter().zip(&blackburns) {
        for (from, to) in [(burn, blackburn), (blackburn, burn)] {
            let wrong = |error: Failed| {
                let message = error.message().unwrap_or_default().to_string();
                Failed::from(format!("{}: {message}", from.name()))
            };
            let loaded = to.with_record(from.record()?).map_err(wrong)?;
            let Outcome::Ran(found) = loaded.run(&setting).map_err(wrong)? else {
                return Err(format!("{}: refused in f32", from.name()).into());
            };
            let exact = Exact::of(&**from, Precision::F32).map_err(wrong)?;
            exact.judge(&**from, Precision::F32, &found).map_err(wrong)?;
        }
    }
    Ok(())
}

/// The control: outputs and gradients that are off by half must be found in every program and precision.
fn planted_fault() -> Result<(), Failed> {
    for program in Modules::Blackburns.programs() {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let exact = Exact::of(&*program, precision)?;
            for place in exact.largest() {
                let mut found = exact.tensors().clone();
                found[place].1.iter_mut().for_each(|number| *number *= 1.6);
                if exact.judge(&*program, precision, &found).is_ok() {
                    let name = &found[place].0;
                    return Err(format!("{}: a wrong {name} was taken", program.name()).into());
                }
            }
        }
    }
    Ok(())
}

/// What a trainer says could be faster: Burn's modules, and not those that stand in for them.
fn advice(device: &Device) -> Result<(), Failed> {
    let burns = advised(burn::nn::LayerNormConfig::new(4).init(device))?;
    let blackburns = advised(blackburn::nn::LayerNormConfig::new(4).init(device))?;
    match (burns, blackburns) {
        (1, 0) => Ok(()),
        found => Err(format!("{found:?} of 1 and 0 modules").into()),
    }
}

fn advised<M: Module + ModuleDisplay + 'static>(module: M) -> Result<usize, Failed> {
    let trainer: Trainer<M, Tensor<2>> = TrainerConfig::new(0.1).init(module)?;
    Ok(trainer.report()?.drop_ins.len())
}
