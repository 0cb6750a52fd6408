//! The provider of layer norms: `burn::nn::LayerNorm` and its gradients.
//!
//! Burn computes a layer norm by eleven operations, and its gradients by some thirty, most of which go over all
//! elements. Both are claimed as one here. Forward, one launch writes the result and what automatic differentiation
//! keeps of the steps; backward, two launches make the gradients of the input and of gamma.
//!
//! The gradient of beta comes before them and by itself, as a sum of rows.

mod pass;
mod search;

pub(crate) use pass::LayerNormPass;
pub(crate) use search::LayerNormSearch;

use crate::stream::{ANY_NUMBER, Name, Pattern, PatternStep as Step};

const OP: &str = "layer_norm";

/// `burn_backend`'s `layer_norm` in the order of its operations.
macro_rules! forward {
    ($($last:expr),*) => {
        &[
            ("mean", Step::MeanRow("x")),
            ("centered", Step::Sub("x", "mean")),
            ("squares", Step::Mul("centered", "centered")),
            ("mean_square", Step::MeanRow("squares")),
            ("variance", Step::AddScalar("mean_square", ANY_NUMBER)),
            ("deviation", Step::Sqrt("variance")),
            ("normalized", Step::Div("centered", "deviation")),
            ("gamma_of_all", Step::Reshape("gamma")),
            $($last,)*
        ]
    };
}

const FORWARD: Pattern = forward!(
    ("scaled", Step::Mul("normalized", "gamma_of_all")),
    ("beta_of_all", Step::Reshape("beta")),
    ("y", Step::Add("scaled", "beta_of_all"))
);

const FORWARD_WITHOUT_BETA: Pattern = forward!(("y", Step::Mul("normalized", "gamma_of_all")));

/// What burn-autodiff makes of the normalization itself, up to the gradient of the centered rows, and of the mean.
/// In between, that gradient is added to one that reached the rows on another way. `scaled` is the gradient of the
/// normalized rows, and `dx` that of the rows.
macro_rules! gradient_of_rows {
    ([$($first:expr),*], $scaled:literal, [$($residual:expr),*], $sum:literal, $dx:literal, [$($last:expr),*]) => {
        &[
            $($first,)*
            ("inverse", Step::Recip("deviation")),
            ("plain", Step::Mul($scaled, "inverse")),
            ("negative", Step::MulScalar("centered", -1.0)),
            ("square", Step::Mul("deviation", "deviation")),
            ("factor", Step::Div("negative", "square")),
            ("weighted", Step::Mul($scaled, "factor")),
            ("of_deviation", Step::SumRow("weighted")),
            ("power", Step::PowfScalar("variance", -0.5)),
            ("half", Step::DivScalar("power", 2.0)),
            ("of_variance", Step::Mul("of_deviation", "half")),
            ("ones", Step::Ones),
            ("share", Step::MulScalar("ones", ANY_NUMBER)),
            ("of_mean_square", Step::SumRow("of_variance")),
            ("of_squares", Step::Mul("share", "of_mean_square")),
            ("of_one", Step::Mul("of_squares", "centered")),
            ("with_plain", Step::Add("of_one", "plain")),
            ("of_other", Step::Mul("of_squares", "centered")),
            ("of_centered", Step::Add("of_other", "with_plain")),
            $($residual,)*
            ("opposite", Step::MulScalar("of_centered", -1.0)),
            ("of_mean", Step::SumRow("opposite")),
            ("ones_again", Step::Ones),
            ("share_again", Step::MulScalar("ones_again", ANY_NUMBER)),
            ("of_row", Step::SumRow("of_mean")),
            ("of_means", Step::Mul("share_again", "of_row")),
            ($dx, Step::Add("of_means", $sum)),
            $($last,)*
        ]
    };
}

pub(super) use gradient_of_rows;

macro_rules! backward {
    ($first:tt, $residual:tt, $sum:literal) => {
        gradient_of_rows!($first, "scaled", $residual, $sum, "dx", [])
    };
}

/// The same with the product with gamma in front, and gamma's gradient; that of beta is by itself.
macro_rules! backward_with_gamma {
    ($residual:tt, $sum:literal) => {
        backward!(
            [
                ("scaled", Step::Mul("dy", "gamma")),
                ("products", Step::Mul("dy", "normalized")),
                ("dgamma", Step::SumOfRows("products"))
            ],
            $residual,
            $sum
        )
    };
}

/// What is longer comes first. Without gamma it is the gradient of a norm that has none, or the rest where the others
/// ran before.
const BACKWARD: [Pattern; 4] = [
    backward_with_gamma!([("with_residual", Step::Add("of_centered", "dsum"))], "with_residual"),
    backward_with_gamma!([], "of_centered"),
    backward!([], [("with_residual", Step::Add("of_centered", "dsum"))], "with_residual"),
    backward!([], [], "of_centered"),
];

/// What others may read of what forward makes.
const OUTPUTS: [Name; 6] = ["y", "centered", "normalized", "variance", "deviation", "gamma_of_all"];
/// What others may read of what backward makes.
const GRADIENTS: [Name; 2] = ["dx", "dgamma"];
