//! Whether what the device made of a norm is within bounds.

use super::{Case, Numbers, Results};
use blackburn_kernels::Pass;
use blackburn_reference::{storage::Storage, tolerance::compare};
use cubecl::client::Client;
use libtest_mimic::Failed;

impl Case {
    pub(super) fn compare(
        &self,
        client: &Client,
        numbers: &Numbers,
        results: &Results,
    ) -> Result<(), Failed> {
        let x = &results.x;
        let dsum = self.residual.then_some(&numbers.dsum[..]);
        if self.residual {
            let residual = self.addends(numbers);
            let sum: Vec<f64> = numbers.x.iter().zip(&residual).map(|(x, r)| x + r).collect();
            // Rounded in f32, and to storage; with dropout the scale and the product in f32, too.
            let narrow = Storage::F32.unit_roundoff();
            let u = narrow + self.storage.unit_roundoff();
            let products = if self.dropout.is_some() { 2.0 } else { 0.0 };
            let sums = if self.has_residual_bias() { 1.0 } else { 0.0 };
            let of_product = (products + sums) * narrow * (1.0 + u);
            let bound = |(sum, residual): (&f64, &f64)| {
                sum.abs() * u + residual.abs() * of_product + self.storage.underflow()
            };
            let bounds: Vec<f64> = sum.iter().zip(&residual).map(bound).collect();
            compare(x, &sum, &bounds).map_err(|error| format!("sum: {error}"))?;
        }
        // From what the device normalized: the rounding of the sum is counted above.
        let op = self.op(numbers);
        let how = self.arithmetic(client, Pass::Forward)?;
        compare(&results.y, &op.forward(x), &op.forward_bounds(x, how))
            .map_err(|error| format!("y: {error}"))?;
        let how = self.arithmetic(client, Pass::Backward)?;
        let expected = op.backward(x, &numbers.dy, dsum);
        let bounds = op.backward_bounds(x, &numbers.dy, dsum, how);
        let [dx, dgamma, dbeta] = &results.gradients;
        compare(dx, &expected.dx, &bounds.dx).map_err(|error| format!("dx: {error}"))?;
        compare(dgamma, &expected.dgamma, &bounds.dgamma)
            .map_err(|error| format!("dgamma: {error}"))?;
        if self.bias {
            compare(dbeta, &expected.dbeta, &bounds.dbeta)
                .map_err(|error| format!("dbeta: {error}"))?;
        }
        if let Some(dresidual) = &results.dresidual {
            let narrow = Storage::F32.unit_roundoff();
            let factors = self.factors();
            let exact: Vec<f64> =
                expected.dx.iter().zip(&factors).map(|(dx, factor)| dx * factor).collect();
            // What dx may be off by, the scale and the product in f32, and another rounding to storage.
            let u = 2.0 * narrow + self.storage.unit_roundoff();
            let bound = |((exact, off), factor): ((&f64, &f64), &f64)| {
                (exact.abs() * u + off * factor) * (1.0 + u) + self.storage.underflow()
            };
            let bounds: Vec<f64> = exact.iter().zip(&bounds.dx).zip(&factors).map(bound).collect();
            compare(dresidual, &exact, &bounds).map_err(|error| format!("dresidual: {error}"))?;
        }
        self.compare_bias(results, &expected.dx, &bounds.dx)?;
        if let Some([of_y, of_gradient]) = results.magnitudes {
            let gradient = results.dresidual.as_ref().unwrap_or(dx);
            for (told, values) in [(of_y, &results.y), (of_gradient, gradient)] {
                let exact = values.iter().fold(0.0f64, |most, value| most.max(value.abs()));
                if told != exact {
                    return Err(format!("a largest magnitude of {exact} became {told}").into());
                }
            }
        }
        Ok(())
    }

    /// The sums of the residual's gradients, which dx with its `bounds` is before dropout.
    fn compare_bias(&self, results: &Results, dx: &[f64], bounds: &[f64]) -> Result<(), Failed> {
        let Some(dbias) = &results.dbias else {
            return match self.has_residual_bias() {
                true => Err("the residual's bias has no gradient".into()),
                false => Ok(()),
            };
        };
        let (narrow, factors) = (Storage::F32.unit_roundoff(), self.factors());
        let (mut sums, mut off) = (vec![0.0; self.width], vec![0.0; self.width]);
        // Scale, product and one addition for each row, in f32.
        let u = (self.rows + 2) as f64 * narrow;
        for (index, ((dx, bound), factor)) in dx.iter().zip(bounds).zip(factors).enumerate() {
            sums[index % self.width] += dx * factor;
            off[index % self.width] += (bound + (dx.abs() + bound) * u) * factor;
        }
        for (off, sum) in off.iter_mut().zip(&sums) {
            *off +=
                (sum.abs() + *off) * self.parameter.unit_roundoff() + self.parameter.underflow();
        }
        compare(dbias, &sums, &off).map_err(|error| format!("dbias: {error}"))?;
        Ok(())
    }
}
