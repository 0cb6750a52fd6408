use super::rule::{AdamwRule, FactorsLaunch, Form};
use crate::{
    DeviceProfile, KernelError,
    buffer::Rows,
    step::{Problem, StepNumbers},
};
use cubecl::client::Client;

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
            Err(KernelError::invalid(Self::OP, argument, expected, actual))
        };
        for (argument, beta) in [("beta_1", self.beta_1), ("beta_2", self.beta_2)] {
            if !(0.0..1.0).contains(&beta) {
                return invalid(argument, "a number from 0 to below 1", beta.to_string());
            }
        }
        check_epsilon(self.epsilon)?;
        if self.time == 0 {
            return invalid("time", "at least 1, the first step", "0".into());
        }
        Ok(())
    }
}

impl StepNumbers<4> for AdamwStep {
    const OP: &'static str = "adamw_update";
    const NAMES: [&'static str; 4] = ["parameter", "gradient", "first", "second"];
    type Rule = AdamwRule;
    type Tensors = AdamwTensors;

    fn validate(&self) -> Result<(), KernelError> {
        self.check()
    }

    fn form(&self, client: &Client) -> Form {
        form_on(client)
    }

    fn factors(&self, gated: bool) -> FactorsLaunch {
        let log = |beta: f64| beta.ln().max(LEAST_LOG) as f32;
        let time = i32::try_from(self.time).unwrap_or(i32::MAX);
        let (rate, correction) = if gated {
            (self.rate, 1.0)
        } else {
            let [first, second] = [self.beta_1, self.beta_2].map(|beta| 1.0 - beta.powi(time));
            (self.rate / first, 1.0 / second)
        };
        FactorsLaunch::new(
            (1.0 - self.beta_1) as f32,
            (1.0 - self.beta_2) as f32,
            (self.rate * self.weight_decay) as f32,
            rate as f32,
            correction as f32,
            self.epsilon as f32,
            log(self.beta_1),
            log(self.beta_2),
            self.time as f32,
        )
    }
}

/// A step's numbers as it multiplies by them, for whoever knows these and not what they come from. A gate does not change
/// them: steps that it took back before are not counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwFactors {
    /// The gradient's share of the first moment, `1 - beta_1`: above 0 and up to 1.
    pub share_1: f64,
    /// Its square's share of the second moment, `1 - beta_2`: above 0 and up to 1.
    pub share_2: f64,
    /// What the first moment is divided by, `1 - beta_1^t`: above 0 and up to 1.
    pub correction_1: f64,
    /// What the second moment is divided by, `1 - beta_2^t`: above 0 and up to 1.
    pub correction_2: f64,
    /// Keeps the division finite; not negative.
    pub epsilon: f64,
    /// The learning rate.
    pub rate: f64,
    /// The share of the parameter that decays in this step: the rate times the weight decay.
    pub decay: f64,
}

impl AdamwFactors {
    /// Checks what would make the update no number.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] naming the number.
    pub fn check(&self) -> Result<(), KernelError> {
        let shares = [
            ("share_1", self.share_1),
            ("share_2", self.share_2),
            ("correction_1", self.correction_1),
            ("correction_2", self.correction_2),
        ];
        if let Some((argument, share)) = shares.into_iter().find(|(_, s)| !(*s > 0.0 && *s <= 1.0))
        {
            let expected = "a number above 0 and up to 1";
            return Err(KernelError::invalid(AdamwStep::OP, argument, expected, share));
        }
        check_epsilon(self.epsilon)
    }
}

impl StepNumbers<4> for AdamwFactors {
    const OP: &'static str = AdamwStep::OP;
    const NAMES: [&'static str; 4] = AdamwStep::NAMES;
    type Rule = AdamwRule;
    type Tensors = AdamwTensors;

    fn validate(&self) -> Result<(), KernelError> {
        self.check()
    }

    fn form(&self, client: &Client) -> Form {
        form_on(client)
    }

    fn factors(&self, _gated: bool) -> FactorsLaunch {
        // A gate's corrections are 1 so.
        let (log_beta, time) = (LEAST_LOG as f32, 1.0);
        FactorsLaunch::new(
            self.share_1 as f32,
            self.share_2 as f32,
            self.decay as f32,
            (self.rate / self.correction_1) as f32,
            (1.0 / self.correction_2) as f32,
            self.epsilon as f32,
            log_beta,
            log_beta,
            time,
        )
    }
}

/// Below this a power is 0 from the first step on; the logarithm of 0 is no number for WGSL.
const LEAST_LOG: f64 = -128.0;

fn check_epsilon(epsilon: f64) -> Result<(), KernelError> {
    match epsilon >= 0.0 && epsilon.is_finite() {
        true => Ok(()),
        false => Err(KernelError::invalid(AdamwStep::OP, "epsilon", "a number from 0", epsilon)),
    }
}

fn form_on(client: &Client) -> Form {
    Form { by_ptx: DeviceProfile::of(client).compute_capability.is_some() }
}

/// A parameter and what belongs to it.
#[derive(Clone, Debug)]
pub struct AdamwTensors {
    /// p.
    pub parameter: Rows,
    /// g.
    pub gradient: Rows,
    /// m.
    pub first: Rows,
    /// v.
    pub second: Rows,
}

impl From<AdamwTensors> for [Rows; 4] {
    fn from(tensors: AdamwTensors) -> Self {
        let AdamwTensors { parameter, gradient, first, second } = tensors;
        [parameter, gradient, first, second]
    }
}

impl From<[Rows; 4]> for AdamwTensors {
    fn from([parameter, gradient, first, second]: [Rows; 4]) -> Self {
        Self { parameter, gradient, first, second }
    }
}

/// What an update asks: parameter, gradient and moments.
pub type AdamwProblem = Problem<4>;

impl AdamwProblem {
    /// The problem that `tensors` pose.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16 and for parameters beyond
    /// 32-bit indices; [`KernelError::InvalidProblem`] when the tensors do not go together.
    pub fn new(tensors: &AdamwTensors) -> Result<Self, KernelError> {
        let AdamwTensors { parameter, gradient, first, second } = tensors;
        Self::of::<AdamwStep>([parameter, gradient, first, second])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: AdamwStep = AdamwStep {
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        rate: 1e-3,
        time: 1,
    };

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

    #[test]
    fn factors_that_lead_to_no_number_are_named() {
        let factors = AdamwFactors {
            share_1: 0.1,
            share_2: 0.05,
            correction_1: 0.19,
            correction_2: 0.0975,
            epsilon: 1e-8,
            rate: 1e-3,
            decay: 1e-4,
        };
        assert_eq!(factors.check(), Ok(()));
        let argument = |factors: AdamwFactors| match factors.check() {
            Err(KernelError::InvalidProblem { argument, .. }) => argument,
            other => panic!("{factors:?} gave {other:?}"),
        };
        assert_eq!(argument(AdamwFactors { share_1: 0.0, ..factors }), "share_1");
        assert_eq!(argument(AdamwFactors { correction_2: f64::NAN, ..factors }), "correction_2");
        assert_eq!(argument(AdamwFactors { epsilon: f64::INFINITY, ..factors }), "epsilon");
    }
}
