//! The gradient of GELU as Burn computes it: that of its tanh form, in sixteen steps, each rounded to storage.
//!
//! A device may compute the gradient of the erf form in one kernel instead, which errs far less. So what it
//! computes is within [`slope_bound`] of the exact slope, the erf form's, either way.

use crate::{gelu::gelu_derivative, storage::Storage};

/// Error of a device's tanh in 16 bits, in units of roundoff: a quotient of two sums of exponentials, each of which
/// is rounded.
const TANH_ROUNDINGS: f64 = 4.0;

/// Relative error of a device's power in f32: three times WGSL's 2^-21 of a logarithm, and its exponential's.
const POWER_ERROR: f64 = 3e-6;

/// A number, and how far off a device's is.
#[derive(Clone, Copy, Debug)]
struct Off {
    value: f64,
    error: f64,
}

/// Operations whose results are rounded to a storage type.
#[derive(Clone, Copy, Debug)]
struct Arithmetic(Storage);

impl Arithmetic {
    fn rounded(self, value: f64, error: f64) -> Off {
        let rounding = self.0.unit_roundoff() * (value.abs() + error) + self.0.underflow();
        Off { value, error: error + rounding }
    }

    fn add(self, a: Off, b: Off) -> Off {
        self.rounded(a.value + b.value, a.error + b.error)
    }

    fn mul(self, a: Off, b: Off) -> Off {
        let error = a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error;
        self.rounded(a.value * b.value, error)
    }

    /// Times a constant, which is rounded, too.
    fn scale(self, a: Off, by: f64) -> Off {
        self.mul(a, Off { value: by, error: self.0.unit_roundoff() * by.abs() })
    }

    /// Plus a constant that every type has.
    fn shift(self, a: Off, by: f64) -> Off {
        self.rounded(a.value + by, a.error)
    }

    fn cube(self, a: Off) -> Off {
        // Two products, or the power by a logarithm in f32.
        let relative = 2.0 * self.0.unit_roundoff() + POWER_ERROR;
        let cube = a.value.powi(3);
        self.rounded(cube, relative * cube.abs() + 3.0 * a.value.powi(2) * a.error)
    }

    fn tanh(self, a: Off, of_tanh: f64) -> Off {
        let tanh = a.value.tanh();
        let own = match self.0 {
            Storage::F32 => of_tanh,
            storage => of_tanh + TANH_ROUNDINGS * storage.unit_roundoff(),
        };
        // tanh'' is at most 0.77.
        let moved = (1.0 - tanh * tanh) * a.error + 0.4 * a.error * a.error;
        self.rounded(tanh, own + moved)
    }
}

/// How far off the slope of GELU at `x`, a number of `storage`, may be from that of its erf form, on a device whose
/// tanh errs by `of_tanh` in f32.
pub fn slope_bound(x: f64, storage: Storage, of_tanh: f64) -> f64 {
    let Off { value, error } = slope(x, storage, of_tanh);
    (value - gelu_derivative(x)).abs() + error
}

/// The slope of the tanh form with Burn's constants.
fn slope(x: f64, storage: Storage, of_tanh: f64) -> Off {
    let of = Arithmetic(storage);
    let x = Off { value: x, error: 0.0 };
    let cube = of.cube(x);
    let inner = of.add(of.scale(cube, 0.035_677_4), of.scale(x, 0.797_885));
    let outer = of.add(of.scale(cube, 0.053_516_1), of.scale(x, 0.398_942));
    let tanh = of.tanh(inner, of_tanh);
    let square = of.mul(tanh, tanh);
    let fall = of.shift(Off { value: -square.value, ..square }, 1.0);
    let product = of.shift(of.mul(outer, fall), 0.5);
    of.add(of.scale(tanh, 0.5), product)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of `storage` from -6 to 6.
    fn arguments(storage: Storage) -> impl Iterator<Item = f64> {
        (-600..=600).map(move |i| storage.round(f64::from(i) / 100.0))
    }

    /// As a device computes it whose functions are exact but for their rounding.
    fn stepwise(x: f64, storage: Storage) -> f64 {
        let r = |value: f64| storage.round(value);
        let scale = |x: f64, by: f64| r(x * r(by));
        let cube = r(x.powi(3));
        let inner = r(scale(cube, 0.035_677_4) + scale(x, 0.797_885));
        let outer = r(scale(cube, 0.053_516_1) + scale(x, 0.398_942));
        let tanh = r(inner.tanh());
        let fall = r(1.0 - r(tanh * tanh));
        r(scale(tanh, 0.5) + r(r(outer * fall) + 0.5))
    }

    #[test]
    fn roundings_are_within_bounds_and_not_far_within() {
        for storage in Storage::ALL {
            let mut largest = 0f64;
            for x in arguments(storage) {
                let off = (stepwise(x, storage) - gelu_derivative(x)).abs();
                largest = largest.max(off / slope_bound(x, storage, 0.0));
            }
            assert!(largest <= 1.0 && largest > 0.1, "{storage:?} {largest}");
        }
    }

    #[test]
    fn the_two_forms_are_a_thousandth_apart() {
        let bounds = arguments(Storage::F32).map(|x| slope_bound(x, Storage::F32, 0.0));
        let largest = bounds.fold(0.0, f64::max);
        assert!(largest > 8e-4 && largest < 1e-3, "{largest}");
    }

    #[test]
    fn the_slope_of_relu_is_out_of_bounds_around_zero_and_none_everywhere_above() {
        for storage in Storage::ALL {
            for x in arguments(storage).filter(|x| x.abs() <= 4.0) {
                let (slope, bound) = (gelu_derivative(x), slope_bound(x, storage, 1e-5));
                assert!(x.abs() > 0.5 || (slope - f64::from(x > 0.0)).abs() > 2.0 * bound);
                assert!(x < 0.0 || slope > 2.0 * bound, "{storage:?} {x} {bound}");
            }
        }
    }
}
