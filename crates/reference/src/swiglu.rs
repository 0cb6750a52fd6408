//! `SwiGLU`: a gate's `SiLU` times another tensor.

use crate::{
    activation::{Activation, FunctionErrors},
    gelu::output_error,
    storage::Storage,
};

const SILU: Activation = Activation::Silu;

/// silu(gate) up.
pub fn swiglu(gate: f64, up: f64) -> f64 {
    SILU.value(gate) * up
}

/// The gradients of gate and up.
pub fn swiglu_gradients(gate: f64, up: f64, dy: f64) -> [f64; 2] {
    [dy * up * SILU.derivative(gate), dy * SILU.value(gate)]
}

/// How far off silu(gate) may be in f32. No error of erf or tanh is part of it.
fn silu_error(gate: f64) -> f64 {
    SILU.value_bound(gate, 0.0, Storage::F32, FunctionErrors::CUDA)
}

/// How far off y may be when it is computed in f32 and stored in `storage`.
pub fn forward_bound(gate: f64, up: f64, storage: Storage) -> f64 {
    up.abs() * silu_error(gate) + output_error(swiglu(gate, up), storage)
}

/// How far off the gradients of gate and up may be.
pub fn backward_bounds(gate: f64, up: f64, dy: f64, storage: Storage) -> [f64; 2] {
    let [dgate, dup] = swiglu_gradients(gate, up, dy);
    let slope = SILU.derivative_bound(gate, 0.0, FunctionErrors::CUDA);
    // The product of dy and up is rounded before it meets the slope.
    let product = Storage::F32.unit_roundoff() * dgate.abs();
    [
        (dy * up).abs() * slope + product + output_error(dgate, storage),
        dy.abs() * silu_error(gate) + output_error(dup, storage),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradcheck::check_derivative;

    #[test]
    fn the_gradients_are_the_function_s_own() {
        for i in -60..=60 {
            let (x, other) = (f64::from(i) / 10.0, 0.7);
            check_derivative(|g| swiglu(g, other), |g| swiglu_gradients(g, other, 1.0)[0], x)
                .unwrap();
            check_derivative(|u| swiglu(other, u), |u| swiglu_gradients(other, u, 1.0)[1], x)
                .unwrap();
        }
    }

    #[test]
    fn known_values_come_out() {
        // sigmoid(1) = 0.731058578630005
        assert!((swiglu(1.0, 2.0) - 2.0 * 0.731_058_578_630_005).abs() < 1e-14);
        assert_eq!(swiglu(0.0, 3.0), 0.0);
        assert_eq!(swiglu_gradients(0.0, 3.0, 2.0), [3.0, 0.0]);
    }

    #[test]
    fn bounds_are_tight_enough_to_tell_a_hard_sigmoid_apart() {
        let hard = 1.0 * (1.0f64 / 6.0 + 0.5);
        assert!((hard - swiglu(1.0, 1.0)).abs() > 1000.0 * forward_bound(1.0, 1.0, Storage::F32));
    }
}
