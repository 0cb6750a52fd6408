//! Single steps of AdamW and of gradient descent with momentum.

use crate::{
    buffers::{download, upload},
    check::{Check, Stop},
    draw::Draw,
    memory::Layout,
    target::Target,
};
use blackburn_kernels::{
    adamw::{AdamwStep, AdamwTensors, adamw_update},
    buffer::Rows,
    sgd::{SgdStep, SgdTensors, sgd_update},
};
use blackburn_reference::{
    adamw::{self, Corrections, Rounding},
    sgd,
    storage::Storage,
};

const F32: Storage = Storage::F32;

/// The types and sizes that tensors of a parameter have.
struct Parameter {
    stored: Storage,
    gradients: Storage,
    rows: usize,
    columns: usize,
}

impl Parameter {
    fn draw(on: &Target, draw: &mut Draw) -> Self {
        let stored = draw.plan("parameter", &on.storages);
        let gradients = draw.plan("gradient", &on.storages);
        let step = if draw.planned("aligned", 2) { 8 } else { 1 };
        let columns = draw.multiple("columns", 1..=5000, step);
        let most = if draw.holds("large", 200) { 1 << 18 } else { 1 << 14 };
        let rows = draw.size("rows", 1..=(most / columns).max(1));
        Self { stored, gradients, rows, columns }
    }

    fn normal(&self, draw: &mut Draw, deviation: f64, storage: Storage) -> Vec<f64> {
        draw.normal(self.rows * self.columns, deviation, storage)
    }

    /// Rows on the device, that many elements apart.
    fn rows(&self, on: &Target, values: &[f64], pitch: usize, storage: Storage) -> Rows {
        let Self { rows, columns, .. } = *self;
        let layout = Layout::rows(rows, columns, pitch);
        let mut buffer = upload(&on.client, &layout.scatter(values, pitch - columns), storage);
        buffer.elements = layout.span();
        Rows { buffer, rows, columns, pitch }
    }

    fn read(&self, on: &Target, rows: &Rows, storage: Storage) -> Result<Vec<f64>, Stop> {
        let memory = download(&on.client, rows.buffer.clone(), storage)?;
        Ok(Layout::rows(rows.rows, rows.columns, rows.pitch).gather(&memory))
    }

    /// How far apart the rows of the parameter with its states, and of its gradient, are: as CUDA's runtime
    /// begins rows.
    fn pitches(&self, draw: &mut Draw) -> [usize; 2] {
        let apart = |step: usize| self.columns.next_multiple_of(step);
        [draw.plan("pitch", &[1, 1, 128]), draw.plan("gradient-pitch", &[1, 1, 256])].map(apart)
    }
}

pub(super) fn adamw(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let parameter = Parameter::draw(on, draw);
    let decays = draw.planned("decays", 2);
    let pitches = parameter.pitches(draw);
    let step = AdamwStep {
        beta_1: draw.number("beta_1", 0.0, 0.99),
        beta_2: draw.number("beta_2", 0.5, 0.9999),
        epsilon: draw.one_of("epsilon", &[1e-8, 1e-5]),
        weight_decay: if decays { draw.number("decay", 0.001, 0.3) } else { 0.0 },
        rate: draw.number("rate", 1e-5, 0.1),
        time: draw.size("time", 1..=3000),
    };
    let stored = parameter.stored;
    let p = parameter.normal(draw, 1.0, stored);
    let mut g = parameter.normal(draw, 0.5, parameter.gradients);
    draw.spoil("gradient", &mut g);
    let m = parameter.normal(draw, 0.1, F32);
    let v: Vec<f64> = parameter.normal(draw, 0.3, F32).iter().map(|v| F32.round(v * v)).collect();
    let tensors = AdamwTensors {
        parameter: parameter.rows(on, &p, pitches[0], stored),
        gradient: parameter.rows(on, &g, pitches[1], parameter.gradients),
        first: parameter.rows(on, &m, pitches[0], F32),
        second: parameter.rows(on, &v, pitches[0], F32),
    };
    if draw.holds("contradiction", 60) {
        let wrong = AdamwStep { beta_2: 1.0, ..step };
        return check.refuses("a beta of 1", adamw_update(&on.client, &wrong, tensors, None, None));
    }
    let new = adamw_update(&on.client, &step, tensors, None, None)?;

    let AdamwStep { beta_1, beta_2, epsilon, weight_decay, rate, time } = step;
    let taken = time as u32;
    let step = adamw::Step { beta_1, beta_2, epsilon, weight_decay, rate, taken };
    let olds =
        (0..p.len()).map(|i| (adamw::Element { parameter: p[i], first: m[i], second: v[i] }, g[i]));
    let (mut expected, mut bounds) = (Vec::new(), Vec::new());
    for (old, g) in olds {
        expected.push(adamw::update(&step, old, g));
        let (nearest, by) = (Rounding::Nearest, Corrections::Host);
        bounds.push(adamw::bound(&step, old, g, stored, nearest, by));
    }
    type Number = fn(&adamw::Element) -> f64;
    let numbers: [(&str, &Rows, Storage, Number); 3] = [
        ("p", &new.parameter, stored, |e| e.parameter),
        ("m", &new.first, F32, |e| e.first),
        ("v", &new.second, F32, |e| e.second),
    ];
    for (what, rows, storage, of) in numbers {
        let [expected, bounds] =
            [&expected, &bounds].map(|all| all.iter().map(of).collect::<Vec<f64>>());
        check.compare(what, parameter.read(on, rows, storage)?, &expected, &bounds)?;
    }
    Ok(())
}

pub(super) fn sgd(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let parameter = Parameter::draw(on, draw);
    let decays = draw.planned("decays", 2);
    let nesterov = draw.planned("nesterov", 2);
    let pitches = parameter.pitches(draw);
    let step = SgdStep {
        momentum: draw.one_of("momentum", &[0.9, 0.99, 0.0]),
        dampening: draw.one_of("dampening", &[0.0, 0.25]),
        nesterov,
        weight_decay: if decays { draw.number("decay", 0.001, 0.3) } else { 0.0 },
        rate: draw.number("rate", 1e-5, 0.1),
        time: draw.one_of("time", &[1, 2, 1000, usize::MAX]),
    };
    let stored = parameter.stored;
    let p = parameter.normal(draw, 1.0, stored);
    let mut g = parameter.normal(draw, 0.5, parameter.gradients);
    draw.spoil("gradient", &mut g);
    let v = parameter.normal(draw, 0.3, F32);
    let tensors = SgdTensors {
        parameter: parameter.rows(on, &p, pitches[0], stored),
        gradient: parameter.rows(on, &g, pitches[1], parameter.gradients),
        velocity: parameter.rows(on, &v, pitches[0], F32),
    };
    if draw.holds("contradiction", 60) {
        let wrong = SgdStep { momentum: -0.1, ..step };
        let result = sgd_update(&on.client, &wrong, tensors, None, None);
        return check.refuses("a momentum below 0", result);
    }
    let new = sgd_update(&on.client, &step, tensors, None, None)?;

    let SgdStep { momentum, dampening, nesterov, weight_decay, rate, time } = step;
    let step = sgd::Step { momentum, dampening, nesterov, weight_decay, rate, is_first: time == 1 };
    let (mut expected, mut bounds) = (Vec::new(), Vec::new());
    for ((parameter, velocity), g) in p.iter().zip(&v).zip(&g) {
        let old = sgd::Element { parameter: *parameter, velocity: *velocity };
        expected.push(sgd::update(&step, old, *g));
        bounds.push(sgd::bound(&step, old, *g, stored, Rounding::Nearest));
    }
    type Number = fn(&sgd::Element) -> f64;
    let numbers: [(&str, &Rows, Storage, Number); 2] =
        [("p", &new.parameter, stored, |e| e.parameter), ("v", &new.velocity, F32, |e| e.velocity)];
    for (what, rows, storage, of) in numbers {
        let [expected, bounds] =
            [&expected, &bounds].map(|all| all.iter().map(of).collect::<Vec<f64>>());
        check.compare(what, parameter.read(on, rows, storage)?, &expected, &bounds)?;
    }
    Ok(())
}
