use crate::{
    KernelError,
    buffer::{Buffer, F32, check_float},
    matmul::{F32Precision, MatmulProblem, TensorLayout},
};
use cubecl::ir::ElemType;

pub(super) const OP: &str = "lstm";
/// Gates of a cell.
pub(super) const GATES: usize = 4;

/// What a sequence asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LstmProblem {
    /// Time steps.
    pub steps: usize,
    /// Sequences.
    pub batch: usize,
    /// Features of a state.
    pub hidden: usize,
    /// Whether the last step comes first.
    pub reverse: bool,
    /// Type of all but cells.
    pub dtype: ElemType,
    /// How f32 is multiplied.
    pub f32_precision: F32Precision,
}

/// What backward reads again.
#[derive(Clone, Debug)]
pub struct LstmSaved {
    /// The gates behind their functions, as `projected` lies.
    pub gates: Buffer,
    /// The first c and that of each step, in the order of the walk: f32, `[steps + 1, batch, hidden]`.
    pub cells: Buffer,
    /// What h was in front of each step: `[steps, batch, hidden]`.
    pub hidden: Buffer,
}

/// What a sequence makes.
#[derive(Clone, Debug)]
pub struct LstmForward {
    /// All h, and the last c behind them: `[steps + 1, batch, hidden]`.
    pub out: Buffer,
    /// For backward.
    pub saved: LstmSaved,
}

/// The gradients.
#[derive(Clone, Debug)]
pub struct LstmGradients {
    /// Of what the input gives the gates.
    pub dprojected: Buffer,
    /// Of the weight.
    pub dweight: Buffer,
    /// Of the first h.
    pub dh: Buffer,
    /// Of the first c, f32.
    pub dc: Buffer,
}

impl LstmProblem {
    /// Elements of a state.
    pub(super) fn state(&self) -> usize {
        self.batch * self.hidden
    }

    /// The step that is walked at `place`.
    pub(super) fn step_at(&self, place: usize) -> usize {
        if self.reverse { self.steps - 1 - place } else { place }
    }

    /// Refuses what the kernels do not serve.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for other types, empty tensors, and beyond 32-bit indices.
    pub fn validate(&self) -> Result<(), KernelError> {
        check_float(OP, "projected", self.dtype)?;
        let most = (self.steps + 1) * self.state() * GATES;
        let is_empty = self.steps == 0 || self.state() == 0;
        if is_empty || i32::try_from(most).is_err() {
            let Self { steps, batch, hidden, .. } = self;
            let reason = format!("{steps} steps of {batch} states of {hidden} features");
            return Err(KernelError::unsupported(OP, reason));
        }
        Ok(())
    }

    pub(super) fn check_saved(&self, saved: &LstmSaved) -> Result<(), KernelError> {
        let LstmSaved { gates, cells, hidden } = saved;
        gates.check(OP, "gates", self.steps * self.state() * GATES, self.dtype)?;
        cells.check(OP, "cells", (self.steps + 1) * self.state(), F32)?;
        hidden.check(OP, "hidden", self.steps * self.state(), self.dtype)
    }

    pub(super) fn check_weight(&self, weight: &Buffer) -> Result<(), KernelError> {
        weight.check(OP, "weight", self.hidden * self.hidden * GATES, self.dtype)
    }

    /// The product of a state `[batch, hidden]` with the weight, in f32.
    pub(super) fn of_state(&self) -> Result<MatmulProblem, KernelError> {
        let Self { batch, hidden, .. } = *self;
        let columns = GATES * hidden;
        self.product([batch, hidden, columns], [hidden, 1], [columns, 1], F32)
    }

    /// The product of gradients of gates `[batch, 4 hidden]` with the transposed weight.
    pub(super) fn of_gates(&self, out: ElemType) -> Result<MatmulProblem, KernelError> {
        let Self { batch, hidden, .. } = *self;
        let columns = GATES * hidden;
        self.product([batch, columns, hidden], [columns, 1], [1, columns], out)
    }

    /// The product that makes the weight's gradient.
    pub(super) fn of_weight(&self) -> Result<MatmulProblem, KernelError> {
        let Self { steps, batch, hidden, dtype, .. } = *self;
        let columns = GATES * hidden;
        self.product([hidden, steps * batch, columns], [1, hidden], [columns, 1], dtype)
    }

    fn product(
        &self,
        [m, k, n]: [usize; 3],
        lhs: [usize; 2],
        rhs: [usize; 2],
        out: ElemType,
    ) -> Result<MatmulProblem, KernelError> {
        let dtype = self.dtype;
        MatmulProblem::new(
            TensorLayout { shape: &[m, k], strides: &lhs, dtype },
            TensorLayout { shape: &[k, n], strides: &rhs, dtype },
            out,
            self.f32_precision,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_from_the_end_has_its_last_step_first() {
        let problem = LstmProblem {
            steps: 5,
            batch: 2,
            hidden: 3,
            reverse: true,
            dtype: F32,
            f32_precision: F32Precision::Full,
        };
        assert_eq!([0, 1, 4].map(|place| problem.step_at(place)), [4, 3, 0]);
        let forward = LstmProblem { reverse: false, ..problem };
        assert_eq!([0, 4].map(|place| forward.step_at(place)), [0, 4]);
        assert!(LstmProblem { steps: 0, ..problem }.validate().is_err());
    }
}
