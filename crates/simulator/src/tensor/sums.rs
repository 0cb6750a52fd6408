//! Sums of products, as tensor cores of a generation make them.

use super::Element;
use crate::arithmetic::TensorCores;

/// The instructions that add differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Mma,
    Wgmma,
    Tcgen05,
}

/// Terms that are cut off at one place, and added there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fused {
    /// Terms along k at once.
    terms: usize,
    /// Bits behind the leading bit of the largest term.
    fraction_bits: i32,
    /// Bits of the result's mantissa.
    mantissa_bits: u32,
}

impl TensorCores {
    /// How an instruction of `k` products adds; `None` is one after another.
    fn fused(self, unit: Unit, element: Element, k: usize) -> Option<Fused> {
        let whole = |fraction_bits| Fused { terms: k, fraction_bits, mantissa_bits: 23 };
        match self {
            Self::InTurn => None,
            Self::Ampere => Some(Fused { terms: k.div_ceil(2), ..whole(24) }),
            Self::Hopper if unit == Unit::Wgmma && element.bits() == 8 => {
                Some(Fused { mantissa_bits: 13, ..whole(13) })
            }
            Self::Hopper | Self::Blackwell => Some(whole(25)),
        }
    }
}

/// Operands of a product: `a` in rows of k, `b` in rows of n.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a> {
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) elements: [Element; 2],
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// `sums += a b`, with sums in rows of n.
pub(crate) fn accumulate(cores: TensorCores, unit: Unit, sums: &mut [f32], operands: Operands<'_>) {
    let Operands { a, b, elements, n, k } = operands;
    let fused = cores.fused(unit, elements[0], k);
    let exponents: Vec<i32> = match fused {
        Some(_) => b.iter().map(|b| exponent(*b, elements[1])).collect(),
        None => Vec::new(),
    };
    for (sums, a) in sums.chunks_exact_mut(n).zip(a.chunks_exact(k)) {
        let Some(fused) = fused else {
            for (a, b) in a.iter().zip(b.chunks_exact(n)) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
            continue;
        };
        let parts = b.chunks(n * fused.terms).zip(exponents.chunks(n * fused.terms));
        for (a, (b, exponents)) in a.chunks(fused.terms).zip(parts) {
            fused.row(sums, a, elements[0], b, exponents);
        }
    }
}

/// Below the exponent of every term that is not zero.
const ZERO: i32 = -10_000;

/// The exponent of a number's leading bit; numbers too small to be normal have that of the smallest normal one.
fn exponent(value: f32, element: Element) -> i32 {
    match value.to_bits() >> 23 & 0xff {
        _ if value == 0.0 => ZERO,
        field => (field as i32 - 127).max(element.least_exponent()),
    }
}

/// A power of two that an f64 holds.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent.clamp(-1022, 1023) + 1023) as u64) << 52)
}

impl Fused {
    /// Adds products to a row of sums: an `a`, and a row of `b` with its exponents, for each term.
    fn row(self, sums: &mut [f32], a: &[f32], element: Element, b: &[f32], exponents: &[i32]) {
        let n = sums.len();
        let of_a: Vec<i32> = a.iter().map(|a| exponent(*a, element)).collect();
        let mut largest: Vec<i32> = sums.iter().map(|sum| exponent(*sum, Element::TF32)).collect();
        for (of_a, of_b) in of_a.iter().zip(exponents.chunks_exact(n)) {
            for (largest, of_b) in largest.iter_mut().zip(of_b) {
                *largest = (*largest).max(of_a + of_b);
            }
        }
        // Units of the last bit that is kept.
        let to_units: Vec<f64> =
            largest.iter().map(|largest| power(self.fraction_bits - largest)).collect();
        let mut units: Vec<f64> =
            sums.iter().zip(&to_units).map(|(sum, to)| (f64::from(*sum) * to).trunc()).collect();
        for (a, b) in a.iter().zip(b.chunks_exact(n)) {
            let a = f64::from(*a);
            for ((units, b), to) in units.iter_mut().zip(b).zip(&to_units) {
                *units += (a * f64::from(*b) * to).trunc();
            }
        }
        for ((sum, units), largest) in sums.iter_mut().zip(units).zip(largest) {
            *sum = self.cut_off(units * power(largest - self.fraction_bits));
        }
    }

    /// The f32 towards zero, with the mantissa's last bits cleared where fewer are kept.
    fn cut_off(self, value: f64) -> f32 {
        let mut near = value as f32;
        if f64::from(near).abs() > value.abs() {
            near = f32::from_bits(near.to_bits() - 1);
        }
        if near.is_nan() {
            return f32::from_bits(0x7fff_ffff);
        }
        f32::from_bits(near.to_bits() & (u32::MAX << (23 - self.mantissa_bits)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One sum of products of bf16 ones with `b`.
    fn sum(cores: TensorCores, unit: Unit, start: f32, element: Element, b: &[f32]) -> f32 {
        let mut sums = [start];
        let a = vec![1.0; b.len()];
        let operands = Operands { a: &a, b, elements: [element; 2], n: 1, k: b.len() };
        accumulate(cores, unit, &mut sums, operands);
        sums[0]
    }

    #[test]
    fn products_are_summed() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]);
        use TensorCores::{Ampere, Blackwell, Hopper, InTurn};
        for cores in [InTurn, Ampere, Hopper, Blackwell] {
            let mut sums = [1.0; 4];
            let elements = [Element::BF16; 2];
            let operands = Operands { a: &a, b: &b, elements, n: 2, k: 2 };
            accumulate(cores, Unit::Mma, &mut sums, operands);
            assert_eq!(sums, [20.0, 23.0, 44.0, 51.0], "{cores:?}");
        }
    }

    #[test]
    fn terms_are_cut_off_behind_the_largest() {
        let small = 2.0_f32.powi(-25);
        // Four of them make the last bit of 1: 24 bits behind 1 keep none, 25 bits keep each.
        let terms = [&[1.0][..], &[small; 4], &[0.0; 11]].concat();
        let of = |cores| sum(cores, Unit::Mma, 0.0, Element::BF16, &terms);
        assert_eq!(of(TensorCores::Ampere), 1.0);
        assert_eq!(of(TensorCores::Hopper), 1.0 + f32::EPSILON);
        // One after another, each is lost to rounding.
        assert_eq!(of(TensorCores::InTurn), 1.0);
    }

    #[test]
    fn ampere_adds_each_half_of_k() {
        let small = 2.0_f32.powi(-25);
        // The small ones come first: among themselves nothing is lost.
        let terms = [&[small; 4][..], &[0.0; 4], &[1.0], &[0.0; 7]].concat();
        let of = |cores| sum(cores, Unit::Mma, 0.0, Element::BF16, &terms);
        assert_eq!(of(TensorCores::Ampere), 1.0 + f32::EPSILON);
    }

    #[test]
    fn results_go_towards_zero() {
        let terms = [-1.0, -0.75 * f32::EPSILON];
        let of = |cores| sum(cores, Unit::Mma, 0.0, Element::BF16, &terms);
        assert_eq!(of(TensorCores::Hopper), -1.0);
        assert_eq!(of(TensorCores::InTurn), -1.0 - f32::EPSILON);
    }

    #[test]
    fn hopper_keeps_13_bits_of_products_of_8_bits() {
        let terms = [1.0, 2.0_f32.powi(-13), 2.0_f32.powi(-14)];
        let of = |unit| sum(TensorCores::Hopper, unit, 0.0, Element::E5M2, &terms);
        assert_eq!(of(Unit::Wgmma), 1.0 + 2.0_f32.powi(-13));
        assert_eq!(of(Unit::Mma), 1.0 + 2.0_f32.powi(-13) + 2.0_f32.powi(-14));
    }

    #[test]
    fn a_zero_cuts_nothing_off() {
        let small = 2.0_f32.powi(-60);
        let mut sums = [small];
        let (a, b, elements) = ([0.0], [2.0_f32.powi(100)], [Element::BF16; 2]);
        let operands = Operands { a: &a, b: &b, elements, n: 1, k: 1 };
        accumulate(TensorCores::Hopper, Unit::Mma, &mut sums, operands);
        assert_eq!(sums, [small]);
    }

    #[test]
    fn numbers_too_small_to_be_normal_cut_off_as_the_smallest_normal_one() {
        let (term, start) = (2.0_f32.powi(-20), 2.0_f32.powi(-40));
        let of = |element| sum(TensorCores::Hopper, Unit::Mma, start, element, &[term]);
        assert_eq!(of(Element::BF16), term + start);
        // 25 bits behind 2^-14.
        assert_eq!(of(Element::F16), term);
    }

    #[test]
    fn what_is_not_a_number_stays_none() {
        let of = |terms: &[f32]| sum(TensorCores::Hopper, Unit::Mma, 0.0, Element::BF16, terms);
        assert_eq!(of(&[f32::INFINITY, 1.0]), f32::INFINITY);
        assert!(of(&[f32::INFINITY, f32::NEG_INFINITY]).is_nan());
        assert!(of(&[f32::NAN, 1.0]).is_nan());
    }
}
