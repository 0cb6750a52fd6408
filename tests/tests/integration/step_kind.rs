//! What the tests of optimizers' kernels share: one as they ask for it, and what it is given.

use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Blueprint, Chance, Gate, Problem, Update},
};
use blackburn_reference::{adamw::Rounding, storage::Storage};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::on_device_with;
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};
use libtest_mimic::{Completion, Failed};

/// An optimizer's kernel, whose step takes N tensors: parameter, gradient, and states in f32.
pub(crate) trait Kind<const N: usize>: 'static {
    const NAME: &'static str;
    /// What its tensors are called.
    const NAMES: [&'static str; N];
    /// A step's numbers.
    type Step: Copy;
    /// The tensors as the kernel takes them.
    type Tensors: Clone + From<[Rows; N]> + Into<[Rows; N]>;
    /// Any step that decays.
    const STEP: Self::Step;

    /// Numbers that are no other parameter's.
    fn numbers(place: usize) -> Self::Step;
    fn decay(step: &mut Self::Step) -> &mut f64;
    fn rate(step: &mut Self::Step) -> &mut f64;
    fn time(step: &mut Self::Step) -> &mut usize;

    /// Contiguous tensors of that many elements, of a parameter in that type with that gradient.
    const START: fn(&Client, usize, Storage, Buffer) -> Self::Tensors;
    const PROBLEM: fn(&Self::Tensors) -> Result<Problem<N>, KernelError>;
    const ONE: One<Self::Step, Self::Tensors>;
    const MANY: Many<Self::Step, Self::Tensors>;
    /// Checks some steps of a parameter in all the ways in which they can be asked for, each from what the
    /// device made of the last one, so that every bound is that of one step. In which types parameter and
    /// gradients are, and how long.
    const SEVERAL_STEPS: fn(&Client, Storage, Storage, usize) -> Result<(), Failed>;

    /// By the blueprint that is made of the problem.
    fn by(
        client: &Client,
        step: &Self::Step,
        tensors: Self::Tensors,
        chance: Option<Chance>,
        plan: &dyn Fn(&Problem<N>, &Client) -> Blueprint,
    ) -> Result<Self::Tensors, KernelError>;

    /// Whether a step from one to the other is the reference's, of which `skipped` ones before it do not
    /// count if it is gated.
    fn check(
        step: Self::Step,
        skipped: Option<usize>,
        numbers: [&Numbers; 2],
        gradient: &[f64],
        stored: Storage,
        rounding: Rounding,
    ) -> Result<(), Failed>;
}

/// The step of one parameter.
pub(crate) type One<S, T> =
    fn(&Client, &S, T, Option<Gate>, Option<Chance>) -> Result<T, KernelError>;

/// Those of several, with the same gate and seed.
pub(crate) type Many<S, T> =
    fn(&Client, Vec<Update<S, T>>, Option<Gate>, Option<Buffer>) -> Result<Vec<T>, KernelError>;

pub(crate) type UpdateOf<K, const N: usize> = Update<<K as Kind<N>>::Step, <K as Kind<N>>::Tensors>;

/// Numbers of a parameter, then those of each state.
pub(crate) type Numbers = Vec<Vec<f64>>;

/// What the device holds, here.
pub(crate) fn numbers<K: Kind<N>, const N: usize>(
    client: &Client,
    tensors: &K::Tensors,
    stored: Storage,
) -> Result<Numbers, Failed> {
    kept::<K, N>(tensors)
        .enumerate()
        .map(|(which, rows)| {
            gathered(client, &rows, if which == 0 { stored } else { Storage::F32 })
        })
        .collect()
}

/// All but the gradient.
pub(crate) fn kept<K: Kind<N>, const N: usize>(tensors: &K::Tensors) -> impl Iterator<Item = Rows> {
    let all: [Rows; N] = tensors.clone().into();
    let [before, after] = [0..1, 2..N];
    before.chain(after).map(move |which| all[which].clone())
}

/// Where memory is.
pub(crate) fn place_of(rows: &Rows) -> impl PartialEq + use<> {
    rows.buffer.handle.memory.descriptor().id
}

/// What lies between rows: it shows wherever it is counted.
const BETWEEN: f64 = 60_000.0;

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

pub(crate) fn on_device_with_both(
    parameter: Storage,
    gradient: Storage,
    test: impl FnOnce(&Client) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    // Of the two, bf16 is what a device may lack.
    let rarer = if gradient == Storage::Bf16 { gradient } else { parameter };
    on_device_with(dtype(rarer), test)
}

pub(crate) fn told(what: &str, error: Failed) -> Failed {
    format!("{what}: {}", error.message().unwrap_or_default()).into()
}

pub(crate) fn number(client: &Client, value: f64) -> Buffer {
    upload(client, &[value], Storage::F32)
}

pub(crate) fn gate(client: &Client, taken: f64, skipped: f64) -> Gate {
    let [taken, skipped, factor] = [taken, skipped, 1.0].map(|value| number(client, value));
    Gate { taken, skipped, factor }
}

pub(crate) fn chance(client: &Client, seed: [u32; 2], draw: u32) -> Chance {
    let bytes: Vec<u8> = seed.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let dtype = ElemType::UInt(UIntKind::U32);
    Chance { seed: Buffer { handle: client.create_from_slice(&bytes), elements: 2, dtype }, draw }
}
