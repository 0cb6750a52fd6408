//! Steps of several parameters on the kernel.

use super::{provider::Optimizer, repeat};
use crate::{
    ops::{
        copies::{self, Known},
        fp8_linear::marked,
    },
    stream::{Done, Replacement, Scalars},
    tensors::{
        Location, Tensors, consume, contiguous_buffer, cube_tensor, register_cube_tensor, rows,
        shape_of, take_cube_tensor, tensor_of_rows,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Chance, Gate, StepNumbers, Update, update_many},
};
use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{CustomOpIr, OperationIr, TensorId, TensorIr};
use burn_std::{DType, Shape};
use cubecl::client::Client;
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// Where the gradient stands among an operation's tensors; the results are the others.
pub(super) const GRADIENT: usize = 1;

/// What a gate reads.
pub(crate) const READINGS: usize = 3;

/// One parameter's operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub(crate) struct StepRequest<K, const N: usize> {
    pub(crate) operation: CustomOpIr,
    kind: PhantomData<K>,
}

impl<K: Optimizer<N>, const N: usize> StepRequest<K, N> {
    /// Where what the device says of the step begins, behind the parameter's tensors and the one that steps are taken
    /// together by.
    const TOLD: usize = N + 1;

    /// The step in `operation`, if that is one.
    pub(crate) fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::Custom(custom) = operation else { return None };
        let shared = custom.inputs.len().checked_sub(N)?;
        let is_step = custom.id == K::ID
            && [1, 2, 1 + READINGS, 2 + READINGS].contains(&shared)
            && (custom.outputs.len(), custom.scalars.len()) == (N - 1, K::SCALARS);
        is_step.then(|| Self { operation: custom.clone(), kind: PhantomData })
    }

    fn tensors(&self) -> [&TensorIr; N] {
        std::array::from_fn(|at| &self.operation.inputs[at])
    }

    pub(crate) fn gate(&self) -> Option<&[TensorIr]> {
        self.operation.inputs.get(Self::TOLD..Self::TOLD + READINGS)
    }

    pub(crate) fn seed(&self) -> Option<&TensorIr> {
        let after_gate = self.gate().map_or(0, <[_]>::len);
        self.operation.inputs.get(Self::TOLD + after_gate)
    }

    /// What it is taken together by, what the device says of the step, and the seed.
    pub(crate) fn shared(&self) -> impl Iterator<Item = TensorId> {
        self.operation.inputs[N..].iter().map(|tensor| tensor.id)
    }

    /// What it is taken together by, if somebody watches the steps that are.
    fn watch(&self, context: &Tensors) -> Option<TensorId> {
        let together = context.tensors.get(&self.operation.inputs.get(N)?.id)?.id;
        repeat::is_watched(together).then_some(together)
    }

    /// Whether it needs something that `other` makes.
    pub(crate) fn reads_from(&self, other: &Self) -> bool {
        let makes = |id: TensorId| other.operation.outputs.iter().any(|out| out.id == id);
        self.operation.inputs.iter().any(|input| makes(input.id))
    }

    /// The step's numbers and the draw.
    fn numbers(&self, context: &Tensors) -> Result<(K::Numbers, u32), KernelError> {
        let scalars = Scalars::of(&self.operation, context);
        let draw = scalars.whole(0).and_then(|draw| u32::try_from(draw).ok());
        K::numbers(&scalars).zip(draw).ok_or_else(|| unknown::<K, N>("number"))
    }
}

fn unknown<K: Optimizer<N>, const N: usize>(what: &str) -> KernelError {
    KernelError::Unsupported { op: K::OP, reason: format!("an unknown {what}") }
}

/// Steps on the kernel, or one by one where something of them is unknown.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub(crate) struct Steps<K, const N: usize> {
    pub(crate) requests: Vec<StepRequest<K, N>>,
}

impl<K: Optimizer<N>, const N: usize> Steps<K, N> {
    /// What the device says of all steps, which stays with the stream, and each step's numbers.
    #[expect(clippy::type_complexity, reason = "named nowhere else")]
    fn known(
        &self,
        context: &Tensors,
    ) -> Result<(Option<Gate>, Option<Buffer>, Vec<(K::Numbers, u32)>), KernelError> {
        let buffer = |tensor| Ok(contiguous_buffer(cube_tensor(context, tensor, K::OP)?));
        let (mut gate, mut seed) = (None, None);
        if let Some(first) = self.requests.first() {
            if let Some([taken, skipped, factor]) = first.gate() {
                gate = Some(Gate {
                    taken: buffer(taken)?,
                    skipped: buffer(skipped)?,
                    factor: buffer(factor)?,
                });
            }
            seed = first.seed().map(buffer).transpose()?;
        }
        for update in &self.requests {
            for tensor in update.tensors() {
                shape_of(context, tensor, K::OP)?;
            }
            if update.operation.outputs.iter().any(|out| !context.tensors.contains_key(&out.id)) {
                return Err(unknown::<K, N>("output"));
            }
        }
        let numbers: Result<_, KernelError> =
            self.requests.iter().map(|update| update.numbers(context)).collect();
        Ok((gate, seed, numbers?))
    }
}

impl<K: Optimizer<N>, const N: usize> Replacement for Steps<K, N> {
    const NAME: &'static str = K::NAME;

    fn launch(&self, context: &mut Tensors) -> Result<Done, KernelError> {
        let (gate, seed, numbers) = self.known(context)?;
        let mut updates = Vec::new();
        for (update, (step, draw)) in self.requests.iter().zip(numbers) {
            let taken: Result<Vec<_>, _> = update
                .tensors()
                .into_iter()
                .map(|tensor| take_cube_tensor(context, tensor, K::OP))
                .collect();
            let tensors = taken?.try_into().map_err(|_| unknown::<K, N>("tensor"))?;
            updates.push(Update { step, tensors, draw, copy: None });
        }
        let watched = self.requests.first().and_then(|first| first.watch(context));
        let is_by_chance = seed.is_some();
        let watch = watched.map(|together| {
            move |client: &Client, noted: Vec<_>, updated: &[[Rows; N]]| {
                repeat::tell::<K, N>(together, client, noted, updated, is_by_chance);
            }
        });
        let watch = watch.as_ref().map(|watch| watch as Watch<'_, K::Numbers, N>);
        for (update, made) in self.requests.iter().zip(stepped(updates, gate, seed, watch)) {
            let kept = made.into_iter().enumerate().filter(|(at, _)| *at != GRADIENT);
            for (out, (_, tensor)) in update.operation.outputs.iter().zip(kept) {
                register_cube_tensor(context, out, tensor, K::OP)?;
            }
            for shared in &update.operation.inputs[N..] {
                consume(context, shared);
            }
        }
        Ok(Done::All)
    }
}

/// One parameter's tensors after a step; the gradient is there as it was.
///
/// # Panics
///
/// Where the kernel refuses it: nobody could do anything else with tensors that are taken.
pub(crate) fn alone<K: Optimizer<N>, const N: usize>(
    step: K::Numbers,
    tensors: [CubeTensor; N],
    gate: Option<Gate>,
    chance: Option<Chance>,
) -> [CubeTensor; N] {
    let draw = chance.as_ref().map_or(0, |chance| chance.draw);
    let seed = chance.map(|chance| chance.seed);
    let update = Update { step, tensors, draw, copy: None };
    stepped(vec![update], gate, seed, None).swap_remove(0)
}

/// Who is told what was stepped, with the kernel's tensors.
type Watch<'a, S, const N: usize> = &'a dyn Fn(&Client, Vec<repeat::Noted<S>>, &[[Rows; N]]);

/// Tensors of several parameters after a step; the gradients are there as they were. Copies of parameters are written,
/// too.
///
/// # Panics
///
/// As [`alone`].
pub(super) fn stepped<S: StepNumbers<N>, const N: usize>(
    updates: Vec<Update<S, [CubeTensor; N]>>,
    gate: Option<Gate>,
    seed: Option<Buffer>,
    watch: Option<Watch<'_, S, N>>,
) -> Vec<[CubeTensor; N]> {
    let Some(first) = updates.first() else { return Vec::new() };
    // Weights have other numbers from here on. A cast that held their memory would have them moved, too.
    marked::forget_casts();
    let client = first.tensors[0].client.clone();
    let mut noted = Vec::new();
    let (kept, updates): (Vec<_>, Vec<_>) = updates
        .into_iter()
        .map(|mut update| {
            let mut known = copies::take(&update.tensors[0].handle);
            let asked = update.copy.take();
            if asked.is_some() {
                // One copy is written, and known ones would not be.
                known.clear();
            }
            let copy = asked.or_else(|| known.first().map(Known::rows));
            if watch.is_some() {
                // Others would have to be copied, too.
                let only = copy.clone().filter(|_| known.len() == 1);
                noted.push(repeat::Noted::of(&update, only));
            }
            let Update { step, tensors, draw, .. } = update;
            let told = |tensor: &CubeTensor| (Location::of(tensor), tensor.shape(), tensor.dtype);
            let kept = tensors.each_ref().map(told);
            ((kept, known), Update { step, tensors: tensors.map(rows).into(), draw, copy })
        })
        .unzip();
    let updated: Vec<_> = update_many::<S, N>(&client, updates, gate, seed)
        .unwrap_or_else(|error| panic!("{error}"))
        .into_iter()
        .map(Into::<[Rows; N]>::into)
        .collect();
    if let Some(watch) = watch {
        watch(&client, noted, &updated);
    }
    type Kept<const N: usize> = ([(Location, Shape, DType); N], Vec<Known>);
    let tensors = |((kept, known), updated): (Kept<N>, [Rows; N])| {
        copies::keep(known, &updated[0].buffer.handle);
        std::array::from_fn(|at| {
            let (place, shape, dtype) = &kept[at];
            tensor_of_rows(place, shape.clone(), updated[at].clone(), *dtype)
        })
    };
    kept.into_iter().zip(updated).map(tensors).collect()
}
