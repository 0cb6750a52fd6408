//! Whether gradients of resized images are Blackburn's: Burn has those of the nearest pixel alone on GPUs.

use burn::tensor::{DType, Device, ops::InterpolateMode};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether Burn has taken the provider.
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Says that Burn has taken the provider of gradients of resized images.
#[cfg(feature = "gpu")]
pub(crate) fn set_registered() {
    REGISTERED.store(true, Ordering::Release);
}

/// Whether the provider `BlackburnInterpolate` takes the gradient of images of that type on `device`, which were
/// resized in that mode.
pub fn has_gradient(device: &Device, dtype: DType, mode: &InterpolateMode) -> bool {
    REGISTERED.load(Ordering::Acquire)
        && crate::tensors::is_gpu(&device.clone().without_autodiff())
        && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        && !matches!(mode, InterpolateMode::Lanczos3)
}
