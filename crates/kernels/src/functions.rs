//! Functions of single numbers, by the device's library or by fewer instructions.

#[cfg(feature = "cuda")]
use crate::ptx::{exp2_fast, math::approximate_reciprocal};
use crate::{DeviceProfile, buffer::F32};
use cubecl::{client::Client, ir::ElemType, prelude::*};

/// How a kernel of elements computes its functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Functions {
    /// By the device's library, exact to a few units in the last place of f32.
    Library,
    /// By [`exponential_by`] and [`reciprocal_by`], which are NVIDIA's instructions if `hardware`.
    Approximate { hardware: bool },
}

impl Functions {
    /// The library's for f32. Of CUDA's, an erf takes some 25 instructions an element, and a division branches:
    /// elements of 16 bits would wait longer for them than for memory.
    pub(crate) fn of(dtype: ElemType, client: &Client) -> Self {
        let hardware = DeviceProfile::of(client).compute_capability.is_some();
        if dtype == F32 { Self::Library } else { Self::Approximate { hardware } }
    }
}

/// `e^x`, with `hardware` by NVIDIA's instruction for powers of two. The `exp` of CUDA's library takes
/// eight instructions, with which passes over rows would wait for arithmetic; a product and a power of two
/// take two.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn exponential_by(x: f32, #[comptime] hardware: bool) -> f32 {
    if comptime!(hardware) { exp2_fast(x * comptime!(std::f32::consts::LOG2_E)) } else { x.exp() }
}

/// `e^x`.
#[cfg(not(feature = "cuda"))]
#[cube]
pub(crate) fn exponential_by(x: f32, #[comptime] _hardware: bool) -> f32 {
    x.exp()
}

/// `2^x`, with `hardware` by NVIDIA's instruction.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn power_of_two_by(x: f32, #[comptime] hardware: bool) -> f32 {
    if comptime!(hardware) { exp2_fast(x) } else { (x * comptime!(std::f32::consts::LN_2)).exp() }
}

/// `2^x`.
#[cfg(not(feature = "cuda"))]
#[cube]
pub(crate) fn power_of_two_by(x: f32, #[comptime] _hardware: bool) -> f32 {
    (x * comptime!(std::f32::consts::LN_2)).exp()
}

/// `1 / x`, of x from 1 to infinity. With `hardware` it is off by one unit in the last place at most, and 0 where it is
/// less than the least normal number.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn reciprocal_by(x: f32, #[comptime] hardware: bool) -> f32 {
    if comptime!(hardware) { approximate_reciprocal(x) } else { 1.0f32 / x }
}

/// `1 / x`.
#[cfg(not(feature = "cuda"))]
#[cube]
pub(crate) fn reciprocal_by(x: f32, #[comptime] _hardware: bool) -> f32 {
    1.0f32 / x
}

/// `1 / (1 + e^-x)`.
#[cube]
pub(crate) fn sigmoid<N: Size>(
    x: Vector<f32, N>,
    #[comptime] functions: Functions,
) -> Vector<f32, N> {
    match comptime!(functions) {
        Functions::Library => {
            let one = Vector::new(1.0f32);
            one / (one + (x * Vector::new(-1.0f32)).exp())
        }
        Functions::Approximate { hardware } => {
            let mut all = Vector::<f32, N>::empty();
            #[unroll]
            for lane in 0..N::value().comptime() {
                let power = exponential_by(-x.extract(lane), hardware);
                all.insert(lane, reciprocal_by(1.0f32 + power, hardware));
            }
            all
        }
    }
}

/// The hyperbolic tangent; the approximate one, `2 sigmoid(2 x) - 1`, is off by few units in the last place of 1.
#[cube]
pub(crate) fn hyperbolic_tangent<N: Size>(
    x: Vector<f32, N>,
    #[comptime] functions: Functions,
) -> Vector<f32, N> {
    match comptime!(functions) {
        Functions::Library => x.tanh(),
        Functions::Approximate { .. } => {
            let two = Vector::new(2.0f32);
            two * sigmoid::<N>(two * x, functions) - Vector::new(1.0f32)
        }
    }
}
