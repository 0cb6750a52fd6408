use super::{
    AdamwBlueprint, AdamwProblem, AdamwStep, AdamwTuning, AdamwWalk,
    blueprint::UNITS,
    kernel::{Compiled, FactorsLaunch, Part, PartLaunch, PitchesLaunch, adamw_update_kernel},
    layout::{F32, check_reading, check_seed, divide, in_launches},
    problem::OP,
};
use crate::{
    KernelError,
    buffer::{Buffer, Rows},
};
use cubecl::{client::Client, prelude::*};

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
    let draw = chance.as_ref().map_or(0, |chance| chance.draw);
    let seed = chance.map(|chance| chance.seed);
    check_readings(OP, gate.as_ref(), seed.as_ref())?;
    let mut planned = [Planned::new(AdamwUpdate { step: *step, tensors, draw }, client, plan)?];
    launch(client, &mut planned, gate.as_ref(), seed.as_ref());
    let [Planned { update, .. }] = planned;
    Ok(update.tensors)
}

/// A parameter's step, of several in one launch.
#[derive(Clone, Debug)]
pub struct AdamwUpdate {
    /// The step's numbers.
    pub step: AdamwStep,
    /// The parameter, and what belongs to it.
    pub tensors: AdamwTensors,
    /// Tells updates with the same seed apart.
    pub draw: u32,
}

/// Tensors of a launch: a launch takes some microseconds, and many a tensor less.
pub const MOST_TENSORS: usize = 16;

/// [`adamw_update`] of several parameters, in their order, which no tensor of another's depends on. With a
/// `seed` those in 16 bits are rounded by chance.
///
/// Up to [`MOST_TENSORS`] take one launch: those that are alike in their types and in how their elements
/// are found, and whose memory nobody else holds. What somebody else holds takes a launch of its own.
///
/// # Errors
///
/// As there, before anything is launched.
pub fn adamw_update_many(
    client: &Client,
    updates: Vec<AdamwUpdate>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
) -> Result<Vec<AdamwTensors>, KernelError> {
    adamw_update_many_with(client, updates, gate, seed, AdamwTuning::default())
}

/// [`adamw_update_many`] by plans that are tuned so.
///
/// # Errors
///
/// As there.
pub fn adamw_update_many_with(
    client: &Client,
    updates: Vec<AdamwUpdate>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
    tuning: AdamwTuning,
) -> Result<Vec<AdamwTensors>, KernelError> {
    check_readings(OP, gate.as_ref(), seed.as_ref())?;
    let plan =
        |problem: &AdamwProblem, client: &Client| AdamwBlueprint::tuned(problem, client, tuning);
    let planned: Result<_, KernelError> =
        updates.into_iter().map(|update| Planned::new(update, client, plan)).collect();
    let updated = in_launches(planned?, most_tensors(client), Planned::goes_with, |together| {
        let passes: Vec<_> = together.iter().map(Planned::passes).collect();
        for (one, cubes) in together.iter_mut().zip(divide(tuning.most_cubes(client), &passes)) {
            one.blueprint.cubes = cubes;
        }
        launch(client, together, gate.as_ref(), seed.as_ref());
    });
    Ok(updated.into_iter().map(|one| one.update.tensors).collect())
}

/// Tensors that a launch has room for.
fn most_tensors(client: &Client) -> usize {
    /// Of each: parameter, gradient and moments, which are overwritten.
    const BUFFERS: usize = 4;
    /// A gate's readings, the seed, and CubeCL's own.
    const OTHERS: usize = 6;
    let most = client.properties().hardware.max_bindings as usize;
    (most.saturating_sub(OTHERS) / BUFFERS).clamp(1, MOST_TENSORS)
}

/// An update that was checked, and how it is done.
struct Planned {
    update: AdamwUpdate,
    problem: AdamwProblem,
    blueprint: AdamwBlueprint,
    /// Whether nobody else holds what is updated.
    is_ours: bool,
}

impl Planned {
    fn new(
        update: AdamwUpdate,
        client: &Client,
        plan: impl FnOnce(&AdamwProblem, &Client) -> AdamwBlueprint,
    ) -> Result<Self, KernelError> {
        update.step.check()?;
        let problem = AdamwProblem::new(&update.tensors)?;
        let blueprint = plan(&problem, client);
        if problem.elements() > 0 {
            blueprint.check(&problem, client)?;
        }
        let AdamwTensors { parameter, first, second, .. } = &update.tensors;
        let is_ours = [parameter, first, second].iter().all(|rows| rows.buffer.handle.can_mut());
        Ok(Self { update, problem, blueprint, is_ours })
    }

    fn passes(&self) -> usize {
        let AdamwBlueprint { walk, vector_size, .. } = self.blueprint;
        self.problem.layout.passes(walk, vector_size)
    }

    /// Whether one launch takes both.
    fn goes_with(&self, other: &Self) -> bool {
        let kind = |this: &Self| {
            let AdamwBlueprint { vector_size, walk, by_ptx, .. } = this.blueprint;
            let AdamwProblem { parameter, gradient, .. } = this.problem;
            (vector_size, walk, by_ptx, parameter, gradient)
        };
        let may_share = |this: &Self| this.is_ours && this.problem.elements() > 0;
        may_share(self) && may_share(other) && kind(self) == kind(other)
    }

    /// Memory for what somebody else holds: parameter and moments.
    fn new_memory(&self, client: &Client) -> [Option<Rows>; 3] {
        let AdamwTensors { parameter, first, second, .. } = &self.update.tensors;
        [parameter, first, second].map(|old| {
            let is_ours = old.buffer.handle.can_mut();
            (!is_ours).then(|| old.empty_like(client))
        })
    }

    /// What the kernel is told, with cubes before `end` that follow those of the tensor before.
    fn part(&self, end: u32, new: &[Option<Rows>; 3], gated: bool) -> PartLaunch {
        let Self { update, problem, blueprint, .. } = self;
        let layout = &problem.layout;
        let AdamwBlueprint { vector_size, walk, .. } = *blueprint;
        let AdamwTensors { parameter, first, second, .. } = &update.tensors;
        let [new_parameter, new_first, new_second] = new;
        let [parameter_out, first_out, second_out] =
            [(new_parameter, parameter), (new_first, first), (new_second, second)]
                .map(|(new, old)| pitch_of(new.as_ref().unwrap_or(old), layout.columns));
        let unit = if walk == AdamwWalk::Gathered { 1 } else { vector_size };
        // All of these fit 32 bits, as the problem has seen; new pitches are not longer.
        let units = |elements: usize| (elements / unit) as u32;
        let [parameter, gradient, first, second] = layout.pitches.map(units);
        let pitches = PitchesLaunch::new(
            layout.columns.div_ceil(unit) as u32,
            layout.columns as u32,
            parameter,
            gradient,
            first,
            second,
            units(parameter_out),
            units(first_out),
            units(second_out),
        );
        let vectors = layout.vectors(walk, vector_size) as u32;
        PartLaunch::new(end, vectors, update.draw, factors(&update.step, gated), pitches)
    }
}

/// Updates what goes together, in one launch: one tensor, or several that nobody else holds.
fn launch(client: &Client, planned: &mut [Planned], gate: Option<&Gate>, seed: Option<&Buffer>) {
    let Some(model) = planned.first().filter(|one| one.problem.elements() > 0) else { return };
    let AdamwProblem { parameter: stored, gradient: read, .. } = model.problem;
    let AdamwBlueprint { vector_size, walk, by_ptx, .. } = model.blueprint;
    let seed = seed.filter(|_| stored != F32);
    let gated = gate.is_some();

    // Asked before copies of handles are made for the launch.
    let new: Vec<_> = planned.iter().map(|one| one.new_memory(client)).collect();
    let in_place = new.iter().flatten().all(Option::is_none);
    let compiled = Compiled { walk, by_ptx, gated, by_chance: seed.is_some(), in_place };
    let mut end = 0;
    let mut parts: SequenceArg<Part> = planned
        .iter()
        .zip(&new)
        .map(|(one, new)| {
            end += one.blueprint.cubes;
            one.part(end, new, gated)
        })
        .collect();
    // A few kernels serve all numbers of tensors: what is not there has no cubes, and the first stands in.
    let count = planned.len().next_power_of_two().min(most_tensors(client));
    for _ in planned.len()..count {
        parts.push(planned[0].part(end, &new[0], gated));
    }
    let at = |place: usize| if place < planned.len() { place } else { 0 };
    let all = |of: fn(&AdamwTensors) -> &Rows| -> Vec<BufferArg> {
        (0..count).map(|place| of(&planned[at(place)].update.tensors).arg()).collect()
    };
    // Buffers are counted as the kernel names them: the parameters, their gradients, the moments.
    let out = |which: usize, buffers_before: usize| -> Vec<BufferArg> {
        let one = |place: usize| match &new[at(place)][which] {
            Some(new) => new.arg(),
            None => {
                let elements = planned[at(place)].problem.elements();
                BufferArg::alias(buffers_before * count + place, elements)
            }
        };
        (0..count).map(one).collect()
    };
    // What is not read is not compiled in, and the gradient, of which there is as much, stands in for it.
    let stand_in = &model.update.tensors.gradient.buffer;
    let reading = |of: fn(&Gate) -> &Buffer| gate.map_or(stand_in, of).arg(1);
    // SAFETY: `AdamwProblem::new` has seen that tensors hold their problem's rows, whose indices and one
    // step beyond fit 32 bits, and `AdamwBlueprint::check` that vectors divide what is walked, or that
    // memory goes on for the last of each row; new ones were allocated so. The kernel stops at the last
    // vector. A gate's readings and a seed are as long as they are read.
    unsafe {
        adamw_update_kernel::launch_unchecked(
            client,
            CubeCount::Static(end, 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            if walk == AdamwWalk::Gathered { 1 } else { vector_size },
            all(|tensors| &tensors.parameter).into_iter().collect(),
            all(|tensors| &tensors.gradient).into_iter().collect(),
            all(|tensors| &tensors.first).into_iter().collect(),
            all(|tensors| &tensors.second).into_iter().collect(),
            reading(|gate| &gate.taken),
            reading(|gate| &gate.skipped),
            reading(|gate| &gate.factor),
            seed.unwrap_or(stand_in).arg(1),
            out(0, 0).into_iter().collect(),
            out(1, 2).into_iter().collect(),
            out(2, 3).into_iter().collect(),
            parts,
            compiled,
            stored,
            read,
        );
    }
    for (one, [parameter, first, second]) in planned.iter_mut().zip(new) {
        let tensors = &mut one.update.tensors;
        for (old, new) in [
            (&mut tensors.parameter, parameter),
            (&mut tensors.first, first),
            (&mut tensors.second, second),
        ] {
            if let Some(new) = new {
                *old = new;
            }
        }
    }
}

/// Checks that a gate's readings and a seed are as long as they are read.
pub(crate) fn check_readings(
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
