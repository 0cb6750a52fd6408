//! Gradient descent with momentum over all of GPT-2's parameters, in few launches and in one each: bytes moved
//! a second.
//! `cargo xtask bench sgd --features cuda`

use blackburn_benches::optimizer::{Many, Optimizer, bench};
use blackburn_kernels::sgd::{SgdStep, SgdTensors, sgd_update_many_with};
use blackburn_reference::{
    adamw::Rounding,
    sgd::{Element, Step, bound, update},
    storage::Storage,
};
use criterion::{criterion_group, criterion_main};

struct Sgd;

impl Optimizer<3> for Sgd {
    const NAME: &'static str = "sgd";
    type Step = SgdStep;
    type Tensors = SgdTensors;
    const STEP: SgdStep = SgdStep {
        momentum: 0.9,
        dampening: 0.0,
        nesterov: false,
        weight_decay: 1e-4,
        rate: 0.1,
        time: 2,
    };
    const MANY: Many<SgdStep, SgdTensors> = sgd_update_many_with;

    fn expected(parameter: f64, gradient: f64, stored: Storage) -> [f64; 2] {
        let SgdStep { momentum, dampening, nesterov, weight_decay, rate, .. } = Self::STEP;
        let step = Step { momentum, dampening, nesterov, weight_decay, rate, is_first: false };
        let old = Element { parameter, velocity: 0.0 };
        let bound = bound(&step, old, gradient, stored, Rounding::Nearest);
        [update(&step, old, gradient).parameter, bound.parameter]
    }
}

criterion_group!(benches, bench::<Sgd, 3>);
criterion_main!(benches);
