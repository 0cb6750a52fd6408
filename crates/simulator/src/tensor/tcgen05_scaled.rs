//! What a block-scaled product of `tcgen05` multiplies (PTX ISA, "Instruction descriptor" of the kind `mxf8f6f4`;
//! CUTLASS `InstrDescriptorBlockScaled`).

use super::{TensorKind, TensorShape};
use crate::error::{FaultKind, Outcome, Trouble};

/// A product, and which byte of the words in tensor memory scales rows of A and columns of B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaledTensorShape {
    pub(crate) shape: TensorShape,
    pub(crate) bytes: [usize; 2],
}

impl ScaledTensorShape {
    /// From the 32 bits of an instruction descriptor. In the place of the type of the sums it has the byte of B's
    /// scales, in that of shifts the byte of A's, and at bit 23 the type of the scales.
    pub(crate) fn decode(bits: u32) -> Outcome<Self> {
        const OWN: u32 = 3 << 4 | 1 << 23 | 3 << 29;
        let fail = |fault, reason: &str| {
            Err(Trouble::new(fault, format!("instruction descriptor {bits:#x}: {reason}")))
        };
        if bits >> 23 & 1 == 0 {
            return fail(FaultKind::Misuse, "scales of 8 bits of another type than ue8m0");
        }
        let shape = TensorShape::decode(bits & !OWN | 1 << 4, TensorKind::F8f6f4, 1)?;
        if shape.m != 128 {
            return fail(FaultKind::Misuse, "scaled products have 128 rows");
        }
        let bytes = [29, 4].map(|at| (bits >> at & 3) as usize);
        Ok(Self { shape, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Element;

    /// e4m3 by e5m2, 128 by 128, scales in ue8m0.
    const FP8: u32 = 1 << 10 | 16 << 17 | 1 << 23 | 8 << 24;

    #[test]
    fn a_descriptor_selects_bytes_of_scales() {
        let scaled = ScaledTensorShape::decode(FP8 | 2 << 4 | 3 << 29).unwrap();
        assert_eq!(scaled.bytes, [3, 2]);
        assert_eq!((scaled.shape.m, scaled.shape.n), (128, 128));
        assert_eq!((scaled.shape.a, scaled.shape.b), (Element::E4M3, Element::E5M2));
    }

    #[test]
    fn what_no_scaled_product_has_is_refused() {
        let kind = |bits| ScaledTensorShape::decode(bits).unwrap_err().kind;
        for bits in [FP8 ^ 1 << 23, FP8 ^ 12 << 24, FP8 | 2 << 7, FP8 | 1 << 6] {
            assert_eq!(kind(bits), FaultKind::Misuse, "{bits:#x}");
        }
    }
}
