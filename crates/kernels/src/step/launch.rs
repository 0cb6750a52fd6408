use super::{
    Blueprint, Chance, Gate, Problem, StepNumbers, Tuning, Walk,
    gate::check_readings,
    kernel::{Compiled, FormOf, Part, PartLaunch, PitchesLaunch, optimizer_step_kernel},
    layout::{GRADIENT, STATES, UNITS},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32, Rows, is_float},
    overwrite::{Overwrite, overwrite_many},
    together::{MOST_TENSORS, divide, in_launches},
};
use cubecl::{client::Client, ir::ElemType, prelude::*};

/// A parameter's step, of several in one launch.
#[derive(Clone, Debug)]
pub struct Update<S, T> {
    /// The step's numbers.
    pub step: S,
    /// The parameter, and what belongs to it.
    pub tensors: T,
    /// Tells updates with the same seed apart.
    pub draw: u32,
    /// Memory that is to hold the parameter's new numbers, too, in its own type, whoever holds it. No tensor of
    /// any update lies there.
    pub copy: Option<Rows>,
}

/// The parameter and its states after one step, in the memory of those before it where nobody else
/// holds that, and laid out as they were. A parameter in f32 is not rounded, with a chance or without.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] for numbers that make no step, for tensors that do not go together, and for
/// readings and seeds that are not as long as they are read; [`KernelError::Unsupported`] for a parameter or
/// gradient in other types than f32, f16 and bf16 and for what goes beyond 32-bit indices.
pub fn update<S: StepNumbers<N>, const N: usize>(
    client: &Client,
    step: &S,
    tensors: S::Tensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
) -> Result<S::Tensors, KernelError> {
    update_with(client, step, tensors, gate, chance, Blueprint::plan)
}

/// [`update`] by the blueprint that `plan` makes of the problem.
///
/// # Errors
///
/// As there, and [`KernelError::InvalidProblem`] for a blueprint that does not serve the problem.
pub fn update_with<S: StepNumbers<N>, const N: usize>(
    client: &Client,
    step: &S,
    tensors: S::Tensors,
    gate: Option<Gate>,
    chance: Option<Chance>,
    plan: impl FnOnce(&Problem<N>, &Client) -> Blueprint,
) -> Result<S::Tensors, KernelError> {
    let draw = chance.as_ref().map_or(0, |chance| chance.draw);
    let seed = chance.map(|chance| chance.seed);
    check_readings(S::OP, gate.as_ref(), seed.as_ref())?;
    let update = Update { step: *step, tensors, draw, copy: None };
    let mut planned = [Planned::new(update, client, plan)?];
    launch(client, &mut planned, gate.as_ref(), seed.as_ref());
    let [Planned { tensors, .. }] = planned;
    Ok(tensors.into())
}

/// [`update`] of several parameters, in their order, which no tensor of another's depends on. With a
/// `seed` those in 16 bits are rounded by chance.
///
/// Up to [`MOST_TENSORS`] take one launch: those that are alike in their types, in how their elements are found,
/// in what of the step is compiled apart, in what of them somebody else holds, which goes to new memory, and in
/// the type of their copies. A copy that the step cannot write by whole vectors is made behind it.
///
/// # Errors
///
/// As there, and for a copy of another length or type or beyond its memory, before anything is launched.
pub fn update_many<S: StepNumbers<N>, const N: usize>(
    client: &Client,
    updates: Vec<Update<S, S::Tensors>>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
) -> Result<Vec<S::Tensors>, KernelError> {
    update_many_with(client, updates, gate, seed, Tuning::default())
}

/// [`update_many`] by plans that are tuned so.
///
/// # Errors
///
/// As there.
pub fn update_many_with<S: StepNumbers<N>, const N: usize>(
    client: &Client,
    updates: Vec<Update<S, S::Tensors>>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
    tuning: Tuning,
) -> Result<Vec<S::Tensors>, KernelError> {
    let mut updates = Updates::new(client, updates, tuning)?;
    updates.launch(client, gate.as_ref(), seed.as_ref())?;
    Ok(updates.planned.into_iter().map(|one| one.tensors.into()).collect())
}

/// Updates of several parameters, planned once: [`repeat`](Self::repeat) does them again and again.
pub struct Updates<S: StepNumbers<N>, const N: usize> {
    planned: Vec<Planned<S, N>>,
    /// Copies that steps cannot write.
    apart: Vec<Option<Rows>>,
    most_cubes: usize,
}

impl<S: StepNumbers<N>, const N: usize> Updates<S, N> {
    fn new(
        client: &Client,
        updates: Vec<Update<S, S::Tensors>>,
        tuning: Tuning,
    ) -> Result<Self, KernelError> {
        let plan =
            |problem: &Problem<N>, client: &Client| Blueprint::tuned(problem, client, tuning);
        let planned: Result<Vec<_>, KernelError> =
            updates.into_iter().map(|update| Planned::new(update, client, plan)).collect();
        let mut planned = planned?;
        let apart = planned.iter_mut().map(Planned::take_copy_apart).collect();
        Ok(Self { planned, apart, most_cubes: tuning.most_cubes(client) })
    }

    /// Plans `updates` that write parameters and states where they are, whoever holds the memory.
    ///
    /// # Errors
    ///
    /// As [`update_many`].
    pub fn in_place(
        client: &Client,
        updates: Vec<Update<S, S::Tensors>>,
    ) -> Result<Self, KernelError> {
        let mut updates = Self::new(client, updates, Tuning::default())?;
        updates.planned.iter_mut().for_each(|one| one.overwrites = true);
        Ok(updates)
    }

    /// The memory of the gradients, in the order of the updates.
    pub fn gradients(&self) -> impl Iterator<Item = &Rows> {
        self.planned.iter().map(|one| &one.tensors[GRADIENT])
    }

    /// Takes the next step of all parameters, whose numbers `next` makes of those before, by what the gradients'
    /// memory holds by now.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for numbers that make no step and for readings that are not as long as they
    /// are read, before anything is launched.
    pub fn repeat(
        &mut self,
        client: &Client,
        next: impl Fn(&mut S),
        gate: Option<&Gate>,
    ) -> Result<(), KernelError> {
        for one in &mut self.planned {
            next(&mut one.step);
            one.step.validate()?;
        }
        self.launch(client, gate, None)
    }

    fn launch(
        &mut self,
        client: &Client,
        gate: Option<&Gate>,
        seed: Option<&Buffer>,
    ) -> Result<(), KernelError> {
        check_readings(S::OP, gate, seed)?;
        let room = |one: &Planned<S, N>| one.room(client);
        let planned = std::mem::take(&mut self.planned);
        self.planned = in_launches(planned, room, Planned::goes_with, |together| {
            let passes: Vec<_> = together.iter().map(Planned::passes).collect();
            for (one, cubes) in together.iter_mut().zip(divide(self.most_cubes, &passes)) {
                one.blueprint.cubes = cubes;
            }
            launch(client, together, gate, seed);
        });
        let copies = self.planned.iter().zip(&self.apart);
        let copies: Vec<_> =
            copies.filter_map(|(one, copy)| Some(one.copied_to(copy.clone()?))).collect();
        overwrite_many(client, &copies)
    }
}

/// An update that was checked, and how it is done.
struct Planned<S: StepNumbers<N>, const N: usize> {
    step: S,
    tensors: [Rows; N],
    draw: u32,
    /// What the step's own kernel writes.
    copy: Option<Rows>,
    problem: Problem<N>,
    blueprint: Blueprint,
    form: FormOf<S, N>,
    /// Whether it writes where its tensors are, though others hold the memory.
    overwrites: bool,
}

impl<S: StepNumbers<N>, const N: usize> Planned<S, N> {
    fn new(
        update: Update<S, S::Tensors>,
        client: &Client,
        plan: impl FnOnce(&Problem<N>, &Client) -> Blueprint,
    ) -> Result<Self, KernelError> {
        let Update { step, tensors, draw, copy } = update;
        step.validate()?;
        let tensors = tensors.into();
        let problem = Problem::of::<S>(tensors.each_ref())?;
        let blueprint = plan(&problem, client);
        if problem.elements() > 0 {
            blueprint.check(&problem)?;
        }
        let form = step.form(client);
        let overwrites = false;
        let planned =
            Self { step, tensors, draw, copy: None, problem, blueprint, form, overwrites };
        copy.iter().try_for_each(|copy| planned.check_copy(copy))?;
        Ok(Self { copy, ..planned })
    }

    fn check_copy(&self, copy: &Rows) -> Result<(), KernelError> {
        let elements = self.problem.elements();
        let is_within = copy.span() <= copy.buffer.elements;
        if copy.elements() != elements || !is_within || !is_float(copy.buffer.dtype) {
            let expected = format!("{elements} elements of f32, f16 or bf16 within its memory");
            return Err(KernelError::invalid(S::OP, "copy", expected, format!("{copy:?}")));
        }
        self.copied_to(copy.clone()).check()
    }

    /// The parameter, as another operation than the step would copy it.
    fn copied_to(&self, copy: Rows) -> Overwrite {
        // The rows of the one that is contiguous are those of the other.
        let in_rows_of = |one: Rows, other: &Rows| match one.is_contiguous() {
            true => Rows { rows: other.rows, columns: other.columns, pitch: other.columns, ..one },
            false => one,
        };
        let parameter = self.tensors[0].clone();
        let target = in_rows_of(copy, &parameter);
        let source = in_rows_of(parameter, &target);
        Overwrite::new(target, source)
    }

    /// Takes the copy away where the step cannot write it.
    fn take_copy_apart(&mut self) -> Option<Rows> {
        let Blueprint { vector_size, walk, .. } = self.blueprint;
        self.copy.take_if(|copy| {
            let vector_bytes = (vector_size * copy.buffer.dtype.size()) as u64;
            let is_written = walk != Walk::Rows
                && copy.is_contiguous()
                && copy.buffer.offset_bytes().is_multiple_of(vector_bytes);
            !is_written
        })
    }

    fn copy_dtype(&self) -> Option<ElemType> {
        self.copy.as_ref().map(|copy| copy.buffer.dtype)
    }

    fn passes(&self) -> usize {
        self.problem.layout.passes(self.blueprint.walk, self.blueprint.vector_size)
    }

    /// Of which of its tensors somebody else holds the memory, so that they go to new one, unless it overwrites.
    fn held(&self) -> [bool; N] {
        std::array::from_fn(|which| {
            which != GRADIENT && !self.overwrites && !self.tensors[which].buffer.handle.can_mut()
        })
    }

    /// Whether one launch takes both: what is overwritten is part of what a kernel is compiled for.
    fn goes_with(&self, other: &Self) -> bool {
        let kind = |this: &Self| {
            let Blueprint { vector_size, walk, .. } = this.blueprint;
            let Problem { parameter, gradient, .. } = this.problem;
            (vector_size, walk, parameter, gradient, this.form, this.held(), this.copy_dtype())
        };
        let is_any = |this: &Self| this.problem.elements() > 0;
        is_any(self) && is_any(other) && kind(self) == kind(other)
    }

    /// How many such tensors a launch has room for.
    fn room(&self, client: &Client) -> usize {
        /// A gate's readings, the seed, and CubeCL's own.
        const OTHERS: usize = 6;
        let held = self.held().into_iter().filter(|is_held| *is_held).count();
        let buffers = N + held + usize::from(self.copy.is_some());
        let most = client.properties().hardware.max_bindings as usize;
        (most.saturating_sub(OTHERS) / buffers).clamp(1, MOST_TENSORS)
    }

    /// Memory for what somebody else holds.
    fn new_memory(&self, client: &Client) -> [Option<Rows>; N] {
        let held = self.held();
        std::array::from_fn(|which| held[which].then(|| self.tensors[which].empty_like(client)))
    }

    /// What the kernel is told, with cubes before `end` that follow those of the tensor before.
    fn part(&self, end: u32, new: &[Option<Rows>; N]) -> PartLaunch {
        let layout = &self.problem.layout;
        let Blueprint { vector_size, walk, .. } = self.blueprint;
        let unit = walk.of_gradient(vector_size);
        // All of these fit 32 bits, as the problem has seen; new pitches are not longer.
        let units = |elements: usize| (elements / unit) as u32;
        let pitches = |which: usize| {
            let new = new[which].as_ref().unwrap_or(&self.tensors[which]);
            PitchesLaunch::new(units(layout.pitches[which]), units(pitch_of(new, layout.columns)))
        };
        PartLaunch::new(
            end,
            layout.vectors(walk, vector_size) as u32,
            self.draw,
            layout.columns.div_ceil(unit) as u32,
            layout.columns as u32,
            pitches(0),
            units(layout.pitches[GRADIENT]),
            (STATES..N).map(pitches).collect(),
        )
    }
}

/// Updates what goes together, in one launch.
fn launch<S: StepNumbers<N>, const N: usize>(
    client: &Client,
    planned: &mut [Planned<S, N>],
    gate: Option<&Gate>,
    seed: Option<&Buffer>,
) {
    let Some(model) = planned.first().filter(|one| one.problem.elements() > 0) else { return };
    let Problem { parameter: stored, gradient: read, .. } = model.problem;
    let (Blueprint { vector_size, walk, .. }, form) = (model.blueprint, model.form);
    let seed = seed.filter(|_| stored != F32);
    let gated = gate.is_some();

    // Asked before copies of handles are made for the launch.
    let room = model.room(client);
    let new: Vec<_> = planned.iter().map(|one| one.new_memory(client)).collect();
    let in_place = new.iter().flatten().all(Option::is_none);
    let by_chance = seed.is_some();
    let is_copied = model.copy.is_some();
    let compiled = Compiled { walk, gated, by_chance, in_place, is_copied };
    // A few kernels serve all numbers of tensors: what is not there has no cubes, and the first stands in.
    let count = planned.len().next_power_of_two().min(room);
    let at = |place: usize| if place < planned.len() { place } else { 0 };
    let cubes = |place: usize| planned.get(place).map_or(0, |one| one.blueprint.cubes);
    let parts = || -> SequenceArg<Part> {
        let mut end = 0;
        let part = |place: usize| {
            end += cubes(place);
            planned[at(place)].part(end, &new[at(place)])
        };
        (0..count).map(part).collect()
    };
    let tensor = |place: usize, which: usize| planned[at(place)].tensors[which].arg();
    // Buffers are counted as the kernel names them: the parameters, their gradients, the states of each.
    let out = |place: usize, which: usize| match &new[at(place)][which] {
        Some(new) => new.arg(),
        None => {
            let position = match which.checked_sub(STATES) {
                None => place,
                Some(state) => STATES * count + place * (N - STATES) + state,
            };
            BufferArg::alias(position, planned[at(place)].problem.elements())
        }
    };
    let copy = |place: usize| planned[at(place)].copy.as_ref().map(Rows::arg);
    // What is not read is not compiled in, and the gradient, of which there is as much, stands in for it.
    let stand_in = &model.tensors[GRADIENT].buffer;
    let reading = |of: fn(&Gate) -> &Buffer| gate.map_or(stand_in, of).arg(1);
    // SAFETY: `Problem::of` has seen that tensors hold their problem's rows, whose indices and one step
    // beyond fit 32 bits, and `Blueprint::check` that vectors divide what is walked, or that memory goes on
    // for the last of each row; new ones were allocated so. The kernel stops at the last vector. A gate's
    // readings and a seed are as long as they are read.
    ahead::launch(client, |client| unsafe {
        optimizer_step_kernel::launch_unchecked::<S::Rule>(
            client,
            CubeCount::Static((0..count).map(cubes).sum(), 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            walk.of_gradient(vector_size),
            (0..count).map(|place| tensor(place, 0)).collect(),
            (0..count).map(|place| tensor(place, GRADIENT)).collect(),
            (0..count)
                .map(|place| (STATES..N).map(|which| tensor(place, which)).collect())
                .collect(),
            reading(|gate| &gate.taken),
            reading(|gate| &gate.skipped),
            reading(|gate| &gate.factor),
            seed.unwrap_or(stand_in).arg(1),
            (0..count).map(|place| out(place, 0)).collect(),
            (0..count).map(|place| (STATES..N).map(|which| out(place, which)).collect()).collect(),
            (0..count).filter_map(copy).collect(),
            parts(),
            (0..count).map(|place| planned[at(place)].step.factors(gated)).collect(),
            compiled,
            form,
            stored,
            read,
            model.copy_dtype().unwrap_or(stored),
        )
    });
    let olds = planned.iter_mut().flat_map(|one| &mut one.tensors);
    for (old, new) in olds.zip(new.into_iter().flatten()) {
        if let Some(new) = new {
            *old = new;
        }
    }
}

/// Elements from one row to the next, of rows that may be told as one.
fn pitch_of(rows: &Rows, columns: usize) -> usize {
    if rows.is_contiguous() { columns } else { rows.pitch }
}
