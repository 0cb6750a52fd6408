use super::{
    Chance, Gate, SgdBlueprint, SgdProblem, SgdStep, SgdWalk,
    problem::OP,
    update::{Compiled, FactorsLaunch, PitchesLaunch, sgd_update_kernel},
};
use crate::{
    KernelError,
    adamw::{F32, UNITS, check_readings, pitch_of},
    buffer::{Buffer, Rows},
};
use cubecl::{client::Client, prelude::*};

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

/// Positions of what may be overwritten, among the kernel's buffers.
const PARAMETER: usize = 0;
const VELOCITY: usize = 2;

/// The parameter and its velocity after one step, in the memory of those before it where nobody else
/// holds that, and laid out as they were. A parameter in f32 is not rounded, with a chance or without.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] for numbers that [`SgdStep::check`] refuses and tensors that do not
/// go together; [`KernelError::Unsupported`] as for [`SgdProblem::new`].
pub fn sgd_update(
    client: &Client,
    step: &SgdStep,
    tensors: SgdTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
) -> Result<SgdTensors, KernelError> {
    sgd_update_with(client, step, tensors, gate, chance, SgdBlueprint::plan)
}

/// [`sgd_update`] by the blueprint that `plan` makes of the problem.
///
/// # Errors
///
/// As there, and [`KernelError::InvalidProblem`] for a blueprint that does not serve the problem.
pub fn sgd_update_with(
    client: &Client,
    step: &SgdStep,
    tensors: SgdTensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
    plan: impl FnOnce(&SgdProblem, &Client) -> SgdBlueprint,
) -> Result<SgdTensors, KernelError> {
    step.check()?;
    let problem = SgdProblem::new(&tensors)?;
    check_readings(OP, gate.as_ref(), chance.as_ref().map(|chance| &chance.seed))?;
    if problem.elements() == 0 {
        return Ok(tensors);
    }
    let blueprint = plan(&problem, client);
    blueprint.check(&problem)?;
    let chance = chance.filter(|_| problem.parameter != F32);
    let SgdBlueprint { vector_size, walk, cubes } = blueprint;
    let SgdTensors { parameter, gradient, velocity } = tensors;
    // Asked before a copy of a handle is made for the launch.
    let [new_parameter, new_velocity] = [&parameter, &velocity].map(|old| {
        let is_ours = old.buffer.handle.can_mut();
        (!is_ours).then(|| old.empty_like(client))
    });
    let out = |new: &Option<Rows>, position| match new {
        Some(new) => new.arg(),
        None => BufferArg::alias(position, problem.elements()),
    };
    let layout = &problem.layout;
    let unit = if walk == SgdWalk::Gathered { 1 } else { vector_size };
    let pitches = {
        let [parameter_out, velocity_out] =
            [(&new_parameter, &parameter), (&new_velocity, &velocity)]
                .map(|(new, old)| pitch_of(new.as_ref().unwrap_or(old), layout.columns));
        // All of these fit 32 bits, as the problem has seen; new pitches are not longer.
        let units = |elements: usize| (elements / unit) as u32;
        let [parameter, gradient, velocity] = layout.pitches.map(units);
        PitchesLaunch::new(
            layout.columns.div_ceil(unit) as u32,
            layout.columns as u32,
            parameter,
            gradient,
            velocity,
            units(parameter_out),
            units(velocity_out),
        )
    };
    // What is not read is not compiled in, and the gradient, of which there is as much, stands in for
    // it.
    let reading = |of: fn(&Gate) -> &Buffer| gate.as_ref().map_or(&gradient.buffer, of).arg(1);
    let seed = chance.as_ref().map_or(&gradient.buffer, |chance| &chance.seed);
    let compiled = Compiled {
        walk,
        nesterov: step.nesterov,
        gated: gate.is_some(),
        by_chance: chance.is_some(),
    };
    // SAFETY: `SgdProblem::new` has seen that the three tensors hold the problem's rows, whose indices and
    // one step beyond fit 32 bits, and `SgdBlueprint::check` that vectors divide what is walked, or that
    // memory goes on for the last of each row; new ones were allocated so. The kernel stops at the last
    // vector. A gate's readings and a seed are as long as they are read.
    unsafe {
        sgd_update_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            unit,
            parameter.arg(),
            gradient.arg(),
            velocity.arg(),
            reading(|gate| &gate.taken),
            reading(|gate| &gate.skipped),
            reading(|gate| &gate.factor),
            seed.arg(1),
            out(&new_parameter, PARAMETER),
            out(&new_velocity, VELOCITY),
            factors(step),
            pitches,
            chance.as_ref().map_or(0, |chance| chance.draw),
            layout.vectors(walk, vector_size) as u32,
            compiled,
            problem.parameter,
            problem.gradient,
        );
    }
    Ok(SgdTensors {
        parameter: new_parameter.unwrap_or(parameter),
        gradient,
        velocity: new_velocity.unwrap_or(velocity),
    })
}

fn factors(step: &SgdStep) -> FactorsLaunch {
    FactorsLaunch::new(
        step.momentum as f32,
        (1.0 - step.dampening) as f32,
        step.weight_decay as f32,
        step.rate as f32,
        step.time as f32,
    )
}
