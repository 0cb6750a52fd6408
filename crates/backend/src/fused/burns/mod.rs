//! Burn's own fusions, with four things changed: they read tensors with strides that they compute right with, do not wait
//! for what a product, a reduction or an operation of Blackburn's separates from their last operation, leave casts of
//! parameters alone ([`is_parameter_cast`]), and reductions run [apart] where the fused kernel would be slower.
//!
//! # Strides
//!
//! The stride of a dimension of size 1 means nothing: nobody steps over it. Burn's fused kernels look at it all the same.
//! They read vectors along one dimension, and take a stride of another that vectors do not divide for a gap
//! (`vectorization_input` of burn-cubecl-fusion 0.22.1). So an image of one channel, which convolutions and permuted
//! tensors leave with a stride of 1 there, counts as one that is read number by number, while its neighbors in the same
//! kernel are read by vectors, and most results of such a kernel are wrong. A convolution with one output channel in
//! front of a mean squared error is enough, or `(x - y) * 2` of an image that was permuted.
//!
//! # Patience
//!
//! Burn ends a segment of the stream when no fusion waits any more. Its own wait without end for what may follow. So the
//! segment of a GELU goes on through the product behind it, into the norm behind that, until there are as many blocks as
//! Burn may have, and the norm is cut into pieces. One operation alone is no fusion yet, and waits.

mod apart;

use crate::{
    stream::{StreamClock, is_parameter_cast, separates},
    tensors::{Tensors, contiguous_strides},
};
use apart::{Apart, ApartState};
use burn_cubecl::{
    CubeDevice,
    fusion::{self, CubeFuser, OptimizationProvider, RegistryError},
};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{
        CubeOptimization, CubeOptimizationState, FusedOperation,
        elemwise::{self, ElementWiseFuser, ElemwiseOptimization},
        matmul::{self, MatmulFuser, MatmulOptimization},
        nhwc_relayout::{self, NHWCRelayoutFuser, NHWCRelayoutOptimization},
        reduce::{self, ReduceFuser, ReduceOptimization, ReduceSettings},
        reduce_broadcasted::{self, ReduceBroadcastedFuser, ReduceBroadcastedOptimization},
    },
};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{OperationIr, TensorStatus};
use burn_std::Strides;
use std::marker::PhantomData;

/// Registers Burn's fusion of that name anew, behind the step. A fusion that this version of Blackburn does not know stays
/// as it is. Reductions may run apart if `reduces`: kernels of ours take them then.
///
/// # Errors
///
/// As Burn's registry has them: tensors that were there before.
pub(crate) fn register(name: &str, reduces: bool) -> Result<(), RegistryError> {
    match name {
        elemwise::NAME => again::<ElemwiseOptimization>(name, false, |device| {
            Box::new(ElementWiseFuser::new(device))
        }),
        matmul::NAME => {
            again::<MatmulOptimization>(name, false, |device| Box::new(MatmulFuser::new(device)))
        }
        reduce::NAME => again::<ReduceOptimization>(name, reduces, |device| {
            Box::new(ReduceFuser::new(device, ReduceSettings::Always))
        }),
        reduce_broadcasted::NAME => {
            again::<ReduceBroadcastedOptimization>(name, reduces, |device| {
                Box::new(ReduceBroadcastedFuser::new(device))
            })
        }
        nhwc_relayout::NAME => again::<NHWCRelayoutOptimization>(name, false, |device| {
            Box::new(NHWCRelayoutFuser::new(device))
        }),
        _ => Ok(()),
    }
}

fn again<O: FusedOperation>(
    name: &str,
    may_run_apart: bool,
    fuser: MakeFuser,
) -> Result<(), RegistryError> {
    fusion::remove(name)?;
    fusion::register(Provider { fuser, may_run_apart, operation: PhantomData::<fn() -> O> })
}

/// Burn's element-wise fusion, as [`register`] registers it.
pub(crate) fn element_wise(device: &CubeDevice) -> BurnsFuser {
    let fuser = Box::new(ElementWiseFuser::new(device.clone()));
    Box::new(Fuser::<ElemwiseOptimization>::new(fuser, None))
}

/// What that fusion made, from its state.
pub(crate) fn element_wise_of(
    device: &CubeDevice,
    state: &CubeOptimizationState,
) -> CubeOptimization {
    CubeOptimization::new(Prepared::<ElemwiseOptimization>::from_state(device, state.decode()))
}

type MakeFuser = fn(CubeDevice) -> BurnsFuser;
pub(crate) type BurnsFuser = Box<dyn OperationFuser<CubeOptimization>>;

struct Provider<O> {
    fuser: MakeFuser,
    /// Whether operations may run [`Apart`].
    may_run_apart: bool,
    operation: PhantomData<fn() -> O>,
}

impl<O: FusedOperation> OptimizationProvider for Provider<O> {
    type Operation = Prepared<O>;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        let device_if_apart = self.may_run_apart.then(|| device.clone());
        CubeFuser::new(Fuser::<O>::new((self.fuser)(device.clone()), device_if_apart))
    }
}

/// Burn's fuser; what it makes of operations is [`Prepared`].
struct Fuser<O> {
    fuser: BurnsFuser,
    /// The operations that it took, if they may run [`Apart`], and where.
    shown: Option<(CubeDevice, Vec<OperationIr>)>,
    /// Counts what [`separates`].
    clock: StreamClock,
    /// When it took its last operation.
    last_at: u64,
    seen: Seen,
    operation: PhantomData<fn() -> O>,
}

/// What a fuser was shown since it began.
#[derive(Clone, Copy, PartialEq)]
enum Seen {
    Nothing,
    /// A cast of a parameter at first, which ends it.
    ParameterCast,
    Operations,
}

impl<O> Fuser<O> {
    /// With a device if operations may run [`Apart`] there.
    fn new(fuser: BurnsFuser, device: Option<CubeDevice>) -> Self {
        Self {
            fuser,
            shown: device.map(|device| (device, Vec::new())),
            clock: StreamClock::default(),
            last_at: 0,
            seen: Seen::Nothing,
            operation: PhantomData,
        }
    }
}

impl<O: FusedOperation> OperationFuser<CubeOptimization> for Fuser<O> {
    fn fuse(&mut self, operation: &OperationIr) {
        if separates(operation) {
            self.clock.tick();
        }
        match self.seen {
            Seen::Nothing if is_parameter_cast(operation) => self.seen = Seen::ParameterCast,
            Seen::Nothing => self.seen = Seen::Operations,
            _ => {}
        }
        if self.seen == Seen::ParameterCast {
            return;
        }
        let taken = self.fuser.len();
        self.fuser.fuse(operation);
        if self.fuser.len() > taken {
            self.last_at = self.clock.now();
            if let Some((_, shown)) = &mut self.shown {
                shown.push(operation.clone());
            }
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let taken = self.fuser.len();
        let burns = self.fuser.finish();
        // The first ones of those that were taken are fused.
        let fused = |shown: &[OperationIr], device| {
            let all = (shown.len() == taken).then_some(shown)?;
            Some(Apart::of(all.get(..burns.num_ops_fused())?, device))
        };
        let apart = self.shown.as_ref().and_then(|(device, shown)| fused(shown, device));
        CubeOptimization::new(Prepared { burns, apart, operation: PhantomData::<fn() -> O> })
    }

    /// Burn resets all fusers behind each segment that it runs, most of which have seen nothing: it knows the segment's plan.
    /// Some of its own are dear to reset.
    fn reset(&mut self) {
        if self.seen == Seen::Operations {
            self.fuser.reset();
        }
        if let Some((_, shown)) = &mut self.shown {
            shown.clear();
        }
        self.seen = Seen::Nothing;
    }

    fn status(&self) -> FuserStatus {
        if self.seen == Seen::ParameterCast {
            return FuserStatus::Closed;
        }
        if self.fuser.len() > 1 && self.clock.now() > self.last_at {
            FuserStatus::Closed
        } else {
            self.fuser.status()
        }
    }

    fn properties(&self) -> FuserProperties {
        self.fuser.properties()
    }

    fn len(&self) -> usize {
        self.fuser.len()
    }

    fn clone_dyn(&self) -> BurnsFuser {
        let Self { fuser, shown, clock, last_at, seen, operation } = self;
        Box::new(Self {
            fuser: fuser.clone_dyn(),
            shown: shown.clone(),
            clock: clock.clone(),
            last_at: *last_at,
            seen: *seen,
            operation: *operation,
        })
    }
}

/// Operations that Burn runs as one, `O`.
struct Prepared<O> {
    burns: CubeOptimization,
    apart: Option<Apart>,
    operation: PhantomData<fn() -> O>,
}

impl<O: FusedOperation> FusedOperation for Prepared<O> {
    const NAME: &'static str = O::NAME;
    type State = (CubeOptimizationState, Option<ApartState>);

    fn num_ops_fused(&self) -> usize {
        self.burns.num_ops_fused()
    }

    fn max_relative_shape_id(&self) -> Option<usize> {
        let apart = self.apart.as_ref().and_then(Apart::max_relative_shape_id);
        burn_fusion::NumOperations::max_relative_shape_id(&self.burns).max(apart)
    }

    fn run(
        &mut self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        match &mut self.apart {
            Some(apart) if apart.is_faster(context) => apart.run(context, fallback),
            _ => {
                prepare(context);
                self.burns.run(context, fallback);
            }
        }
    }

    fn to_state(&self) -> Self::State {
        (self.burns.to_state(), self.apart.as_ref().map(Apart::to_state))
    }

    fn from_state(device: &CubeDevice, (burns, apart): Self::State) -> Self {
        let burns = CubeOptimization::new(O::from_state(device, burns.decode()));
        let apart = apart.map(|apart| Apart::from_state(device, apart));
        Self { burns, apart, operation: PhantomData }
    }
}

/// Gives dimensions of size 1 strides that no vector straddles, in all tensors that there are.
fn prepare(context: &mut Tensors) {
    let mut changed = Vec::new();
    for tensor in context.tensors.values() {
        let Some(handle) = context.handles.get_handle_ref(&tensor.id) else { continue };
        if handle.tiles.is_none() && handle.qparams.is_none() {
            changed.extend(harmless(&tensor.shape, &handle.strides).map(|to| (tensor.id, to)));
        }
    }
    for (id, strides) in changed {
        // Out and in again, so that nobody else seems to hold the memory.
        let mut handle = context.handles.get_handle(&id, &TensorStatus::ReadWrite);
        handle.strides = strides;
        context.handles.register_handle(id, handle);
    }
}

/// The strides of the same tensor with others in dimensions of size 1, where one of these would be taken for a gap between
/// vectors.
///
/// A tensor that is contiguous but for them gets contiguous strides. In any other these dimensions come outermost, with
/// the number of elements as their stride, which every vector divides that divides a dense dimension.
fn harmless(shape: &[usize], strides: &[usize]) -> Option<Strides> {
    let innermost = (0..shape.len()).find(|dim| shape[*dim] > 1 && strides[*dim] == 1)?;
    let is_gap = |dim: usize| {
        shape[dim] == 1 && strides[dim] != 0 && !strides[dim].is_multiple_of(shape[innermost])
    };
    if !(0..shape.len()).any(is_gap) {
        return None;
    }
    let contiguous = contiguous_strides(shape);
    if (0..shape.len()).all(|dim| shape[dim] == 1 || strides[dim] == contiguous[dim]) {
        return (contiguous != strides).then(|| Strides::new(&contiguous));
    }
    let elements = shape.iter().product();
    let outermost = |dim: usize| if shape[dim] == 1 { elements } else { strides[dim] };
    Some(Strides::new(&(0..shape.len()).map(outermost).collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_of_one_channel_lies_as_if_it_were_contiguous() {
        // Channels follow each other in memory, and there is one.
        assert_eq!(
            harmless(&[3, 1, 16, 16], &[256, 1, 16, 1]),
            Some(Strides::new(&[256, 256, 16, 1]))
        );
        assert_eq!(harmless(&[2, 1, 8], &[8, 1, 1]), Some(Strides::new(&[8, 8, 1])));
        // A column that was transposed.
        assert_eq!(harmless(&[1, 12], &[1, 1]), Some(Strides::new(&[12, 1])));
    }

    #[test]
    fn other_orders_of_memory_keep_it() {
        let images = harmless(&[2, 8, 6, 1], &[48, 1, 8, 1]);
        assert_eq!(images, Some(Strides::new(&[48, 1, 8, 96])));
    }

    #[test]
    fn tensors_without_such_a_dimension_stay_as_they_are() {
        for (shape, strides) in [
            (&[3, 4, 16, 16][..], &[1024, 1, 64, 4][..]),
            (&[3, 1, 16, 16], &[256, 256, 16, 1]),
            // What Burn makes of a column, and of a parameter of a channel each.
            (&[12, 1], &[1, 1]),
            (&[1, 48, 1, 1], &[48, 1, 1, 1]),
            // Multiples are no gaps, and broadcasts are not read along.
            (&[2, 8, 6, 1], &[48, 1, 8, 8]),
            (&[1, 8], &[0, 1]),
            (&[1, 1], &[1, 1]),
            (&[], &[]),
        ] {
            assert_eq!(harmless(shape, strides), None, "{shape:?} {strides:?}");
        }
    }
}
