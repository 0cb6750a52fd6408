//! The provider that runs matrix products, and what follows them, on Blackburn's matmul kernels.
//!
//! Burn emits a linear layer as `[Reshape(x)] Matmul Reshape(bias) Add [Reshape]`, and its gradient
//! as products of transposed views. Views in front run as Burn runs them (most move no data); taken
//! is the product and what follows:
//!
//! | step | operations | becomes |
//! |---|---|---|
//! | product | `Matmul` of f32, f16 or bf16 | the kernel |
//! | scale | `MulScalar` or `DivScalar` | [`Epilogue::alpha`] |
//! | bias | `[Reshape]`, `Add` of one row | [`Epilogue::bias`] |
//! | activation | GELU, `ReLU` or `SiLU` as Burn emits them | [`Epilogue::activation`] |
//! | residual | `Add` of a tensor of the same shape | [`Epilogue::residual`] |
//! | view | `Reshape` of the result | the same memory under another shape |
//!
//! Where an operand's memory is [marked](crate::ops::fp8_linear::mark), the product is computed in 8 bits.
//!
//! Each step is optional, and what is done to the product stays in that order. A step is taken only
//! if nothing else reads what it is applied to. Sizes, numbers and memory layouts are known only
//! when the stretch runs: the steps up to the first that does not fit are served by one launch, and
//! the others run as Burn runs them.
//!
//! [`Epilogue::alpha`]: blackburn_kernels::matmul::Epilogue::alpha
//! [`Epilogue::bias`]: blackburn_kernels::matmul::Epilogue::bias
//! [`Epilogue::activation`]: blackburn_kernels::matmul::Epilogue::activation
//! [`Epilogue::residual`]: blackburn_kernels::matmul::Epilogue::residual

mod activations;
mod chain;
mod eight_bits;
mod fuser;
mod operation;
#[cfg(test)]
mod tests;

use crate::fused::gelu;
use blackburn_kernels::matmul::F32Precision;
use burn_cubecl::{
    CubeDevice,
    fusion::{self, CubeFuser, OptimizationProvider, RegistryError},
};
use fuser::MatmulFuser;
use operation::MatmulOperation;
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

/// The provider's name.
pub(crate) const NAME: &str = "BlackburnMatmul";

/// How products are computed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MatmulSettings {
    /// With what precision f32 tensors are multiplied.
    pub(crate) f32_precision: F32Precision,
    /// Whether plans are measured, or chosen by the model alone.
    pub(crate) tune: bool,
    /// Whether GELU's gradient behind a product is served with it.
    pub(crate) takes_gelu: bool,
}

static SETTINGS: OnceLock<MatmulSettings> = OnceLock::new();

/// Says how products are computed; the first call decides for the process, as the first
/// registration of providers does.
pub(crate) fn configure(settings: MatmulSettings) {
    // A second call finds Burn's registry sealed too, and changes nothing.
    let _ = SETTINGS.set(settings);
}

static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers the provider with Burn.
///
/// # Errors
///
/// As Burn's registry has them: a second provider of the name, and tensors that were there before.
pub(crate) fn register() -> Result<(), RegistryError> {
    fusion::register(MatmulProvider)?;
    REGISTERED.store(true, Ordering::Release);
    Ok(())
}

/// Whether [`register`] was called, and Burn took the provider.
pub(crate) fn is_registered() -> bool {
    REGISTERED.load(Ordering::Acquire)
}

fn settings() -> MatmulSettings {
    SETTINGS.get().copied().unwrap_or_default()
}

/// Gives Burn a [`MatmulFuser`].
struct MatmulProvider;

impl OptimizationProvider for MatmulProvider {
    type Operation = MatmulOperation;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(MatmulFuser::new(settings().takes_gelu, gelu::takes_sum()))
    }
}
