use super::layout::F32;
use crate::{KernelError, buffer::Buffer};

/// What the device says of a step.
#[derive(Clone, Debug)]
pub struct Gate {
    /// 0 where the step is not taken.
    pub taken: Buffer,
    /// How many steps before this one were not.
    pub skipped: Buffer,
    /// What the gradient is multiplied by first.
    pub factor: Buffer,
}

/// What decides which way a parameter is rounded.
#[derive(Clone, Debug)]
pub struct Chance {
    /// Two words.
    pub seed: Buffer,
    /// Tells updates with the same seed apart.
    pub draw: u32,
}

/// Checks that a gate's readings and a seed are as long as they are read.
pub(super) fn check_readings(
    op: &'static str,
    gate: Option<&Gate>,
    seed: Option<&Buffer>,
) -> Result<(), KernelError> {
    if let Some(Gate { taken, skipped, factor }) = gate {
        check_reading(op, "factor", factor)?;
        check_reading(op, "taken", taken)?;
        check_reading(op, "skipped", skipped)?;
    }
    seed.map_or(Ok(()), |seed| check_seed(op, seed))
}

/// Whether a gate's reading is one number of f32.
fn check_reading(
    op: &'static str,
    argument: &'static str,
    buffer: &Buffer,
) -> Result<(), KernelError> {
    if (buffer.elements, buffer.dtype) == (1, F32) {
        return Ok(());
    }
    Err(KernelError::InvalidProblem {
        op,
        argument,
        expected: format!("1 elements of {F32:?}"),
        actual: format!("{} elements of {:?}", buffer.elements, buffer.dtype),
    })
}

/// Whether a seed is two words.
fn check_seed(op: &'static str, seed: &Buffer) -> Result<(), KernelError> {
    if seed.elements == 2 && seed.dtype.size() == 4 {
        return Ok(());
    }
    Err(KernelError::InvalidProblem {
        op,
        argument: "seed",
        expected: "2 elements of 32 bits".into(),
        actual: format!("{} elements of {:?}", seed.elements, seed.dtype),
    })
}
