//! Floating-point types as storage.

use half::{bf16, f16};

/// A type that tensors are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
}

impl Storage {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Half the distance between 1 and the next number: the relative error of rounding to nearest.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Self::F32 => 2f64.powi(-24),
            Self::F16 => 2f64.powi(-11),
            Self::Bf16 => 2f64.powi(-8),
        }
    }

    /// Half the distance between the smallest numbers: the absolute error of rounding near zero,
    /// where a device that flushes subnormal numbers may lose all of one.
    pub fn underflow(self) -> f64 {
        match self {
            Self::F32 | Self::Bf16 => f64::from(f32::MIN_POSITIVE),
            Self::F16 => f16::MIN_POSITIVE.to_f64(),
        }
    }

    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// `value`, rounded to this type, to nearest with ties to even.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F32 => f64::from(value as f32),
            Self::F16 => f16::from_f32(to_odd(value)).to_f64(),
            Self::Bf16 => bf16::from_f32(to_odd(value)).to_f64(),
        }
    }

    /// The bytes of `values` in this type, in the machine's order.
    pub fn encode(self, values: &[f64]) -> Vec<u8> {
        let element = |value: &f64| match self {
            Self::F32 => (*value as f32).to_ne_bytes().to_vec(),
            Self::F16 => f16::from_f32(to_odd(*value)).to_ne_bytes().to_vec(),
            Self::Bf16 => bf16::from_f32(to_odd(*value)).to_ne_bytes().to_vec(),
        };
        values.iter().flat_map(element).collect()
    }

    /// The numbers in `bytes`; a last, incomplete element is left out.
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        let element = |bytes: &[u8]| match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f64::from(f32::from_ne_bytes([a, b, c, d])),
            (Self::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
            (Self::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
            _ => unreachable!("chunks have the size of an element"),
        };
        bytes.chunks_exact(self.bytes()).map(element).collect()
    }
}

/// `value` in f32, with what was lost leaving its mark in the last bit (rounding to odd), so that a second
/// rounding, to fewer bits, is right. `from_f64` of half 2.7 cuts the significand to 20 bits instead, and so
/// takes for a tie what is above one.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let exact = f64::from(near);
    if exact == value || !near.is_finite() {
        return near;
    }
    let towards_zero =
        if exact.abs() > value.abs() { f32::from_bits(near.to_bits() - 1) } else { near };
    f32::from_bits(towards_zero.to_bits() | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_errs_by_at_most_the_unit_roundoff() {
        for storage in Storage::ALL {
            let u = storage.unit_roundoff();
            // The midpoint between 1 and its successor is the worst case, and is reached.
            assert_eq!(storage.round(1.0 + u) - 1.0, 0.0);
            assert_eq!(storage.round(1.0 + 1.01 * u) - 1.0, 2.0 * u);
        }
    }

    #[test]
    fn just_above_a_tie_is_rounded_up() {
        for storage in [Storage::F16, Storage::Bf16] {
            let u = storage.unit_roundoff();
            for little in [2f64.powi(-22), 2f64.powi(-40), 2f64.powi(-51)] {
                assert_eq!(storage.round(1.0 + u + little), 1.0 + 2.0 * u, "{storage:?} {little}");
                assert_eq!(storage.round(1.0 + u - little), 1.0, "{storage:?} {little}");
                assert_eq!(storage.round(-1.0 - 3.0 * u + little), -1.0 - 2.0 * u);
            }
        }
    }

    #[test]
    fn decoding_undoes_encoding() {
        let values = [0.0, -1.5, 0.1, 1e30, f64::INFINITY];
        for storage in Storage::ALL {
            let rounded: Vec<f64> = values.iter().map(|v| storage.round(*v)).collect();
            assert_eq!(storage.decode(&storage.encode(&values)), rounded);
        }
    }
}
