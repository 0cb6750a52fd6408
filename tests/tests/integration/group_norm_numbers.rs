//! Numbers that normalization may lose digits of, NaN, and the same numbers twice.

use super::{Case, F32, ORDERS, Results};
use blackburn_kernels::group_norm::{GroupNormBlueprint, GroupNormPass};
use blackburn_tests::on_device;
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("group_norm::{name}"), move || on_device(test))
    };
    vec![
        trial("a_large_mean_loses_no_digits", large_mean),
        trial("groups_far_from_each_other_lose_no_digits", far_groups),
        trial("constant_groups_have_no_variance", constant),
        trial("a_nan_stays_in_its_group", nan),
        trial("repeated_runs_give_the_same_bits", repeats),
    ]
}

fn large_mean(client: &Client) -> Result<(), Failed> {
    for order in ORDERS {
        for (shape, groups) in [([2, 24, 500], 4), ([2, 7, 19], 1)] {
            let case = Case { shape, groups, order, offset: 1000.0, ..Case::plain(F32) };
            case.check(client)?;
            // In figures, too: squares less the square of the mean are off by hundredths.
            let numbers = case.numbers();
            let plain = case.without_parameters();
            let op = case.op(&numbers, &plain);
            let exact = op.inverse_deviations(&op.statistics(&numbers.x));
            let rstd = case.run(client, &numbers)?.rstd;
            let off = rstd.iter().zip(&exact).map(|(a, e)| (a / e - 1.0).abs());
            let worst = off.fold(0.0, f64::max);
            if worst > 1e-5 {
                return Err(format!("{case:?}: a deviation is off by a share of {worst:e}").into());
            }
        }
    }
    Ok(())
}

/// Each group by itself, in a vector that holds channels of several, and a first value far from the others.
fn far_groups(client: &Client) -> Result<(), Failed> {
    for order in ORDERS {
        let case = Case { shape: [2, 12, 300], groups: 6, order, ..Case::plain(F32) };
        let mut numbers = case.numbers();
        for (i, x) in numbers.x.iter_mut().enumerate() {
            *x = F32.round(*x + 5000.0 * (i / 600 % 6) as f64);
        }
        case.check_with(client, &numbers)?;
        numbers.x[0] = -4000.0;
        case.check_with(client, &numbers)?;
    }
    Ok(())
}

/// Every distance is zero, so that nothing is rounded.
fn constant(client: &Client) -> Result<(), Failed> {
    for order in ORDERS {
        let case = Case { shape: [2, 24, 500], order, ..Case::plain(F32) };
        let mut numbers = case.numbers();
        numbers.x.fill(F32.round(-777.7));
        let Results { mean, y, .. } = case.run(client, &numbers)?;
        let betas = (0..y.len()).map(|i| numbers.beta[i / 500 % 24]);
        if !(mean.iter().all(|m| *m == numbers.x[0]) && y.iter().copied().eq(betas)) {
            return Err(format!("{order:?}: means of {mean:?}").into());
        }
    }
    Ok(())
}

fn nan(client: &Client) -> Result<(), Failed> {
    for order in ORDERS {
        for special in [f64::NAN, f64::INFINITY] {
            let case = Case { order, ..Case::plain(F32) };
            let mut numbers = case.numbers();
            let spoiled = 1234;
            numbers.x[spoiled] = special;
            let Results { y, mean, rstd, dx, dgamma, .. } = case.run(client, &numbers)?;
            // Elements of a group of a sample; a group; and a channel of all samples.
            for (what, values, each) in [("y", &y, 300), ("dx", &dx, 300), ("rstd", &rstd, 1)] {
                for (i, value) in values.iter().enumerate() {
                    if (i / each == spoiled / 300) != value.is_nan() {
                        return Err(format!("{special}, {order:?}: {what} {i}: {value}").into());
                    }
                }
            }
            let finite = mean.iter().filter(|mean| mean.is_finite()).count();
            let whole = dgamma.iter().filter(|value| value.is_finite()).count();
            if (finite, whole) != (mean.len() - 1, 21) {
                return Err(format!("{special}, {order:?}: {mean:?}, {dgamma:?}").into());
            }
        }
    }
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    for order in ORDERS {
        let case = Case { shape: [1, 8, 5000], groups: 2, order, ..Case::plain(F32) };
        if GroupNormBlueprint::plan(&case.problem(), GroupNormPass::Statistics, client).splits < 2 {
            return Err("the shape does not split, so this shows nothing".into());
        }
        let numbers = case.numbers();
        let first = case.run(client, &numbers)?;
        for _ in 0..3 {
            if case.run(client, &numbers)? != first {
                return Err("two runs on the same input differ".into());
            }
        }
    }
    Ok(())
}
