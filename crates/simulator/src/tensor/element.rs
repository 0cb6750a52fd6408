//! Elements of operands as f32.

use crate::{
    machine::{E4M3, E5M2, F16, Format},
    ptx::Ty,
};
use std::sync::OnceLock;

/// The type of an operand's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    BF16,
    TF32,
    E2M1,
    E4M3,
    E5M2,
}

/// The values of `e2m1`: a sign, two bits of exponent, one of mantissa, and neither NaN nor infinity.
const E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

fn table(format: Format, bits: u32) -> Vec<f32> {
    (0..1_u64 << bits).map(|pattern| format.value(pattern) as f32).collect()
}

impl Element {
    pub(crate) fn of(ty: Ty) -> Option<Self> {
        Some(match ty {
            Ty::F16 => Self::F16,
            Ty::BF16 => Self::BF16,
            Ty::TF32 => Self::TF32,
            Ty::E2M1 => Self::E2M1,
            Ty::E4M3 => Self::E4M3,
            Ty::E5M2 => Self::E5M2,
            _ => return None,
        })
    }

    /// The exponent of the smallest normal number.
    pub(crate) fn least_exponent(self) -> i32 {
        match self {
            Self::E2M1 => 0,
            Self::E4M3 => -6,
            Self::E5M2 | Self::F16 => -14,
            Self::BF16 | Self::TF32 => -126,
        }
    }

    pub(crate) fn bits(self) -> usize {
        match self {
            Self::E2M1 => 4,
            Self::E4M3 | Self::E5M2 => 8,
            Self::F16 | Self::BF16 => 16,
            Self::TF32 => 32,
        }
    }

    /// Elements in so many bytes.
    pub(crate) fn in_bytes(self, bytes: usize) -> usize {
        8 * bytes / self.bits()
    }

    /// The values of as many elements as `into` has, one after another in `bytes`.
    pub(crate) fn decode(self, bytes: &[u8], into: &mut [f32]) {
        static F16_VALUES: OnceLock<Vec<f32>> = OnceLock::new();
        static E4M3_VALUES: OnceLock<Vec<f32>> = OnceLock::new();
        static E5M2_VALUES: OnceLock<Vec<f32>> = OnceLock::new();
        let half = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
        let places = into.iter_mut().zip(bytes.chunks_exact(self.bits().div_ceil(8)));
        match self {
            // The first of two lies in the low half of a byte.
            Self::E2M1 => {
                let codes = bytes.iter().flat_map(|byte| [byte & 0xf, byte >> 4]);
                into.iter_mut()
                    .zip(codes)
                    .for_each(|(to, code)| *to = E2M1_VALUES[usize::from(code)]);
            }
            Self::F16 => {
                let table = F16_VALUES.get_or_init(|| table(F16, 16));
                places.for_each(|(to, from)| *to = table[usize::from(half(from))]);
            }
            Self::BF16 => places.for_each(|(to, from)| {
                *to = f32::from_bits(u32::from(half(from)) << 16);
            }),
            // The low 13 bits are not read.
            Self::TF32 => places.for_each(|(to, from)| {
                let bits = u32::from_le_bytes([from[0], from[1], from[2], from[3]]);
                *to = f32::from_bits(bits & 0xffff_e000);
            }),
            Self::E4M3 => {
                let table = E4M3_VALUES.get_or_init(|| table(E4M3, 8));
                places.for_each(|(to, from)| *to = table[usize::from(from[0])]);
            }
            Self::E5M2 => {
                let table = E5M2_VALUES.get_or_init(|| table(E5M2, 8));
                places.for_each(|(to, from)| *to = table[usize::from(from[0])]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_elements_of_4_bits_share_a_byte_the_first_in_its_low_half() {
        let mut values = [0.0; 4];
        Element::E2M1.decode(&[0x72, 0x9f], &mut values);
        assert_eq!(values, [1.0, 6.0, -6.0, -0.5]);
        assert_eq!([4, 32].map(|bytes| Element::E2M1.in_bytes(bytes)), [8, 64]);
        assert_eq!([4, 32].map(|bytes| Element::TF32.in_bytes(bytes)), [1, 8]);
    }
}
