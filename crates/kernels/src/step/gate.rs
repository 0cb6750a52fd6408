use crate::{
    KernelError,
    buffer::{Buffer, F32},
};

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
        factor.check(op, "factor", 1, F32)?;
        taken.check(op, "taken", 1, F32)?;
        skipped.check(op, "skipped", 1, F32)?;
    }
    seed.map_or(Ok(()), |seed| check_seed(op, seed))
}

/// Whether a seed is two words.
fn check_seed(op: &'static str, seed: &Buffer) -> Result<(), KernelError> {
    if seed.elements == 2 && seed.dtype.size() == 4 {
        return Ok(());
    }
    Err(seed.mismatch(op, "seed", "2 elements of 32 bits"))
}
