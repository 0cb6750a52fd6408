//! A tensor that operations share, so that Burn puts them into one block.

use burn::tensor::{DType, Device, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Has operations that a provider takes together share a tensor of one element, which none of them reads.
///
/// Burn's fusion puts operations into one block if they share a tensor. Others begin a block each. Where there are as
/// many blocks as there may be, it tries to merge them, for which it copies them and shows all of their operations to all
/// searches again. For the hundreds of parameters of a model that took as long as all else in the first steps.
///
/// Clones share one.
#[derive(Clone, Debug, Default)]
pub struct Together(Arc<Mutex<Vec<Tensor<1>>>>);

impl Together {
    /// The tensor on `device`, off the autodiff graph.
    pub(crate) fn on(&self, device: &Device) -> Tensor<1> {
        let device = device.clone().without_autodiff();
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = shared.iter().find(|tensor| tensor.device() == device) {
            return there.clone();
        }
        let new = Tensor::empty([1], (&device, DType::F32));
        shared.push(new.clone());
        new
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn clones_share_a_tensor_of_the_device() {
        let device = Device::flex();
        let together = Together::default();
        let one = together.on(&device.clone().autodiff());
        assert_eq!((one.dims(), one.device()), ([1], device.clone()));
        together.clone().on(&device);
        assert_eq!(together.0.lock().expect("nobody panicked").len(), 1);
    }
}
