//! The reductions that Burn has for floating-point numbers, and what the textbook says of each.

use blackburn_reference::storage::Storage;
use blackburn_tests::tensors::values;
use burn::{prelude::*, tensor::TensorData};
use libtest_mimic::Failed;
use std::error::Error;

type Bound = fn(&[f64], Storage) -> f64;

/// A reduction along a dimension. What it makes are its numbers, then their places where it tells those.
pub(crate) struct Along {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Tensor<3>, usize) -> Result<Vec<f64>, Failed>,
    pub(crate) expected: fn(&[Vec<f64>]) -> Vec<f64>,
    /// `None` where nothing rounds.
    pub(crate) bound: Option<Bound>,
    pub(crate) is_product: bool,
}

impl Along {
    pub(crate) fn is_exact(&self) -> bool {
        self.bound.is_none()
    }

    /// Whether the provider takes it along that dimension of `rank`.
    pub(crate) fn takes(&self, dim: usize, rank: usize) -> bool {
        self.name != "mean" || dim + 1 != rank
    }
}

/// A reduction of a whole tensor.
pub(crate) struct Whole {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Tensor<3>) -> Result<Vec<f64>, Failed>,
    pub(crate) expected: fn(&[f64]) -> f64,
    pub(crate) bound: Option<Bound>,
    pub(crate) is_product: bool,
}

impl Whole {
    pub(crate) fn is_exact(&self) -> bool {
        self.bound.is_none()
    }
}

/// The numbers of a tensor of any kind; truth is 0 or 1.
pub(crate) fn numbers<E: Error>(data: Result<TensorData, E>) -> Result<Vec<f64>, Failed> {
    let data = data.map_err(|error| error.to_string())?;
    let data = data.try_cast_as::<f64>().map_err(|error| error.to_string())?;
    Ok(data.try_to_vec().map_err(|error| format!("{error:?}"))?)
}

/// How often the provider has run.
pub(crate) fn served() -> u64 {
    blackburn_backend::profile::served().get("BlackburnReduce").copied().unwrap_or(0)
}

/// The elements of each output, of a tensor of `dims` in order: along `dim`, or all.
pub(crate) fn groups(dims: &[usize], dim: Option<usize>, x: &[f64]) -> Vec<Vec<f64>> {
    let Some(dim) = dim else { return vec![x.to_vec()] };
    let inner: usize = dims[dim + 1..].iter().product();
    let outputs = x.len() / dims[dim];
    let group = |output: usize| {
        let first = output / inner * inner * dims[dim] + output % inner;
        (0..dims[dim]).map(|at| x[first + at * inner]).collect()
    };
    (0..outputs).map(group).collect()
}

/// The place that wins, where NaN wins over all, and the first of several.
fn place(group: &[f64], wins: fn(f64, f64) -> bool) -> usize {
    let mut best = 0;
    for (at, x) in group.iter().enumerate() {
        if !group[best].is_nan() && (x.is_nan() || wins(*x, group[best])) {
            best = at;
        }
    }
    best
}

fn highest(group: &[f64]) -> usize {
    place(group, |x, best| x > best)
}

fn lowest(group: &[f64]) -> usize {
    place(group, |x, best| x < best)
}

fn farthest(group: &[f64]) -> f64 {
    let sizes: Vec<f64> = group.iter().map(|x| x.abs()).collect();
    sizes[highest(&sizes)]
}

fn any(group: &[f64]) -> f64 {
    f64::from(group.iter().any(|x| *x != 0.0))
}

fn all(group: &[f64]) -> f64 {
    f64::from(group.iter().all(|x| *x != 0.0))
}

fn sum(group: &[f64]) -> f64 {
    group.iter().sum()
}

fn mean(group: &[f64]) -> f64 {
    sum(group) / group.len() as f64
}

fn product(group: &[f64]) -> f64 {
    group.iter().product()
}

/// Additions in f32, in any order, and one rounding to storage.
fn sum_bound(group: &[f64], storage: Storage) -> f64 {
    let sizes: f64 = group.iter().map(|x| x.abs()).sum();
    blackburn_reference::column_sum::bound(sum(group), sizes, group.len(), storage)
}

/// The same, with a rounding of the factor and one of the product with it.
fn mean_bound(group: &[f64], storage: Storage) -> f64 {
    let sizes: f64 = group.iter().map(|x| x.abs()).sum();
    let length = group.len() as f64;
    blackburn_reference::column_sum::bound(mean(group), sizes / length, group.len() + 2, storage)
}

/// Products in f32, each of which rounds once, and one rounding to storage.
fn product_bound(group: &[f64], storage: Storage) -> f64 {
    let roundings = group.len() as f64 * Storage::F32.unit_roundoff();
    let storing = storage.unit_roundoff();
    product(group).abs() * (roundings.exp() * (1.0 + storing) - 1.0) + storage.underflow()
}

/// Every reduction along a dimension.
pub(crate) fn along() -> [Along; 11] {
    let each = |name, run, expected| Along { name, run, expected, bound: None, is_product: false };
    [
        each(
            "max",
            |x, dim| values(x.max_dim(dim)),
            |of| of.iter().map(|x| x[highest(x)]).collect(),
        ),
        each(
            "min",
            |x, dim| values(x.min_dim(dim)),
            |of| of.iter().map(|x| x[lowest(x)]).collect(),
        ),
        each(
            "max_abs",
            |x, dim| values(x.max_abs_dim(dim)),
            |of| of.iter().map(|x| farthest(x)).collect(),
        ),
        each(
            "argmax",
            |x, dim| numbers(x.argmax(dim).try_into_data()),
            |of| of.iter().map(|x| highest(x) as f64).collect(),
        ),
        each(
            "argmin",
            |x, dim| numbers(x.argmin(dim).try_into_data()),
            |of| of.iter().map(|x| lowest(x) as f64).collect(),
        ),
        each(
            "max with places",
            |x, dim| {
                let (x, places) = x.max_dim_with_indices(dim);
                Ok([values(x)?, numbers(places.try_into_data())?].concat())
            },
            |of| {
                let places = of.iter().map(|x| highest(x) as f64);
                of.iter().map(|x| x[highest(x)]).chain(places).collect()
            },
        ),
        each(
            "min with places",
            |x, dim| {
                let (x, places) = x.min_dim_with_indices(dim);
                Ok([values(x)?, numbers(places.try_into_data())?].concat())
            },
            |of| {
                let places = of.iter().map(|x| lowest(x) as f64);
                of.iter().map(|x| x[lowest(x)]).chain(places).collect()
            },
        ),
        each(
            "any",
            |x, dim| numbers(x.any_dim(dim).try_into_data()),
            |of| of.iter().map(|x| any(x)).collect(),
        ),
        each(
            "all",
            |x, dim| numbers(x.all_dim(dim).try_into_data()),
            |of| of.iter().map(|x| all(x)).collect(),
        ),
        Along {
            bound: Some(mean_bound),
            ..each(
                "mean",
                |x, dim| values(x.mean_dim(dim)),
                |of| of.iter().map(|x| mean(x)).collect(),
            )
        },
        Along {
            bound: Some(product_bound),
            is_product: true,
            ..each(
                "prod",
                |x, dim| values(x.prod_dim(dim)),
                |of| of.iter().map(|x| product(x)).collect(),
            )
        },
    ]
}

/// Every reduction of a whole tensor.
pub(crate) fn of_all() -> [Whole; 8] {
    let each = |name, run, expected| Whole { name, run, expected, bound: None, is_product: false };
    [
        each("max", |x| values(x.max()), |x| x[highest(x)]),
        each("min", |x| values(x.min()), |x| x[lowest(x)]),
        each("max_abs", |x| values(x.max_abs()), farthest),
        each("any", |x| numbers(x.any().try_into_data()), any),
        each("all", |x| numbers(x.all().try_into_data()), all),
        Whole { bound: Some(sum_bound), ..each("sum", |x| values(x.sum()), sum) },
        Whole { bound: Some(mean_bound), ..each("mean", |x| values(x.mean()), mean) },
        Whole {
            bound: Some(product_bound),
            is_product: true,
            ..each("prod", |x| values(x.prod()), product)
        },
    ]
}
