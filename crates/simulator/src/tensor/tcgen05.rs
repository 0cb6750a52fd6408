//! What a product of `tcgen05` multiplies (PTX ISA, "tcgen05 Instruction descriptor"; CUTLASS `mma_sm100_desc.hpp`).

use super::Element;
use crate::error::{FaultKind, Outcome, Trouble};

/// The types that an instruction's name allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorKind {
    F16,
    Tf32,
    F8f6f4,
    /// Of products whose blocks are scaled alone.
    F4,
}

/// A product of a block, or of a pair of blocks, of which each has half of the rows and half of the columns: `m` rows,
/// `n` columns, 32 bytes of k, sums in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorShape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) a: Element,
    pub(crate) b: Element,
    pub(crate) negate: [bool; 2],
    /// Whether m and n run along memory.
    pub(crate) transposed: [bool; 2],
}

impl TensorKind {
    /// `kind::f16`, without its `kind::`.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "f16" => Self::F16,
            "tf32" => Self::Tf32,
            "f8f6f4" => Self::F8f6f4,
            _ => return None,
        })
    }

    fn element(self, bits: u32) -> Option<Element> {
        Some(match (self, bits) {
            (Self::F16, 0) => Element::F16,
            (Self::F16, 1) => Element::BF16,
            (Self::Tf32, 2) => Element::TF32,
            (Self::F8f6f4, 0) => Element::E4M3,
            (Self::F8f6f4, 1) => Element::E5M2,
            (Self::F4, 1) => Element::E2M1,
            _ => return None,
        })
    }
}

impl TensorShape {
    /// From the 32 bits of an instruction descriptor, of so many blocks: one, or a pair.
    pub(crate) fn decode(bits: u32, kind: TensorKind, blocks: usize) -> Outcome<Self> {
        let fail = |fault, reason: &str| {
            Err(Trouble::new(fault, format!("instruction descriptor {bits:#x}: {reason}")))
        };
        if bits & 0b111 != 0 || bits >> 30 != 0 {
            return fail(FaultKind::Unsupported, "sparse operands or shifts are not supported");
        }
        if bits & (1 << 3 | 1 << 6 | 1 << 23 | 1 << 29) != 0 {
            return fail(FaultKind::Misuse, "bits that have to be zero are set");
        }
        if bits >> 4 & 3 != 1 {
            return fail(FaultKind::Unsupported, "sums of another type than f32");
        }
        let elements = [7, 10].map(|at| kind.element(bits >> at & 7));
        let [Some(a), Some(b)] = elements else {
            return fail(FaultKind::Misuse, "types that the instruction does not multiply");
        };
        if kind == TensorKind::F16 && a != b {
            return fail(FaultKind::Misuse, "operands of 16 bits of two types");
        }
        let (m, n) = ((bits >> 24 & 0x1f) as usize * 16, (bits >> 17 & 0x3f) as usize * 8);
        // 128 rows have their columns in pairs of eight.
        let step = match (m, blocks) {
            (64, 1) => 8,
            (128, 1) => 16,
            (256, 2) => 32,
            (128, 2) => return fail(FaultKind::Unsupported, "128 rows of a pair of blocks"),
            (_, 1) => {
                return fail(FaultKind::Misuse, &format!("{m} rows; 64 and 128 are possible"));
            }
            _ => {
                let reason = format!("{m} rows of a pair of blocks; 128 and 256 are possible");
                return fail(FaultKind::Misuse, &reason);
            }
        };
        if n == 0 || n > 256 || !n.is_multiple_of(step) {
            let reason =
                format!("{n} columns of {m} rows; multiples of {step} up to 256 are possible");
            return fail(FaultKind::Misuse, &reason);
        }
        let [transposed, negate] =
            [15, 13].map(|at| [bits >> at & 1 == 1, bits >> (at + 1) & 1 == 1]);
        if kind == TensorKind::Tf32 && transposed != [false; 2] {
            return fail(FaultKind::Unsupported, "operands of 32 bits across k");
        }
        if kind == TensorKind::F4 && transposed != [false; 2] {
            return fail(FaultKind::Misuse, "operands of 4 bits across k");
        }
        if a.bits() == 8 && transposed[1] && !(n / blocks).is_multiple_of(16) {
            return fail(
                FaultKind::Unsupported,
                "operands of 8 bits across k in parts of 16 bytes",
            );
        }
        Ok(Self { m, n, a, b, negate, transposed })
    }

    /// The lane of tensor memory that holds a row of a block's sums.
    pub(crate) fn lane(self, row: usize) -> usize {
        if self.m == 64 { row / 16 * 32 + row % 16 } else { row }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// bf16, 128 by 256, sums in f32.
    const BF16: u32 = 0x0840_0490;

    #[test]
    fn a_descriptor_is_read_field_by_field() {
        let shape = TensorShape::decode(BF16 | 1 << 14 | 1 << 15, TensorKind::F16, 1).unwrap();
        let expected = TensorShape {
            m: 128,
            n: 256,
            a: Element::BF16,
            b: Element::BF16,
            negate: [false, true],
            transposed: [true, false],
        };
        assert_eq!(shape, expected);
    }

    #[test]
    fn what_no_product_has_is_refused() {
        let kind = |bits, kind| TensorShape::decode(bits, kind, 1).unwrap_err().kind;
        for bits in [BF16 | 1 << 6, BF16 ^ 1 << 7, BF16 | 2 << 10, BF16 | 1 << 17, BF16 | 1 << 24] {
            assert_eq!(kind(bits, TensorKind::F16), FaultKind::Misuse, "{bits:#x}");
        }
        assert_eq!(kind(BF16, TensorKind::Tf32), FaultKind::Misuse);
        assert_eq!(kind(BF16 | 1 << 2, TensorKind::F16), FaultKind::Unsupported);
        assert_eq!(kind(BF16 ^ 1 << 4, TensorKind::F16), FaultKind::Unsupported);
    }

    #[test]
    fn a_pair_of_blocks_has_twice_the_rows() {
        const PAIR: u32 = BF16 ^ 24 << 24;
        let decode = |bits, blocks| TensorShape::decode(bits, TensorKind::F16, blocks);
        assert_eq!(decode(PAIR, 2).map(|shape| (shape.m, shape.n)).unwrap(), (256, 256));
        let kind = |bits, blocks| decode(bits, blocks).unwrap_err().kind;
        assert_eq!(kind(PAIR, 1), FaultKind::Misuse);
        // Columns of a pair come 32 at a time.
        assert_eq!(kind(PAIR ^ 2 << 17, 2), FaultKind::Misuse);
        assert_eq!(kind(PAIR ^ 20 << 24, 2), FaultKind::Misuse);
        assert_eq!(kind(BF16, 2), FaultKind::Unsupported);
    }

    #[test]
    fn sixty_four_rows_lie_in_halves_of_the_warps_lanes() {
        let shape = TensorShape::decode(BF16 ^ 12 << 24, TensorKind::F16, 1).unwrap();
        assert_eq!(shape.m, 64);
        assert_eq!([0, 15, 16, 63].map(|row| shape.lane(row)), [0, 15, 32, 111]);
    }
}
