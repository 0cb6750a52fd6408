use super::{
    AdamwBlueprint, AdamwProblem, AdamwStep, AdamwWalk,
    blueprint::UNITS,
    layout::{check_reading, check_seed},
    problem::OP,
    update::{Compiled, FactorsLaunch, PitchesLaunch, adamw_update_kernel},
};
use crate::{
    KernelError,
    buffer::{Buffer, Rows},
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};

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

/// Positions of what may be overwritten, among the kernel's buffers.
const PARAMETER: usize = 0;
const FIRST: usize = 2;
const SECOND: usize = 3;

/// The parameter and its moments after one step, in the memory of those before it where nobody else
/// holds that, and laid out as they were. A parameter in f32 is not rounded, with a chance or without.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] for numbers that [`AdamwStep::check`] refuses and tensors that do not
/// go together; [`KernelError::Unsupported`] as for [`AdamwProblem::new`].
pub fn adamw_update(
    client: &Client,
    step: &AdamwStep,
    tensors: AdamwTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
) -> Result<AdamwTensors, KernelError> {
    adamw_update_with(client, step, tensors, gate, chance, AdamwBlueprint::plan)
}

/// [`adamw_update`] by the blueprint that `plan` makes of the problem.
///
/// # Errors
///
/// As there, and [`KernelError::InvalidProblem`] for a blueprint that does not serve the problem.
pub fn adamw_update_with(
    client: &Client,
    step: &AdamwStep,
    tensors: AdamwTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
    plan: impl FnOnce(&AdamwProblem, &Client) -> AdamwBlueprint,
) -> Result<AdamwTensors, KernelError> {
    step.check()?;
    let problem = AdamwProblem::new(&tensors)?;
    check_readings(OP, gate.as_ref(), chance.as_ref())?;
    if problem.elements() == 0 {
        return Ok(tensors);
    }
    let blueprint = plan(&problem, client);
    blueprint.check(&problem, client)?;
    let chance = chance.filter(|_| problem.parameter != ElemType::Float(FloatKind::F32));
    let AdamwBlueprint { vector_size, walk, unroll, by_ptx, cubes } = blueprint;
    let AdamwTensors { parameter, gradient, first, second } = tensors;
    // Asked before a copy of a handle is made for the launch.
    let [new_parameter, new_first, new_second] = [&parameter, &first, &second].map(|old| {
        let is_ours = old.buffer.handle.can_mut();
        (!is_ours).then(|| old.empty_like(client))
    });
    let out = |new: &Option<Rows>, position| match new {
        Some(new) => new.arg(),
        None => BufferArg::alias(position, problem.elements()),
    };
    let pitches = {
        let [parameter_out, first_out, second_out] =
            [(&new_parameter, &parameter), (&new_first, &first), (&new_second, &second)]
                .map(|(new, old)| pitch_of(new.as_ref().unwrap_or(old), problem.columns));
        let unit = if walk == AdamwWalk::Gathered { 1 } else { vector_size };
        // All of these fit 32 bits, as the problem has seen; new pitches are not longer.
        let units = |elements: usize| (elements / unit) as u32;
        let [parameter, gradient, first, second] = problem.pitches.map(units);
        PitchesLaunch::new(
            problem.columns.div_ceil(unit) as u32,
            problem.columns as u32,
            parameter,
            gradient,
            first,
            second,
            units(parameter_out),
            units(first_out),
            units(second_out),
        )
    };
    // What is not read is not compiled in, and the gradient, of which there is as much, stands in for
    // it.
    let reading = |of: fn(&Gate) -> &Buffer| gate.as_ref().map_or(&gradient.buffer, of).arg(1);
    let seed = chance.as_ref().map_or(&gradient.buffer, |chance| &chance.seed);
    let (gated, by_chance) = (gate.is_some(), chance.is_some());
    // SAFETY: `AdamwProblem::new` has seen that the four tensors hold the problem's rows, whose indices and
    // one step beyond fit 32 bits, and `AdamwBlueprint::check` that vectors divide what is walked, or that
    // memory goes on for the last of each row; new ones were allocated so. The kernel stops at the last
    // vector. A gate's readings and a seed are as long as they are read.
    unsafe {
        adamw_update_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            if walk == AdamwWalk::Gathered { 1 } else { vector_size },
            parameter.arg(),
            gradient.arg(),
            first.arg(),
            second.arg(),
            reading(|gate| &gate.taken),
            reading(|gate| &gate.skipped),
            reading(|gate| &gate.factor),
            seed.arg(1),
            out(&new_parameter, PARAMETER),
            out(&new_first, FIRST),
            out(&new_second, SECOND),
            factors(step, gated),
            pitches,
            chance.as_ref().map_or(0, |chance| chance.draw),
            problem.layout().vectors(walk, vector_size) as u32,
            Compiled { walk, unroll, by_ptx, gated, by_chance },
            problem.parameter,
            problem.gradient,
        );
    }
    Ok(AdamwTensors {
        parameter: new_parameter.unwrap_or(parameter),
        gradient,
        first: new_first.unwrap_or(first),
        second: new_second.unwrap_or(second),
    })
}

/// Whether what a gate and a chance read is as long as it is read.
pub(crate) fn check_readings(
    op: &'static str,
    gate: Option<&Gate>,
    chance: Option<&Chance>,
) -> Result<(), KernelError> {
    if let Some(Gate { taken, skipped, factor }) = gate {
        check_reading(op, "factor", factor)?;
        check_reading(op, "taken", taken)?;
        check_reading(op, "skipped", skipped)?;
    }
    chance.map_or(Ok(()), |chance| check_seed(op, &chance.seed))
}

/// Elements from one row to the next, of rows that may be told as one.
pub(crate) fn pitch_of(rows: &Rows, columns: usize) -> usize {
    if rows.is_contiguous() { columns } else { rows.pitch }
}

fn factors(step: &AdamwStep, gated: bool) -> FactorsLaunch {
    /// Below this a power is 0 from the first step on; the logarithm of 0 is no number for WGSL.
    const LEAST_LOG: f64 = -128.0;
    let log = |beta: f64| beta.ln().max(LEAST_LOG) as f32;
    let time = i32::try_from(step.time).unwrap_or(i32::MAX);
    let (rate, correction) = if gated {
        (step.rate, 1.0)
    } else {
        let [first, second] = [step.beta_1, step.beta_2].map(|beta| 1.0 - beta.powi(time));
        (step.rate / first, 1.0 / second)
    };
    FactorsLaunch::new(
        (1.0 - step.beta_1) as f32,
        (1.0 - step.beta_2) as f32,
        (step.rate * step.weight_decay) as f32,
        rate as f32,
        correction as f32,
        step.epsilon as f32,
        log(step.beta_1),
        log(step.beta_2),
        step.time as f32,
    )
}
