use super::Rounding;
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

/// What shares a scale, which follows from its own largest magnitude.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scaling {
    /// A tensor.
    #[default]
    Tensor,
    /// Each 32 elements along what a product sums over: MXFP8. Scales are powers of two. Blackwell's tensor cores
    /// multiply by them; elsewhere operands become 16 bits again, which is slower than 16 bits alone and for tests.
    Blocks,
}

/// How a linear layer is computed in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Recipe {
    /// The format of activations and weights.
    pub forward: Format,
    /// The format of the output's gradient.
    pub backward: Format,
    /// Powers of two that scales are smaller by than they could be.
    pub margin: u32,
    /// Which sums are promoted. Those of products with scales of blocks never need it.
    pub promotion: Promotion,
    /// What shares a scale.
    #[serde(default)]
    pub scaling: Scaling,
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
            scaling: Scaling::Tensor,
        }
    }

    /// E4M3 for gradients too: one bit of mantissa more for those whose range fits.
    pub const fn e4m3() -> Self {
        Self { backward: Format::E4m3, ..Self::hybrid() }
    }

    /// MXFP8: E4M3 for all, with scales of blocks. The scale of a block is rounded up, as in Mishra et al., "Recipes for
    /// Pre-training LLMs with MXFP8" (2025), so that no number saturates.
    pub const fn mxfp8() -> Self {
        Self { scaling: Scaling::Blocks, promotion: Promotion::Never, ..Self::e4m3() }
    }

    /// Leaves `margin` powers of two between the largest magnitude and the format's largest number;
    /// at most 16, and with scales of blocks none.
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
        assert!(
            self.margin == 0 || self.scaling == Scaling::Tensor,
            "{op}: argument `recipe`: expected no margin with scales of blocks, got {}",
            self.margin
        );
    }

    /// How activations and weights are rounded.
    pub(crate) fn forward_rounding(&self) -> Rounding {
        self.rounding(self.forward)
    }

    /// How the output's gradient is rounded.
    pub(crate) fn backward_rounding(&self) -> Rounding {
        self.rounding(self.backward)
    }

    fn rounding(&self, format: Format) -> Rounding {
        Rounding { format, margin: self.margin, scaling: self.scaling }
    }
}

impl Default for Recipe {
    fn default() -> Self {
        Self::hybrid()
    }
}
