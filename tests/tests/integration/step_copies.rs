//! Copies of parameters that a step writes, against the parameters that it leaves.

use crate::step_kind::{Kind, UpdateOf, chance, gate, gathered, kept, spread, told};
use blackburn_kernels::{
    KernelError,
    buffer::Rows,
    step::{Gate, Update},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::buffers::{dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials<K: Kind<N>, const N: usize>() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("{}::{what}_in_{storage:?}", K::NAME).to_lowercase();
        trials.push(Trial::ignorable_test(name("copies_are_what_parameters_become"), move || {
            on_device_with(dtype(storage), |client| copies::<K, N>(client, storage))
        }));
    }
    trials.push(Trial::ignorable_test(format!("{}::a_bad_copy_is_named", K::NAME), || {
        on_device(bad_copies::<K, N>)
    }));
    trials
}

/// Rows and columns, and the pitches of parameter and states, of the gradient, and of the copy: without anything
/// between rows, of one vector and less, with a gradient that is gathered, and where the step cannot write the
/// copy: by rows, and to rows.
const LAYOUTS: [([usize; 2], [usize; 3]); 8] = [
    ([1, 70_008], [70_008; 3]),
    ([1, 3], [3; 3]),
    ([37, 12], [12; 3]),
    ([36, 14], [14, 16, 14]),
    ([37, 12], [16, 16, 12]),
    ([37, 13], [16, 24, 32]),
    ([37, 12], [12, 12, 16]),
    ([1, 1027], [1027; 3]),
];

/// How the steps are asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asked {
    Open,
    /// Through a gate, and rounded by chance.
    Gated,
    Closed,
}

impl Asked {
    fn gate(self, client: &Client) -> Option<Gate> {
        match self {
            Self::Open => None,
            Self::Gated => Some(gate(client, 1.0, 1.0)),
            Self::Closed => Some(gate(client, 0.0, 1.0)),
        }
    }
}

/// Whatever a copy held before, and in whatever type it is.
fn copies<K: Kind<N>, const N: usize>(client: &Client, copied: Storage) -> Result<(), Failed> {
    for asked in [Asked::Open, Asked::Gated, Asked::Closed] {
        // A copy is of what the parameter's type holds, and not of what was rounded to it.
        let narrow = if copied == Storage::F32 { Storage::F16 } else { copied };
        for stored in [Storage::F32, narrow] {
            for is_held in [false, true] {
                steps::<K, N>(client, asked, [stored, copied], is_held).map_err(|error| {
                    told(&format!("{asked:?}, {stored:?}, held: {is_held}"), error)
                })?;
            }
        }
    }
    Ok(())
}

/// The parameter's rows before a step.
fn parameter<K: Kind<N>, const N: usize>(tensors: &K::Tensors) -> Option<Rows> {
    kept::<K, N>(tensors).next()
}

/// The step of each layout with a copy of its own, all together, against the same without copies.
fn steps<K: Kind<N>, const N: usize>(
    client: &Client,
    asked: Asked,
    [stored, copied]: [Storage; 2],
    is_held: bool,
) -> Result<(), Failed> {
    let seed = (asked == Asked::Gated).then(|| chance(client, [3, 5], 0).seed);
    let run = |updates| (K::MANY)(client, updates, asked.gate(client), seed.clone());
    let expected = run(updates::<K, N>(client, stored, None)?)?;
    let updates = updates::<K, N>(client, stored, Some(copied))?;
    let copies: Vec<_> = updates.iter().filter_map(|update| update.copy.clone()).collect();
    let holder: Vec<_> = updates.iter().filter(|_| is_held).map(|it| it.tensors.clone()).collect();
    let new = run(updates)?;
    drop(holder);
    for (((new, expected), copy), layout) in new.iter().zip(&expected).zip(&copies).zip(LAYOUTS) {
        for (place, (new, expected)) in kept::<K, N>(new).zip(kept::<K, N>(expected)).enumerate() {
            let storage = if place == 0 { stored } else { Storage::F32 };
            let [new, expected] = [new, expected].map(|rows| gathered(client, &rows, storage));
            if new? != expected? {
                return Err(format!("{layout:?}: a copy changes what is stepped").into());
            }
        }
        let parameter = parameter::<K, N>(new).ok_or("no parameter")?;
        let rounded = gathered(client, &parameter, stored)?.into_iter().map(|x| copied.round(x));
        if gathered(client, copy, copied)? != rounded.collect::<Vec<_>>() {
            return Err(format!("{layout:?}: the copy is not the parameter").into());
        }
    }
    Ok(())
}

/// An update for each layout, with a copy of other numbers.
fn updates<K: Kind<N>, const N: usize>(
    client: &Client,
    stored: Storage,
    copied: Option<Storage>,
) -> Result<Vec<UpdateOf<K, N>>, Failed> {
    let update = |(place, layout): (usize, ([usize; 2], [usize; 3]))| {
        let ([rows, columns], [pitch, of_gradient, of_copy]) = layout;
        let length = rows * columns;
        let gradient = normal(1000 + place as u64, length, 0.5, stored);
        let flat = (K::START)(client, length, stored, upload(client, &gradient, stored));
        let mut tensors: [Rows; N] = flat.into();
        for (which, rows_of) in tensors.iter_mut().enumerate() {
            let storage = if which < 2 { stored } else { Storage::F32 };
            let values = gathered(client, rows_of, storage)?;
            let pitch = if which == 1 { of_gradient } else { pitch };
            *rows_of = spread(client, &values, storage, [rows, columns, pitch]);
        }
        let copy = copied
            .map(|copied| spread(client, &vec![-7.0; length], copied, [rows, columns, of_copy]));
        let draw = place as u32;
        Ok(Update { step: K::numbers(place), tensors: tensors.into(), draw, copy })
    };
    LAYOUTS.into_iter().enumerate().map(update).collect()
}

fn bad_copies<K: Kind<N>, const N: usize>(client: &Client) -> Result<(), Failed> {
    let named = |change: fn(&mut Rows)| {
        let mut updates = updates::<K, N>(client, Storage::F32, Some(Storage::F32))?;
        updates.iter_mut().filter_map(|update| update.copy.as_mut()).for_each(change);
        match (K::MANY)(client, updates, None, None) {
            Err(KernelError::InvalidProblem { argument: "copy", .. }) => Ok(()),
            Err(other) => Err(Failed::from(format!("`copy` was expected, got {other}"))),
            Ok(_) => Err(Failed::from("a bad copy was taken")),
        }
    };
    named(|copy| copy.columns -= 1)?;
    named(|copy| copy.buffer.elements -= 1)?;
    named(|copy| copy.buffer.dtype = cubecl::ir::ElemType::UInt(cubecl::ir::UIntKind::U32))
}
