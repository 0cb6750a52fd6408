//! Steps of several parameters in few launches, against each parameter's own launch and against f64.

use crate::step_kind::{Kind, Numbers, UpdateOf, chance, gate, numbers, place_of, told};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Chance, Gate, Update},
};
use blackburn_reference::{adamw::Rounding, random::normal, storage::Storage};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Of one cube and many, with and without vectors, none at all, and more than one launch takes.
const LENGTHS: [usize; 23] = [
    1, 768, 3, 70_004, 0, 1024, 1027, 4, 30_000, 256, 256, 40_001, 768, 2, 12, 1028, 5000, 768,
    768, 8192, 1, 96, 100_000,
];

pub(crate) fn trials<K: Kind<N>, const N: usize>() -> Vec<Trial> {
    let mut trials = Vec::new();
    for stored in Storage::ALL {
        let name = |what: &str| format!("{}::{what}_in_{stored:?}", K::NAME).to_lowercase();
        let all = [Asked::Open, Asked::Gated, Asked::ByChance];
        trials.push(Trial::ignorable_test(name("many_are_stepped_as_one_by_one"), move || {
            on_device_with(dtype(stored), |client| {
                all.into_iter().try_for_each(|asked| {
                    as_one_by_one::<K, N>(client, stored, asked)
                        .map_err(|error| told(&format!("{asked:?}"), error))
                })
            })
        }));
        trials.push(Trial::ignorable_test(name("steps_of_many_are_within_bounds"), move || {
            on_device_with(dtype(stored), |client| {
                all.into_iter().try_for_each(|asked| {
                    within_bounds::<K, N>(client, stored, asked)
                        .map_err(|error| told(&format!("{asked:?}"), error))
                })
            })
        }));
    }
    let tests: [(&str, Test); 4] = [
        ("many_of_several_types_go_together", types::<K, N>),
        ("a_closed_gate_keeps_every_bit_of_many", closed_gate::<K, N>),
        ("what_others_hold_of_many_stays", held::<K, N>),
        ("a_bad_one_of_many_is_named", bad_one::<K, N>),
    ];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(format!("{}::{name}", K::NAME), move || on_device(test))
    }));
    trials
}

type Test = fn(&Client) -> Result<(), Failed>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Asked {
    Open,
    Gated,
    ByChance,
}

/// Steps that a gate has taken back.
const SKIPPED: usize = 2;

impl Asked {
    fn gate(self, client: &Client) -> Option<Gate> {
        (self == Self::Gated).then(|| gate(client, 1.0, SKIPPED as f64))
    }

    fn chance(self, client: &Client, draw: u32) -> Option<Chance> {
        (self == Self::ByChance).then(|| chance(client, [3, 5], draw))
    }
}

fn gradient_of(place: usize, length: usize, storage: Storage) -> Vec<f64> {
    normal((1000 + place) as u64, length, 0.5, storage)
}

fn update<K: Kind<N>, const N: usize>(
    client: &Client,
    place: usize,
    length: usize,
    [stored, of_gradient]: [Storage; 2],
) -> UpdateOf<K, N> {
    let gradient = upload(client, &gradient_of(place, length, of_gradient), of_gradient);
    let tensors = (K::START)(client, length, stored, gradient);
    Update { step: K::numbers(place), tensors, draw: place as u32, copy: None }
}

/// One of each length, of the types at its place.
fn updates<K: Kind<N>, const N: usize>(
    client: &Client,
    lengths: &[usize],
    types: impl Fn(usize) -> [Storage; 2],
) -> Vec<UpdateOf<K, N>> {
    let of =
        |(place, length): (usize, &usize)| update::<K, N>(client, place, *length, types(place));
    lengths.iter().enumerate().map(of).collect()
}

/// Two steps of all: the second one goes on from states that are not zero.
fn stepped<K: Kind<N>, const N: usize>(
    client: &Client,
    mut updates: Vec<UpdateOf<K, N>>,
    step: impl Fn(Vec<UpdateOf<K, N>>) -> Result<Vec<K::Tensors>, KernelError>,
    stored: impl Fn(usize) -> Storage,
) -> Result<Vec<Numbers>, Failed> {
    for _ in 0..2 {
        let of_next = |update: &UpdateOf<K, N>| {
            let mut step = update.step;
            *K::time(&mut step) += 1;
            (step, update.draw)
        };
        let next: Vec<_> = updates.iter().map(of_next).collect();
        let next = step(updates)?.into_iter().zip(next);
        let update = |(tensors, (step, draw))| Update { step, tensors, draw, copy: None };
        updates = next.map(update).collect();
    }
    let all = updates.iter().enumerate();
    all.map(|(place, update)| numbers::<K, N>(client, &update.tensors, stored(place))).collect()
}

fn one_by_one<K: Kind<N>, const N: usize>(
    client: &Client,
    updates: Vec<UpdateOf<K, N>>,
    asked: Asked,
) -> Result<Vec<K::Tensors>, KernelError> {
    let one = |Update { step, tensors, draw, .. }: UpdateOf<K, N>| {
        (K::ONE)(client, &step, tensors, asked.gate(client), asked.chance(client, draw))
    };
    updates.into_iter().map(one).collect()
}

fn together<K: Kind<N>, const N: usize>(
    client: &Client,
    updates: Vec<UpdateOf<K, N>>,
    asked: Asked,
) -> Result<Vec<K::Tensors>, KernelError> {
    let seed = asked.chance(client, 0).map(|chance| chance.seed);
    (K::MANY)(client, updates, asked.gate(client), seed)
}

fn same(found: &[Numbers], expected: &[Numbers]) -> Result<(), Failed> {
    if found.len() != expected.len() {
        return Err(format!("{} parameters of {}", found.len(), expected.len()).into());
    }
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    differs.map_or(Ok(()), |place| {
        Err(format!("parameter {place}, of {} elements, differs", expected[place][0].len()).into())
    })
}

fn as_one_by_one<K: Kind<N>, const N: usize>(
    client: &Client,
    stored: Storage,
    asked: Asked,
) -> Result<(), Failed> {
    let updates = || updates::<K, N>(client, &LENGTHS, |_| [stored; 2]);
    let run = |updates| {
        let step = |updates| together::<K, N>(client, updates, asked);
        stepped::<K, N>(client, updates, step, |_| stored)
    };
    let alone = |updates| one_by_one::<K, N>(client, updates, asked);
    let expected = stepped::<K, N>(client, updates(), alone, |_| stored)?;
    same(&run(updates())?, &expected)?;
    // The numbers of one are not those of another.
    let mut wrong = updates();
    *K::decay(&mut wrong[3].step) += 0.1;
    match same(&run(wrong)?, &expected) {
        Err(_) => Ok(()),
        Ok(()) => Err("another decay of one parameter was not seen".into()),
    }
}

fn within_bounds<K: Kind<N>, const N: usize>(
    client: &Client,
    stored: Storage,
    asked: Asked,
) -> Result<(), Failed> {
    let updates = updates::<K, N>(client, &LENGTHS, |_| [stored; 2]);
    let results = |tensors: &K::Tensors| numbers::<K, N>(client, tensors, stored);
    let old: Result<Vec<_>, _> = updates.iter().map(|update| results(&update.tensors)).collect();
    let steps: Vec<_> = updates.iter().map(|update| update.step).collect();
    let new = together::<K, N>(client, updates, asked)?;
    let skipped = (asked == Asked::Gated).then_some(SKIPPED);
    let rounding = match asked {
        Asked::ByChance => Rounding::Chance,
        _ => Rounding::Nearest,
    };
    for (place, ((step, old), new)) in steps.into_iter().zip(old?).zip(new).enumerate() {
        let gradient = gradient_of(place, LENGTHS[place], stored);
        let new = results(&new)?;
        K::check(step, skipped, [&old, &new], &gradient, stored, rounding)
            .map_err(|error| told(&format!("parameter {place}"), error))?;
    }
    Ok(())
}

/// Those of each type take a launch, and results come in the order of what was given.
fn types<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let kinds =
        [[Storage::F32, Storage::F32], [Storage::F16, Storage::F16], [Storage::F32, Storage::F16]];
    let of_type = |place: usize| kinds[place % kinds.len()];
    let updates = || updates::<K, N>(client, &LENGTHS, of_type);
    let stored = |place| of_type(place)[0];
    let asked = Asked::ByChance;
    let alone = |updates| one_by_one::<K, N>(client, updates, asked);
    let expected = stepped::<K, N>(client, updates(), alone, stored)?;
    let many = |updates| together::<K, N>(client, updates, asked);
    same(&stepped::<K, N>(client, updates(), many, stored)?, &expected)
}

fn all_numbers<K: Kind<N>, const N: usize>(
    client: &Client,
    tensors: &[K::Tensors],
) -> Result<Vec<Numbers>, Failed> {
    tensors.iter().map(|tensors| numbers::<K, N>(client, tensors, Storage::F32)).collect()
}

/// In place, where parameters are held, and where all is.
fn closed_gate<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    for kept in [0, 1, N] {
        let mut updates = updates::<K, N>(client, &[1027, 5000, 3], |_| [Storage::F32; 2]);
        for update in &mut updates {
            let mut tensors = update.tensors.clone().into();
            let nothing = vec![f64::NAN; tensors[1].elements()];
            tensors[1] = upload(client, &nothing, Storage::F32).into();
            update.tensors = tensors.into();
        }
        let tensors: Vec<_> = updates.iter().map(|update| update.tensors.clone()).collect();
        let old = all_numbers::<K, N>(client, &tensors)?;
        let mut held: Vec<Rows> = Vec::new();
        for tensors in tensors {
            held.extend(tensors.into().into_iter().take(kept));
        }
        let new = (K::MANY)(client, updates, Some(gate(client, 0.0, 1.0)), None)?;
        same(&all_numbers::<K, N>(client, &new)?, &old)
            .map_err(|error| told(&format!("{kept} tensors of each held"), error))?;
        drop(held);
    }
    Ok(())
}

fn place_of_parameter<K: Kind<N>, const N: usize>(
    tensors: &K::Tensors,
) -> impl PartialEq + use<K, N> {
    place_of(&tensors.clone().into()[0])
}

/// Some of several parameters are held by somebody, one of them with its states: they stay as they are, and
/// their results and those of the others are what they are otherwise. The others stay where they are.
fn held<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    const ALL_OF: usize = 2;
    let is_held = |which: usize| !which.is_multiple_of(3);
    let updates = || updates::<K, N>(client, &LENGTHS[5..], |_| [Storage::F32; 2]);
    let expected = all_numbers::<K, N>(client, &(K::MANY)(client, updates(), None, None)?)?;
    let updates = updates();
    let kept_states = updates[ALL_OF].tensors.clone();
    let states_before = numbers::<K, N>(client, &kept_states, Storage::F32)?;
    let parameter = |tensors: &K::Tensors| tensors.clone().into()[0].clone();
    let read = |parameter: &Rows| download(client, parameter.buffer.clone(), Storage::F32);
    let mut kept = Vec::new();
    for (which, update) in updates.iter().enumerate().filter(|(which, _)| is_held(*which)) {
        let parameter = parameter(&update.tensors);
        kept.push((which, read(&parameter)?, parameter));
    }
    let place = |tensors: &K::Tensors| place_of_parameter::<K, N>(tensors);
    let places: Vec<_> = updates.iter().map(|update| place(&update.tensors)).collect();
    let new = (K::MANY)(client, updates, None, None)?;
    same(&all_numbers::<K, N>(client, &new)?, &expected)?;
    if numbers::<K, N>(client, &kept_states, Storage::F32)? != states_before {
        return Err("states that were held were overwritten".into());
    }
    for (which, before, parameter) in &kept {
        if read(parameter)? != *before {
            return Err(format!("parameter {which} was held, and was overwritten").into());
        }
    }
    for (which, (new, before)) in new.iter().zip(places).enumerate() {
        if (place(new) == before) == is_held(which) {
            return Err(format!("parameter {which} went to other memory, or did not").into());
        }
    }
    Ok(())
}

fn bad_one<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let updates = || updates::<K, N>(client, &[12; 3], |_| [Storage::F32; 2]);
    let named =
        |updates, seed: Option<Buffer>, name: &str| match (K::MANY)(client, updates, None, seed) {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
            Err(other) => Err(Failed::from(format!("`{name}` was expected, got {other}"))),
            Ok(_) => Err(Failed::from(format!("a bad `{name}` was taken"))),
        };
    let mut late = updates();
    *K::time(&mut late[2].step) = 0;
    named(late, None, "time")?;
    let mut short = updates();
    let mut tensors = short[1].tensors.clone().into();
    tensors[1].buffer.elements -= 1;
    short[1].tensors = tensors.into();
    named(short, None, "gradient")?;
    let Chance { mut seed, .. } = chance(client, [1, 2], 0);
    seed.elements = 1;
    named(updates(), Some(seed), "seed")
}
