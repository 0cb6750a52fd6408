//! Activations behind a linear layer, with their derivatives and bounds.
//!
//! A bound has three parts: how far the argument was off already, times the steepest slope; the
//! error of the device's erf, tanh or exp, carried through the formula; and one rounding to storage.

use crate::{
    gelu::{self, CUDA_ERF_ERROR, PORTABLE_ERF_ERROR},
    storage::Storage,
};

/// sqrt(2 / pi), which the tanh form of GELU has in its argument.
const TANH_SCALE: f64 = 0.797_884_560_802_865_4;

/// Weight of the cubic term in that argument.
const TANH_CUBIC: f64 = 0.044_715;

/// Beyond it e^-x overflows in f32 and a device's `SiLU` of -x is zero.
const EXP_RANGE: f64 = 87.0;

/// Absolute errors of a device's functions in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FunctionErrors {
    /// Of erf.
    pub erf: f64,
    /// Of tanh.
    pub tanh: f64,
}

impl FunctionErrors {
    /// CUDA's `erff` and `tanhf`: at most 2 ulp of a number below 1 (CUDA C++ Programming Guide,
    /// mathematical functions).
    pub const CUDA: Self = Self { erf: CUDA_ERF_ERROR, tanh: 2.0 / (1u64 << 23) as f64 };

    /// Any runtime: the portable erf, and the 1e-5 that WGSL allows tanh.
    pub const PORTABLE: Self = Self { erf: PORTABLE_ERF_ERROR, tanh: 1e-5 };
}

/// What is applied to each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x
    Identity,
    /// max(x, 0)
    Relu,
    /// x sigmoid(x)
    Silu,
    /// x Phi(x), by erf
    Gelu,
    /// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    GeluTanh,
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Identity, Self::Relu, Self::Silu, Self::Gelu, Self::GeluTanh];

    /// The activation of `x`.
    pub fn value(self, x: f64) -> f64 {
        match self {
            Self::Identity => x,
            // `f64::max` would turn NaN into zero.
            Self::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Self::Silu => x * sigmoid(x),
            Self::Gelu => gelu::gelu(x),
            Self::GeluTanh => 0.5 * x * (1.0 + tanh_argument(x).tanh()),
        }
    }

    /// Its derivative at `x`; that of `ReLU` is 0 at 0.
    pub fn derivative(self, x: f64) -> f64 {
        match self {
            Self::Identity => 1.0,
            Self::Relu if x.is_nan() => x,
            Self::Relu => f64::from(x > 0.0),
            Self::Silu => {
                let s = sigmoid(x);
                s + x * s * (1.0 - s)
            }
            Self::Gelu => gelu::gelu_derivative(x),
            Self::GeluTanh => {
                let t = tanh_argument(x).tanh();
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * tanh_argument_slope(x)
            }
        }
    }

    /// The steepest slope: by how much an error of the argument grows at most.
    pub fn steepest_slope(self) -> f64 {
        match self {
            Self::Identity | Self::Relu => 1.0,
            Self::Silu => 1.1,
            // Both near sqrt(2), where the second derivative of the erf form is zero.
            Self::Gelu | Self::GeluTanh => 1.13,
        }
    }

    /// The steepest slope of the derivative. That of `ReLU` has a step instead, see
    /// [`Activation::derivative_bound`].
    pub fn steepest_derivative_slope(self) -> f64 {
        match self {
            Self::Identity | Self::Relu => 0.0,
            Self::Silu => 0.5,
            // Both at 0: 2 phi(0).
            Self::Gelu | Self::GeluTanh => 0.8,
        }
    }

    /// How far off the activation may be when its argument is `z` to within `z_bound`, it is
    /// computed in f32 and stored in `storage`.
    ///
    /// An argument that is NaN or infinite is the device's too, so that its bound does not count. `ReLU` makes
    /// an exact zero of minus infinity; the others make NaN of it, as the product of it and zero.
    pub fn value_bound(
        self,
        z: f64,
        z_bound: f64,
        storage: Storage,
        errors: FunctionErrors,
    ) -> f64 {
        let u = Storage::F32.unit_roundoff();
        let z_bound = if z.is_finite() { z_bound } else { 0.0 };
        let moved = self.steepest_slope() * z_bound;
        let y = self.value(z).abs() + moved;
        // The device's own argument may be that large.
        let x = z.abs() + z_bound;
        let function = match self {
            Self::Identity | Self::Relu => 0.0,
            Self::Silu if x > EXP_RANGE => y.min(x * (-z.abs()).exp()) + 6.0 * u * y,
            Self::Silu => y * sigmoid_relative_error(z),
            Self::Gelu => x * gelu::cdf_error(errors.erf),
            // 1 + tanh is at most 2, and half of it is rounded.
            Self::GeluTanh => 0.5 * x * (tanh_error(errors.tanh) + 2.0 * u),
        };
        moved + function + gelu::output_error(y, storage)
    }

    /// How far off the derivative may be when it is computed in f32 from an argument that is `z` to
    /// within `z_bound`.
    ///
    /// The function's own error is taken at `z`: where the argument is off, it changes by a product
    /// of two small errors. An argument that is NaN or infinite is the device's too.
    pub fn derivative_bound(self, z: f64, z_bound: f64, errors: FunctionErrors) -> f64 {
        let u = Storage::F32.unit_roundoff();
        let z_bound = if z.is_finite() { z_bound } else { 0.0 };
        let function = match self {
            Self::Identity => 0.0,
            // On which side of the step the device was cannot be told.
            Self::Relu => f64::from(z.abs() <= z_bound),
            Self::Silu => {
                let s = sigmoid(z);
                let flushed = if z < -EXP_RANGE { 1.0 } else { sigmoid_relative_error(z) };
                // d/ds (s + z s (1 - s)) is at most 1 + |z|; the difference 1 - s is off by u.
                s * (1.0 + z.abs()) * (flushed + 4.0 * u)
            }
            Self::Gelu => gelu::derivative_error(z, errors.erf),
            Self::GeluTanh => {
                let t = tanh_argument(z).tanh();
                let tanh = tanh_error(errors.tanh);
                let slope = (0.5 * z * tanh_argument_slope(z)).abs();
                // d/dt (1 - t^2) = -2 t. The difference is off by 2 u before it is multiplied, and
                // the slope, five operations, by a relative 7 u.
                let product = slope * (2.0 * t.abs() * tanh + 2.0 * u + 7.0 * u * (1.0 - t * t));
                0.5 * tanh + product + 3.0 * u
            }
        };
        self.steepest_derivative_slope() * z_bound + function + Storage::F32.underflow()
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// 1 / (1 + e): a relative error d of e is one of (1 - s) d of the quotient. The exponent is scaled
/// to base 2 in one rounding; then come an addition and a division, of 2 ulp where it is fast.
fn sigmoid_relative_error(x: f64) -> f64 {
    let u = Storage::F32.unit_roundoff();
    let exp = gelu::exp_relative_error(x) + u * x.abs();
    (1.0 - sigmoid(x)) * exp + 6.0 * u
}

fn tanh_argument(x: f64) -> f64 {
    TANH_SCALE * (x + TANH_CUBIC * x * x * x)
}

fn tanh_argument_slope(x: f64) -> f64 {
    TANH_SCALE * (1.0 + 3.0 * TANH_CUBIC * x * x)
}

/// tanh's own error, and that of its argument: two constants and five operations in f32, a relative
/// 7 u, where t tanh'(t) is at most 0.45.
fn tanh_error(tanh: f64) -> f64 {
    tanh + 0.45 * 7.0 * Storage::F32.unit_roundoff()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradcheck::check_derivative;

    /// From -12 to 12, none of them zero.
    fn arguments() -> impl Iterator<Item = f64> {
        (-1200..1200).map(|i| (f64::from(i) + 0.5) / 100.0)
    }

    /// The derivative as a device computes it, each operation rounded to f32.
    fn f32_derivative(activation: Activation, x: f32) -> f32 {
        match activation {
            Activation::Silu => {
                let s = 1.0 / (1.0 + (-x).exp());
                s + x * s * (1.0 - s)
            }
            Activation::GeluTanh => {
                let (scale, cubic) = (TANH_SCALE as f32, TANH_CUBIC as f32);
                let t = (scale * (x + cubic * x * x * x)).tanh();
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (scale * (1.0 + 3.0 * cubic * x * x))
            }
            _ => activation.derivative(f64::from(x)) as f32,
        }
    }

    /// The value as a device computes it.
    fn f32_value(activation: Activation, x: f32) -> f32 {
        match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                let (scale, cubic) = (TANH_SCALE as f32, TANH_CUBIC as f32);
                0.5 * x * (1.0 + (scale * (x + cubic * x * x * x)).tanh())
            }
            _ => activation.value(f64::from(x)) as f32,
        }
    }

    #[test]
    fn derivatives_are_the_activations_own() {
        for activation in Activation::ALL {
            for x in arguments() {
                let (f, d) = (|x| activation.value(x), |x| activation.derivative(x));
                check_derivative(f, d, x).unwrap_or_else(|e| panic!("{activation:?} {e}"));
            }
        }
    }

    #[test]
    fn known_values_come_out() {
        assert!((Activation::GeluTanh.value(1.0) - 0.841_191_990_608_276).abs() < 1e-12);
        assert!((Activation::Silu.value(1.0) - 0.731_058_578_630_004_9).abs() < 1e-15);
        assert_eq!((Activation::Relu.value(-2.0), Activation::Relu.value(2.0)), (0.0, 2.0));
        assert!(Activation::ALL.iter().all(|a| a.value(f64::NAN).is_nan()));
        assert!(Activation::Relu.derivative(f64::NAN).is_nan());
    }

    #[test]
    fn slopes_are_the_steepest_ones_and_hardly_more() {
        for activation in Activation::ALL {
            let steepest = arguments().map(|x| activation.derivative(x).abs()).fold(0.0, f64::max);
            let slope = activation.steepest_slope();
            assert!(steepest <= slope && slope < 1.01 * steepest, "{activation:?} {steepest}");
            if activation == Activation::Relu {
                continue;
            }
            let bend = |x: f64| {
                (activation.derivative(x + 1e-6) - activation.derivative(x - 1e-6)).abs() / 2e-6
            };
            let steepest = arguments().map(bend).fold(0.0, f64::max);
            let slope = activation.steepest_derivative_slope();
            assert!(steepest <= slope && slope <= 1.01 * steepest, "{activation:?} {steepest}");
        }
    }

    #[test]
    fn arithmetic_in_f32_is_within_bounds_and_not_far_within() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let (mut worst_value, mut worst_derivative) = (0f64, 0f64);
            // Large arguments too, where exponentials leave the range of f32.
            for x in arguments().chain((-120..120).map(|i| f64::from(i) + 0.5)) {
                let x = Storage::F32.round(x);
                let errors = FunctionErrors::CUDA;
                let error = f64::from(f32_value(activation, x as f32)) - activation.value(x);
                let bound = activation.value_bound(x, 0.0, Storage::F32, errors);
                worst_value = worst_value.max(error.abs() / bound);
                let device = f64::from(f32_derivative(activation, x as f32));
                let bound = activation.derivative_bound(x, 0.0, errors);
                let error = (device - activation.derivative(x)).abs();
                worst_derivative = worst_derivative.max(error / bound);
            }
            for worst in [worst_value, worst_derivative] {
                assert!(worst <= 1.0 && worst > 0.05, "{activation:?} {worst}");
            }
        }
    }

    #[test]
    fn an_argument_at_the_edge_of_its_bound_stays_within_the_result_s() {
        let (z_bound, errors) = (1e-3, FunctionErrors::PORTABLE);
        for activation in Activation::ALL {
            for z in arguments() {
                let value_bound = activation.value_bound(z, z_bound, Storage::F32, errors);
                let derivative_bound = activation.derivative_bound(z, z_bound, errors);
                for moved in [z - z_bound, z + z_bound] {
                    let value = activation.value(moved) - activation.value(z);
                    assert!(value.abs() <= value_bound, "{activation:?} {z}");
                    let derivative = activation.derivative(moved) - activation.derivative(z);
                    assert!(derivative.abs() <= derivative_bound, "{activation:?} {z}");
                }
            }
        }
    }

    #[test]
    fn a_finite_result_of_an_infinite_argument_has_a_bound() {
        let errors = FunctionErrors::PORTABLE;
        for z in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for z_bound in [0.0, 1e-3, f64::INFINITY, f64::NAN] {
                for activation in Activation::ALL {
                    let bound = activation.value_bound(z, z_bound, Storage::F32, errors);
                    assert!(!activation.value(z).is_finite() || bound.is_finite());
                    let bound = activation.derivative_bound(z, z_bound, errors);
                    assert!(!activation.derivative(z).is_finite() || bound.is_finite());
                }
            }
        }
        let relu = Activation::Relu;
        let of_relu = |z: f64| relu.value_bound(z, f64::INFINITY, Storage::F32, errors);
        assert_eq!(relu.value(f64::NEG_INFINITY), 0.0);
        assert_eq!(of_relu(f64::NEG_INFINITY), Storage::F32.underflow());
        assert_eq!(relu.derivative(f64::NEG_INFINITY), 0.0);
        assert!(Activation::Gelu.value(f64::NEG_INFINITY).is_nan());
    }

    #[test]
    fn the_two_forms_of_gelu_are_out_of_each_other_s_bounds() {
        let difference = Activation::Gelu.value(2.0) - Activation::GeluTanh.value(2.0);
        for (errors, factor) in [(FunctionErrors::CUDA, 100.0), (FunctionErrors::PORTABLE, 5.0)] {
            for activation in [Activation::Gelu, Activation::GeluTanh] {
                let bound = activation.value_bound(2.0, 0.0, Storage::F32, errors);
                assert!(difference.abs() > factor * bound, "{activation:?} {bound:e}");
            }
        }
    }
}
