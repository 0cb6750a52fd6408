use serde::{Deserialize, Serialize};

/// An 8-bit floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// 4 bits of exponent, 3 of mantissa; numbers up to 448.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa; numbers up to 57344.
    E5m2,
}

/// Which products' sums Hopper's tensor cores hand over to f32 every 128 elements of k. They keep 14
/// bits of mantissa or so by themselves, which shows in long sums. Other devices sum in f32 anyway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Promotion {
    /// None: fastest.
    Never,
    /// Those of the gradients, as Transformer Engine does: dW is summed over all tokens.
    #[default]
    Backward,
    /// All three.
    Always,
}

/// How a linear layer is computed in 8 bits. Each tensor is scaled as a whole, by its own largest
/// magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Recipe {
    /// The format of activations and weights.
    pub forward: Format,
    /// The format of the output's gradient.
    pub backward: Format,
    /// Powers of two that scales are smaller by than they could be.
    pub margin: u32,
    /// Which sums are promoted.
    pub promotion: Promotion,
}

impl Recipe {
    /// From here on a margin takes every number to zero.
    const MOST_MARGIN: u32 = 16;

    /// E4M3 forward, where precision counts, and E5M2 for gradients, whose range is wide. The
    /// default.
    pub const fn hybrid() -> Self {
        Self {
            forward: Format::E4m3,
            backward: Format::E5m2,
            margin: 0,
            promotion: Promotion::Backward,
        }
    }

    /// E4M3 for gradients too: one bit of mantissa more for those whose range fits.
    pub const fn e4m3() -> Self {
        Self { backward: Format::E4m3, ..Self::hybrid() }
    }

    /// Leaves `margin` powers of two between the largest magnitude and the format's largest number;
    /// at most 16.
    #[must_use]
    pub fn with_margin(mut self, margin: u32) -> Self {
        self.margin = margin;
        self
    }

    /// Chooses which sums are promoted.
    #[must_use]
    pub fn with_promotion(mut self, promotion: Promotion) -> Self {
        self.promotion = promotion;
        self
    }

    /// Panics, in the name of `op`, where no number would be left.
    pub(super) fn check(&self, op: &str) {
        assert!(
            self.margin <= Self::MOST_MARGIN,
            "{op}: argument `recipe`: expected a margin of at most {}, got {}",
            Self::MOST_MARGIN,
            self.margin
        );
    }
}

impl Default for Recipe {
    fn default() -> Self {
        Self::hybrid()
    }
}
