use burn::tensor::{Device, Tensor};

/// Whether `device` is a GPU of this build, or a software device that passes for one.
#[cfg(feature = "gpu")]
pub(crate) fn is_gpu(device: &Device) -> bool {
    matches!(device.as_dispatch(), burn::backend::DispatchDevice::Cube(_))
}

/// Whether kernels can count the elements of `tensor` in 32 bits, and one step of a grid beyond them.
pub(crate) fn is_counted_in_32_bits<const D: usize>(tensor: &Tensor<D>) -> bool {
    /// What kernels leave free at the upper end.
    const MARGIN: u64 = 1 << 24;
    let elements: u64 = tensor.dims().iter().map(|size| *size as u64).product();
    elements + MARGIN <= u64::from(u32::MAX)
}

/// Without a GPU backend there is none.
#[cfg(not(feature = "gpu"))]
pub(crate) fn is_gpu(_device: &Device) -> bool {
    false
}
