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
//! | or a factor | `Mul` by a tensor of the same shape, as by the mask of dropout | [`Epilogue::residual_multiplies`] |
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
//! [`Epilogue::residual_multiplies`]: blackburn_kernels::matmul::Epilogue::residual_multiplies

mod activations;
mod chain;
mod eight_bits;
mod placed;
mod product;
mod search;
#[cfg(test)]
mod tests;

pub(crate) use product::ProductSettings;
pub(crate) use search::{MatmulSearch, MatmulSettings};

/// The provider's name.
pub(crate) const NAME: &str = "BlackburnMatmul";
