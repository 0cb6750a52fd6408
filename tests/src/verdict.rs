//! How far off a program may be, by what it computes in f32 on the CPU.
//!
//! # How far off a program may be
//!
//! Let *u* be the unit roundoff of the type that is computed in, and *n* the number of operations in a row that round.
//! A rounding changes its result by at most *u* of it. What that does to an output or a gradient depends on what follows.
//! It is measured: all inputs and parameters are changed by *u* of themselves, with random signs, and the program runs
//! in f32. The change of a tensor, in the norm of its numbers, is that tensor's *sensitivity*. Roundings are independent
//! of each other, and n of them add up to the root of n. So a tensor may be off by
//!
//! ```text
//! 2 sqrt(n) (sensitivity + u size)
//! ```
//!
//! in the norm: the size of an output is its own norm. The terms of a gradient may cancel out, which rounding does not
//! see: a key's bias has a gradient of zero, as a sum of terms that are as large as those of its like. So the size of a
//! gradient is the largest norm among all gradients of the program. A backward pass has twice the operations of the pass
//! forward, which it comes behind: 3 n. With products in 8 bits, each of them adds noise of its own, 18 dB below an
//! output and 17 dB below a gradient, as the tests of such layers have it, and L of them in a row the root of L as
//! much. Each comes with two more operations at least: L is at most a third of n.
//!
//! A bound that is as large as what it judges would judge nothing: one above `WIDEST` of the size is refused.

use crate::{
    plain::Tensors,
    programs::{Outcome, Program, Setting},
};
use blackburn::train::precision::{Precision, PrecisionPolicy};
use burn::tensor::{Device, FloatDType};
use libtest_mimic::Failed;

/// Draws of signs, of which the largest change counts.
const DRAWS: u64 = 3;

/// The largest share of a tensor's size that it may be off by.
const WIDEST: f64 = 0.5;

/// The same where products are in 8 bits, whose noise alone is a third of that for a few in a row.
const WIDEST_IN_8_BITS: f64 = 0.9;

/// What a program computes in f32 on the CPU, and how much it changes with its inputs and parameters.
#[derive(Debug)]
pub struct Exact {
    unit: f64,
    tensors: Tensors,
    sensitivities: Vec<f64>,
}

/// Half a unit in the last place of 1.
fn unit_roundoff(dtype: FloatDType) -> Result<f64, Failed> {
    match dtype {
        FloatDType::F32 => Ok(2f64.powi(-24)),
        FloatDType::F16 => Ok(2f64.powi(-11)),
        FloatDType::BF16 => Ok(2f64.powi(-8)),
        other => Err(format!("no precision computes in {other:?}").into()),
    }
}

impl Exact {
    /// Runs `program`, and again with inputs and parameters as far off as `precision` rounds them.
    ///
    /// # Errors
    ///
    /// What the program reports.
    pub fn of(program: &dyn Program, precision: Precision) -> Result<Self, Failed> {
        let unit = match precision {
            // Operands of products have 11 digits.
            Precision::Tf32 => (-11f64).exp2(),
            _ => unit_roundoff(precision.dtype())?,
        };
        let run = |noise| {
            let policy = PrecisionPolicy::new(Precision::F32);
            let device = Device::flex().autodiff();
            match program.run(&Setting { device, policy, casts_for_loss: false, noise })? {
                Outcome::Ran(tensors) => Ok(tensors),
                Outcome::Refused(reason) => Err(Failed::from(format!("refused in f32: {reason}"))),
            }
        };
        let tensors = run(None)?;
        let mut sensitivities = vec![0f64; tensors.len()];
        for draw in 0..DRAWS {
            let changed = distances(&run(Some((unit, draw)))?, &tensors)?;
            for (most, change) in sensitivities.iter_mut().zip(changed) {
                *most = most.max(change);
            }
        }
        Ok(Self { unit, tensors, sensitivities })
    }

    /// What the program computed.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The places of the output and of the largest gradient.
    pub fn largest(&self) -> Vec<usize> {
        let gradients = self.tensors.iter().enumerate().skip(1);
        let largest = gradients.max_by(|(_, (_, a)), (_, (_, b))| norm(a).total_cmp(&norm(b)));
        [0].into_iter().chain(largest.map(|(place, _)| place)).collect()
    }

    /// Whether `found` is within its bounds.
    ///
    /// # Errors
    ///
    /// The tensors that are not, and those whose bounds say nothing.
    pub fn judge(
        &self,
        program: &dyn Program,
        precision: Precision,
        found: &Tensors,
    ) -> Result<(), Failed> {
        let gradients = self.tensors.iter().skip(1).map(|(_, numbers)| norm(numbers));
        let largest = gradients.fold(0.0, f64::max);
        let mut wrong = Vec::new();
        let distances = distances(found, &self.tensors)?;
        for (place, (name, numbers)) in self.tensors.iter().enumerate() {
            let is_output = place == 0;
            let size = if is_output { norm(numbers) } else { largest };
            let bound = self.bound(program.roundings(), precision, place, size);
            let widest = if precision.recipe().is_some() { WIDEST_IN_8_BITS } else { WIDEST };
            let distance = distances[place];
            // NaN is not within it either.
            let is_within = distance <= bound;
            if !is_within {
                wrong.push(format!(
                    "{name} is off by {distance:.3e}, bound {bound:.3e}, size {size:.3e}"
                ));
            }
            if bound > widest * size && size > 0.0 {
                wrong.push(format!(
                    "{name}: a bound of {bound:.3e} for a size of {size:.3e} says nothing"
                ));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ").into()) }
    }

    fn bound(&self, roundings: f64, precision: Precision, place: usize, size: f64) -> f64 {
        let (passes, decibels) = if place == 0 { (1.0, 18.0) } else { (3.0, 17.0) };
        let rounding =
            2.0 * (passes * roundings).sqrt() * (self.sensitivities[place] + self.unit * size);
        match precision.recipe() {
            None => rounding,
            Some(_) => {
                let noise = 10f64.powf(-decibels / 20.0);
                rounding + noise * (roundings / 3.0).max(1.0).sqrt() * size
            }
        }
    }
}

fn norm(numbers: &[f64]) -> f64 {
    numbers.iter().map(|number| number * number).sum::<f64>().sqrt()
}

/// How far tensors are from those of the same names.
fn distances(found: &Tensors, expected: &Tensors) -> Result<Vec<f64>, Failed> {
    let names = |tensors: &Tensors| {
        let shapes = tensors.iter().map(|(name, numbers)| (name.clone(), numbers.len()));
        shapes.collect::<Vec<_>>()
    };
    if names(found) != names(expected) {
        return Err(format!("got {:?}, expected {:?}", names(found), names(expected)).into());
    }
    let pairs = found.iter().zip(expected);
    Ok(pairs
        .map(|((_, found), (_, expected))| {
            let differences = found.iter().zip(expected).map(|(a, b)| a - b);
            norm(&differences.collect::<Vec<_>>())
        })
        .collect())
}
