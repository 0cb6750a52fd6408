//! Optimizer states that load where they belong.

use burn::{
    optim::{DynOptimizer, DynState, LearningRate, StateSink, StateSource},
    tensor::{Device, kind::BridgeTensor},
};

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
