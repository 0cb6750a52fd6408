//! The provider of batch normalization in training: `burn::nn::BatchNorm` and its gradients.
//!
//! Burn computes both by some twenty operations over the whole tensor, of which reshapes copy it and reductions
//! read it row by row. They are claimed as one, with a ReLU's gradient in front of them, and run in two passes
//! forward and two backward. Statistics leave in the type that Burn has them in, but what is made of them here
//! is made before that rounding.
//!
//! Taken are images and sequences. A normalization of `[n, channels]` begins as any product with a transposed
//! weight does, and is left to Burn.

mod behind;
mod pass;
mod search;
mod view;

pub(crate) use behind::BehindArithmetic;
pub(crate) use pass::BatchNormPass;
pub(crate) use search::BatchNormSearch;

use crate::stream::{ANY_NUMBER, Name, Pattern, PatternStep as Step};

const OP: &str = "batch_norm";

/// `burn_backend`'s `batch_norm_train` in the order of its operations, with what is behind it.
macro_rules! forward {
    ($($behind:expr),*) => {
        &[
            ("x_turned", Step::SwapFirst("x")),
            ("x_rows", Step::Reshape("x_turned")),
            ("row_mean", Step::MeanRow("x_rows")),
            ("mean_of_all", Step::Reshape("row_mean")),
            ("centered", Step::Sub("x", "mean_of_all")),
            ("square", Step::Mul("centered", "centered")),
            ("square_turned", Step::SwapFirst("square")),
            ("square_rows", Step::Reshape("square_turned")),
            ("row_variance", Step::MeanRow("square_rows")),
            ("mean", Step::Reshape("mean_of_all")),
            ("variance", Step::Reshape("row_variance")),
            ("gamma_of_all", Step::Reshape("gamma")),
            ("beta_of_all", Step::Reshape("beta")),
            ("mean_again", Step::Reshape("mean")),
            ("variance_of_all", Step::Reshape("variance")),
            ("shifted", Step::AddScalar("variance_of_all", ANY_NUMBER)),
            ("deviation", Step::Sqrt("shifted")),
            ("distance", Step::Sub("x", "mean_again")),
            ("normalized", Step::Div("distance", "deviation")),
            ("scaled", Step::Mul("normalized", "gamma_of_all")),
            ("y", Step::Add("scaled", "beta_of_all")),
            $($behind,)*
        ]
    };
}

const FORWARD: Pattern = forward!();

/// With the running statistics of the module.
const FORWARD_WITH_RUNNING: Pattern = forward!(
    ("kept_mean", Step::MulScalar("running_mean", ANY_NUMBER)),
    ("new_mean", Step::MulScalar("mean", ANY_NUMBER)),
    ("updated_mean", Step::Add("kept_mean", "new_mean")),
    ("kept_variance", Step::MulScalar("running_variance", ANY_NUMBER)),
    ("new_variance", Step::MulScalar("variance", ANY_NUMBER)),
    ("updated_variance", Step::Add("kept_variance", "new_variance"))
);

/// `burn_backend`'s `batch_norm_train_backward`, with what is in front of it.
macro_rules! backward {
    ($($in_front:expr),*) => {
        &[
            $($in_front,)*
            ("shifted", Step::AddScalar("variance", ANY_NUMBER)),
            ("deviation", Step::Sqrt("shifted")),
            ("rstd", Step::Recip("deviation")),
            ("rstd_of_all", Step::Reshape("rstd")),
            ("mean_of_all", Step::Reshape("mean")),
            ("distance", Step::Sub("x", "mean_of_all")),
            ("normalized", Step::Mul("distance", "rstd_of_all")),
            ("dy_turned", Step::SwapFirst("dy")),
            ("dy_rows", Step::Reshape("dy_turned")),
            ("product", Step::Mul("dy", "normalized")),
            ("product_turned", Step::SwapFirst("product")),
            ("product_rows", Step::Reshape("product_turned")),
            ("dbeta_row", Step::SumRow("dy_rows")),
            ("dgamma_row", Step::SumRow("product_rows")),
            ("dy_mean", Step::MeanRow("dy_rows")),
            ("dy_mean_of_all", Step::Reshape("dy_mean")),
            ("product_mean", Step::MeanRow("product_rows")),
            ("product_mean_of_all", Step::Reshape("product_mean")),
            ("dy_centered", Step::Sub("dy", "dy_mean_of_all")),
            ("projected", Step::Mul("normalized", "product_mean_of_all")),
            ("gamma_of_all", Step::Reshape("gamma")),
            ("scale", Step::Mul("gamma_of_all", "rstd_of_all")),
            ("difference", Step::Sub("dy_centered", "projected")),
            ("dx", Step::Mul("scale", "difference")),
            ("dgamma", Step::Reshape("dgamma_row")),
            ("dbeta", Step::Reshape("dbeta_row")),
        ]
    };
}

const BACKWARD: Pattern = backward!();

/// Behind the gradient of a ReLU, whose output is `y`.
const BACKWARD_OF_RELU: Pattern =
    backward!(("is_zero", Step::AtMost("y", 0.0)), ("dy", Step::Fill("grad", "is_zero", 0.0)));

/// What others may read of what forward makes.
const OUTPUTS: [Name; 5] = ["y", "mean", "variance", "updated_mean", "updated_variance"];
/// What others may read of what backward makes.
const GRADIENTS: [Name; 4] = ["dx", "dgamma", "dbeta", "dy"];
