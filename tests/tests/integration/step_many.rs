//! Steps of several parameters in few launches, against each parameter's own launch and against f64.

use crate::{
    adamw::{chance, gate, told},
    gelu::{dtype, upload},
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Chance, Gate, Update},
};
use blackburn_reference::{adamw::Rounding, random::normal, storage::Storage};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};
use std::fmt::Debug;

/// An optimizer's kernel.
pub(crate) trait Kind: 'static {
    const NAME: &'static str;
    /// A step's numbers.
    type Step: Copy;
    /// A parameter and what belongs to it.
    type Tensors: Clone;
    /// What a parameter's element is made of.
    type Element: PartialEq + Copy + Debug;

    /// Numbers that are no other parameter's.
    fn numbers(place: usize) -> Self::Step;
    /// Those of the step after it.
    fn later(step: Self::Step) -> Self::Step;
    /// Others, by which the result is another.
    fn others(step: Self::Step) -> Self::Step;
    /// Those of a step before the first, which are refused for their `time`.
    fn too_early(step: Self::Step) -> Self::Step;

    fn start(client: &Client, length: usize, stored: Storage, gradient: Buffer) -> Self::Tensors;
    fn elements(
        client: &Client,
        tensors: &Self::Tensors,
        stored: Storage,
    ) -> Result<Vec<Self::Element>, Failed>;
    fn parameter(tensors: &Self::Tensors) -> &Rows;
    fn gradient(tensors: &mut Self::Tensors) -> &mut Rows;

    fn one(
        client: &Client,
        step: &Self::Step,
        tensors: Self::Tensors,
        gate: Option<Gate>,
        chance: Option<Chance>,
    ) -> Result<Self::Tensors, KernelError>;
    fn many(
        client: &Client,
        updates: Vec<UpdateOf<Self>>,
        gate: Option<Gate>,
        seed: Option<Buffer>,
    ) -> Result<Vec<Self::Tensors>, KernelError>;

    /// Whether a step from `old` to `new` is the reference's, of which `skipped` ones before it do not
    /// count if it is gated.
    fn check(
        step: Self::Step,
        skipped: Option<usize>,
        elements: [&[Self::Element]; 2],
        gradient: &[f64],
        stored: Storage,
        rounding: Rounding,
    ) -> Result<(), Failed>;
}

pub(crate) type UpdateOf<K> = Update<<K as Kind>::Step, <K as Kind>::Tensors>;

/// Of one cube and many, with and without vectors, none at all, and more than one launch takes.
const LENGTHS: [usize; 23] = [
    1, 768, 3, 70_004, 0, 1024, 1027, 4, 30_000, 256, 256, 40_001, 768, 2, 12, 1028, 5000, 768,
    768, 8192, 1, 96, 100_000,
];

pub(crate) fn trials<K: Kind>() -> Vec<Trial> {
    let mut trials = Vec::new();
    for stored in Storage::ALL {
        let name = |what: &str| format!("{}::{what}_in_{stored:?}", K::NAME).to_lowercase();
        let all = [Asked::Open, Asked::Gated, Asked::ByChance];
        trials.push(Trial::ignorable_test(name("many_are_stepped_as_one_by_one"), move || {
            on_device_with(dtype(stored), |client| {
                all.into_iter().try_for_each(|asked| {
                    as_one_by_one::<K>(client, stored, asked)
                        .map_err(|error| told(&format!("{asked:?}"), error))
                })
            })
        }));
        trials.push(Trial::ignorable_test(name("steps_of_many_are_within_bounds"), move || {
            on_device_with(dtype(stored), |client| {
                all.into_iter().try_for_each(|asked| {
                    within_bounds::<K>(client, stored, asked)
                        .map_err(|error| told(&format!("{asked:?}"), error))
                })
            })
        }));
    }
    let tests: [(&str, Test); 4] = [
        ("many_of_several_types_go_together", types::<K>),
        ("a_closed_gate_keeps_every_bit_of_many", closed_gate::<K>),
        ("what_others_hold_of_many_stays", held::<K>),
        ("a_bad_one_of_many_is_named", bad_one::<K>),
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

fn update<K: Kind>(
    client: &Client,
    place: usize,
    length: usize,
    [stored, of_gradient]: [Storage; 2],
) -> UpdateOf<K> {
    let gradient = upload(client, &gradient_of(place, length, of_gradient), of_gradient);
    let tensors = K::start(client, length, stored, gradient);
    Update { step: K::numbers(place), tensors, draw: place as u32 }
}

/// One of each length, of the types at its place.
fn updates<K: Kind>(
    client: &Client,
    lengths: &[usize],
    types: impl Fn(usize) -> [Storage; 2],
) -> Vec<UpdateOf<K>> {
    let of = |(place, length): (usize, &usize)| update::<K>(client, place, *length, types(place));
    lengths.iter().enumerate().map(of).collect()
}

/// Two steps of all: the second one goes on from states that are not zero.
fn stepped<K: Kind>(
    client: &Client,
    mut updates: Vec<UpdateOf<K>>,
    step: impl Fn(Vec<UpdateOf<K>>) -> Result<Vec<K::Tensors>, KernelError>,
    stored: impl Fn(usize) -> Storage,
) -> Result<Vec<Vec<K::Element>>, Failed> {
    for _ in 0..2 {
        let numbers: Vec<_> =
            updates.iter().map(|update| (K::later(update.step), update.draw)).collect();
        let next = step(updates)?.into_iter().zip(numbers);
        updates = next.map(|(tensors, (step, draw))| Update { step, tensors, draw }).collect();
    }
    let all = updates.iter().enumerate();
    all.map(|(place, update)| K::elements(client, &update.tensors, stored(place))).collect()
}

fn one_by_one<K: Kind>(
    client: &Client,
    updates: Vec<UpdateOf<K>>,
    asked: Asked,
) -> Result<Vec<K::Tensors>, KernelError> {
    let one = |Update { step, tensors, draw }: UpdateOf<K>| {
        K::one(client, &step, tensors, asked.gate(client), asked.chance(client, draw))
    };
    updates.into_iter().map(one).collect()
}

fn together<K: Kind>(
    client: &Client,
    updates: Vec<UpdateOf<K>>,
    asked: Asked,
) -> Result<Vec<K::Tensors>, KernelError> {
    let seed = asked.chance(client, 0).map(|chance| chance.seed);
    K::many(client, updates, asked.gate(client), seed)
}

fn same<E: PartialEq>(found: &[Vec<E>], expected: &[Vec<E>]) -> Result<(), Failed> {
    if found.len() != expected.len() {
        return Err(format!("{} parameters of {}", found.len(), expected.len()).into());
    }
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    differs.map_or(Ok(()), |place| {
        Err(format!("parameter {place}, of {} elements, differs", expected[place].len()).into())
    })
}

fn as_one_by_one<K: Kind>(client: &Client, stored: Storage, asked: Asked) -> Result<(), Failed> {
    let updates = || updates::<K>(client, &LENGTHS, |_| [stored; 2]);
    let run = |updates| {
        let step = |updates| together::<K>(client, updates, asked);
        stepped::<K>(client, updates, step, |_| stored)
    };
    let alone = |updates| one_by_one::<K>(client, updates, asked);
    let expected = stepped::<K>(client, updates(), alone, |_| stored)?;
    same(&run(updates())?, &expected)?;
    // The numbers of one are not those of another.
    let mut wrong = updates();
    wrong[3].step = K::others(wrong[3].step);
    match same(&run(wrong)?, &expected) {
        Err(_) => Ok(()),
        Ok(()) => Err("other numbers of one parameter were not seen".into()),
    }
}

fn within_bounds<K: Kind>(client: &Client, stored: Storage, asked: Asked) -> Result<(), Failed> {
    let updates = updates::<K>(client, &LENGTHS, |_| [stored; 2]);
    let elements = |tensors: &K::Tensors| K::elements(client, tensors, stored);
    let old: Result<Vec<_>, _> = updates.iter().map(|update| elements(&update.tensors)).collect();
    let steps: Vec<_> = updates.iter().map(|update| update.step).collect();
    let new = together::<K>(client, updates, asked)?;
    let skipped = (asked == Asked::Gated).then_some(SKIPPED);
    let rounding = match asked {
        Asked::ByChance => Rounding::Chance,
        _ => Rounding::Nearest,
    };
    for (place, ((step, old), new)) in steps.into_iter().zip(old?).zip(new).enumerate() {
        let gradient = gradient_of(place, LENGTHS[place], stored);
        let new = elements(&new)?;
        K::check(step, skipped, [&old, &new], &gradient, stored, rounding)
            .map_err(|error| told(&format!("parameter {place}"), error))?;
    }
    Ok(())
}

/// Those of each type take a launch, and results come in the order of what was given.
fn types<K: Kind>(client: &Client) -> Result<(), Failed> {
    let kinds =
        [[Storage::F32, Storage::F32], [Storage::F16, Storage::F16], [Storage::F32, Storage::F16]];
    let of_type = |place: usize| kinds[place % kinds.len()];
    let updates = || updates::<K>(client, &LENGTHS, of_type);
    let stored = |place| of_type(place)[0];
    let asked = Asked::ByChance;
    let alone = |updates| one_by_one::<K>(client, updates, asked);
    let expected = stepped::<K>(client, updates(), alone, stored)?;
    let many = |updates| together::<K>(client, updates, asked);
    same(&stepped::<K>(client, updates(), many, stored)?, &expected)
}

fn all_elements<K: Kind>(
    client: &Client,
    tensors: &[K::Tensors],
) -> Result<Vec<Vec<K::Element>>, Failed> {
    tensors.iter().map(|tensors| K::elements(client, tensors, Storage::F32)).collect()
}

fn closed_gate<K: Kind>(client: &Client) -> Result<(), Failed> {
    let mut updates = updates::<K>(client, &[1027, 5000, 3], |_| [Storage::F32; 2]);
    for update in &mut updates {
        let gradient = K::gradient(&mut update.tensors);
        let numbers = vec![f64::NAN; gradient.elements()];
        *gradient = upload(client, &numbers, Storage::F32).into();
    }
    let tensors: Vec<_> = updates.iter().map(|update| update.tensors.clone()).collect();
    let old = all_elements::<K>(client, &tensors)?;
    drop(tensors);
    let new = K::many(client, updates, Some(gate(client, 0.0, 1.0)), None)?;
    same(&all_elements::<K>(client, &new)?, &old)
}

fn place_of(rows: &Rows) -> impl PartialEq + use<> {
    rows.buffer.handle.memory.descriptor().id
}

/// One of several tensors is held by somebody: it stays as it is, and its result and those of the others are
/// what they are otherwise. The others stay where they are.
fn held<K: Kind>(client: &Client) -> Result<(), Failed> {
    const HELD: usize = 2;
    let updates = || updates::<K>(client, &LENGTHS[..6], |_| [Storage::F32; 2]);
    let expected = all_elements::<K>(client, &K::many(client, updates(), None, None)?)?;
    let updates = updates();
    let kept = updates[HELD].tensors.clone();
    let before = K::elements(client, &kept, Storage::F32)?;
    let parameters = updates.iter().map(|update| K::parameter(&update.tensors));
    let places: Vec<_> = parameters.map(place_of).collect();
    let new = K::many(client, updates, None, None)?;
    same(&all_elements::<K>(client, &new)?, &expected)?;
    if K::elements(client, &kept, Storage::F32)? != before {
        return Err("what was held was overwritten".into());
    }
    for (place, (new, before)) in new.iter().zip(places).enumerate() {
        if (place_of(K::parameter(new)) == before) == (place == HELD) {
            return Err(format!("parameter {place} went to other memory, or did not").into());
        }
    }
    Ok(())
}

fn bad_one<K: Kind>(client: &Client) -> Result<(), Failed> {
    let updates = || updates::<K>(client, &[12; 3], |_| [Storage::F32; 2]);
    let named =
        |updates, seed: Option<Buffer>, name: &str| match K::many(client, updates, None, seed) {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
            Err(other) => Err(Failed::from(format!("`{name}` was expected, got {other}"))),
            Ok(_) => Err(Failed::from(format!("a bad `{name}` was taken"))),
        };
    let mut late = updates();
    late[2].step = K::too_early(late[2].step);
    named(late, None, "time")?;
    let mut short = updates();
    K::gradient(&mut short[1].tensors).buffer.elements -= 1;
    named(short, None, "gradient")?;
    let Chance { mut seed, .. } = chance(client, [1, 2], 0);
    seed.elements = 1;
    named(updates(), Some(seed), "seed")
}
