//! AdamW and gradient descent with momentum, with weight decay on matrices only, steps that a loss scaler
//! can take back, and optimizer states that load where they belong.

mod adamw;
mod gate;
mod on_device;
mod repeat_count;
mod sgd;
mod skipped;
mod stochastic;

pub use adamw::{AdamW, AdamWState};
pub(crate) use gate::Reading;
pub use gate::StepGate;
pub use on_device::OnDevice;
pub use repeat_count::RepeatCount;
pub use sgd::{Sgd, SgdGroups, SgdState};
pub use skipped::Skipped;
use skipped::SkippedCounts;
use stochastic::Draws;

use crate::path::ModulePath;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamGroup},
    optim::{ModuleOptimizer, Optimizer},
    tensor::{Device, Tensor},
};

/// AdamW in two groups: parameters of two or more dimensions decay, biases and normalization gains
/// do not.
///
/// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101; the
/// split is GPT-2's and its successors'.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWGroups {
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Keeps the division finite.
    pub epsilon: f32,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f32,
    /// Rounds parameters of 16 bits up or down by chance instead of to the nearest value, so that
    /// small updates count in the mean. Parameters in f32 are not rounded.
    pub stochastic_rounding: bool,
}

impl Default for AdamWGroups {
    /// GPT-3's: betas 0.9 and 0.95, epsilon 1e-8, weight decay 0.1 (arXiv:2005.14165, appendix B).
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            stochastic_rounding: false,
        }
    }
}

impl AdamWGroups {
    /// An optimizer for `model`, whose state loads onto `device`.
    pub fn init<M: Module>(&self, model: &M, device: &Device) -> ModuleOptimizer {
        self.build(model, device, None)
    }

    /// The same, which leaves parameters and moments alone in steps whose gradients overflowed: give
    /// it [`GradScaler::gate`](crate::scaler::GradScaler::gate).
    pub fn init_gated<M: Module>(
        &self,
        model: &M,
        device: &Device,
        gate: &StepGate,
    ) -> ModuleOptimizer {
        self.build(model, device, Some(gate))
    }

    fn build<M: Module>(
        &self,
        model: &M,
        device: &Device,
        gate: Option<&StepGate>,
    ) -> ModuleOptimizer {
        // One of each for all groups, whose steps share a launch then.
        let (draws, counts) = (Draws::default(), SkippedCounts::default());
        let together = gate.map(StepGate::together).unwrap_or_default();
        let adamw = |weight_decay: f32| AdamW {
            beta_1: self.beta_1.into(),
            beta_2: self.beta_2.into(),
            epsilon: self.epsilon.into(),
            weight_decay: weight_decay.into(),
            rounds_stochastically: self.stochastic_rounding,
            gate: gate.cloned(),
            draws: draws.clone(),
            together: together.clone(),
            counts: counts.clone(),
        };
        in_two_groups(model, device, adamw(self.weight_decay), adamw(0.0))
    }
}

/// `of_vectors` for the model's parameters of fewer than two dimensions, and `of_matrices` for the others,
/// each with its state on `device`.
fn in_two_groups<M: Module, O: Optimizer>(
    model: &M,
    device: &Device,
    of_matrices: O,
    of_vectors: O,
) -> ModuleOptimizer {
    let mut vectors = VectorPaths::default();
    model.visit(&mut vectors);
    ModuleOptimizer::from(of_matrices.clone())
        .with_group(ParamGroup::all(), OnDevice::new(of_matrices, device), None)
        .with_group(ParamGroup::from_paths(vectors.found), OnDevice::new(of_vectors, device), None)
}

/// The paths of parameters with fewer than two dimensions.
#[derive(Default)]
struct VectorPaths {
    path: ModulePath,
    found: Vec<String>,
}

impl ModuleVisitor for VectorPaths {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        if D < 2 {
            self.found.push(self.path.name());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::{Linear, LinearConfig},
        optim::{AdamWConfig, GradientsParams},
        tensor::{DType, FloatDType},
    };

    pub(super) fn step(optimizer: &mut ModuleOptimizer, model: Linear, gradient: f32) -> Linear {
        let device = Device::flex();
        let mut gradients = GradientsParams::new();
        gradients.register(model.weight.id, Tensor::<2>::full([3, 2], gradient, &device));
        let bias = model.bias.as_ref().expect("LinearConfig gives a bias").id;
        gradients.register(bias, Tensor::<1>::full([2], gradient, &device));
        optimizer.step(0.1, model, gradients)
    }

    pub(super) fn ones(device: &Device) -> Linear {
        LinearConfig::new(3, 2).with_initializer(burn::nn::Initializer::Ones).init(device)
    }

    pub(super) fn values(model: &Linear) -> (f32, f32) {
        let bias = model.bias.as_ref().expect("LinearConfig gives a bias");
        (model.weight.val().mean().into_scalar(), bias.val().mean().into_scalar())
    }

    #[test]
    fn matrices_decay_and_vectors_do_not() {
        let device = Device::flex().autodiff();
        let mut optimizer = AdamWGroups { weight_decay: 0.5, ..AdamWGroups::default() }
            .init(&ones(&device), &device);
        // A zero gradient leaves the decay alone: 1 - 0.1 * 0.5.
        let (weight, bias) = values(&step(&mut optimizer, ones(&device), 0.0));
        assert!((weight - 0.95).abs() < 1e-6, "{weight}");
        assert_eq!(bias, 1.0);
    }

    /// Five steps with gradients that change.
    pub(super) fn trained(mut optimizer: ModuleOptimizer, device: &Device) -> Vec<f32> {
        let mut model = ones(device);
        for gradient in [0.3, -0.7, 0.01, 2.0, -0.1] {
            model = step(&mut optimizer, model, gradient);
        }
        let mut numbers: Vec<f32> = model.weight.val().into_data().try_to_vec().expect("f32");
        let bias = model.bias.expect("LinearConfig gives a bias");
        numbers.extend(bias.val().into_data().try_to_vec::<f32>().expect("f32"));
        numbers
    }

    #[test]
    fn without_a_gate_it_is_burns() {
        let device = Device::flex().autodiff();
        let ours = AdamWGroups { weight_decay: 0.0, ..AdamWGroups::default() };
        let burns = AdamWConfig::new()
            .with_beta_1(ours.beta_1)
            .with_beta_2(ours.beta_2)
            .with_epsilon(ours.epsilon)
            .with_weight_decay(0.0)
            .init();
        let ours = trained(ours.init(&ones(&device), &device), &device);
        for (a, b) in ours.iter().zip(trained(burns, &device)) {
            // Five steps of some ten roundings each, of updates of 0.1.
            assert!((a - b).abs() < 50.0 * 0.1 * f32::EPSILON, "{a} against {b}");
        }
    }

    /// What a scaler would say, of gradients that need no factor.
    pub(super) fn reading(taken: f32, skipped: f32) -> Reading {
        let [taken, skipped, factor] =
            [taken, skipped, 1.0].map(|value| Tensor::from_data([value], &Device::flex()));
        Reading { taken, skipped, factor, is_first: false, number: 0 }
    }

    #[test]
    fn an_open_gate_changes_nothing_and_a_closed_one_lets_nothing_pass() {
        let device = Device::flex().autodiff();
        let config = AdamWGroups::default();
        let gate = StepGate::new();
        gate.set(Some(reading(1.0, 0.0)));
        let gated = trained(config.init_gated(&ones(&device), &device, &gate), &device);
        for (a, b) in gated.iter().zip(trained(config.init(&ones(&device), &device), &device)) {
            // The corrections of the first steps are computed in f32: 1 - exp(ln 0.95) has lost
            // four bits.
            assert!((a - b).abs() < 5.0 * 0.1 * 32.0 * f32::EPSILON, "{a} against {b}");
        }
        gate.set(Some(reading(0.0, 0.0)));
        let closed = trained(config.init_gated(&ones(&device), &device, &gate), &device);
        assert!(closed.iter().all(|x| *x == 1.0), "{closed:?}");
    }

    /// The mean of 4096 weights in bf16 that were 1, after ten steps that take a fortieth of their distance.
    pub(super) fn mean_after_small_updates(
        init: impl FnOnce(&Linear, &Device) -> ModuleOptimizer,
    ) -> f32 {
        let device = Device::flex().autodiff();
        let config = LinearConfig::new(64, 64).with_bias(false);
        let mut model = config.with_initializer(burn::nn::Initializer::Ones).init(&device);
        model.weight = model.weight.map(|w| w.cast(FloatDType::BF16).detach().require_grad());
        let mut optimizer = init(&model, &device);
        for _ in 0..10 {
            let mut gradients = GradientsParams::new();
            let gradient = Tensor::<2>::ones([64, 64], &Device::flex()).cast(FloatDType::BF16);
            gradients.register(model.weight.id, gradient);
            model = optimizer.step(1e-4, model, gradients);
        }
        assert_eq!(model.weight.val().dtype(), DType::BF16);
        model.weight.val().cast(FloatDType::F32).mean().into_scalar()
    }

    /// Whether small updates by chance have moved weights as far as they should.
    pub(super) fn check_mean(mean: f32) {
        // 4096 weights that move by one of 256 with a chance of a fortieth, ten times.
        let deviation = (10.0 * 0.0256 * 0.9744f32 / 4096.0).sqrt() / 256.0;
        assert!((mean - 0.999).abs() < 5.0 * deviation, "{mean}, deviation {deviation}");
    }

    #[test]
    fn small_updates_of_16_bit_parameters_count_in_the_mean() {
        let train = |stochastic_rounding: bool| {
            let groups =
                AdamWGroups { weight_decay: 0.0, stochastic_rounding, ..AdamWGroups::default() };
            mean_after_small_updates(|model, device| groups.init(model, device))
        };
        assert_eq!(train(false), 1.0, "the control kept updates of a fortieth of a unit");
        check_mean(train(true));
    }

    /// One step, saving, loading and another one, against two steps, and against one of an optimizer that
    /// knows nothing.
    pub(super) fn check_resumed(init: impl Fn(&Linear, &Device) -> ModuleOptimizer) {
        let device = Device::flex().autodiff();
        let start = ones(&device);
        let mut optimizer = init(&start, &device);
        let model = step(&mut optimizer, start, 0.3);
        let bytes = optimizer.into_bytes().expect("the state serializes");
        let mut restored = init(&model, &device).from_bytes(bytes).expect("the state loads");

        let straight = values(&step(&mut optimizer, model.clone(), -0.7));
        let resumed = values(&step(&mut restored, model.clone(), -0.7));
        assert_eq!(straight, resumed);
        let fresh = values(&step(&mut init(&model, &device), model, -0.7));
        assert_ne!(straight, fresh, "the state made no difference, so this test shows nothing");
    }

    #[test]
    fn a_saved_and_loaded_optimizer_continues_bit_for_bit() {
        check_resumed(|model, device| AdamWGroups::default().init(model, device));
    }
}
