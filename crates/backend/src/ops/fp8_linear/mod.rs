//! Linear layers whose three products multiply 8-bit floats, with a hand-written gradient.
//!
//! ```text
//! y  = q(x) q(W) + b        x  [rows, inputs],  W [inputs, outputs],  b [outputs]
//! dx = q'(dy) q(W)^T
//! dW = q(x)^T q'(dy)
//! db = sum_rows dy          not rounded to 8 bits
//! ```
//!
//! `q` rounds a tensor to 8 bits with a scale of its own, which takes the tensor's largest magnitude
//! to the format's largest number; `q'` does the same in the format of gradients. With scales of blocks
//! ([`Scaling::Blocks`]) each 32 elements along what a product sums over have their own, so that `q(x)` of `y`, whose
//! blocks are along rows, is another than that of `dW`, whose blocks are along columns. Gradients pass
//! through `q` as if it were not there (the straight-through estimator). Sums are f32 and rounded
//! once, to the type of x; dW has the type of W, so weights may be f32 while x is bf16.
//!
//! NaN and infinity have no scale. Both are NaN in 8 bits, and make NaN of what is summed with them: an
//! overflow reaches the gradients, where a loss scaler finds it.
//!
//! Saved for backward are `q(x)^T` and `q(W)` in 8 bits, half of what bf16 takes, and of those only
//! the one that a gradient is asked for.
//!
//! | device | rounding | products |
//! |---|---|---|
//! | CUDA: Hopper, Ada, workstation Blackwell | kernels | 8-bit tensor cores |
//! | with scales of blocks, CUDA: Blackwell | kernels | tensor cores that take scales of blocks |
//! | other GPUs, software adapters | kernels | codes as 16-bit floats or f32, the same sums |
//! | the CPU (Flex) | Rust | codes as f32 |
//!
//! [`linear`] is called by name. [`mark`] has the products that unmodified modules make with a weight
//! computed so.
//!
//! Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022); NVIDIA Transformer Engine's
//! `Float8CurrentScaling` and `MXFP8BlockScaling` for the recipes.

#[cfg(feature = "gpu")]
pub(crate) mod cast_once;
#[cfg(feature = "gpu")]
pub(crate) mod codes;
#[cfg(feature = "gpu")]
mod cube;
mod host;
mod layer;
#[cfg(feature = "gpu")]
pub(crate) mod magnitudes;
mod mark;
#[cfg(feature = "gpu")]
pub(crate) mod marked;
mod primitives;
mod recipe;
mod tally;

pub use layer::Fp8LinearOps;
pub use mark::{Fp8MarkOps, Fp8MarkPrimitives, mark, serves_marks};
#[cfg(feature = "gpu")]
pub(crate) use marked::set_served;
#[cfg(feature = "gpu")]
pub use primitives::Fp8MatrixMetadata;
pub use primitives::{Fp8Matrix, Fp8Primitives, Layout, Product, Rounding};
pub use recipe::{Format, Promotion, Recipe, Scaling};
pub use tally::Tally;
#[cfg(feature = "gpu")]
pub(crate) use tally::count_other;

use burn::{
    backend::Dispatch,
    nn::Linear,
    tensor::{DType, Tensor},
};

/// `x W + b` in 8 bits, by `recipe`.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x | any leading dimensions, inputs | f32, f16, bf16 |
/// | W | inputs, outputs, as `burn::nn::Linear` has it | f32, f16, bf16 |
/// | b | outputs | any float; it is cast to that of x |
/// | result | the leading dimensions of x, outputs | that of x |
///
/// Where x or W is empty, the result is the bias, and x and W get no gradient.
///
/// # Panics
///
/// When the shapes do not go together, a type is another one, or a GPU is given tensors of 2^32
/// elements or more.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    recipe: &Recipe,
) -> Tensor<D> {
    let [inputs, outputs] = weight.dims();
    check_types(&x, &weight);
    check_shapes(x.dims(), [inputs, outputs], bias.as_ref().map(|bias| bias.dims()));
    recipe.check("fp8::linear");
    let dtype = x.dtype();
    let mut shape = x.dims();
    let rows = shape[..D - 1].iter().product();
    shape[D - 1] = outputs;
    let bias = bias.map(|bias| if bias.dtype() == dtype { bias } else { bias.cast(dtype) });
    if rows * inputs * outputs == 0 {
        // Nothing to scale, and sums of nothing.
        let zeros = Tensor::<D>::zeros(shape, &x.device()).cast(dtype);
        return match bias {
            Some(bias) => zeros + bias.unsqueeze(),
            None => zeros,
        };
    }
    let x = x.reshape([rows, inputs]);
    let bias = bias.map(Tensor::into_dispatch).into();
    let y = <Dispatch as Fp8LinearOps>::fp8_linear(
        x.into_dispatch(),
        weight.into_dispatch(),
        bias,
        *recipe,
    );
    Tensor::<2>::from_dispatch(y).reshape(shape)
}

/// What `layer.forward(x)` computes, by [`linear`]: any `burn::nn::Linear`, as it is.
///
/// # Panics
///
/// As [`linear`].
pub fn linear_forward<const D: usize>(layer: &Linear, x: Tensor<D>, recipe: &Recipe) -> Tensor<D> {
    linear(x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()), recipe)
}

fn check_types<const D: usize>(x: &Tensor<D>, weight: &Tensor<2>) {
    for (argument, dtype) in [("x", x.dtype()), ("weight", weight.dtype())] {
        assert!(
            matches!(dtype, DType::F32 | DType::F16 | DType::BF16),
            "fp8::linear: argument `{argument}`: expected f32, f16 or bf16, got {dtype:?}"
        );
    }
}

fn check_shapes<const D: usize>(x: [usize; D], weight: [usize; 2], bias: Option<[usize; 1]>) {
    let last = x.last().copied();
    assert!(
        last == Some(weight[0]),
        "fp8::linear: argument `x`: expected {} in the last dimension, the rows of weight \
         {weight:?}, got shape {x:?}",
        weight[0]
    );
    assert!(
        bias.is_none_or(|bias| bias == [weight[1]]),
        "fp8::linear: argument `bias`: expected {} elements, the columns of weight {weight:?}, got \
         {bias:?}",
        weight[1]
    );
}
