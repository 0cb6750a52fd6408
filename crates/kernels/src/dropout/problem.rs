use super::DropoutMask;
use crate::{
    KernelError,
    buffer::{Buffer, check_float},
};
use cubecl::ir::ElemType;

pub(super) const OP: &str = "dropout";

/// What a dropout asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutProblem {
    /// Number of elements.
    pub elements: usize,
    /// Type of all tensors.
    pub dtype: ElemType,
    /// The share that is left out, from 0 to below 1.
    pub rate: f64,
    /// What the choice depends on.
    pub seed: u64,
}

impl DropoutProblem {
    /// Checks what the numbers have to be.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for a rate out of its range; [`KernelError::Unsupported`] for dtypes
    /// other than f32, f16 and bf16 and for elements beyond 32-bit indices.
    pub fn validate(&self) -> Result<(), KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 20;
        let unsupported = |reason| Err(KernelError::Unsupported { op: OP, reason });
        check_float(OP, "x", self.dtype)?;
        if u32::try_from(self.elements.saturating_add(STEP)).is_err() {
            return unsupported(format!("{} elements", self.elements));
        }
        self.mask(None).validate(OP)
    }

    /// The elements that are left out.
    pub(super) fn mask(&self, key: Option<&Buffer>) -> DropoutMask {
        DropoutMask { rate: self.rate, seed: self.seed, key: key.cloned() }
    }

    /// Bytes that have to be moved: x in, y out, and a residual in.
    pub fn bytes(&self, adds: bool) -> usize {
        (2 + usize::from(adds)) * self.elements * self.dtype.size()
    }

    pub(super) fn check(&self, argument: &'static str, buffer: &Buffer) -> Result<(), KernelError> {
        buffer.check(OP, argument, self.elements, self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const HALF: DropoutProblem = DropoutProblem {
        elements: 100,
        dtype: ElemType::Float(FloatKind::BF16),
        rate: 0.5,
        seed: 0,
    };

    #[test]
    fn a_residual_is_one_tensor_more() {
        assert_eq!(HALF.bytes(true) - HALF.bytes(false), 200);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for rate in [-0.1, 1.0, f64::NAN] {
            let refused = DropoutProblem { rate, ..HALF }.validate();
            assert!(matches!(refused, Err(KernelError::InvalidProblem { argument: "rate", .. })));
        }
        let refused = DropoutProblem { elements: 1 << 32, ..HALF }.validate();
        assert!(matches!(refused, Err(KernelError::Unsupported { .. })));
    }
}
