//! What computes each element by itself, and random numbers.

use crate::cases::{Cases, Inputs, TRUTH, named};
use burn::tensor::{Distribution, Tensor, activation};

pub(crate) fn add(cases: &mut Cases) {
    let dims = cases.shapes.matrix;
    let count = dims.iter().product::<usize>();
    let e = cases.element;
    macro_rules! unary {
        ($op:literal, $input:ident, |$x:ident| $run:expr) => {
            cases.add($op, named(&dims), 2 * e * count, move |inputs| {
                let x = inputs.$input(dims);
                move || {
                    let $x = x.clone();
                    $run
                }
            });
        };
    }
    macro_rules! binary {
        ($op:literal, $bytes:expr, |$x:ident, $y:ident| $run:expr) => {
            cases.add($op, named(&dims), $bytes * count, move |inputs| {
                let [x, y] = [(); 2].map(|()| inputs.numbers(dims));
                move || {
                    let ($x, $y) = (x.clone(), y.clone());
                    $run
                }
            });
        };
    }
    unary!("add_scalar", numbers, |x| x + 1.0);
    unary!("exp", numbers, |x| x.exp());
    unary!("gelu", numbers, |x| activation::gelu(x));
    unary!("sigmoid", numbers, |x| activation::sigmoid(x));
    unary!("tanh", numbers, |x| x.tanh());
    unary!("powf", positive, |x| x.powf_scalar(1.7));
    unary!("clamp", numbers, |x| x.clamp(-0.5, 0.5));
    binary!("add", 3 * e, |x, y| x + y);
    binary!("mul", 3 * e, |x, y| x * y);
    binary!("greater", 2 * e + TRUTH, |x, y| x.greater(y));
    binary!("equal", 2 * e + TRUTH, |x, y| x.equal(y));
    cases.add("greater_scalar", named(&dims), (e + TRUTH) * count, move |inputs| {
        let x = inputs.numbers(dims);
        move || x.clone().greater_elem(0.5)
    });
    cases.add("mask_where", named(&dims), (3 * e + TRUTH) * count, move |inputs| {
        let [x, y] = [(); 2].map(|()| inputs.numbers(dims));
        let mask = inputs.mask(dims);
        move || x.clone().mask_where(mask.clone(), y.clone())
    });
    cases.add("mask_fill", named(&dims), (2 * e + TRUTH) * count, move |inputs| {
        let (x, mask) = (inputs.numbers(dims), inputs.mask(dims));
        move || x.clone().mask_fill(mask.clone(), -1.0)
    });
    for (op, distribution) in [
        ("random_uniform", Distribution::Uniform(-1.0, 1.0)),
        ("random_normal", Distribution::Normal(0.0, 1.0)),
        ("random_bernoulli", Distribution::Bernoulli(0.9)),
    ] {
        cases.add(op, named(&dims), e * count, move |inputs: &Inputs| {
            let options = inputs.options();
            move || Tensor::<2>::random(dims, distribution, options.clone())
        });
    }
}
