//! What a block-scaled product of `tcgen05` multiplies (PTX ISA, "Instruction descriptor" of the kinds `mxf8f6f4`, `mxf4`
//! and `mxf4nvf4`; CUTLASS `InstrDescriptorBlockScaled`).

use super::{BlockScaling, Element, ScaleType, ScaledKind, TensorKind, TensorShape};
use crate::error::{FaultKind, Outcome, Trouble};

/// A product, its scales, and from which byte of the words in tensor memory on they scale rows of A and columns of B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaledTensorShape {
    pub(crate) shape: TensorShape,
    pub(crate) scaling: BlockScaling,
    pub(crate) bytes: [usize; 2],
}

impl ScaledTensorShape {
    /// From the 32 bits of an instruction descriptor, of so many blocks: one, or a pair. In the place of the type of the sums it has the byte of B's
    /// scales, in that of shifts the byte of A's, and at bit 23 the type of the scales.
    pub(crate) fn decode(bits: u32, kind: ScaledKind, blocks: usize) -> Outcome<Self> {
        const OWN: u32 = 3 << 4 | 1 << 23 | 3 << 29;
        let fail = |fault, reason: &str| {
            Err(Trouble::new(fault, format!("instruction descriptor {bits:#x}: {reason}")))
        };
        let ty = if bits >> 23 & 1 == 1 { ScaleType::Ue8m0 } else { ScaleType::Ue4m3 };
        let Some(scaling) = kind.scaled_by(ty) else {
            return fail(FaultKind::Misuse, "its scales have another type than ue8m0");
        };
        let elements = if kind.takes(Element::E2M1) { TensorKind::F4 } else { TensorKind::F8f6f4 };
        let shape = TensorShape::decode(bits & !OWN | 1 << 4, elements, blocks)?;
        if shape.m != 128 * blocks {
            return fail(FaultKind::Misuse, "scaled products have 128 rows of each block");
        }
        let bytes = [29, 4].map(|at| (bits >> at & 3) as usize);
        if bytes.iter().any(|byte| !kind.begins_at(*byte)) {
            let reason =
                format!("scales begin at bytes {bytes:?}, in groups of {}", scaling.scales);
            return fail(FaultKind::Misuse, &reason);
        }
        Ok(Self { shape, scaling, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// e4m3 by e5m2, 128 by 128, scales in ue8m0.
    const FP8: u32 = 1 << 10 | 16 << 17 | 1 << 23 | 8 << 24;
    /// e2m1, 128 by 128, scales in ue4m3.
    const FP4: u32 = 1 << 7 | 1 << 10 | 16 << 17 | 1 << 27;

    fn decode(bits: u32, kind: &str, vector: &str) -> Outcome<ScaledTensorShape> {
        ScaledTensorShape::decode(bits, ScaledKind::named(kind, Some(vector)).unwrap(), 1)
    }

    #[test]
    fn a_descriptor_selects_bytes_of_scales() {
        let scaled = decode(FP8 | 2 << 4 | 3 << 29, "kind::mxf8f6f4", "scale_vec::1X").unwrap();
        assert_eq!(scaled.bytes, [3, 2]);
        assert_eq!((scaled.shape.m, scaled.shape.n), (128, 128));
        assert_eq!((scaled.shape.a, scaled.shape.b), (Element::E4M3, Element::E5M2));
        let scaled = decode(FP4, "kind::mxf4nvf4", "scale_vec::4X").unwrap();
        assert_eq!((scaled.shape.m, scaled.shape.n, scaled.shape.a), (128, 128, Element::E2M1));
        assert_eq!(scaled.scaling, BlockScaling { scales: 4, ty: ScaleType::Ue4m3 });
        let scaled = decode(FP4 | 1 << 23 | 2 << 4, "kind::mxf4", "scale_vec::2X").unwrap();
        assert_eq!((scaled.bytes, scaled.scaling.ty), ([0, 2], ScaleType::Ue8m0));
    }

    #[test]
    fn a_pair_has_twice_the_rows() {
        let kind = ScaledKind::named("kind::mxf8f6f4", None).unwrap();
        let decode = |bits, blocks| ScaledTensorShape::decode(bits, kind, blocks);
        let pair = FP8 ^ 24 << 24;
        assert_eq!(decode(pair, 2).map(|scaled| scaled.shape.m).unwrap(), 256);
        assert_eq!(decode(pair, 1).unwrap_err().kind, FaultKind::Misuse);
        assert_eq!(decode(FP8, 2).unwrap_err().kind, FaultKind::Unsupported);
    }

    #[test]
    fn what_no_scaled_product_has_is_refused() {
        for (kind, vector, bits) in [
            ("kind::mxf8f6f4", "scale_vec::1X", FP8 ^ 1 << 23),
            ("kind::mxf8f6f4", "scale_vec::1X", FP8 ^ 12 << 24),
            ("kind::mxf8f6f4", "scale_vec::1X", FP8 | 2 << 7),
            ("kind::mxf8f6f4", "scale_vec::1X", FP8 | 1 << 6),
            ("kind::mxf4nvf4", "scale_vec::4X", FP4 | 1 << 4),
            ("kind::mxf4nvf4", "scale_vec::4X", FP4 | 2 << 29),
            ("kind::mxf4nvf4", "scale_vec::4X", FP4 ^ 1 << 7),
            ("kind::mxf4nvf4", "scale_vec::4X", FP4 | 1 << 12),
            ("kind::mxf4nvf4", "scale_vec::4X", FP4 | 1 << 16),
            ("kind::mxf4", "scale_vec::2X", FP4),
            ("kind::mxf4", "scale_vec::2X", FP4 | 1 << 23 | 1 << 29),
        ] {
            let kind = decode(bits, kind, vector).unwrap_err().kind;
            assert_eq!(kind, FaultKind::Misuse, "{bits:#x}");
        }
        // Products of 96 elements of k.
        let kind = decode(FP4 | 1 << 31, "kind::mxf4nvf4", "scale_vec::4X").unwrap_err().kind;
        assert_eq!(kind, FaultKind::Unsupported);
    }
}
