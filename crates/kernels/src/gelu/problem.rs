use crate::{KernelError, buffer::Buffer};
use cubecl::ir::{ElemType, FloatKind};

/// What a GELU call asks: how many elements of which type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GeluProblem {
    /// Number of elements.
    pub elements: usize,
    /// Type of inputs and outputs.
    pub dtype: ElemType,
}

impl GeluProblem {
    /// The problem that `input` poses.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16.
    pub fn new(op: &'static str, input: &Buffer) -> Result<Self, KernelError> {
        match input.dtype {
            ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16) => {
                Ok(Self { elements: input.elements, dtype: input.dtype })
            }
            other => Err(KernelError::Unsupported {
                op,
                reason: format!("dtype {other:?}; the kernel takes f32, f16 and bf16"),
            }),
        }
    }

    /// Checks that another operand has the same length and type as the first.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] naming `argument`.
    pub fn check_operand(
        &self,
        op: &'static str,
        argument: &'static str,
        operand: &Buffer,
    ) -> Result<(), KernelError> {
        if (operand.elements, operand.dtype) == (self.elements, self.dtype) {
            return Ok(());
        }
        Err(KernelError::InvalidProblem {
            op,
            argument,
            expected: format!("{} elements of {:?}", self.elements, self.dtype),
            actual: format!("{} elements of {:?}", operand.elements, operand.dtype),
        })
    }

    /// Bytes that the forward pass has to move: x in, y out.
    pub fn forward_bytes(&self) -> usize {
        2 * self.elements * self.dtype.size()
    }

    /// Bytes that the backward pass has to move: x and dy in, dx out.
    pub fn backward_bytes(&self) -> usize {
        3 * self.elements * self.dtype.size()
    }

    /// Bytes that the backward pass has to move where the sums of dx's columns go out too.
    pub fn backward_sum_bytes(&self, columns: usize) -> usize {
        self.backward_bytes() + columns * self.dtype.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_moves_one_tensor_more_than_forward() {
        let problem = GeluProblem { elements: 1000, dtype: ElemType::Float(FloatKind::BF16) };
        assert_eq!(problem.forward_bytes(), 4000);
        assert_eq!(problem.backward_bytes() - problem.forward_bytes(), 2000);
        assert_eq!(problem.backward_sum_bytes(100) - problem.backward_bytes(), 200);
    }
}
