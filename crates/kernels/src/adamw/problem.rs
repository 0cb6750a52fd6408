use super::{
    launch::AdamwTensors,
    layout::{F32, Layout},
};
use crate::KernelError;
use cubecl::ir::ElemType;

pub(super) const OP: &str = "adamw_update";

/// A step's numbers, of which all parameters of a group share all but the time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Decay of the first moment, from 0 to below 1.
    pub beta_1: f64,
    /// Decay of the second moment, from 0 to below 1.
    pub beta_2: f64,
    /// Keeps the division finite; not negative.
    pub epsilon: f64,
    /// Decoupled weight decay, before the rate.
    pub weight_decay: f64,
    /// The learning rate.
    pub rate: f64,
    /// Steps up to this one and with it, those included that a gate took back; from 1.
    pub time: usize,
}

impl AdamwStep {
    /// Checks what would make the update no number.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] naming the number.
    pub fn check(&self) -> Result<(), KernelError> {
        let invalid = |argument, expected: &str, actual: String| {
            Err(KernelError::InvalidProblem { op: OP, argument, expected: expected.into(), actual })
        };
        for (argument, beta) in [("beta_1", self.beta_1), ("beta_2", self.beta_2)] {
            if !(0.0..1.0).contains(&beta) {
                return invalid(argument, "a number from 0 to below 1", beta.to_string());
            }
        }
        if !(self.epsilon >= 0.0 && self.epsilon.is_finite()) {
            return invalid("epsilon", "a number from 0", self.epsilon.to_string());
        }
        if self.time == 0 {
            return invalid("time", "at least 1, the first step", "0".into());
        }
        Ok(())
    }
}

/// What an update asks: how many elements of which types, and how they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdamwProblem {
    /// Type of the parameter.
    pub parameter: ElemType,
    /// Type of its gradient.
    pub gradient: ElemType,
    /// How parameter, gradient and moments lie.
    pub(super) layout: Layout<4>,
}

impl AdamwProblem {
    /// The problem that `tensors` pose.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16 and for parameters beyond
    /// 32-bit indices; [`KernelError::InvalidProblem`] when the tensors do not go together.
    pub fn new(tensors: &AdamwTensors) -> Result<Self, KernelError> {
        let AdamwTensors { parameter, gradient, first, second } = tensors;
        let named = [
            ("parameter", parameter),
            ("gradient", gradient),
            ("first", first),
            ("second", second),
        ];
        let layout = Layout::of(OP, named)?;
        let [parameter, gradient] = [parameter, gradient].map(|tensor| tensor.buffer.dtype);
        Ok(Self { parameter, gradient, layout })
    }

    /// Elements of the parameter.
    pub fn elements(&self) -> usize {
        self.layout.elements()
    }

    /// Bytes that have to be moved: parameter and moments in and out, the gradient in.
    pub fn bytes(&self) -> usize {
        let moments = 4 * F32.size();
        self.elements() * (moments + 2 * self.parameter.size() + self.gradient.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const STEP: AdamwStep = AdamwStep {
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        rate: 1e-3,
        time: 1,
    };

    #[test]
    fn an_element_moves_28_bytes_in_f32_and_22_in_bf16() {
        let bytes = |kind| {
            let dtype = ElemType::Float(kind);
            let layout = Layout { rows: 1, columns: 10, pitches: [10; 4], beyond_rows: 1 };
            AdamwProblem { parameter: dtype, gradient: dtype, layout }.bytes()
        };
        assert_eq!(bytes(FloatKind::F32), 280);
        assert_eq!(bytes(FloatKind::BF16), 220);
    }

    #[test]
    fn numbers_that_lead_to_no_number_are_named() {
        assert_eq!(STEP.check(), Ok(()));
        let argument = |step: AdamwStep| match step.check() {
            Err(KernelError::InvalidProblem { argument, .. }) => argument,
            other => panic!("{step:?} gave {other:?}"),
        };
        assert_eq!(argument(AdamwStep { beta_1: 1.0, ..STEP }), "beta_1");
        assert_eq!(argument(AdamwStep { beta_2: f64::NAN, ..STEP }), "beta_2");
        assert_eq!(argument(AdamwStep { epsilon: -1.0, ..STEP }), "epsilon");
        assert_eq!(argument(AdamwStep { time: 0, ..STEP }), "time");
    }
}
