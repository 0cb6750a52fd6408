//! What operations that only GPUs have ask of a device.

use burn::tensor::Device;

/// Whether `device` is a GPU of this build, or a software device that passes for one.
#[cfg(feature = "gpu")]
pub(crate) fn is_gpu(device: &Device) -> bool {
    matches!(device.as_dispatch(), burn::backend::DispatchDevice::Cube(_))
}

/// Without a GPU backend there is none.
#[cfg(not(feature = "gpu"))]
pub(crate) fn is_gpu(_device: &Device) -> bool {
    false
}
