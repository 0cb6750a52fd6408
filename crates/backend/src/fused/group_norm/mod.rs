//! The provider of norms of groups of channels: `burn::nn::GroupNorm` and `burn::nn::InstanceNorm`, and their gradients.
//!
//! Burn turns the images into rows of a group each, which copies those of a convolution, and computes a norm of these
//! rows by seven operations, its gradient by some twenty-five. All are claimed as one here, with the parameters and what
//! turns images into rows. Forward writes the result and what automatic differentiation keeps of the steps, and
//! backward makes the gradients of the input and of gamma from these.
//!
//! The gradient of beta comes before them and by itself, as a sum over all dimensions but that of the channels. In f16
//! Burn computes the rows in f32, by casts that are not taken here.

mod pass;
mod search;

pub(crate) use pass::GroupNormPass;
pub(crate) use search::GroupNormSearch;

use super::layer_norm::gradient_of_rows;
use crate::stream::{ANY_NUMBER, Name, Pattern, PatternStep as Step};

const OP: &str = "group_norm";

/// `burn_nn`'s `group_norm` in the order of its operations.
macro_rules! forward {
    ([$($first:expr),*], $rows:literal, $normalized:literal, [$($behind:expr),*]) => {
        &[
            $($first,)*
            ("mean", Step::MeanRow($rows)),
            ("centered", Step::Sub($rows, "mean")),
            ("squares", Step::Mul("centered", "centered")),
            ("mean_square", Step::MeanRow("squares")),
            ("variance", Step::AddScalar("mean_square", ANY_NUMBER)),
            ("deviation", Step::Sqrt("variance")),
            ($normalized, Step::Div("centered", "deviation")),
            $($behind,)*
        ]
    };
}

const FORWARD: Pattern = forward!(
    [("rows", Step::Reshape("x"))],
    "rows",
    "normalized_rows",
    [
        ("normalized", Step::Reshape("normalized_rows")),
        ("gamma_of_all", Step::Reshape("gamma")),
        ("scaled", Step::Mul("normalized", "gamma_of_all")),
        ("beta_of_all", Step::Reshape("beta")),
        ("y", Step::Add("scaled", "beta_of_all"))
    ]
);

const FORWARD_WITHOUT_PARAMETERS: Pattern = forward!(
    [("rows", Step::Reshape("x"))],
    "rows",
    "normalized_rows",
    [("y", Step::Reshape("normalized_rows"))]
);

/// Sequences, whose channels are rows already.
const FORWARD_OF_ROWS: Pattern = forward!(
    [],
    "x",
    "normalized",
    [
        ("gamma_of_all", Step::Reshape("gamma")),
        ("scaled", Step::Mul("normalized", "gamma_of_all")),
        ("beta_of_all", Step::Reshape("beta")),
        ("y", Step::Add("scaled", "beta_of_all"))
    ]
);

const BACKWARD: Pattern = gradient_of_rows!(
    [
        ("scaled", Step::Mul("dy", "gamma")),
        ("products", Step::Mul("dy", "normalized")),
        ("dgamma", Step::SumOfChannels("products")),
        ("scaled_rows", Step::Reshape("scaled"))
    ],
    "scaled_rows",
    [],
    "of_centered",
    "dx_rows",
    [("dx", Step::Reshape("dx_rows"))]
);

const BACKWARD_OF_ROWS: Pattern = gradient_of_rows!(
    [
        ("scaled", Step::Mul("dy", "gamma")),
        ("products", Step::Mul("dy", "normalized")),
        ("dgamma", Step::SumOfChannels("products"))
    ],
    "scaled",
    [],
    "of_centered",
    "dx",
    []
);

/// What others may read of what forward makes.
const OUTPUTS: [Name; 6] = ["y", "centered", "normalized", "variance", "deviation", "gamma_of_all"];
/// What others may read of what backward makes.
const GRADIENTS: [Name; 2] = ["dx", "dgamma"];
