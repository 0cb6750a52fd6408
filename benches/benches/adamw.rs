//! AdamW over all of GPT-2's parameters, in few launches and in one each: bytes moved a second.
//! `cargo xtask bench adamw --features cuda`

use blackburn_benches::optimizer::{Many, Optimizer, bench};
use blackburn_kernels::adamw::{AdamwStep, AdamwTensors, adamw_update_many_with};
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding, Step, bound, update},
    storage::Storage,
};
use criterion::{criterion_group, criterion_main};

struct Adamw;

impl Optimizer<4> for Adamw {
    const NAME: &'static str = "adamw";
    type Step = AdamwStep;
    type Tensors = AdamwTensors;
    const STEP: AdamwStep = AdamwStep {
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        rate: 6e-4,
        time: 1,
    };
    const MANY: Many<AdamwStep, AdamwTensors> = adamw_update_many_with;

    fn expected(parameter: f64, gradient: f64, stored: Storage) -> [f64; 2] {
        let AdamwStep { beta_1, beta_2, epsilon, weight_decay, rate, .. } = Self::STEP;
        let step = Step { beta_1, beta_2, epsilon, weight_decay, rate, taken: 1 };
        let old = Element { parameter, ..Element::default() };
        let bound = bound(&step, old, gradient, stored, Rounding::Nearest, Corrections::Host);
        [update(&step, old, gradient).parameter, bound.parameter]
    }
}

criterion_group!(benches, bench::<Adamw, 4>);
criterion_main!(benches);
