//! Rows that lie apart, and blueprints other than the planned one.

use super::{STEP, elements, start};
use crate::{
    adamw::{
        chance, gate,
        layouts::{LAYOUTS, gathered, spread},
        told,
    },
    gelu::{download, dtype, upload},
};
use blackburn_kernels::{
    KernelError,
    buffer::Rows,
    sgd::{
        SgdBlueprint, SgdProblem, SgdStep, SgdTensors, SgdTuning, SgdWalk, sgd_update,
        sgd_update_with,
    },
};
use blackburn_reference::{random::normal, sgd::Element, storage::Storage};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("sgd::{what}_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(
            name("rows_that_lie_apart_are_stepped_as_those_that_do_not"),
            move || on_device_with(dtype(storage), |client| apart(client, storage)),
        ));
        trials
            .push(Trial::ignorable_test(name("every_blueprint_gives_the_same_bits"), move || {
                on_device_with(dtype(storage), |client| blueprints(client, storage))
            }));
    }
    trials.push(Trial::ignorable_test("sgd::walks_are_planned_by_what_they_allow", || {
        on_device(planned_walks)
    }));
    trials.push(Trial::ignorable_test("sgd::layouts_that_do_not_go_together_are_named", || {
        on_device(refusals)
    }));
    trials
}

fn results(client: &Client, tensors: &SgdTensors, stored: Storage) -> Result<Vec<Element>, Failed> {
    let parameter = gathered(client, &tensors.parameter, stored)?;
    let velocity = gathered(client, &tensors.velocity, Storage::F32)?;
    let element = |(parameter, velocity)| Element { parameter, velocity };
    Ok(parameter.into_iter().zip(velocity).map(element).collect())
}

/// The numbers of contiguous `tensors`, in rows that lie as far apart.
fn laid_out(
    client: &Client,
    tensors: &SgdTensors,
    stored: Storage,
    [rows, columns]: [usize; 2],
    pitches: [usize; 3],
) -> Result<SgdTensors, Failed> {
    let at = |flat: &Rows, storage, pitch| -> Result<Rows, Failed> {
        let values = download(client, flat.buffer.clone(), storage)?;
        Ok(spread(client, &values, storage, [rows, columns, pitch]))
    };
    Ok(SgdTensors {
        parameter: at(&tensors.parameter, stored, pitches[0])?,
        gradient: at(&tensors.gradient, stored, pitches[1])?,
        velocity: at(&tensors.velocity, Storage::F32, pitches[2])?,
    })
}

/// Rows that lie apart, in place and not, gated and rounded by chance and not, against the same numbers
/// without anything between them: to the bit, and laid out as before. And through a closed gate.
fn apart(client: &Client, stored: Storage) -> Result<(), Failed> {
    const ROWS: usize = 37;
    for (columns, [parameter, gradient, velocity, _]) in LAYOUTS {
        let pitches = [parameter, gradient, velocity];
        for is_held in [false, true] {
            let is_gated = is_held;
            let length = ROWS * columns;
            let gradient = normal(7, length, 0.5, stored);
            let flat = start(client, length, stored, upload(client, &gradient, stored));
            let old = elements(client, &flat, stored)?;
            let tensors = laid_out(client, &flat, stored, [ROWS, columns], pitches)?;
            let held = is_held.then(|| tensors.clone());
            let step = |tensors, time| {
                let gate = is_gated.then(|| gate(client, 1.0, 0.0));
                let chance = is_gated.then(|| chance(client, [3, 5], 7));
                let step = SgdStep { nesterov: is_gated, time, ..STEP };
                sgd_update(client, &step, tensors, gate, chance)
            };
            let expected = step(step(flat, 1)?, 2)?;
            let new = step(step(tensors, 1)?, 2)?;
            let what = format!("{columns} columns by {pitches:?}, held: {is_held}");
            if results(client, &new, stored)? != elements(client, &expected, stored)? {
                return Err(format!("{what}: other results than from contiguous rows").into());
            }
            let Some(held) = held else {
                let all = [&new.parameter, &new.gradient, &new.velocity];
                if all.map(|rows| rows.pitch) != pitches {
                    return Err(format!("{what}: {:?}", all.map(|rows| rows.pitch)).into());
                }
                continue;
            };
            if results(client, &held, stored)? != old {
                return Err(format!("{what}: memory that others hold was written to").into());
            }
            let closed = sgd_update(client, &STEP, held, Some(gate(client, 0.0, 0.0)), None)?;
            if results(client, &closed, stored)? != old {
                return Err(format!("{what}: a step that is not taken moved something").into());
            }
        }
    }
    Ok(())
}

/// The whole grid, more than it and less, with all that a plan may choose.
fn blueprints(client: &Client, stored: Storage) -> Result<(), Failed> {
    for length in [8, 1000, 1024, 70_008] {
        let gradient = normal(7, length, 0.5, stored);
        let run = |tuning: Option<SgdTuning>| -> Result<Vec<Element>, Failed> {
            let tensors = start(client, length, stored, upload(client, &gradient, stored));
            let plan = |problem: &SgdProblem, client: &Client| match tuning {
                Some(tuning) => SgdBlueprint::tuned(problem, client, tuning),
                None => SgdBlueprint::plan(problem, client),
            };
            let chance = Some(chance(client, [3, 5], 7));
            let new = sgd_update_with(client, &STEP, tensors, None, chance, plan)?;
            elements(client, &new, stored)
        };
        let planned = run(None)?;
        for widest in [1, 4, 8] {
            for cubes_a_multiprocessor in [1, 2, 8, 16] {
                let tuning = SgdTuning { widest, cubes_a_multiprocessor };
                let error = |what: &str| format!("{length} elements by {tuning:?}: {what}");
                let found = run(Some(tuning)).map_err(|failed| told(&error(""), failed))?;
                if found != planned {
                    return Err(error("other results than the plan's").into());
                }
            }
        }
    }
    Ok(())
}

fn planned_walks(client: &Client) -> Result<(), Failed> {
    let plan = |columns: usize, pitches: [usize; 3]| -> Result<(SgdWalk, usize), Failed> {
        let rows =
            |pitch| spread(client, &vec![0.0; 2 * columns], Storage::F32, [2, columns, pitch]);
        let [parameter, gradient, velocity] = pitches.map(rows);
        let problem = SgdProblem::new(&SgdTensors { parameter, gradient, velocity })?;
        let blueprint = SgdBlueprint::plan(&problem, client);
        Ok((blueprint.walk, blueprint.vector_size))
    };
    // What every device of today loads at once.
    for (columns, pitches, expected) in [
        (12, [12; 3], (SgdWalk::Flat, 4)),
        (12, [12, 16, 12], (SgdWalk::Rows, 4)),
        (13, [16, 32, 16], (SgdWalk::Rows, 4)),
        (14, [14, 16, 14], (SgdWalk::Gathered, 4)),
        (13, [13, 16, 16], (SgdWalk::Rows, 1)),
    ] {
        let found = plan(columns, pitches)?;
        if found != expected {
            let what = format!("{columns} columns by {pitches:?}");
            return Err(format!("{what}: {found:?}, not {expected:?}").into());
        }
    }
    Ok(())
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let values = vec![0.0; 24];
    let tensors = |shape: [usize; 3]| {
        let flat = || Rows::one(upload(client, &values, Storage::F32));
        let gradient = spread(client, &values, Storage::F32, shape);
        SgdTensors { parameter: flat(), gradient, velocity: flat() }
    };
    let named = |result: Result<SgdTensors, KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(Failed::from(format!("`{name}` was expected to be named, got {other:?}"))),
    };
    let mut other = tensors([2, 12, 16]);
    other.velocity = spread(client, &values, Storage::F32, [4, 6, 8]);
    named(sgd_update(client, &STEP, other, None, None), "velocity")?;
    let mut beyond = tensors([2, 12, 16]);
    beyond.gradient.buffer.elements -= 1;
    named(sgd_update(client, &STEP, beyond, None, None), "gradient")?;
    let wrong = |change: fn(SgdBlueprint) -> SgdBlueprint| {
        let plan =
            |problem: &SgdProblem, client: &Client| change(SgdBlueprint::plan(problem, client));
        sgd_update_with(client, &STEP, tensors([2, 12, 16]), None, None, plan)
    };
    named(wrong(|plan| SgdBlueprint { walk: SgdWalk::Flat, ..plan }), "blueprint")?;
    named(wrong(|plan| SgdBlueprint { vector_size: 5, ..plan }), "blueprint")?;
    named(wrong(|plan| SgdBlueprint { cubes: u32::MAX, ..plan }), "blueprint")
}
