//! Rounding up or down by chance, so that the mean is right.
//!
//! A parameter in bf16 has 8 bits: an update below a 512th of it is lost to rounding to the nearest
//! value, every time. Rounded up as often as the update is large against the distance of values,
//! it moves the parameter by as much in the mean.
//!
//! Source: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551,
//! section 3; for bf16, Zamirai et al., arXiv:2010.06192.

use blackburn_backend::steps::Draw;
use burn::tensor::{Device, Distribution, FloatDType, Int, IntDType, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Seeds for the kernel, drawn with the device's own seed: one for all parameters of a step, which are
/// then told apart by a number.
///
/// Clones draw from one.
#[derive(Clone, Debug, Default)]
pub(super) struct Draws(Arc<Mutex<Option<Drawn>>>);

#[derive(Debug)]
struct Drawn {
    time: usize,
    seed: Tensor<1, Int>,
    next: u32,
}

impl Draws {
    /// A draw that there was not before, on `device`.
    pub(super) fn next(&self, time: usize, device: &Device) -> Draw {
        let mut drawn = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let current = drawn.take().filter(|drawn| {
            drawn.time == time && drawn.next < u32::MAX && drawn.seed.device() == *device
        });
        let Drawn { time, seed, next } = current.unwrap_or_else(|| {
            let any = Distribution::Uniform(0.0, f64::from(i32::MAX));
            let seed = Tensor::<1, Int>::random([2], any, device).cast(IntDType::I32);
            Drawn { time, seed, next: 0 }
        });
        *drawn = Some(Drawn { time, seed: seed.clone(), next: next + 1 });
        Draw { seed, number: next }
    }
}

/// `tensor`, in f32, as a parameter is `stored`: rounded to the nearest value, or in 16 bits by chance.
pub(super) fn stored_as<const D: usize>(
    tensor: Tensor<D>,
    stored: FloatDType,
    by_chance: bool,
) -> Tensor<D> {
    match stored {
        FloatDType::F32 => tensor,
        _ if by_chance => round_stochastically(tensor, stored),
        _ => tensor.cast(stored),
    }
}

/// `tensor`, in f32, in a type of 16 bits: each element one of the two values around it, the nearer
/// the likelier, drawn with the device's seed. What the type has is kept.
fn round_stochastically<const D: usize>(tensor: Tensor<D>, stored: FloatDType) -> Tensor<D> {
    // Bits after the leading one, and the least normal number.
    let (fraction_bits, least): (i32, f64) = match stored {
        FloatDType::F16 => (10, 2f64.powi(-14)),
        _ => (7, 2f64.powi(-126)),
    };
    let exponent = tensor.clone().abs().clamp_min(least).log().div_scalar(2f64.ln()).floor();
    let distance = exponent.sub_scalar(f64::from(fraction_bits)).mul_scalar(2f64.ln()).exp();
    let near = tensor.clone().cast(stored).cast(FloatDType::F32);
    let rest = tensor.clone() - near.clone();
    // On the other side of the element. Exponents and powers are off by a rounding; the cast is not.
    let far = near.clone() + rest.clone().sign() * distance;
    let far = far.cast(stored).cast(FloatDType::F32);
    // Not a number, and below no chance, where nothing is left over.
    let share = rest / (far.clone() - near.clone());
    let chance = tensor.random_like(Distribution::Uniform(0.0, 1.0));
    near.mask_where(chance.lower(share), far).cast(stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: usize = 20_000;

    /// Rounds `COUNT` copies of `value`.
    fn rounded(value: f32, stored: FloatDType) -> Vec<f32> {
        let device = Device::flex();
        let all = Tensor::<1>::full([COUNT], value, &device);
        let rounded = round_stochastically(all, stored);
        assert_eq!(rounded.dtype(), stored.into());
        rounded.cast(FloatDType::F32).into_data().try_to_vec().expect("f32")
    }

    #[test]
    fn the_mean_is_the_value_and_only_its_neighbours_occur() {
        for (stored, distance) in
            [(FloatDType::BF16, 2f32.powi(-7)), (FloatDType::F16, 2f32.powi(-10))]
        {
            for share in [0.1, 0.5, 0.9] {
                let low = 1.25;
                let value = low + share * distance;
                let all = rounded(value, stored);
                let high = low + distance;
                assert!(all.iter().all(|x| *x == low || *x == high), "{stored:?} {share}");
                let ups = all.iter().filter(|x| **x == high).count() as f32 / COUNT as f32;
                // Five deviations of a binomial share.
                let bound = 5.0 * (share * (1.0 - share) / COUNT as f32).sqrt();
                assert!((ups - share).abs() < bound, "{stored:?}: {ups}, expected {share}");
            }
        }
    }

    #[test]
    fn no_draw_occurs_twice() {
        let device = Device::flex();
        let draws = Draws::default();
        let all: Vec<(Vec<i32>, u32)> = [1, 1, 2, 2, 1]
            .into_iter()
            .map(|time| {
                let Draw { seed, number } = draws.clone().next(time, &device);
                (seed.into_data().try_to_vec().expect("i32"), number)
            })
            .collect();
        assert_eq!(all[0].0, all[1].0, "parameters of one step share a seed");
        for (i, draw) in all.iter().enumerate() {
            assert!(!all[..i].contains(draw), "{all:?}");
        }
    }

    #[test]
    fn what_the_type_has_is_kept() {
        for stored in [FloatDType::BF16, FloatDType::F16] {
            for value in [0.0, 1.0, -2.0, -3.5, 0.75] {
                assert!(rounded(value, stored).iter().all(|x| *x == value), "{stored:?} {value}");
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_so() {
        assert!(rounded(f32::NAN, FloatDType::BF16).iter().all(|x| x.is_nan()));
        assert!(rounded(f32::INFINITY, FloatDType::BF16).iter().all(|x| *x == f32::INFINITY));
    }
}
