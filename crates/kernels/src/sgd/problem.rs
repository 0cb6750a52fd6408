use super::launch::SgdTensors;
use crate::{
    KernelError,
    adamw::{F32, Layout},
};
use cubecl::ir::ElemType;

pub(super) const OP: &str = "sgd_update";

/// A step's numbers, of which all parameters of a group share all but the time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// What is kept of the velocity; not negative.
    pub momentum: f64,
    /// What of the gradient is kept out of the velocity, after the first step.
    pub dampening: f64,
    /// Whether the step looks ahead by the new velocity.
    pub nesterov: bool,
    /// What of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// The learning rate.
    pub rate: f64,
    /// Steps up to this one and with it, those included that a gate took back; from 1. More than there can
    /// have been skipped, as [`usize::MAX`], where the velocity is known to be one.
    pub time: usize,
}

impl SgdStep {
    /// Checks what would make the update no number.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] naming the number.
    pub fn check(&self) -> Result<(), KernelError> {
        let invalid = |argument, expected: &str, actual: String| {
            Err(KernelError::InvalidProblem { op: OP, argument, expected: expected.into(), actual })
        };
        if !(self.momentum >= 0.0 && self.momentum.is_finite()) {
            return invalid("momentum", "a number from 0", self.momentum.to_string());
        }
        for (argument, number) in [
            ("dampening", self.dampening),
            ("weight_decay", self.weight_decay),
            ("rate", self.rate),
        ] {
            if !number.is_finite() {
                return invalid(argument, "a finite number", number.to_string());
            }
        }
        if self.time == 0 {
            return invalid("time", "at least 1, the first step", "0".into());
        }
        Ok(())
    }
}

/// What an update asks: how many elements of which types, and how they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SgdProblem {
    /// Type of the parameter.
    pub parameter: ElemType,
    /// Type of its gradient.
    pub gradient: ElemType,
    /// How parameter, gradient and velocity lie.
    pub(super) layout: Layout<3>,
}

impl SgdProblem {
    /// The problem that `tensors` pose.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16 and for parameters beyond
    /// 32-bit indices; [`KernelError::InvalidProblem`] when the tensors do not go together.
    pub fn new(tensors: &SgdTensors) -> Result<Self, KernelError> {
        let SgdTensors { parameter, gradient, velocity } = tensors;
        let named = [("parameter", parameter), ("gradient", gradient), ("velocity", velocity)];
        let layout = Layout::of(OP, named)?;
        let [parameter, gradient] = [parameter, gradient].map(|tensor| tensor.buffer.dtype);
        Ok(Self { parameter, gradient, layout })
    }

    /// Elements of the parameter.
    pub fn elements(&self) -> usize {
        self.layout.elements()
    }

    /// Bytes that have to be moved: parameter and velocity in and out, the gradient in.
    pub fn bytes(&self) -> usize {
        let velocity = 2 * F32.size();
        self.elements() * (velocity + 2 * self.parameter.size() + self.gradient.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const STEP: SgdStep = SgdStep {
        momentum: 0.9,
        dampening: 0.0,
        nesterov: false,
        weight_decay: 1e-4,
        rate: 0.1,
        time: 1,
    };

    #[test]
    fn an_element_moves_20_bytes_in_f32_and_14_in_bf16() {
        let bytes = |kind| {
            let dtype = ElemType::Float(kind);
            let layout = Layout { rows: 1, columns: 10, pitches: [10; 3], beyond_rows: 1 };
            SgdProblem { parameter: dtype, gradient: dtype, layout }.bytes()
        };
        assert_eq!(bytes(FloatKind::F32), 200);
        assert_eq!(bytes(FloatKind::BF16), 140);
    }

    #[test]
    fn numbers_that_lead_to_no_number_are_named() {
        assert_eq!(STEP.check(), Ok(()));
        let argument = |step: SgdStep| match step.check() {
            Err(KernelError::InvalidProblem { argument, .. }) => argument,
            other => panic!("{step:?} gave {other:?}"),
        };
        assert_eq!(argument(SgdStep { momentum: -0.1, ..STEP }), "momentum");
        assert_eq!(argument(SgdStep { momentum: f64::NAN, ..STEP }), "momentum");
        assert_eq!(argument(SgdStep { dampening: f64::INFINITY, ..STEP }), "dampening");
        assert_eq!(argument(SgdStep { weight_decay: f64::NAN, ..STEP }), "weight_decay");
        assert_eq!(argument(SgdStep { rate: f64::NAN, ..STEP }), "rate");
        assert_eq!(argument(SgdStep { time: 0, ..STEP }), "time");
    }
}
