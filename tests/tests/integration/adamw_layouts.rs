//! Rows that lie apart, and blueprints other than the planned one.

use super::{STEP, chance, elements, gate, start, told};
use crate::gelu::{download, dtype, upload};
use blackburn_kernels::{
    KernelError,
    adamw::{
        AdamwBlueprint, AdamwProblem, AdamwStep, AdamwTensors, AdamwTuning, AdamwWalk,
        adamw_update, adamw_update_with,
    },
    buffer::Rows,
};
use blackburn_reference::{adamw::Element, random::normal, storage::Storage};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// What lies between rows: it shows wherever it is counted.
const BETWEEN: f64 = 60_000.0;

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("adamw::{what}_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(
            name("rows_that_lie_apart_are_stepped_as_those_that_do_not"),
            move || on_device_with(dtype(storage), |client| apart(client, storage)),
        ));
        trials
            .push(Trial::ignorable_test(name("every_blueprint_gives_the_same_bits"), move || {
                on_device_with(dtype(storage), |client| blueprints(client, storage))
            }));
    }
    trials.push(Trial::ignorable_test("adamw::walks_are_planned_by_what_they_allow", || {
        on_device(planned_walks)
    }));
    trials.push(Trial::ignorable_test("adamw::layouts_that_do_not_go_together_are_named", || {
        on_device(refusals)
    }));
    trials
}

/// The rows of a contiguous tensor, `pitch` elements apart.
pub(crate) fn spread(
    client: &Client,
    values: &[f64],
    storage: Storage,
    [rows, columns, pitch]: [usize; 3],
) -> Rows {
    let mut all = vec![BETWEEN; rows * pitch];
    for (row, values) in values.chunks(columns).enumerate() {
        all[row * pitch..][..columns].copy_from_slice(values);
    }
    let mut buffer = upload(client, &all, storage);
    buffer.elements = (rows - 1) * pitch + columns;
    Rows { buffer, rows, columns, pitch }
}

/// What rows hold, without what lies between them.
pub(crate) fn gathered(client: &Client, rows: &Rows, storage: Storage) -> Result<Vec<f64>, Failed> {
    let all = download(client, rows.buffer.clone(), storage)?;
    Ok((0..rows.rows).flat_map(|row| all[row * rows.pitch..][..rows.columns].to_vec()).collect())
}

fn results(
    client: &Client,
    tensors: &AdamwTensors,
    stored: Storage,
) -> Result<Vec<Element>, Failed> {
    let parameter = gathered(client, &tensors.parameter, stored)?;
    let first = gathered(client, &tensors.first, Storage::F32)?;
    let second = gathered(client, &tensors.second, Storage::F32)?;
    let element = |((parameter, first), second)| Element { parameter, first, second };
    Ok(parameter.into_iter().zip(first).zip(second).map(element).collect())
}

/// Columns, and pitches of parameter, gradient and moments. Where a pitch is that of contiguous rows,
/// they are.
pub(crate) const LAYOUTS: [(usize, [usize; 4]); 9] = [
    (12, [16, 16, 16, 16]),
    (12, [12, 20, 12, 12]),
    (13, [13, 16, 13, 13]),
    (13, [16, 24, 16, 32]),
    (13, [14, 16, 16, 16]),
    (13, [16, 13, 16, 13]),
    (3, [3, 8, 3, 3]),
    (1, [4, 4, 4, 4]),
    (1031, [1032, 1040, 1032, 1032]),
];

/// Rows that lie apart, in place and not, gated and rounded by chance and not, against the same numbers
/// without anything between them: to the bit, and laid out as before.
fn apart(client: &Client, stored: Storage) -> Result<(), Failed> {
    const ROWS: usize = 37;
    for (columns, pitches) in LAYOUTS {
        for is_held in [false, true] {
            let is_gated = is_held;
            let length = ROWS * columns;
            let gradient = normal(7, length, 0.5, stored);
            let flat = start(client, length, stored, upload(client, &gradient, stored));
            let parameter = download(client, flat.parameter.buffer.clone(), stored)?;
            let zeros = vec![0.0; length];
            let at = |values: &[f64], storage, which: usize| {
                spread(client, values, storage, [ROWS, columns, pitches[which]])
            };
            let tensors = AdamwTensors {
                parameter: at(&parameter, stored, 0),
                gradient: at(&gradient, stored, 1),
                first: at(&zeros, Storage::F32, 2),
                second: at(&zeros, Storage::F32, 3),
            };
            let held = is_held.then(|| tensors.clone());
            let step = |tensors, time| {
                let gate = is_gated.then(|| gate(client, 1.0, 0.0));
                let chance = is_gated.then(|| chance(client, [3, 5], 7));
                adamw_update(client, &AdamwStep { time, ..STEP }, tensors, gate, chance)
            };
            // The second one goes on from moments that are not zero.
            let expected = step(step(flat, 1)?, 2)?;
            let new = step(step(tensors, 1)?, 2)?;
            let what = format!("{columns} columns by {pitches:?}, held: {is_held}");
            if results(client, &new, stored)? != elements(client, &expected, stored)? {
                return Err(format!("{what}: other results than from contiguous rows").into());
            }
            if let Some(held) = held {
                let kept = results(client, &held, stored)?;
                let is_kept = kept.iter().map(|e| e.parameter).eq(parameter.iter().copied())
                    && kept.iter().all(|e| e.first == 0.0 && e.second == 0.0);
                if !is_kept {
                    return Err(format!("{what}: memory that others hold was written to").into());
                }
            } else {
                let all = [&new.parameter, &new.gradient, &new.first, &new.second];
                if all.map(|rows| rows.pitch) != pitches {
                    return Err(format!("{what}: {:?}", all.map(|rows| rows.pitch)).into());
                }
            }
        }
    }
    let columns = 13;
    let pitches = [16, 24, 16, 32];
    let gradient = vec![f64::NAN; 2 * columns];
    let at = |values: &[f64], storage, pitch| spread(client, values, storage, [2, columns, pitch]);
    let parameter = normal(2, 2 * columns, 1.0, stored);
    let zeros = vec![0.0; 2 * columns];
    let tensors = AdamwTensors {
        parameter: at(&parameter, stored, pitches[0]),
        gradient: at(&gradient, stored, pitches[1]),
        first: at(&zeros, Storage::F32, pitches[2]),
        second: at(&zeros, Storage::F32, pitches[3]),
    };
    let held = tensors.clone();
    let new = adamw_update(client, &STEP, tensors, Some(gate(client, 0.0, 0.0)), None)?;
    if results(client, &new, stored)? != results(client, &held, stored)? {
        return Err("a step that is not taken moved rows that lie apart".into());
    }
    Ok(())
}

/// The whole grid, more than it and less, with all that a plan may choose.
fn blueprints(client: &Client, stored: Storage) -> Result<(), Failed> {
    for length in [8, 1000, 1024, 70_008] {
        let gradient = normal(7, length, 0.5, stored);
        let run = |tuning: Option<AdamwTuning>| -> Result<Vec<Element>, Failed> {
            let tensors = start(client, length, stored, upload(client, &gradient, stored));
            let plan = |problem: &AdamwProblem, client: &Client| match tuning {
                Some(tuning) => AdamwBlueprint::tuned(problem, client, tuning),
                None => AdamwBlueprint::plan(problem, client),
            };
            let chance = Some(chance(client, [3, 5], 7));
            let new = adamw_update_with(client, &STEP, tensors, None, chance, plan)?;
            elements(client, &new, stored)
        };
        let planned = run(None)?;
        for widest in [1, 2, 4, 8] {
            for cubes_a_multiprocessor in [1, 2, 8, 16] {
                let tuning = AdamwTuning { widest, cubes_a_multiprocessor };
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
    let plan = |columns: usize, pitches: [usize; 4]| -> Result<(AdamwWalk, usize), Failed> {
        let rows =
            |pitch| spread(client, &vec![0.0; 2 * columns], Storage::F32, [2, columns, pitch]);
        let [parameter, gradient, first, second] = pitches.map(rows);
        let problem = AdamwProblem::new(&AdamwTensors { parameter, gradient, first, second })?;
        let blueprint = AdamwBlueprint::plan(&problem, client);
        Ok((blueprint.walk, blueprint.vector_size))
    };
    // What every device of today loads at once.
    for (columns, pitches, expected) in [
        (12, [12; 4], (AdamwWalk::Flat, 4)),
        (12, [12, 16, 12, 12], (AdamwWalk::Rows, 4)),
        (13, [16, 32, 16, 16], (AdamwWalk::Rows, 4)),
        (14, [14, 16, 14, 14], (AdamwWalk::Gathered, 4)),
        (13, [13, 16, 16, 13], (AdamwWalk::Rows, 1)),
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
        AdamwTensors { parameter: flat(), gradient, first: flat(), second: flat() }
    };
    let named = |result: Result<AdamwTensors, KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(Failed::from(format!("`{name}` was expected to be named, got {other:?}"))),
    };
    let mut other = tensors([2, 12, 16]);
    other.first = spread(client, &values, Storage::F32, [4, 6, 8]);
    named(adamw_update(client, &STEP, other, None, None), "first")?;
    let mut beyond = tensors([2, 12, 16]);
    beyond.gradient.buffer.elements -= 1;
    named(adamw_update(client, &STEP, beyond, None, None), "gradient")?;
    let wrong = |change: fn(AdamwBlueprint) -> AdamwBlueprint| {
        let plan =
            |problem: &AdamwProblem, client: &Client| change(AdamwBlueprint::plan(problem, client));
        adamw_update_with(client, &STEP, tensors([2, 12, 16]), None, None, plan)
    };
    named(wrong(|plan| AdamwBlueprint { walk: AdamwWalk::Flat, ..plan }), "blueprint")?;
    named(wrong(|plan| AdamwBlueprint { vector_size: 5, ..plan }), "blueprint")?;
    named(wrong(|plan| AdamwBlueprint { cubes: 0, ..plan }), "blueprint")?;
    named(wrong(|plan| AdamwBlueprint { cubes: u32::MAX, ..plan }), "blueprint")
}
