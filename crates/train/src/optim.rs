//! AdamW with weight decay on matrices only, and optimizer states that load where they belong.

use crate::path::ModulePath;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamGroup},
    optim::{
        AdamWConfig, DynOptimizer, DynState, LearningRate, ModuleOptimizer, StateSink, StateSource,
    },
    tensor::{Device, Tensor, kind::BridgeTensor},
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
}

impl Default for AdamWGroups {
    /// GPT-3's: betas 0.9 and 0.95, epsilon 1e-8, weight decay 0.1 (arXiv:2005.14165, appendix B).
    fn default() -> Self {
        Self { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1 }
    }
}

impl AdamWGroups {
    /// An optimizer for `model`, whose state loads onto `device`.
    pub fn init<M: Module>(&self, model: &M, device: &Device) -> ModuleOptimizer {
        let adamw = |weight_decay| {
            AdamWConfig::new()
                .with_beta_1(self.beta_1)
                .with_beta_2(self.beta_2)
                .with_epsilon(self.epsilon)
                .with_weight_decay(weight_decay)
                .build()
        };
        let mut vectors = VectorPaths::default();
        model.visit(&mut vectors);
        ModuleOptimizer::from(adamw(self.weight_decay))
            .with_group(ParamGroup::all(), OnDevice::new(adamw(self.weight_decay), device), None)
            .with_group(
                ParamGroup::from_paths(vectors.found),
                OnDevice::new(adamw(0.0), device),
                None,
            )
    }
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

/// An optimizer whose state loads onto a given device.
///
/// Burn 0.22 puts loaded state on `Device::default()`, which is chosen by the features that were
/// compiled in: a program built for CUDA that runs on its CPU would look for a GPU that is not
/// there.
#[derive(Clone, Debug)]
pub struct OnDevice<O> {
    optimizer: O,
    device: Device,
}

impl<O> OnDevice<O> {
    /// Pins the state of `optimizer` to `device`.
    pub fn new(optimizer: O, device: &Device) -> Self {
        // Optimizer state takes no part in differentiation.
        Self { optimizer, device: device.clone().without_autodiff() }
    }
}

impl<O: DynOptimizer> DynOptimizer for OnDevice<O> {
    fn step_dyn(
        &self,
        rank: usize,
        lr: LearningRate,
        tensor: BridgeTensor,
        grad: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        self.optimizer.step_dyn(rank, lr, tensor, grad, state)
    }

    fn to_device_dyn(&self, state: DynState, device: &Device) -> DynState {
        self.optimizer.to_device_dyn(state, device)
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        self.optimizer.state_flatten(prefix, state, out);
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        src: &mut StateSource,
        _default: &Device,
    ) -> Option<DynState> {
        self.optimizer.state_unflatten(rank, prefix, src, &self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::{Linear, LinearConfig},
        optim::GradientsParams,
    };

    fn step(optimizer: &mut ModuleOptimizer, model: Linear, gradient: f32) -> Linear {
        let device = Device::flex();
        let mut gradients = GradientsParams::new();
        gradients.register(model.weight.id, Tensor::<2>::full([3, 2], gradient, &device));
        let bias = model.bias.as_ref().expect("LinearConfig gives a bias").id;
        gradients.register(bias, Tensor::<1>::full([2], gradient, &device));
        optimizer.step(0.1, model, gradients)
    }

    fn ones(device: &Device) -> Linear {
        LinearConfig::new(3, 2).with_initializer(burn::nn::Initializer::Ones).init(device)
    }

    fn values(model: &Linear) -> (f32, f32) {
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

    #[test]
    fn a_saved_and_loaded_optimizer_continues_bit_for_bit() {
        let device = Device::flex().autodiff();
        let config = AdamWGroups::default();
        let start = ones(&device);
        let mut optimizer = config.init(&start, &device);
        let model = step(&mut optimizer, start, 0.3);
        let bytes = optimizer.into_bytes().expect("the state serializes");
        let mut restored = config.init(&model, &device).from_bytes(bytes).expect("the state loads");

        let straight = values(&step(&mut optimizer, model.clone(), -0.7));
        let resumed = values(&step(&mut restored, model.clone(), -0.7));
        assert_eq!(straight, resumed);
        let fresh = values(&step(&mut config.init(&model, &device), model, -0.7));
        assert_ne!(straight, fresh, "the state made no difference, so this test shows nothing");
    }
}
