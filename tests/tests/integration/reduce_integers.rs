//! Burn's reductions of integers and of truth, unmodified: exact, on the routine that suits their sizes.

use crate::reduce_cases::{groups, numbers, served};
use blackburn_reference::random::normal;
use blackburn_reference::storage::Storage;
use blackburn_tests::on_burn_device;
use burn::{prelude::*, tensor::TensorData};
use libtest_mimic::{Failed, Trial};

/// Sizes, and a dimension: planes, cubes, several cubes for an output, and units that share columns.
const SHAPES: [([usize; 2], usize); 8] = [
    ([300, 130], 0),
    ([300, 130], 1),
    ([20, 2000], 1),
    ([200, 100], 0),
    ([2, 40_000], 1),
    ([20_011, 1], 0),
    ([40_000, 4], 0),
    ([16_384, 64], 0),
];

pub(crate) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let tests: [(&str, Test); 2] =
        [("integers_are_exact_and_wrap", integers), ("truth_is_exact", truth)];
    let trial = |(name, test): (&str, Test)| {
        Trial::ignorable_test(format!("reduce::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    tests.map(trial).into()
}

/// Compares, and counts the reductions that the provider must have run.
struct Checked {
    name: &'static str,
    made: Vec<f64>,
    expected: Vec<f64>,
}

fn check(
    shape: [usize; 2],
    dim: Option<usize>,
    all: Vec<Checked>,
    before: u64,
) -> Result<(), Failed> {
    let count = all.len() as u64;
    for Checked { name, made, expected } in all {
        if made != expected {
            let at = made.iter().zip(&expected).position(|(made, expected)| made != expected);
            return Err(format!("{name} of {shape:?} along {dim:?}: differs at {at:?}").into());
        }
    }
    match served() - before {
        ran if ran >= count => Ok(()),
        ran => Err(format!("{ran} of {count} of {shape:?} along {dim:?} were served").into()),
    }
}

fn integers(device: &Device) -> Result<(), Failed> {
    for (shape, dim) in SHAPES {
        // Large enough for sums and products to wrap, and few enough for ties.
        let x: Vec<i32> = normal(5, shape.iter().product(), 1.0, Storage::F32)
            .iter()
            .map(|x| ((x * 4.0).round() as i32).wrapping_mul(200_000_001).wrapping_add(1))
            .collect();
        let tensor: Tensor<2, Int> = Tensor::from_data(TensorData::new(x.clone(), shape), device);
        let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        device.sync().map_err(|error| error.to_string())?;
        let read = |tensor: Tensor<2, Int>| numbers(tensor.try_into_data());
        let read_one = |tensor: Tensor<1, Int>| numbers(tensor.try_into_data());
        let each = |dim: Option<usize>, of: &dyn Fn(&[i32]) -> f64| -> Vec<f64> {
            let exact =
                |group: &Vec<f64>| -> Vec<i32> { group.iter().map(|x| *x as i32).collect() };
            groups(&shape, dim, &wide).iter().map(|group| of(&exact(group))).collect()
        };
        let sum = |x: &[i32]| f64::from(x.iter().fold(0_i32, |sum, x| sum.wrapping_add(*x)));
        let product = |x: &[i32]| f64::from(x.iter().fold(1_i32, |all, x| all.wrapping_mul(*x)));
        let mean = |x: &[i32]| {
            f64::from(x.iter().fold(0_i32, |sum, x| sum.wrapping_add(*x)) / x.len() as i32)
        };
        let max = |x: &[i32]| x.iter().max().map_or(0.0, |x| f64::from(*x));
        let min = |x: &[i32]| x.iter().min().map_or(0.0, |x| f64::from(*x));
        let first = |x: &[i32], of: f64| x.iter().position(|x| f64::from(*x) == of);
        let argmax = |x: &[i32]| first(x, max(x)).map_or(-1.0, |at| at as f64);
        let argmin = |x: &[i32]| first(x, min(x)).map_or(-1.0, |at| at as f64);

        let before = served();
        let along = vec![
            Checked {
                name: "sum",
                made: read(tensor.clone().sum_dim(dim))?,
                expected: each(Some(dim), &sum),
            },
            Checked {
                name: "prod",
                made: read(tensor.clone().prod_dim(dim))?,
                expected: each(Some(dim), &product),
            },
            Checked {
                name: "mean",
                made: read(tensor.clone().mean_dim(dim))?,
                expected: each(Some(dim), &mean),
            },
            Checked {
                name: "max",
                made: read(tensor.clone().max_dim(dim))?,
                expected: each(Some(dim), &max),
            },
            Checked {
                name: "min",
                made: read(tensor.clone().min_dim(dim))?,
                expected: each(Some(dim), &min),
            },
            Checked {
                name: "argmax",
                made: read(tensor.clone().argmax(dim))?,
                expected: each(Some(dim), &argmax),
            },
            Checked {
                name: "argmin",
                made: read(tensor.clone().argmin(dim))?,
                expected: each(Some(dim), &argmin),
            },
        ];
        check(shape, Some(dim), along, before)?;

        let before = served();
        let whole = vec![
            Checked {
                name: "sum",
                made: read_one(tensor.clone().sum())?,
                expected: each(None, &sum),
            },
            Checked {
                name: "prod",
                made: read_one(tensor.clone().prod())?,
                expected: each(None, &product),
            },
            Checked {
                name: "max",
                made: read_one(tensor.clone().max())?,
                expected: each(None, &max),
            },
            Checked {
                name: "min",
                made: read_one(tensor.clone().min())?,
                expected: each(None, &min),
            },
        ];
        check(shape, None, whole, before)?;
    }
    Ok(())
}

fn truth(device: &Device) -> Result<(), Failed> {
    for (shape, dim) in SHAPES {
        let count: usize = shape.iter().product();
        let last = |value: bool| -> Vec<bool> {
            (0..count).map(|at| (at + 1 == count) == value).collect()
        };
        let some: Vec<bool> = (0..count).map(|at| at % 7 == 3).collect();
        for x in [last(true), last(false), some, vec![true; count], vec![false; count]] {
            let tensor: Tensor<2, Bool> =
                Tensor::from_data(TensorData::new(x.clone(), shape), device);
            let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            device.sync().map_err(|error| error.to_string())?;
            let each = |dim: Option<usize>, of: fn(&[f64]) -> bool| -> Vec<f64> {
                groups(&shape, dim, &wide).iter().map(|group| f64::from(of(group))).collect()
            };
            let any = |x: &[f64]| x.contains(&1.0);
            let all = |x: &[f64]| !x.contains(&0.0);
            let before = served();
            let made = [
                numbers(tensor.clone().any_dim(dim).try_into_data())?,
                numbers(tensor.clone().all_dim(dim).try_into_data())?,
            ];
            let [made_any, made_all] = made;
            let along = vec![
                Checked { name: "any", made: made_any, expected: each(Some(dim), any) },
                Checked { name: "all", made: made_all, expected: each(Some(dim), all) },
            ];
            check(shape, Some(dim), along, before)?;
            let before = served();
            let [made_any, made_all] = [
                numbers(tensor.clone().any().try_into_data())?,
                numbers(tensor.clone().all().try_into_data())?,
            ];
            let whole = vec![
                Checked { name: "any", made: made_any, expected: each(None, any) },
                Checked { name: "all", made: made_all, expected: each(None, all) },
            ];
            check(shape, None, whole, before)?;
        }
    }
    Ok(())
}
