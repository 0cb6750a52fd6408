//! A long short-term memory (LSTM) over a sequence, and its gradients.
//!
//! Bounds are carried along: every number has a limit of how far a device may be off that computes in f32, and rounds what
//! it keeps to the storage type.

use crate::storage::Storage;
use std::ops::{Add, Mul};

/// A number, and how far off a device may be.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bounded {
    /// The exact one.
    pub exact: f64,
    /// The bound.
    pub bound: f64,
}

/// How far off a function of f32 may be, beside what its argument makes of it: some units in the last place of 1, which
/// sigmoids and hyperbolic tangents stay below.
const FUNCTION_ERROR: f64 = 16.0 / (1u64 << 24) as f64;

impl Bounded {
    fn of(exact: f64) -> Self {
        Self { exact, bound: 0.0 }
    }

    /// With an operation of f32 behind it.
    fn computed(exact: f64, bound: f64) -> Self {
        Self { exact, bound: bound + Storage::F32.unit_roundoff() * (exact.abs() + bound) }
    }

    fn stored(self, storage: Storage) -> Self {
        let Self { exact, bound } = self;
        let rounding = storage.unit_roundoff() * (exact.abs() + bound) + storage.underflow();
        Self { exact, bound: bound + rounding }
    }

    fn sigmoid(self) -> Self {
        // The slope is a quarter at most.
        Self { exact: 1.0 / (1.0 + (-self.exact).exp()), bound: self.bound / 4.0 + FUNCTION_ERROR }
    }

    fn tanh(self) -> Self {
        Self { exact: self.exact.tanh(), bound: self.bound + FUNCTION_ERROR }
    }

    /// `1 - x`.
    fn rest(self) -> Self {
        Self::computed(1.0 - self.exact, self.bound)
    }
}

impl Add for Bounded {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self::computed(self.exact + other.exact, self.bound + other.bound)
    }
}

impl Mul for Bounded {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let bound = self.exact.abs() * other.bound
            + other.exact.abs() * self.bound
            + self.bound * other.bound;
        Self::computed(self.exact * other.exact, bound)
    }
}

/// A sequence: tensors of the kernels, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Lstm<'a> {
    /// Steps, batch and hidden features.
    pub sizes: [usize; 3],
    /// Whether the last step comes first.
    pub reverse: bool,
    /// What the input gives the gates: `[steps, batch, 4 hidden]`.
    pub projected: &'a [f64],
    /// `[hidden, 4 hidden]`.
    pub weight: &'a [f64],
    /// The first h, `[batch, hidden]`.
    pub h: &'a [f64],
    /// The first c, `[batch, hidden]`.
    pub c: &'a [f64],
    /// What is rounded to: all but cells.
    pub storage: Storage,
}

/// What a sequence makes.
#[derive(Clone, Debug)]
pub struct Made {
    /// All h, and the last c: `[steps + 1, batch, hidden]`.
    pub out: Vec<Bounded>,
    gates: Vec<[Vec<Bounded>; 4]>,
    cells: Vec<Vec<Bounded>>,
    before: Vec<Vec<Bounded>>,
}

/// The gradients.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Of `projected`.
    pub dprojected: Vec<Bounded>,
    /// Of the weight.
    pub dweight: Vec<Bounded>,
    /// Of the first h.
    pub dh: Vec<Bounded>,
    /// Of the first c.
    pub dc: Vec<Bounded>,
}

impl Lstm<'_> {
    fn walk(&self) -> Vec<usize> {
        let steps = 0..self.sizes[0];
        if self.reverse { steps.rev().collect() } else { steps.collect() }
    }

    /// A sum of products of so many terms.
    fn sum(terms: impl Iterator<Item = [Bounded; 2]>) -> Bounded {
        terms.fold(Bounded::default(), |sum, [a, b]| sum + a * b)
    }

    /// Gate `gate` of feature `column`: where it lies in a row of gates.
    fn at(&self, row: usize, gate: usize, column: usize) -> usize {
        let hidden = self.sizes[2];
        row * 4 * hidden + gate * hidden + column
    }

    /// Forward.
    pub fn forward(&self) -> Made {
        let [steps, batch, hidden] = self.sizes;
        let state = batch * hidden;
        let mut h: Vec<Bounded> = self.h.iter().copied().map(Bounded::of).collect();
        let mut cells = vec![self.c.iter().copied().map(Bounded::of).collect::<Vec<_>>()];
        let mut out = vec![Bounded::default(); (steps + 1) * state];
        let mut gates: Vec<[Vec<Bounded>; 4]> = vec![Default::default(); steps];
        let mut before = vec![Vec::new(); steps];
        for (walked, step) in self.walk().into_iter().enumerate() {
            let mut now: [Vec<Bounded>; 4] = Default::default();
            for unit in 0..state {
                let (row, column) = (unit / hidden, unit % hidden);
                for (gate, all) in now.iter_mut().enumerate() {
                    let of_input = self.projected[step * 4 * state + self.at(row, gate, column)];
                    let product = Self::sum((0..hidden).map(|k| {
                        [h[row * hidden + k], Bounded::of(self.weight[self.at(k, gate, column)])]
                    }));
                    let sum = Bounded::of(of_input) + product;
                    all.push(if gate == 2 { sum.tanh() } else { sum.sigmoid() });
                }
            }
            let [taken, kept, candidate, shown] = &now;
            let c: Vec<Bounded> = (0..state)
                .map(|unit| kept[unit] * cells[walked][unit] + taken[unit] * candidate[unit])
                .collect();
            before[step] = h;
            h = (0..state)
                .map(|unit| (shown[unit] * c[unit].tanh()).stored(self.storage))
                .collect();
            out[step * state..][..state].copy_from_slice(&h);
            cells.push(c);
            gates[step] = now.map(|all| all.into_iter().map(|x| x.stored(self.storage)).collect());
        }
        let last = cells[steps].iter().map(|c| c.stored(self.storage));
        out.splice(steps * state.., last);
        Made { out, gates, cells, before }
    }

    /// The gradients from that of [`Made::out`].
    pub fn backward(&self, made: &Made, dout: &[f64]) -> Gradients {
        let [steps, batch, hidden] = self.sizes;
        let state = batch * hidden;
        let of = |step: usize| dout[step * state..][..state].iter().copied().map(Bounded::of);
        let mut dc: Vec<Bounded> = of(steps).collect();
        let mut behind: Option<Vec<Bounded>> = None;
        let mut dprojected = vec![Bounded::default(); steps * 4 * state];
        // The gradient of h that gradients of gates make.
        let through = |da: &[Bounded], unit: usize| {
            let (row, column) = (unit / hidden, unit % hidden);
            Self::sum((0..4 * hidden).map(|k| {
                [da[row * 4 * hidden + k], Bounded::of(self.weight[column * 4 * hidden + k])]
            }))
        };
        for (walked, step) in self.walk().into_iter().enumerate().rev() {
            let [taken, kept, candidate, shown] = &made.gates[step];
            let mut da = vec![Bounded::default(); 4 * state];
            for (unit, dout) in of(step).enumerate() {
                let mut dh = dout;
                if let Some(behind) = &behind {
                    dh = dh + through(behind, unit);
                }
                let tanh = made.cells[walked + 1][unit].tanh();
                let [i, f, g, o] = [taken, kept, candidate, shown].map(|gate| gate[unit]);
                let of_c = dc[unit] + dh * o * (tanh * tanh).rest();
                let all = [
                    of_c * g * i * i.rest(),
                    of_c * made.cells[walked][unit] * f * f.rest(),
                    of_c * i * (g * g).rest(),
                    dh * tanh * o * o.rest(),
                ];
                for (gate, gradient) in all.into_iter().enumerate() {
                    da[self.at(unit / hidden, gate, unit % hidden)] = gradient.stored(self.storage);
                }
                dc[unit] = of_c * f;
            }
            dprojected[step * 4 * state..][..4 * state].copy_from_slice(&da);
            behind = Some(da);
        }
        let first = behind.unwrap_or_default();
        let dh = (0..state).map(|unit| through(&first, unit).stored(self.storage)).collect();
        let dweight = (0..hidden * 4 * hidden)
            .map(|at| {
                let (row, column) = (at / (4 * hidden), at % (4 * hidden));
                let terms = (0..steps * batch).map(|term| {
                    let (step, sequence) = (term / batch, term % batch);
                    let h = made.before[step][sequence * hidden + row];
                    [h, dprojected[term * 4 * hidden + column]]
                });
                Self::sum(terms).stored(self.storage)
            })
            .collect();
        Gradients { dprojected, dweight, dh, dc }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::normal;

    #[test]
    fn gradients_are_those_of_central_differences() {
        const STEP: f64 = 1e-5;
        let sizes @ [steps, batch, hidden] = [3, 2, 3];
        let (state, storage) = (batch * hidden, Storage::F32);
        let draw = |seed, count| normal(seed, count, 0.7, storage);
        for reverse in [false, true] {
            let inputs = [
                draw(1, steps * 4 * state),
                draw(2, hidden * 4 * hidden),
                draw(3, state),
                draw(4, state),
            ];
            let dout = draw(5, (steps + 1) * state);
            let run = |[projected, weight, h, c]: &[Vec<f64>; 4]| {
                let lstm = Lstm { sizes, reverse, projected, weight, h, c, storage };
                let made = lstm.forward();
                let loss: f64 = made.out.iter().zip(&dout).map(|(y, dy)| y.exact * dy).sum();
                let Gradients { dprojected, dweight, dh, dc } = lstm.backward(&made, &dout);
                (loss, [dprojected, dweight, dh, dc])
            };
            let (_, gradients) = run(&inputs);
            for (which, gradient) in gradients.iter().enumerate() {
                for at in 0..inputs[which].len() {
                    let moved = |by: f64| {
                        let mut inputs = inputs.clone();
                        inputs[which][at] += by;
                        run(&inputs).0
                    };
                    let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                    let off = (slope - gradient[at].exact).abs();
                    assert!(off < 1e-7, "{which}, {at}: {slope} and {}", gradient[at].exact);
                }
            }
        }
    }
}
