//! What makes one number of many: along a dimension, or of all; softmax and running sums.

use crate::cases::{Cases, INDEX, TRUTH, along, named, over_dims};
use burn::{
    nn::loss::{MseLoss, Reduction},
    tensor::activation::{log_softmax, softmax},
};

pub(crate) fn add(cases: &mut Cases) {
    let e = cases.element;
    over_dims!(cases, "sum", (e, e), numbers, |x, dim| x.sum_dim(dim));
    over_dims!(cases, "mean", (e, e), numbers, |x, dim| x.mean_dim(dim));
    over_dims!(cases, "prod", (e, e), positive, |x, dim| x.prod_dim(dim));
    over_dims!(cases, "max", (e, e), numbers, |x, dim| x.max_dim(dim));
    over_dims!(cases, "min", (e, e), numbers, |x, dim| x.min_dim(dim));
    over_dims!(cases, "argmax", (e, INDEX), numbers, |x, dim| x.argmax(dim));
    over_dims!(cases, "argmin", (e, INDEX), numbers, |x, dim| x.argmin(dim));
    over_dims!(cases, "var", (e, e), numbers, |x, dim| x.var(dim));
    over_dims!(cases, "any", (TRUTH, TRUTH), mask, |x, dim| x.any_dim(dim));
    over_dims!(cases, "all", (TRUTH, TRUTH), mask, |x, dim| x.all_dim(dim));

    along!(cases, "sum", (e, e), numbers, rows 1, |x, dim| x.sum_dim(dim));
    along!(cases, "max", (e, e), numbers, rows 1, |x, dim| x.max_dim(dim));
    along!(cases, "argmax", (e, INDEX), numbers, rows 1, |x, dim| x.argmax(dim));
    along!(cases, "var", (e, e), numbers, rows 1, |x, dim| x.var(dim));

    over_dims!(cases, "softmax", (2 * e, 0), numbers, |x, dim| softmax(x, dim));
    over_dims!(cases, "log_softmax", (2 * e, 0), numbers, |x, dim| log_softmax(x, dim));
    along!(cases, "softmax", (2 * e, 0), numbers, rows 1, |x, dim| softmax(x, dim));
    over_dims!(cases, "cumsum", (2 * e, 0), numbers, |x, dim| x.cumsum(dim));
    along!(cases, "cumsum", (2 * e, 0), numbers, rows 1, |x, dim| x.cumsum(dim));
    along!(cases, "cumprod", (2 * e, 0), numbers, matrix 1, |x, dim| x.cumprod(dim));
    along!(cases, "cummax", (2 * e, 0), numbers, matrix 1, |x, dim| x.cummax(dim));

    of_all(cases);
    sorts(cases);
}

/// Over all dimensions.
fn of_all(cases: &mut Cases) {
    let dims = cases.shapes.matrix;
    let bytes = dims.iter().product::<usize>() * cases.element;
    macro_rules! whole {
        ($op:literal, $input:ident, $bytes:expr, |$x:ident| $run:expr) => {
            cases.add($op, named(&dims), $bytes, move |inputs| {
                let x = inputs.$input(dims);
                move || {
                    let $x = x.clone();
                    $run
                }
            });
        };
    }
    whole!("sum_all", numbers, bytes, |x| x.sum());
    whole!("mean_all", numbers, bytes, |x| x.mean());
    whole!("max_all", numbers, bytes, |x| x.max());
    whole!("any_all", mask, dims.iter().product::<usize>() * TRUTH, |x| x.any());
    cases.add("mse_loss", named(&dims), 2 * bytes, move |inputs| {
        let [x, y] = [(); 2].map(|()| inputs.numbers(dims));
        move || MseLoss::new().forward(x.clone(), y.clone(), Reduction::Mean)
    });
}

/// Orders, and the greatest few.
fn sorts(cases: &mut Cases) {
    const K: usize = 16;
    let e = cases.element;
    along!(cases, "sort", (2 * e, 0), numbers, sorted 1, |x, dim| x.sort(dim));
    along!(cases, "argsort", (e + INDEX, 0), numbers, sorted 1, |x, dim| x.argsort(dim));
    let dims @ [rows, columns] = cases.shapes.sorted;
    let shape = format!("{} dim 1 k {K}", named(&dims));
    let bytes = rows * columns * e + rows * K * (e + INDEX);
    cases.add("topk", shape, bytes, move |inputs| {
        let x = inputs.numbers(dims);
        move || x.clone().topk_with_indices(K, 1)
    });
}
