use super::{NAME, OP, backward::Backward, forward::Forward, probabilities::Probabilities};
use crate::{
    declined,
    tensors::{Place, Tensors, contiguous_buffer, cube_tensor, register_zeros},
};
use blackburn_kernels::{KernelError, buffer::Buffer};
use burn_backend::DType;
use burn_cubecl::kernel::cast;
use burn_cubecl_fusion::{FallbackOperation, optim::FusedOperation};
use burn_ir::TensorIr;
use serde::{Deserialize, Serialize};

/// A pass on the kernels, or on Burn's own operations where those decline.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SoftmaxOperation {
    pub(super) pass: Pass,
}

/// Which.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Pass {
    /// So many operations that turned out to begin neither, as Burn runs them.
    Neither(usize),
    Forward(Forward),
    Backward(Backward),
    Probabilities(Probabilities),
}

/// Positions of the operations that a pass covers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Positions {
    /// Of those that run first, as Burn runs them.
    pub(super) passengers: Vec<usize>,
    /// Of those that the kernels replace.
    pub(super) steps: Vec<usize>,
}

impl Positions {
    /// Runs what runs first, and `launch` or, where that declines, Burn's own operations.
    fn run(
        &self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
        launch: impl FnOnce(&mut Tensors) -> Result<(), KernelError>,
    ) {
        for position in &self.passengers {
            fallback(*position).run(context);
        }
        if let Err(reason) = launch(context) {
            declined::tell_once(NAME, &reason);
            for position in &self.steps {
                fallback(*position).run(context);
            }
        }
    }
}

impl Pass {
    /// How many operations it covers.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Neither(operations) => *operations,
            Self::Forward(Forward { positions, .. })
            | Self::Backward(Backward { positions, .. })
            | Self::Probabilities(Probabilities { positions, .. }) => {
                positions.passengers.len() + positions.steps.len()
            }
        }
    }
}

impl FusedOperation for SoftmaxOperation {
    const NAME: &'static str = NAME;
    type State = Self;

    fn num_ops_fused(&self) -> usize {
        self.pass.len()
    }

    fn run(
        &mut self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        match &self.pass {
            Pass::Neither(operations) => {
                (0..*operations).for_each(|position| fallback(position).run(context));
            }
            Pass::Forward(forward) => {
                forward.positions.run(context, fallback, |context| forward.launch(context));
            }
            Pass::Backward(backward) => {
                backward.positions.run(context, fallback, |context| backward.launch(context));
            }
            Pass::Probabilities(pass) => {
                pass.positions.run(context, fallback, |context| pass.launch(context));
            }
        }
    }

    fn to_state(&self) -> Self::State {
        self.clone()
    }

    fn from_state(_device: &cubecl::Device, state: Self::State) -> Self {
        state
    }
}

/// The numbers in `tensor`, one for each row, in the type that the kernels take them.
pub(super) fn numbers(
    context: &Tensors,
    tensor: &TensorIr,
    dtype: DType,
) -> Result<Buffer, KernelError> {
    Ok(contiguous_buffer(cast(cube_tensor(context, tensor, OP)?, dtype)))
}

/// What a pass forward makes of rows without elements, or of no rows: `elements` like them, the sum of
/// each, and its `maxima`, which rows without elements do not have.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where those are asked for; nothing is made then.
pub(super) fn make_of_nothing<const N: usize>(
    context: &mut Tensors,
    place: &Place,
    elements: [Option<&TensorIr>; N],
    sum: Option<&TensorIr>,
    maxima: [Option<&TensorIr>; 2],
) -> Result<(), KernelError> {
    let is_empty = |out: &&TensorIr| {
        let known = context.tensors.get(&out.id);
        known.is_some_and(|known| known.shape.num_elements() == 0)
    };
    if !maxima.iter().flatten().all(is_empty) {
        return Err(unsupported("rows without elements"));
    }
    for out in elements.into_iter().chain([sum]).chain(maxima).flatten() {
        register_zeros(context, out, place, OP)?;
    }
    Ok(())
}

pub(super) fn unsupported(reason: &str) -> KernelError {
    KernelError::Unsupported { op: OP, reason: reason.into() }
}
