//! A linear layer with an activation: `z = x W + b`, `y = act(z)`, and its gradients.
//!
//! Backward, with `dy` the gradient of the output: `dz = dy act'(z)`, `dx = dz W^T`,
//! `dW = x^T dz`, `db = sum_rows dz`.
//!
//! | tensor | shape |
//! |---|---|
//! | `x`, `dx` | `[rows, inputs]` |
//! | `W`, `dW` | `[inputs, outputs]` |
//! | `b`, `db` | `[outputs]` |
//! | `z`, `y`, `dy`, `dz` | `[rows, outputs]` |
//!
//! All are contiguous and row-major, as `burn::nn::Linear` has them.

use crate::{
    activation::{Activation, FunctionErrors},
    column_sum::{self, column_sum},
    gelu::output_error,
    matmul::{Layout, MatmulCase, MatmulPrecision, magnitudes, matmul},
    storage::Storage,
};

/// The layer with its input.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// Rows of `x`: tokens, or the batch.
    pub rows: usize,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
    /// The input.
    pub x: &'a [f64],
    /// `W`.
    pub weight: &'a [f64],
    /// `b`, where the layer has one.
    pub bias: Option<&'a [f64]>,
    /// `act`.
    pub activation: Activation,
}

/// What forward computes.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearForward {
    /// What the activation is applied to.
    pub z: Vec<f64>,
    /// The output.
    pub y: Vec<f64>,
}

/// What backward computes, or the bounds of it.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGradients {
    /// Of `z`.
    pub dz: Vec<f64>,
    /// Of `x`.
    pub dx: Vec<f64>,
    /// Of `W`.
    pub dw: Vec<f64>,
    /// Of `b`; it is computed whether the layer has one or not.
    pub db: Vec<f64>,
}

/// What a device computes the layer in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearPrecision {
    /// Of the three products. Its `out` is the type of `y`, `dx`, `dW` and `db`.
    pub product: MatmulPrecision,
    /// The type in which the activation and its derivative read `z`: f32 where the product is still
    /// in registers or is computed again, the storage type where it was stored in between.
    pub z: Storage,
    /// The type in which the products of backward read `dz`.
    pub dz: Storage,
    /// Of the activation.
    pub functions: FunctionErrors,
}

/// `x W + b`.
///
/// # Panics
///
/// When a slice has another length than its shape.
pub fn linear(
    [rows, inputs, outputs]: [usize; 3],
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
) -> Vec<f64> {
    let activation = Activation::Identity;
    Linear { rows, inputs, outputs, x, weight, bias, activation }.forward().y
}

impl Linear<'_> {
    /// The product `x W`.
    pub fn forward_case(&self) -> MatmulCase {
        MatmulCase {
            name: "linear, forward",
            batch: 1,
            m: self.rows,
            n: self.outputs,
            k: self.inputs,
            lhs: Layout::RowMajor,
            rhs: Layout::RowMajor,
        }
    }

    /// The product `dz W^T`.
    pub fn dgrad_case(&self) -> MatmulCase {
        MatmulCase {
            name: "linear, dgrad",
            n: self.inputs,
            k: self.outputs,
            rhs: Layout::ColumnMajor,
            ..self.forward_case()
        }
    }

    /// The product `x^T dz`.
    pub fn wgrad_case(&self) -> MatmulCase {
        MatmulCase {
            name: "linear, wgrad",
            m: self.inputs,
            k: self.rows,
            lhs: Layout::ColumnMajor,
            ..self.forward_case()
        }
    }

    /// `z` and `y`.
    ///
    /// # Panics
    ///
    /// When a slice has another length than its shape.
    pub fn forward(&self) -> LinearForward {
        let mut z = matmul(&self.forward_case(), self.x, self.weight);
        self.add_bias(&mut z, |b| b);
        let y = z.iter().map(|z| self.activation.value(*z)).collect();
        LinearForward { z, y }
    }

    /// The gradients, given `z` and the gradient of `y`.
    ///
    /// # Panics
    ///
    /// When a slice has another length than its shape.
    pub fn backward(&self, z: &[f64], dy: &[f64]) -> LinearGradients {
        assert_eq!(z.len(), self.rows * self.outputs, "z differs in length from its shape");
        assert_eq!(dy.len(), z.len(), "dy and z differ in length");
        let dz: Vec<f64> =
            dy.iter().zip(z).map(|(dy, z)| dy * self.activation.derivative(*z)).collect();
        LinearGradients {
            dx: matmul(&self.dgrad_case(), &dz, self.weight),
            dw: matmul(&self.wgrad_case(), self.x, &dz),
            db: column_sum(&dz, 1, self.rows, self.outputs),
            dz,
        }
    }

    /// How far off `z` and `y` may be.
    ///
    /// # Panics
    ///
    /// When `forward` is another layer's.
    pub fn forward_bounds(
        &self,
        forward: &LinearForward,
        precision: &LinearPrecision,
    ) -> LinearForward {
        let mut magnitudes = magnitudes(&self.forward_case(), self.x, self.weight);
        self.add_bias(&mut magnitudes, f64::abs);
        // The bias is one more term of the sum.
        let terms = self.inputs + 1;
        let product = precision.product.with_out(precision.z);
        let z = product.bounds(&forward.z, &magnitudes, terms);
        let y = forward.z.iter().zip(&z).map(|(value, bound)| {
            let out = precision.product.out;
            self.activation.value_bound(*value, *bound, out, precision.functions)
        });
        LinearForward { y: y.collect(), z }
    }

    /// How far off the gradients may be, `z_bounds` being those of `z`: zero where the device was
    /// given `z` itself.
    ///
    /// What `dz` is off moves `dx`, `dW` and `db` on top of their own errors.
    ///
    /// # Panics
    ///
    /// When the slices or `gradients` are another layer's.
    pub fn backward_bounds(
        &self,
        z: &[f64],
        z_bounds: &[f64],
        dy: &[f64],
        gradients: &LinearGradients,
        precision: &LinearPrecision,
    ) -> LinearGradients {
        let len = self.rows * self.outputs;
        assert!(
            [z, z_bounds, dy, &gradients.dz].iter().all(|slice| slice.len() == len),
            "z, z_bounds, dy and dz have the shape of the output"
        );
        let dz: Vec<f64> = (0..len)
            .map(|i| {
                let activation = self.activation;
                let slope = activation.derivative_bound(z[i], z_bounds[i], precision.functions);
                let moved = dy[i].abs() * slope;
                moved + output_error(gradients.dz[i].abs() + moved, precision.dz)
            })
            .collect();
        // The largest that the device's own dz may be.
        let largest: Vec<f64> = gradients.dz.iter().zip(&dz).map(|(v, b)| v.abs() + b).collect();
        let bounds = |values: &[f64], moved: Vec<f64>, magnitudes: &[f64], k| {
            let own = |((value, moved), magnitude): ((&f64, &f64), &f64)| {
                moved + precision.product.bound(value.abs() + moved, *magnitude, k)
            };
            values.iter().zip(&moved).zip(magnitudes).map(own).collect::<Vec<f64>>()
        };
        let (dgrad, wgrad) = (self.dgrad_case(), self.wgrad_case());
        let moved_db = column_sum(&dz, 1, self.rows, self.outputs);
        let largest_db = column_sum(&largest, 1, self.rows, self.outputs);
        let db = (0..self.outputs).map(|j| {
            let value = gradients.db[j].abs() + moved_db[j];
            let out = precision.product.out;
            moved_db[j] + column_sum::bound(value, largest_db[j], self.rows, out)
        });
        LinearGradients {
            dx: bounds(
                &gradients.dx,
                magnitudes(&dgrad, &dz, self.weight),
                &magnitudes(&dgrad, &largest, self.weight),
                self.outputs,
            ),
            dw: bounds(
                &gradients.dw,
                magnitudes(&wgrad, self.x, &dz),
                &magnitudes(&wgrad, self.x, &largest),
                self.rows,
            ),
            db: db.collect(),
            dz,
        }
    }

    fn add_bias(&self, z: &mut [f64], map: fn(f64) -> f64) {
        let Some(bias) = self.bias else { return };
        assert_eq!(bias.len(), self.outputs, "the bias differs in length from its shape");
        if bias.is_empty() {
            return;
        }
        for row in z.chunks_exact_mut(self.outputs) {
            row.iter_mut().zip(bias).for_each(|(z, b)| *z += map(*b));
        }
    }
}

#[cfg(test)]
mod tests;
