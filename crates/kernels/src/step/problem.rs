use super::{
    Step,
    layout::{Layout, STATES},
};
use crate::{
    KernelError,
    buffer::{F32, Rows},
};
use cubecl::ir::ElemType;

/// What an update asks: how many elements of which types, and how its N tensors lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem<const N: usize> {
    /// Whose it is.
    pub(crate) op: &'static str,
    /// Type of the parameter.
    pub parameter: ElemType,
    /// Type of its gradient.
    pub gradient: ElemType,
    /// How parameter, gradient and states lie.
    pub(crate) layout: Layout<N>,
}

impl<const N: usize> Problem<N> {
    /// The problem that `tensors` pose to a step of that kind.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16 and for parameters beyond
    /// 32-bit indices; [`KernelError::InvalidProblem`] when the tensors do not go together.
    pub(crate) fn of<S: Step<N>>(tensors: [&Rows; N]) -> Result<Self, KernelError> {
        let layout = Layout::of(S::OP, S::NAMES, tensors)?;
        let [parameter, gradient] = [0, 1].map(|at| tensors[at].buffer.dtype);
        Ok(Self { op: S::OP, parameter, gradient, layout })
    }

    /// Elements of the parameter.
    pub fn elements(&self) -> usize {
        self.layout.elements()
    }

    /// Bytes that have to be moved: parameter and states in and out, the gradient in.
    pub fn bytes(&self) -> usize {
        let states = 2 * (N - STATES) * F32.size();
        self.elements() * (states + 2 * self.parameter.size() + self.gradient.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    fn bytes<const N: usize>(kind: FloatKind) -> usize {
        let dtype = ElemType::Float(kind);
        let layout = Layout { rows: 1, columns: 10, pitches: [10; N], beyond_rows: 1 };
        Problem { op: "test", parameter: dtype, gradient: dtype, layout }.bytes()
    }

    #[test]
    fn an_element_moves_its_states_twice_and_28_bytes_in_f32_with_two() {
        assert_eq!(bytes::<4>(FloatKind::F32), 280);
        assert_eq!(bytes::<4>(FloatKind::BF16), 220);
        assert_eq!(bytes::<3>(FloatKind::F32), 200);
        assert_eq!(bytes::<3>(FloatKind::BF16), 140);
    }
}
