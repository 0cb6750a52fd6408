//! What is known of the steps that are watched.

use crate::{
    graph::Identity,
    steps::{operation::GRADIENT, provider::Optimizer},
    tensors::{Address, address},
};
use blackburn_kernels::{
    KernelError,
    buffer::Rows,
    step::{Gate, StepNumbers, Update, Updates},
};
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::TensorId;
use cubecl::client::Client;
use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

/// Steps that one launch or a few took, to be taken again.
pub(crate) trait Again: Send {
    /// How many there are.
    fn count(&self) -> usize;

    /// Takes the next ones.
    ///
    /// # Errors
    ///
    /// As the kernel's.
    fn repeat(&mut self, rate: f64, gate: Option<&Gate>) -> Result<(), KernelError>;
}

/// What is repeated in a step.
pub(super) struct All {
    /// Gradients whose squares are added up, by launches.
    pub(super) sums: Vec<Vec<Rows>>,
    pub(super) steps: Vec<Box<dyn Again>>,
}

/// Steps of one optimizer.
struct Steps<K: Optimizer<N>, const N: usize> {
    client: Client,
    updates: Updates<K::Numbers, N>,
}

impl<K: Optimizer<N>, const N: usize> Again for Steps<K, N> {
    fn count(&self) -> usize {
        self.updates.gradients().count()
    }

    fn repeat(&mut self, rate: f64, gate: Option<&Gate>) -> Result<(), KernelError> {
        self.updates.repeat(&self.client, |numbers| K::advance(numbers, rate), gate)
    }
}

/// What watched steps were, in their order; none for one that cannot be repeated.
type Told = Vec<Option<Box<dyn Again>>>;

/// By the tensor that the steps share.
static WATCHED: LazyLock<Mutex<HashMap<TensorId, Told>>> = LazyLock::new(Mutex::default);

fn watched() -> MutexGuard<'static, HashMap<TensorId, Told>> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where steps are told, as long as this is there.
#[derive(Debug)]
pub(super) struct WatchEntry(TensorId);

impl WatchEntry {
    /// That of steps that share `together`; none on CPUs.
    pub(super) fn watched(together: &Tensor<1>) -> Option<Self> {
        let id = Identity::of(together.clone())?.id();
        watched().insert(id, Vec::new());
        Some(Self(id))
    }

    /// What was told.
    pub(super) fn take(&self) -> Told {
        watched().remove(&self.0).unwrap_or_default()
    }
}

impl Drop for WatchEntry {
    fn drop(&mut self) {
        self.take();
    }
}

/// Whether somebody watches steps that share this tensor.
pub(crate) fn is_watched(together: TensorId) -> bool {
    watched().contains_key(&together)
}

/// A step that was taken, without its tensors.
pub(crate) struct Noted<S> {
    step: S,
    /// Memory that it wrote, too.
    copy: Option<Rows>,
    /// Where the gradient lies.
    gradient: Address,
}

impl<S> Noted<S> {
    /// That of `update`, which writes `copy`, too.
    pub(crate) fn of<const N: usize>(
        update: &Update<S, [CubeTensor; N]>,
        copy: Option<Rows>,
    ) -> Self
    where
        S: Copy,
    {
        let gradient = address(&update.tensors[GRADIENT].handle);
        Self { step: update.step, copy, gradient }
    }

    /// The next one of the same tensors, if the gradient was read where it lies and there is a copy.
    fn next<const N: usize>(self, tensors: &[Rows; N]) -> Option<Update<S, S::Tensors>>
    where
        S: StepNumbers<N>,
    {
        let Self { step, copy, gradient } = self;
        let is_read_there = address(&tensors[GRADIENT].buffer.handle) == gradient;
        let tensors = tensors.clone().into();
        (is_read_there && copy.is_some()).then(|| Update { step, tensors, draw: 0, copy })
    }
}

/// Tells of steps that share `together` and were taken together: their tensors afterwards, and whether they were
/// rounded by chance.
pub(crate) fn tell<K: Optimizer<N>, const N: usize>(
    together: TensorId,
    client: &Client,
    noted: Vec<Noted<K::Numbers>>,
    tensors: &[[Rows; N]],
    is_by_chance: bool,
) {
    let updates = noted.into_iter().zip(tensors).map(|(noted, tensors)| noted.next(tensors));
    let updates: Option<Vec<_>> = updates.collect::<Option<_>>().filter(|_| !is_by_chance);
    let updates = updates.and_then(|updates| Updates::in_place(client, updates).ok());
    let steps = updates.map(|updates| {
        let steps = Steps::<K, N> { client: client.clone(), updates };
        Box::new(steps) as Box<dyn Again>
    });
    if let Some(told) = watched().get_mut(&together) {
        told.push(steps);
    }
}
