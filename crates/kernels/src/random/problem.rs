use crate::KernelError;
use cubecl::ir::{ElemType, FloatKind};

pub(super) const OP: &str = "random";

/// How numbers are distributed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RandomDistribution {
    /// 1 with this probability, which is above 0 and below 1, and else 0.
    Bernoulli(f64),
    /// From `low` to below `high`.
    Uniform {
        /// The least number.
        low: f64,
        /// No number reaches it, but for rounding.
        high: f64,
    },
    /// With a mean and a standard deviation.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        deviation: f64,
    },
}

/// Which numbers are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomProblem {
    /// How many.
    pub elements: usize,
    /// Their type.
    pub dtype: ElemType,
    /// How they are distributed.
    pub distribution: RandomDistribution,
    /// Tells tensors under one key apart.
    pub number: u32,
}

impl RandomProblem {
    /// Checks what the kernel takes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16, for elements beyond 32-bit
    /// indices, for probabilities of 0 and 1, and for numbers that are not finite.
    pub fn validate(&self) -> Result<(), KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 20;
        let unsupported = |reason| Err(KernelError::Unsupported { op: OP, reason });
        if self.bits().is_none() {
            let reason = format!("dtype {:?}; the kernel takes f32, f16 and bf16", self.dtype);
            return unsupported(reason);
        }
        if u32::try_from(self.elements.saturating_add(STEP)).is_err() {
            return unsupported(format!("{} elements", self.elements));
        }
        let is_sound = match self.distribution {
            RandomDistribution::Bernoulli(p) => p > 0.0 && p < 1.0,
            RandomDistribution::Uniform { low, high } => low.is_finite() && high.is_finite(),
            RandomDistribution::Normal { mean, deviation } => {
                mean.is_finite() && deviation.is_finite()
            }
        };
        if is_sound { Ok(()) } else { unsupported(format!("{:?}", self.distribution)) }
    }

    /// Bits of a number just below 1.
    pub(super) fn bits(&self) -> Option<u32> {
        match self.dtype {
            ElemType::Float(FloatKind::F32) => Some(24),
            ElemType::Float(FloatKind::F16) => Some(11),
            ElemType::Float(FloatKind::BF16) => Some(8),
            _ => None,
        }
    }
}

/// What has to be below it to be a 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threshold {
    /// Half a word: that is, a probability of 16 bits.
    OfHalf(u32),
    OfWord(u32),
}

/// A half of a word tells probabilities apart that are neither near 0 nor near 1.
pub(crate) fn threshold(probability: f64) -> Threshold {
    /// The rarer outcome is off by at most 2^-17 of 2^-6, which is 1/2048 of it.
    const RAREST_OF_HALVES: f64 = 1.0 / 64.0;
    // The casts stop at the largest.
    match probability.min(1.0 - probability) >= RAREST_OF_HALVES {
        true => Threshold::OfHalf((probability * 2f64.powi(16)).round() as u32),
        false => Threshold::OfWord((probability * 2f64.powi(32)).round() as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_outcomes_take_a_whole_word() {
        assert_eq!(threshold(0.5), Threshold::OfHalf(1 << 15));
        assert_eq!(threshold(1.0 / 64.0), Threshold::OfHalf(1 << 10));
        for rare in [2f64.powi(-10), 1.0 - 2f64.powi(-10)] {
            let of_word = (rare * 2f64.powi(32)) as u32;
            assert_eq!(threshold(rare), Threshold::OfWord(of_word));
        }
    }

    #[test]
    fn what_the_kernel_does_not_draw_is_declined() {
        let sound = RandomProblem {
            elements: 5,
            dtype: ElemType::Float(FloatKind::BF16),
            distribution: RandomDistribution::Bernoulli(0.5),
            number: 1,
        };
        assert!(sound.validate().is_ok());
        let with = |distribution| RandomProblem { distribution, ..sound };
        for declined in [
            RandomProblem { elements: 1 << 32, ..sound },
            RandomProblem { dtype: ElemType::Float(FloatKind::F64), ..sound },
            with(RandomDistribution::Bernoulli(0.0)),
            with(RandomDistribution::Bernoulli(1.0)),
            with(RandomDistribution::Bernoulli(f64::NAN)),
            with(RandomDistribution::Uniform { low: 0.0, high: f64::INFINITY }),
            with(RandomDistribution::Normal { mean: f64::NAN, deviation: 1.0 }),
        ] {
            let refused = declined.validate();
            assert!(matches!(refused, Err(KernelError::Unsupported { .. })), "{declined:?}");
        }
    }
}
