//! A matrix in 8 bits, in the layouts that products take, for all of them that read it.

use super::{Rounding, codes::Quantized};
use cubecl::ir::ElemType;

/// What is cast: how a matrix lies in memory, and how it is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CastKey {
    /// Rows and columns as they are stored.
    pub(crate) stored: [usize; 2],
    /// Elements from one row to the next.
    pub(crate) pitch: usize,
    pub(crate) dtype: ElemType,
    pub(crate) rounding: Rounding,
}

/// Which of a layer's matrices it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Input,
    Weight,
    OutputGradient,
}

/// Which of the two copies a product reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// Codes in the order of the matrix.
    Rows,
    /// Codes in the order of its transpose.
    Transposed,
}

/// The codes of a matrix.
pub(super) struct Cast {
    key: CastKey,
    operand: Operand,
    codes: Quantized,
}

impl Cast {
    pub(super) fn new(key: CastKey, operand: Operand, codes: Quantized) -> Self {
        Self { key, operand, codes }
    }

    /// The codes, if they are those of `key` and the copy is there.
    pub(super) fn codes(&self, key: &CastKey, copies: Copies) -> Option<Quantized> {
        let copy = match copies {
            Copies::Rows => &self.codes.rows,
            Copies::Transposed => &self.codes.transposed,
        };
        (self.key == *key && copy.is_some()).then(|| self.codes.clone())
    }

    /// Lets go of what the forward pass alone reads of an input. The transpose waits for the backward pass, or the only
    /// copy does.
    pub(super) fn end_forward(&mut self) {
        if self.operand == Operand::Input && self.codes.transposed.is_some() {
            self.codes.rows = None;
        }
    }
}
