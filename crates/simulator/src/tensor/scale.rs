//! Products whose blocks of k are scaled (PTX ISA, "Block Scaling for mma.sync"): where the scales lie, what they
//! are, and the scaled sums.

use super::Element;
use crate::{
    error::{FaultKind, Outcome, Trouble},
    machine::E4M3,
};

/// Which of the scales a register of some lanes gives for one operand: those from that byte on, of the lanes of every
/// four that `thread` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaleSelector {
    pub(crate) byte: usize,
    /// 0 or 1, a pair of lanes of four, for the left operand; 0 to 3, one of them, for the right one.
    pub(crate) thread: usize,
}

impl ScaleSelector {
    /// The lane that has the scales of a row of the left operand. The second lane of its pair has those of the row
    /// 8 below.
    pub(crate) fn lane_of_row(self, row: usize) -> usize {
        4 * (row % 8) + 2 * self.thread + row / 8
    }

    /// The lane that has the scales of a column of the right operand.
    pub(crate) fn lane_of_column(self, column: usize) -> usize {
        4 * column + self.thread
    }
}

/// What an instruction's kind says of its operands, and how many scales a row or a column of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaledKind {
    element_bits: usize,
    /// 1, 2 or 4, one behind the other along k.
    pub(crate) scales: usize,
}

impl ScaledKind {
    /// `kind::mxf4nvf4` and `scale_vec::4X`, which tells blocks of 16 as `block16` does.
    pub(crate) fn named(kind: &str, vector: Option<&str>) -> Option<Self> {
        let (element_bits, scales) = match (kind, vector) {
            ("kind::mxf8f6f4", None | Some("scale_vec::1X" | "block32")) => (8, 1),
            ("kind::mxf4", None | Some("scale_vec::2X" | "block32"))
            | ("kind::mxf4nvf4", Some("scale_vec::2X" | "block32")) => (4, 2),
            ("kind::mxf4nvf4", Some("scale_vec::4X" | "block16")) => (4, 4),
            _ => return None,
        };
        Some(Self { element_bits, scales })
    }

    /// Whether it multiplies elements of that type.
    pub(crate) fn takes(self, element: Element) -> bool {
        element.bits() == self.element_bits
    }

    /// Whether the scales of an instruction may begin at that byte of a word.
    pub(crate) fn begins_at(self, byte: usize) -> bool {
        byte.is_multiple_of(self.scales) && byte + self.scales <= 4
    }

    /// The scales of that type, if the kind has any.
    pub(crate) fn scaled_by(self, ty: ScaleType) -> Option<BlockScaling> {
        let is_served = ty == ScaleType::Ue8m0 || self.scales == 4;
        is_served.then_some(BlockScaling { scales: self.scales, ty })
    }
}

/// The type of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleType {
    /// A power of two, or NaN.
    Ue8m0,
    /// `e4m3` without its sign, whose bit is zero.
    Ue4m3,
}

impl ScaleType {
    /// The type of that name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "ue8m0" => Some(Self::Ue8m0),
            "ue4m3" => Some(Self::Ue4m3),
            _ => None,
        }
    }

    fn value(self, bits: u8) -> Outcome<f64> {
        match (self, bits) {
            (Self::Ue8m0, u8::MAX) => Ok(f64::NAN),
            (Self::Ue8m0, exponent) => Ok(2.0_f64.powi(i32::from(exponent) - 127)),
            (Self::Ue4m3, 0x80..) => {
                let reason = format!("a scale of type ue4m3 has its sign set: {bits:#x}");
                Err(Trouble::new(FaultKind::Misuse, reason))
            }
            (Self::Ue4m3, bits) => Ok(E4M3.value(u64::from(bits))),
        }
    }
}

/// The scales of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockScaling {
    /// Of a row or a column.
    pub(crate) scales: usize,
    pub(crate) ty: ScaleType,
}

impl BlockScaling {
    /// Appends the scales of a row or a column: those of `word` from that byte on, or NaN where it is not known.
    pub(crate) fn read(
        self,
        word: u32,
        byte: usize,
        is_known: bool,
        into: &mut Vec<f64>,
    ) -> Outcome {
        for byte in byte..byte + self.scales {
            let bits = (word >> (8 * byte)) as u8;
            into.push(if is_known { self.ty.value(bits)? } else { f64::NAN });
        }
        Ok(())
    }
}

/// `sums += a b`, with blocks of k of each row of a and of each column of b scaled: products are added in f64, scaled,
/// and rounded to f32 with the sum. `rows` and `columns` have as many scales each as `k` has blocks; operands are as
/// [`accumulate`](super::accumulate) takes them.
pub(crate) fn accumulate_scaled(
    sums: &mut [f32],
    [a, b]: [&[f32]; 2],
    [rows, columns]: [&[f64]; 2],
    k: usize,
) {
    let n = b.len() / k;
    let blocks = columns.len() / n;
    let depth = k / blocks;
    let rows = rows.chunks_exact(blocks);
    for ((sums, a), row_scales) in sums.chunks_exact_mut(n).zip(a.chunks_exact(k)).zip(rows) {
        let columns = columns.chunks_exact(blocks);
        for (column, (sum, column_scales)) in sums.iter_mut().zip(columns).enumerate() {
            let scales = row_scales.iter().zip(column_scales);
            let parts = a.chunks_exact(depth).zip(b.chunks_exact(depth * n)).zip(scales);
            let dot = |(a, b): (&[f32], &[f32])| -> f64 {
                let terms = a.iter().zip(b[column..].iter().step_by(n));
                terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let added: f64 = parts.map(|(part, (row, column))| row * column * dot(part)).sum();
            *sum = (f64::from(*sum) + added) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_lie_in_the_lanes_that_the_manual_names() {
        let first = ScaleSelector { byte: 0, thread: 0 };
        // Of four lanes the first pair has rows g and g + 8, the second pair those of another product.
        assert_eq!([0, 1, 7, 8, 15].map(|row| first.lane_of_row(row)), [0, 4, 28, 1, 29]);
        let second = ScaleSelector { byte: 3, thread: 1 };
        assert_eq!([0, 8, 15].map(|row| second.lane_of_row(row)), [2, 3, 31]);
        assert_eq!([0, 5, 7].map(|column| first.lane_of_column(column)), [0, 20, 28]);
        assert_eq!(ScaleSelector { byte: 0, thread: 3 }.lane_of_column(7), 31);
    }

    #[test]
    fn scales_are_powers_of_two_or_numbers_without_a_sign() {
        let ue8m0 = |bits| ScaleType::Ue8m0.value(bits).unwrap();
        assert_eq!([0x7f, 0x80, 0x7e, 0].map(ue8m0), [1.0, 2.0, 0.5, 2.0_f64.powi(-127)]);
        assert_eq!(ue8m0(254), 2.0_f64.powi(127));
        assert!(ue8m0(255).is_nan());
        let ue4m3 = |bits| ScaleType::Ue4m3.value(bits).unwrap();
        // 1, 1.5, the largest number, and the smallest normal and subnormal ones.
        let known = [1.0, 1.5, 448.0, 2.0_f64.powi(-6), 2.0_f64.powi(-9), 0.0];
        assert_eq!([0x38, 0x3c, 0x7e, 0x08, 0x01, 0].map(ue4m3), known);
        assert!(ue4m3(0x7f).is_nan());
        assert_eq!(ScaleType::Ue4m3.value(0xb8).unwrap_err().kind, FaultKind::Misuse);
    }

    #[test]
    fn kinds_have_as_many_scales_as_their_names_say() {
        let named = |kind, vector| ScaledKind::named(kind, vector).map(|kind| kind.scales);
        assert_eq!(named("kind::mxf8f6f4", None), Some(1));
        assert_eq!(named("kind::mxf4", Some("block32")), Some(2));
        assert_eq!(named("kind::mxf4nvf4", Some("scale_vec::2X")), Some(2));
        assert_eq!(named("kind::mxf4nvf4", Some("block16")), Some(4));
        for (kind, vector) in [
            ("kind::mxf4nvf4", None),
            ("kind::mxf4", Some("scale_vec::4X")),
            ("kind::mxf8f6f4", Some("scale_vec::2X")),
        ] {
            assert_eq!(named(kind, vector), None, "{kind} {vector:?}");
        }
        let pairs = ScaledKind::named("kind::mxf4", None).unwrap();
        assert_eq!([0, 1, 2, 3].map(|byte| pairs.begins_at(byte)), [true, false, true, false]);
        assert_eq!(pairs.scaled_by(ScaleType::Ue4m3), None);
        assert!(pairs.takes(Element::E2M1) && !pairs.takes(Element::E4M3));
    }

    #[test]
    fn a_word_gives_the_scales_from_a_byte_on() {
        let read = |scales, byte, is_known| {
            let mut into = Vec::new();
            let scaling = BlockScaling { scales, ty: ScaleType::Ue8m0 };
            scaling.read(0x8281_807f, byte, is_known, &mut into).unwrap();
            into
        };
        assert_eq!(read(1, 3, true), [8.0]);
        assert_eq!(read(2, 2, true), [4.0, 8.0]);
        assert_eq!(read(4, 0, true), [1.0, 2.0, 4.0, 8.0]);
        assert!(read(4, 0, false).iter().all(|scale| scale.is_nan()));
    }

    #[test]
    fn sums_are_scaled_by_row_and_column() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]);
        let mut sums = [1.0; 4];
        accumulate_scaled(&mut sums, [&a, &b], [&[1.0, 0.5], &[2.0, 4.0]], 2);
        assert_eq!(sums, [39.0, 89.0, 44.0, 101.0]);
    }

    #[test]
    fn each_block_of_k_has_its_scales() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]);
        let mut sums = [1.0];
        // (5 + 12) 2 10 + (21 + 32) 3 100.
        accumulate_scaled(&mut sums, [&a, &b], [&[2.0, 3.0], &[10.0, 100.0]], 4);
        assert_eq!(sums, [16_241.0]);
    }
}
