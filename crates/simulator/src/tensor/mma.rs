//! Shapes of products, and how fragments lie in registers (PTX ISA, "Matrix Fragments for mma.m16n8k16" and its
//! neighbours).

use super::Element;
use crate::ptx::Ty;

/// A product of a warp: 16 rows, 8 columns, 32 bytes of k, sums in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MmaShape {
    pub(crate) a: Element,
    pub(crate) b: Element,
}

/// A product of a warpgroup: 64 rows, `n` columns, 32 bytes of k, sums in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WgmmaShape {
    pub(crate) n: usize,
    pub(crate) a: Element,
    pub(crate) b: Element,
}

/// The number behind a letter.
fn after(text: &str, letter: char) -> Option<(usize, &str)> {
    let rest = text.strip_prefix(letter)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((rest[..end].parse().ok()?, &rest[end..]))
}

/// m, n and k of `m16n8k16`.
fn sizes(shape: &str) -> Option<[usize; 3]> {
    let (m, rest) = after(shape, 'm')?;
    let (n, rest) = after(rest, 'n')?;
    let (k, rest) = after(rest, 'k')?;
    rest.is_empty().then_some([m, n, k])
}

/// The operands' types, if k is 32 bytes of them.
fn elements(k: usize, a: &str, b: &str) -> Option<[Element; 2]> {
    let [a, b] = [Element::of(Ty::named(a)?)?, Element::of(Ty::named(b)?)?];
    (k == a.in_bytes(32) && k == b.in_bytes(32)).then_some([a, b])
}

impl MmaShape {
    /// `m16n8k16` and `f32.bf16.bf16.f32`.
    pub(crate) fn named(shape: &str, types: &[&str]) -> Option<Self> {
        let ([16, 8, k], ["f32", a, b, "f32"]) = (sizes(shape)?, types) else { return None };
        let [a, b] = elements(k, a, b)?;
        Some(Self { a, b })
    }

    /// Registers of d, a, b and c.
    pub(crate) fn registers(self) -> [usize; 4] {
        [4, 4, 2, 4]
    }
}

impl WgmmaShape {
    /// `m64n128k16` and `f32.bf16.bf16`.
    pub(crate) fn named(shape: &str, types: &[&str]) -> Option<Self> {
        let ([64, n, k], ["f32", a, b]) = (sizes(shape)?, types) else { return None };
        let [a, b] = elements(k, a, b)?;
        let is_served = n.is_multiple_of(8) && (8..=256).contains(&n) && a != Element::E2M1;
        is_served.then_some(Self { n, a, b })
    }
}

/// Row and first element of k of register `register` of operand A in a lane; operand B has column
/// `lane / 4` and the k of A's registers `2 * register`.
pub(crate) fn fragment_place(lane: usize, register: usize, element: Element) -> (usize, usize) {
    let in_register = element.in_bytes(4);
    let row = lane / 4 + 8 * (register % 2);
    (row, (lane % 4) * in_register + 4 * in_register * (register / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_from_opcodes() {
        let bf16 = MmaShape { a: Element::BF16, b: Element::BF16 };
        assert_eq!(MmaShape::named("m16n8k16", &["f32", "bf16", "bf16", "f32"]), Some(bf16));
        assert_eq!(MmaShape::named("m16n8k8", &["f32", "bf16", "bf16", "f32"]), None);
        let fp8 = WgmmaShape { n: 192, a: Element::E4M3, b: Element::E5M2 };
        assert_eq!(WgmmaShape::named("m64n192k32", &["f32", "e4m3", "e5m2"]), Some(fp8));
        assert_eq!(WgmmaShape::named("m64n64k64", &["f32", "e2m1", "e2m1"]), None);
        let fp4 = MmaShape { a: Element::E2M1, b: Element::E2M1 };
        assert_eq!(MmaShape::named("m16n8k64", &["f32", "e2m1", "e2m1", "f32"]), Some(fp4));
        assert_eq!(MmaShape::named("m16n8k32", &["f32", "e2m1", "e2m1", "f32"]), None);
        assert_eq!(WgmmaShape::named("m64n300k32", &["f32", "e4m3", "e5m2"]), None);
    }

    #[test]
    fn fragments_lie_as_the_manual_says() {
        // m16n8k16: a4 and a5 of lane 5 are row 1, columns 10 and 11.
        assert_eq!(fragment_place(5, 2, Element::BF16), (1, 10));
        assert_eq!(fragment_place(5, 3, Element::BF16), (9, 10));
        // m16n8k8 of tf32: a2 of lane 6 is row 1, column 6.
        assert_eq!(fragment_place(6, 2, Element::TF32), (1, 6));
        // m16n8k32: a8 of lane 7 is row 1, column 28.
        assert_eq!(fragment_place(7, 2, Element::E4M3), (1, 28));
        // m16n8k64: a16 of lane 7 is row 1, column 56, and a24 is 8 rows below.
        assert_eq!(fragment_place(7, 2, Element::E2M1), (1, 56));
        assert_eq!(fragment_place(7, 3, Element::E2M1), (9, 56));
    }
}
