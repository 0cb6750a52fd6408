//! Steps of several parameters in few launches, against each parameter's own launch.

use super::{STEP, chance, elements, gate, start, told};
use crate::gelu::{dtype, upload};
use blackburn_kernels::{
    KernelError,
    adamw::{AdamwStep, AdamwTensors, AdamwUpdate, Chance, adamw_update, adamw_update_many},
    buffer::{Buffer, Rows},
};
use blackburn_reference::{adamw::Element, random::normal, storage::Storage};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Of one cube and many, with and without vectors, none at all, and more than one launch takes.
const LENGTHS: [usize; 23] = [
    1, 768, 3, 70_004, 0, 1024, 1027, 4, 30_000, 256, 256, 40_001, 768, 2, 12, 1028, 5000, 768,
    768, 8192, 1, 96, 100_000,
];

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for stored in Storage::ALL {
        let name = format!("adamw::many_are_stepped_as_one_by_one_in_{stored:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(stored), |client| {
                [Asked::Open, Asked::Gated, Asked::ByChance].into_iter().try_for_each(|asked| {
                    as_one_by_one(client, stored, asked)
                        .map_err(|error| told(&format!("{asked:?}"), error))
                })
            })
        }));
    }
    trials.extend([
        Trial::ignorable_test("adamw::many_of_several_types_go_together", || on_device(types)),
        Trial::ignorable_test("adamw::a_closed_gate_keeps_every_bit_of_many", || {
            on_device(closed_gate)
        }),
        Trial::ignorable_test("adamw::what_others_hold_of_many_stays", || on_device(held)),
        Trial::ignorable_test("adamw::a_bad_one_of_many_is_named", || on_device(bad_one)),
    ]);
    trials
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Asked {
    Open,
    Gated,
    ByChance,
}

/// What a parameter's gradient is, and its step's numbers, which are no other's.
fn update(client: &Client, place: usize, length: usize, types: [Storage; 2]) -> AdamwUpdate {
    let [stored, of_gradient] = types;
    let gradient = normal((1000 + place) as u64, length, 0.5, of_gradient);
    let step = AdamwStep {
        weight_decay: if place.is_multiple_of(2) { 0.1 } else { 0.0 },
        rate: 1e-2 / (1 + place) as f64,
        time: 1 + place % 5,
        ..STEP
    };
    let tensors = start(client, length, stored, upload(client, &gradient, of_gradient));
    AdamwUpdate { step, tensors, draw: place as u32 }
}

/// Two steps of all: the second one goes on from moments that are not zero.
fn stepped(
    client: &Client,
    mut updates: Vec<AdamwUpdate>,
    step: impl Fn(Vec<AdamwUpdate>) -> Result<Vec<AdamwTensors>, KernelError>,
    stored: impl Fn(usize) -> Storage,
) -> Result<Vec<Vec<Element>>, Failed> {
    for _ in 0..2 {
        let (numbers, tensors): (Vec<_>, Vec<_>) = updates
            .into_iter()
            .map(|AdamwUpdate { step, tensors, draw }| {
                ((step, draw), AdamwUpdate { step, tensors, draw })
            })
            .unzip();
        let next = step(tensors)?.into_iter().zip(numbers);
        updates = next
            .map(|(tensors, (step, draw))| AdamwUpdate {
                step: AdamwStep { time: step.time + 1, ..step },
                tensors,
                draw,
            })
            .collect();
    }
    updates
        .iter()
        .enumerate()
        .map(|(place, update)| elements(client, &update.tensors, stored(place)))
        .collect()
}

fn one_by_one(
    client: &Client,
    updates: Vec<AdamwUpdate>,
    asked: Asked,
) -> Result<Vec<AdamwTensors>, KernelError> {
    let one = |AdamwUpdate { step, tensors, draw }| {
        let gate = (asked == Asked::Gated).then(|| gate(client, 1.0, 2.0));
        let chance = (asked == Asked::ByChance).then(|| chance(client, [3, 5], draw));
        adamw_update(client, &step, tensors, gate, chance)
    };
    updates.into_iter().map(one).collect()
}

fn together(
    client: &Client,
    updates: Vec<AdamwUpdate>,
    asked: Asked,
) -> Result<Vec<AdamwTensors>, KernelError> {
    let gate = (asked == Asked::Gated).then(|| gate(client, 1.0, 2.0));
    let seed = (asked == Asked::ByChance).then(|| chance(client, [3, 5], 0).seed);
    adamw_update_many(client, updates, gate, seed)
}

fn same(found: &[Vec<Element>], expected: &[Vec<Element>]) -> Result<(), Failed> {
    if found.len() != expected.len() {
        return Err(format!("{} parameters of {}", found.len(), expected.len()).into());
    }
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    differs.map_or(Ok(()), |place| {
        Err(format!("parameter {place}, of {} elements, differs", expected[place].len()).into())
    })
}

fn as_one_by_one(client: &Client, stored: Storage, asked: Asked) -> Result<(), Failed> {
    let updates = || -> Vec<AdamwUpdate> {
        let of = |(place, length): (usize, &usize)| update(client, place, *length, [stored; 2]);
        LENGTHS.iter().enumerate().map(of).collect()
    };
    let of_type = |_| stored;
    let expected =
        stepped(client, updates(), |updates| one_by_one(client, updates, asked), of_type)?;
    let found = stepped(client, updates(), |updates| together(client, updates, asked), of_type)?;
    same(&found, &expected)?;
    // The numbers of one are not those of another.
    let mut wrong = updates();
    wrong[3].step.weight_decay += 0.1;
    let wrong = stepped(client, wrong, |updates| together(client, updates, asked), of_type)?;
    match same(&wrong, &expected) {
        Err(_) => Ok(()),
        Ok(()) => Err("another decay of one parameter was not seen".into()),
    }
}

/// Those of each type take a launch, and results come in the order of what was given.
fn types(client: &Client) -> Result<(), Failed> {
    let kinds =
        [[Storage::F32, Storage::F32], [Storage::F16, Storage::F16], [Storage::F32, Storage::F16]];
    let of_type = |place: usize| kinds[place % kinds.len()];
    let updates = || -> Vec<AdamwUpdate> {
        let of = |(place, length): (usize, &usize)| update(client, place, *length, of_type(place));
        LENGTHS.iter().enumerate().map(of).collect()
    };
    let stored = |place| of_type(place)[0];
    let asked = Asked::ByChance;
    let expected =
        stepped(client, updates(), |updates| one_by_one(client, updates, asked), stored)?;
    let found = stepped(client, updates(), |updates| together(client, updates, asked), stored)?;
    same(&found, &expected)
}

fn closed_gate(client: &Client) -> Result<(), Failed> {
    let all = |tensors: &[AdamwTensors]| -> Result<Vec<Vec<Element>>, Failed> {
        tensors.iter().map(|tensors| elements(client, tensors, Storage::F32)).collect()
    };
    let mut updates: Vec<AdamwUpdate> = Vec::new();
    for (place, length) in [1027, 5000, 3].into_iter().enumerate() {
        let mut update = update(client, place, length, [Storage::F32; 2]);
        let gradient = upload(client, &vec![f64::NAN; length], Storage::F32);
        update.tensors.gradient = gradient.into();
        updates.push(update);
    }
    let tensors: Vec<_> = updates.iter().map(|update| update.tensors.clone()).collect();
    let old = all(&tensors)?;
    drop(tensors);
    let gate = gate(client, 0.0, 1.0);
    let new = adamw_update_many(client, updates, Some(gate), None)?;
    same(&all(&new)?, &old)
}

fn place_of(rows: &Rows) -> impl PartialEq + use<> {
    rows.buffer.handle.memory.descriptor().id
}

/// One of several tensors is held by somebody: it stays as it is, and its result and those of the others are
/// what they are otherwise. The others stay where they are.
fn held(client: &Client) -> Result<(), Failed> {
    const HELD: usize = 2;
    let updates = || -> Vec<AdamwUpdate> {
        let of =
            |(place, length): (usize, &usize)| update(client, place, *length, [Storage::F32; 2]);
        LENGTHS[..6].iter().enumerate().map(of).collect()
    };
    let results = |tensors: &[AdamwTensors]| -> Result<Vec<Vec<Element>>, Failed> {
        tensors.iter().map(|tensors| elements(client, tensors, Storage::F32)).collect()
    };
    let expected = results(&adamw_update_many(client, updates(), None, None)?)?;
    let updates = updates();
    let kept = updates[HELD].tensors.clone();
    let before = elements(client, &kept, Storage::F32)?;
    let places: Vec<_> = updates.iter().map(|update| place_of(&update.tensors.parameter)).collect();
    let new = adamw_update_many(client, updates, None, None)?;
    same(&results(&new)?, &expected)?;
    if elements(client, &kept, Storage::F32)? != before {
        return Err("what was held was overwritten".into());
    }
    for (place, (new, before)) in new.iter().zip(places).enumerate() {
        if (place_of(&new.parameter) == before) == (place == HELD) {
            return Err(format!("parameter {place} went to other memory, or did not").into());
        }
    }
    Ok(())
}

fn bad_one(client: &Client) -> Result<(), Failed> {
    let updates = || -> Vec<AdamwUpdate> {
        (0..3).map(|place| update(client, place, 12, [Storage::F32; 2])).collect()
    };
    let named = |result: Result<_, KernelError>, name: &str| match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        Err(other) => Err(Failed::from(format!("`{name}` was expected, got {other}"))),
        Ok(_) => Err(Failed::from(format!("a bad `{name}` was taken"))),
    };
    let many = |updates, seed: Option<Buffer>| adamw_update_many(client, updates, None, seed);
    let mut late = updates();
    late[2].step.time = 0;
    named(many(late, None), "time")?;
    let mut short = updates();
    short[1].tensors.gradient.buffer.elements -= 1;
    named(many(short, None), "gradient")?;
    let Chance { mut seed, .. } = chance(client, [1, 2], 0);
    seed.elements = 1;
    named(many(updates(), Some(seed)), "seed")
}
