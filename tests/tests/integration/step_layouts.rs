//! Rows that lie apart, and blueprints other than the planned one, of any optimizer's kernel.

use crate::step_kind::{Kind, Numbers, chance, gate, numbers, spread, told};
use blackburn_kernels::{
    KernelError,
    buffer::Rows,
    step::{Blueprint, Problem, Tuning, Walk},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials<K: Kind<N>, const N: usize>() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("{}::{what}_in_{storage:?}", K::NAME).to_lowercase();
        trials.push(Trial::ignorable_test(
            name("rows_that_lie_apart_are_stepped_as_those_that_do_not"),
            move || on_device_with(dtype(storage), |client| apart::<K, N>(client, storage)),
        ));
        trials
            .push(Trial::ignorable_test(name("every_blueprint_gives_the_same_bits"), move || {
                on_device_with(dtype(storage), |client| blueprints::<K, N>(client, storage))
            }));
    }
    let name = |what: &str| format!("{}::{what}", K::NAME);
    trials.push(Trial::ignorable_test(name("walks_are_planned_by_what_they_allow"), || {
        on_device(planned_walks::<K, N>)
    }));
    trials.push(Trial::ignorable_test(name("layouts_that_do_not_go_together_are_named"), || {
        on_device(refusals::<K, N>)
    }));
    trials
}

/// Rows and columns, and pitches of parameter, gradient and states, of which an optimizer has two at most.
/// Where a pitch is that of contiguous rows, they are. Where the elements make whole vectors, and the rows do
/// not, the gradient is gathered.
const LAYOUTS: [([usize; 2], [usize; 4]); 11] = [
    ([37, 12], [16, 16, 16, 16]),
    ([37, 12], [12, 20, 12, 12]),
    ([37, 13], [13, 16, 13, 13]),
    ([36, 13], [13, 16, 13, 13]),
    ([36, 14], [14, 16, 14, 14]),
    ([37, 13], [16, 24, 16, 32]),
    ([37, 13], [14, 16, 16, 16]),
    ([37, 13], [16, 13, 16, 13]),
    ([37, 3], [3, 8, 3, 3]),
    ([37, 1], [4, 4, 4, 4]),
    ([37, 1031], [1032, 1040, 1032, 1032]),
];

fn first<const N: usize>(pitches: [usize; 4]) -> [usize; N] {
    std::array::from_fn(|which| pitches[which])
}

/// The numbers of contiguous `tensors`, in rows that lie as far apart.
fn laid_out<K: Kind<N>, const N: usize>(
    client: &Client,
    tensors: &K::Tensors,
    stored: Storage,
    [rows, columns]: [usize; 2],
    pitches: [usize; N],
) -> Result<K::Tensors, Failed> {
    let mut all: [Rows; N] = tensors.clone().into();
    for (which, (flat, pitch)) in all.iter_mut().zip(pitches).enumerate() {
        let storage = if which < 2 { stored } else { Storage::F32 };
        let values = download(client, flat.buffer.clone(), storage)?;
        *flat = spread(client, &values, storage, [rows, columns, pitch]);
    }
    Ok(all.into())
}

/// Rows that lie apart, in place and not, gated and rounded by chance and not, against the same numbers
/// without anything between them: to the bit, and laid out as before. And through a closed gate.
fn apart<K: Kind<N>, const N: usize>(client: &Client, stored: Storage) -> Result<(), Failed> {
    for ([rows, columns], pitches) in LAYOUTS {
        let pitches = first::<N>(pitches);
        for is_held in [false, true] {
            let is_gated = is_held;
            let length = rows * columns;
            let gradient = normal(7, length, 0.5, stored);
            let flat = (K::START)(client, length, stored, upload(client, &gradient, stored));
            let old = numbers::<K, N>(client, &flat, stored)?;
            let tensors = laid_out::<K, N>(client, &flat, stored, [rows, columns], pitches)?;
            let held = is_held.then(|| tensors.clone());
            let step = |tensors, time| {
                let gate = is_gated.then(|| gate(client, 1.0, 0.0));
                let chance = is_gated.then(|| chance(client, [3, 5], 7));
                let mut step = K::numbers(if is_gated { 3 } else { 2 });
                *K::time(&mut step) = time;
                (K::ONE)(client, &step, tensors, gate, chance)
            };
            // The second one goes on from states that are not zero.
            let expected = step(step(flat, 1)?, 2)?;
            let new = step(step(tensors, 1)?, 2)?;
            let what = format!("{rows} by {columns} in {pitches:?}, held: {is_held}");
            let results = |tensors: &K::Tensors| numbers::<K, N>(client, tensors, stored);
            if results(&new)? != results(&expected)? {
                return Err(format!("{what}: other results than from contiguous rows").into());
            }
            let Some(held) = held else {
                let found = new.into().map(|rows| rows.pitch);
                if found != pitches {
                    return Err(format!("{what}: {found:?}").into());
                }
                continue;
            };
            if results(&held)? != old {
                return Err(format!("{what}: memory that others hold was written to").into());
            }
            let mut bad = held.clone().into();
            let nothing = vec![f64::NAN; length];
            bad[1] = spread(client, &nothing, stored, [rows, columns, pitches[1]]);
            let gate = Some(gate(client, 0.0, 0.0));
            let closed = (K::ONE)(client, &K::STEP, bad.into(), gate, None)?;
            if results(&closed)? != old {
                return Err(format!("{what}: a step that is not taken moved something").into());
            }
        }
    }
    Ok(())
}

/// The whole grid, more than it and less, with all that a plan may choose.
fn blueprints<K: Kind<N>, const N: usize>(client: &Client, stored: Storage) -> Result<(), Failed> {
    for length in [8, 1000, 1024, 70_008] {
        let gradient = normal(7, length, 0.5, stored);
        let run = |tuning: Option<Tuning>| -> Result<Numbers, Failed> {
            let tensors = (K::START)(client, length, stored, upload(client, &gradient, stored));
            let plan = |problem: &Problem<N>, client: &Client| match tuning {
                Some(tuning) => Blueprint::tuned(problem, client, tuning),
                None => Blueprint::plan(problem, client),
            };
            let chance = Some(chance(client, [3, 5], 7));
            let new = K::by(client, &K::STEP, tensors, chance, &plan)?;
            numbers::<K, N>(client, &new, stored)
        };
        let planned = run(None)?;
        for widest in [1, 2, 4, 8] {
            for cubes_a_multiprocessor in [1, 2, 8, 16] {
                let tuning = Tuning { widest, cubes_a_multiprocessor };
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

fn planned_walks<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let plan = |columns: usize, pitches: [usize; N]| -> Result<(Walk, usize), Failed> {
        let rows =
            |pitch| spread(client, &vec![0.0; 2 * columns], Storage::F32, [2, columns, pitch]);
        let blueprint = Blueprint::plan(&(K::PROBLEM)(&pitches.map(rows).into())?, client);
        Ok((blueprint.walk, blueprint.vector_size))
    };
    // What every device of today loads at once.
    for (columns, pitches, expected) in [
        (12, [12; 4], (Walk::Flat, 4)),
        (12, [12, 16, 12, 12], (Walk::Rows, 4)),
        (13, [16, 32, 16, 16], (Walk::Rows, 4)),
        (14, [14, 16, 14, 14], (Walk::Gathered, 4)),
        (13, [13, 16, 16, 13], (Walk::Rows, 1)),
    ] {
        let pitches = first::<N>(pitches);
        let found = plan(columns, pitches)?;
        if found != expected {
            let what = format!("{columns} columns by {pitches:?}");
            return Err(format!("{what}: {found:?}, not {expected:?}").into());
        }
    }
    Ok(())
}

fn refusals<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let values = vec![0.0; 24];
    let tensors = || -> [Rows; N] {
        let flat = upload(client, &values, Storage::F32);
        let mut all = (K::START)(client, 24, Storage::F32, flat).into();
        all[1] = spread(client, &values, Storage::F32, [2, 12, 16]);
        all
    };
    let named = |result: Result<K::Tensors, KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        Err(other) => Err(Failed::from(format!("`{name}` was expected to be named, got {other}"))),
        Ok(_) => Err(Failed::from(format!("a bad `{name}` was taken"))),
    };
    let step = |tensors: [Rows; N]| (K::ONE)(client, &K::STEP, tensors.into(), None, None);
    let mut other = tensors();
    other[2] = spread(client, &values, Storage::F32, [4, 6, 8]);
    named(step(other), K::NAMES[2])?;
    let mut beyond = tensors();
    beyond[1].buffer.elements -= 1;
    named(step(beyond), "gradient")?;
    let wrong = |change: fn(Blueprint) -> Blueprint| {
        let plan = |problem: &Problem<N>, client: &Client| change(Blueprint::plan(problem, client));
        K::by(client, &K::STEP, tensors().into(), None, &plan)
    };
    named(wrong(|plan| Blueprint { walk: Walk::Flat, ..plan }), "blueprint")?;
    named(wrong(|plan| Blueprint { vector_size: 5, ..plan }), "blueprint")?;
    named(wrong(|plan| Blueprint { cubes: 0, ..plan }), "blueprint")?;
    named(wrong(|plan| Blueprint { cubes: u32::MAX, ..plan }), "blueprint")
}
