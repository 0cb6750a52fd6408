//! Where the naive computation rounds.

use crate::{matmul::MatmulPrecision, storage::Storage};

/// What becomes of values that are stored, and of those that are multiplied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    storage: Option<Storage>,
    operand: Operand,
}

/// What a multiplication takes of an operand: some explicit bits of its mantissa.
#[derive(Clone, Copy, Debug)]
enum Operand {
    All,
    Truncated(u32),
    Rounded(u32),
}

impl Rounding {
    /// Nothing: the reference.
    pub(super) const NONE: Self = Self { storage: None, operand: Operand::All };

    /// Tensors in the product's type of output. Where its units take fewer bits than were stored,
    /// operands are truncated, which is what happens if nobody rounds them.
    pub(super) fn of(product: &MatmulPrecision) -> Self {
        let operand = operand_bits(product).map_or(Operand::All, Operand::Truncated);
        Self { storage: Some(product.out), operand }
    }

    /// All that a device may do: operands truncated or, where it makes a difference, rounded.
    pub(super) fn all_of(product: &MatmulPrecision) -> Vec<Self> {
        let truncated = Self::of(product);
        let rounded = operand_bits(product).map(Operand::Rounded);
        [truncated]
            .into_iter()
            .chain(rounded.map(|operand| Self { operand, ..truncated }))
            .collect()
    }

    /// The value as it is read again.
    pub(super) fn stored(self, value: f64) -> f64 {
        self.storage.map_or(value, |storage| storage.round(value))
    }

    /// The value as it is multiplied.
    pub(super) fn operand(self, value: f64) -> f64 {
        let cut = |bits: u32, raised: u64| {
            f64::from_bits((value.to_bits() + raised) & (u64::MAX << (52 - bits)))
        };
        match self.operand {
            Operand::All => value,
            Operand::Truncated(bits) => cut(bits, 0),
            Operand::Rounded(bits) => cut(bits, 1 << (51 - bits)),
        }
    }

    /// All of a tensor as it is multiplied.
    pub(super) fn operands(self, values: &[f64]) -> Vec<f64> {
        values.iter().map(|value| self.operand(*value)).collect()
    }
}

fn operand_bits(product: &MatmulPrecision) -> Option<u32> {
    let error = Some(product.operand_error).filter(|error| *error > 0.0);
    error.map(|error| (-error.log2()).floor().clamp(0.0, 51.0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_operands_that_are_narrower_than_their_storage_lose_bits() {
        let tf32 = Rounding::of(&MatmulPrecision::tf32());
        assert_eq!(tf32.operand(1.0 + 1.99 / 1024.0), 1.0 + 1.0 / 1024.0);
        assert_eq!(tf32.stored(1.0 + 1.5 / 1024.0), 1.0 + 1.5 / 1024.0);
        let [_, rounded] = Rounding::all_of(&MatmulPrecision::tf32())[..] else { panic!() };
        assert_eq!(rounded.operand(1.0 + 1.51 / 1024.0), 1.0 + 2.0 / 1024.0);
        assert_eq!(rounded.operand(-1.0 - 1.49 / 1024.0), -1.0 - 1.0 / 1024.0);
        assert_eq!(rounded.operand(2.0 - 1e-6), 2.0);
        let bf16 = Rounding::of(&MatmulPrecision::tensor_core(Storage::Bf16));
        assert_eq!(bf16.operand(1.0 + 1.5 / 1024.0), 1.0 + 1.5 / 1024.0);
        assert_eq!(bf16.stored(1.0 + 1.5 / 1024.0), 1.0);
        assert_eq!(Rounding::NONE.stored(0.1), 0.1);
    }
}
