//! The providers that take the steps of several parameters together, one launch for up to
//! [`MOST_TENSORS`]. Burn's optimizers hand over one parameter at a time, each of which is one operation in
//! the stream.
//!
//! What differs from step to step are scalars of the operation, which Burn's plans leave open.
//!
//! Burn puts operations into one block if they share a tensor, as those with a gate or a seed do; others
//! begin a block each, and are merged when there are as many blocks as there may be.

use super::operation::{Asked, Scalars, StepOperation};
use crate::stream::Shown;
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    step::{Gate, MOST_TENSORS, Update},
};
use burn_cubecl::{
    CubeDevice,
    fusion::{CubeFuser, OptimizationProvider},
};
use burn_cubecl_fusion::optim::CubeOptimization;
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::OperationIr;
use cubecl::client::Client;
use std::{fmt::Debug, marker::PhantomData};

/// An optimizer whose step takes N tensors (parameter, gradient, and states in f32) and makes all but the
/// gradient.
pub(crate) trait Kind<const N: usize>:
    Clone + Debug + Default + Send + Sync + 'static
{
    /// The provider's name.
    const NAME: &'static str;
    /// Whose errors say so.
    const OP: &'static str;
    /// What the operation is named in the stream: its trait says so, too.
    const ID: &'static str;
    /// The operation's scalars: the draw, then the step's numbers.
    const SCALARS: usize;
    /// The step's numbers, as the kernel takes them.
    type Step: Copy;
    /// The tensors, as it takes them.
    type Tensors: From<[Rows; N]> + Into<[Rows; N]>;
    /// Does the steps of several parameters.
    const MANY: Many<Self::Step, Self::Tensors>;

    /// The step's numbers among an operation's scalars; none where one is unknown.
    fn step(scalars: &Scalars<'_>) -> Option<Self::Step>;
}

/// Steps of several parameters, in their order, with the same gate and seed.
pub(crate) type Many<S, T> =
    fn(&Client, Vec<Update<S, T>>, Option<Gate>, Option<Buffer>) -> Result<Vec<T>, KernelError>;

/// Registers [`StepFuser`] with Burn.
#[derive(Default)]
pub(crate) struct StepProvider<K, const N: usize>(PhantomData<K>);

impl<K: Kind<N>, const N: usize> OptimizationProvider for StepProvider<K, N> {
    type Operation = StepOperation<K, N>;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(StepFuser::<K, N>::default())
    }
}

/// Takes steps that follow each other, share what the device says of them, and do not depend on each other.
///
/// It is over when Burn shows any other operation, to whichever block, or many blocks would wait for
/// parameters that do not come.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepFuser<K, const N: usize> {
    updates: Vec<Asked<K, N>>,
    closed: bool,
    /// Operations of other kinds.
    others: Shown,
    /// How many of those there had been before the first update.
    others_before: u64,
}

impl<K: Kind<N>, const N: usize> StepFuser<K, N> {
    /// As of any fusion below those that save a tensor. Nobody else takes these operations.
    const SCORE: u64 = 15;

    fn is_over(&self) -> bool {
        let others_came = || self.others.so_far() != self.others_before;
        self.closed || !self.updates.is_empty() && others_came()
    }

    fn takes(&self, update: &Asked<K, N>) -> bool {
        let shares = |other: &Asked<K, N>| other.shared().eq(update.shared());
        !self.is_over()
            && self.updates.first().is_none_or(shares)
            && !self.updates.iter().any(|other| update.reads_from(other))
    }
}

impl<K: Kind<N>, const N: usize> OperationFuser<CubeOptimization> for StepFuser<K, N> {
    fn fuse(&mut self, operation: &OperationIr) {
        let Some(update) = Asked::<K, N>::of(operation) else {
            self.others.count();
            self.closed = true;
            return;
        };
        if !self.takes(&update) {
            self.closed = true;
            return;
        }
        if self.updates.is_empty() {
            self.others_before = self.others.so_far();
        }
        self.updates.push(update);
        self.closed = self.updates.len() == MOST_TENSORS;
    }

    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(StepOperation { updates: self.updates.clone() })
    }

    fn reset(&mut self) {
        *self = Self { others: self.others.clone(), ..Self::default() };
    }

    fn status(&self) -> FuserStatus {
        if self.is_over() { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        // One alone, too: left to Burn, it would be settled together with whatever closed this fuser.
        let ready = !self.updates.is_empty();
        FuserProperties { score: if ready { Self::SCORE } else { 0 }, ready }
    }

    fn len(&self) -> usize {
        self.updates.len()
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}
