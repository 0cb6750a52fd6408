use super::rule::{FactorsLaunch, Form, SgdRule};
use crate::{
    KernelError,
    buffer::Rows,
    step::{Problem, Step},
};
use cubecl::client::Client;

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
            Err(KernelError::invalid(Self::OP, argument, expected, actual))
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

impl Step<3> for SgdStep {
    const OP: &'static str = "sgd_update";
    const NAMES: [&'static str; 3] = ["parameter", "gradient", "velocity"];
    type Rule = SgdRule;
    type Tensors = SgdTensors;

    fn validate(&self) -> Result<(), KernelError> {
        self.check()
    }

    fn form(&self, _client: &Client) -> Form {
        Form { nesterov: self.nesterov }
    }

    fn factors(&self, _gated: bool) -> FactorsLaunch {
        FactorsLaunch::new(
            self.momentum as f32,
            (1.0 - self.dampening) as f32,
            self.weight_decay as f32,
            self.rate as f32,
            self.time as f32,
        )
    }
}

/// A parameter and what belongs to it.
#[derive(Clone, Debug)]
pub struct SgdTensors {
    /// p.
    pub parameter: Rows,
    /// g.
    pub gradient: Rows,
    /// v.
    pub velocity: Rows,
}

impl From<SgdTensors> for [Rows; 3] {
    fn from(SgdTensors { parameter, gradient, velocity }: SgdTensors) -> Self {
        [parameter, gradient, velocity]
    }
}

impl From<[Rows; 3]> for SgdTensors {
    fn from([parameter, gradient, velocity]: [Rows; 3]) -> Self {
        Self { parameter, gradient, velocity }
    }
}

/// What an update asks: parameter, gradient and velocity.
pub type SgdProblem = Problem<3>;

impl SgdProblem {
    /// The problem that `tensors` pose.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16 and for parameters beyond
    /// 32-bit indices; [`KernelError::InvalidProblem`] when the tensors do not go together.
    pub fn new(tensors: &SgdTensors) -> Result<Self, KernelError> {
        let SgdTensors { parameter, gradient, velocity } = tensors;
        Self::of::<SgdStep>([parameter, gradient, velocity])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: SgdStep = SgdStep {
        momentum: 0.9,
        dampening: 0.0,
        nesterov: false,
        weight_decay: 1e-4,
        rate: 0.1,
        time: 1,
    };

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
