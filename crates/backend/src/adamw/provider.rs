//! The provider that takes the steps of several parameters together, one launch for up to
//! [`MOST_TENSORS`]. Burn's optimizers hand over one parameter at a time, each of which is one operation in
//! the stream.
//!
//! What differs from step to step are scalars of the operation, which Burn's plans leave open.
//!
//! Burn puts operations into one block if they share a tensor, as those with a gate or a seed do; others
//! begin a block each, and are merged when there are as many blocks as there may be.

use super::{Step, cube::numbers};
use crate::{
    declined,
    gelu::Shown,
    handles::{
        Place, Tensors, consume, contiguous_buffer, cube_tensor, register_cube_tensor, rows,
        take_cube_tensor, tensor_of_rows,
    },
};
use blackburn_kernels::{
    KernelError,
    adamw::{AdamwTensors, AdamwUpdate, Gate, MOST_TENSORS, adamw_update_many},
    buffer::Buffer,
};
use burn::backend::TensorMetadata;
use burn_cubecl::{
    CubeDevice,
    fusion::{CubeFuser, OptimizationProvider},
};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{CubeOptimization, FusedOperation},
};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser, stream::ScalarId};
use burn_ir::{CustomOpIr, OperationIr, ScalarIr, TensorId, TensorIr};
use burn_std::{DType, Shape};
use serde::{Deserialize, Serialize};

/// The provider's name.
pub(crate) const NAME: &str = "BlackburnAdamw";

const OP: &str = "adamw_update";

/// What the operation is named in the stream: `AdamwPrimitives` says so, too.
const ID: &str = "blackburn::adamw_step";

/// Registers [`AdamwFuser`] with Burn.
pub(crate) struct AdamwProvider;

impl OptimizationProvider for AdamwProvider {
    type Operation = AdamwOperation;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(AdamwFuser::default())
    }
}

/// Takes steps that follow each other, share what the device says of them, and do not depend on each other.
///
/// It is over when Burn shows any other operation, to whichever block, or many blocks would wait for
/// parameters that do not come.
#[derive(Clone, Debug, Default)]
struct AdamwFuser {
    updates: Vec<Update>,
    closed: bool,
    /// Operations of other kinds.
    others: Shown,
    /// How many of those there had been before the first update.
    others_before: u64,
}

impl AdamwFuser {
    /// As of any fusion below those that save a tensor. Nobody else takes these operations.
    const SCORE: u64 = 15;

    fn is_over(&self) -> bool {
        let others_came = || self.others.so_far() != self.others_before;
        self.closed || !self.updates.is_empty() && others_came()
    }

    fn takes(&self, update: &Update) -> bool {
        let shares = |other: &Update| other.shared().eq(update.shared());
        !self.is_over()
            && self.updates.first().is_none_or(shares)
            && !self.updates.iter().any(|other| update.reads_from(other))
    }
}

impl OperationFuser<CubeOptimization> for AdamwFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        let Some(update) = Update::of(operation) else {
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
        CubeOptimization::new(AdamwOperation { updates: self.updates.clone() })
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

/// One parameter's operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Update(CustomOpIr);

impl Update {
    /// Parameter, gradient, and moments.
    const TENSORS: usize = 4;
    /// What a gate reads.
    const READINGS: usize = 3;
    /// Parameter and moments.
    const OUTPUTS: usize = 3;
    /// The draw and the step's numbers.
    const SCALARS: usize = 7;

    /// The step in `operation`, if that is one.
    fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::Custom(custom) = operation else { return None };
        let shared = custom.inputs.len().checked_sub(Self::TENSORS)?;
        let is_step = custom.id == ID
            && [0, 1, Self::READINGS, Self::READINGS + 1].contains(&shared)
            && (custom.outputs.len(), custom.scalars.len()) == (Self::OUTPUTS, Self::SCALARS);
        is_step.then(|| Self(custom.clone()))
    }

    fn tensors(&self) -> [&TensorIr; Self::TENSORS] {
        std::array::from_fn(|at| &self.0.inputs[at])
    }

    fn gate(&self) -> Option<&[TensorIr]> {
        self.0.inputs.get(Self::TENSORS..Self::TENSORS + Self::READINGS)
    }

    fn seed(&self) -> Option<&TensorIr> {
        let after_gate = self.gate().map_or(0, <[_]>::len);
        self.0.inputs.get(Self::TENSORS + after_gate)
    }

    /// What the device says of the step, and the seed.
    fn shared(&self) -> impl Iterator<Item = TensorId> {
        self.0.inputs[Self::TENSORS..].iter().map(|tensor| tensor.id)
    }

    /// Whether it needs something that `other` makes.
    fn reads_from(&self, other: &Self) -> bool {
        let makes = |id: TensorId| other.0.outputs.iter().any(|out| out.id == id);
        self.0.inputs.iter().any(|input| makes(input.id))
    }

    /// The step's numbers and the draw.
    fn numbers(&self, context: &Tensors) -> Result<(Step, u32), KernelError> {
        let unknown = || unknown("number");
        let scalar = |at: usize| {
            let ScalarIr::UInt(value) = self.0.scalars[at] else { return Err(unknown()) };
            context.scalars.get(&ScalarId { value }).copied().ok_or_else(unknown)
        };
        let real = |at| match scalar(at)? {
            ScalarIr::Float(number) => Ok(number),
            _ => Err(unknown()),
        };
        let whole = |at| match scalar(at)? {
            ScalarIr::UInt(number) => Ok(number),
            _ => Err(unknown()),
        };
        let step = Step {
            beta_1: real(1)?,
            beta_2: real(2)?,
            epsilon: real(3)?,
            weight_decay: real(4)?,
            rate: real(5)?,
            time: usize::try_from(whole(6)?).map_err(|_| unknown())?,
        };
        Ok((step, u32::try_from(whole(0)?).map_err(|_| unknown())?))
    }
}

fn unknown(what: &str) -> KernelError {
    KernelError::Unsupported { op: OP, reason: format!("an unknown {what}") }
}

/// Steps on the kernel, or one by one where something of them is unknown.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AdamwOperation {
    updates: Vec<Update>,
}

/// What an updated parameter is as a tensor.
struct Parameter {
    place: Place,
    shape: Shape,
    dtype: DType,
}

impl AdamwOperation {
    /// What the device says of all steps, which stays with the stream, and each step's numbers.
    #[expect(clippy::type_complexity, reason = "named nowhere else")]
    fn known(
        &self,
        context: &Tensors,
    ) -> Result<(Option<Gate>, Option<Buffer>, Vec<(Step, u32)>), KernelError> {
        let buffer = |tensor| Ok(contiguous_buffer(cube_tensor(context, tensor, OP)?));
        let (mut gate, mut seed) = (None, None);
        if let Some(first) = self.updates.first() {
            if let Some([taken, skipped, factor]) = first.gate() {
                gate = Some(Gate {
                    taken: buffer(taken)?,
                    skipped: buffer(skipped)?,
                    factor: buffer(factor)?,
                });
            }
            seed = first.seed().map(buffer).transpose()?;
        }
        for update in &self.updates {
            for tensor in update.tensors() {
                cube_tensor(context, tensor, OP)?;
            }
            if update.0.outputs.iter().any(|out| !context.tensors.contains_key(&out.id)) {
                return Err(unknown("output"));
            }
        }
        let numbers: Result<_, KernelError> =
            self.updates.iter().map(|update| update.numbers(context)).collect();
        Ok((gate, seed, numbers?))
    }

    fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let (gate, seed, all_numbers) = self.known(context)?;
        let mut updates = Vec::new();
        let mut parameters = Vec::new();
        for (update, (step, draw)) in self.updates.iter().zip(all_numbers) {
            let [parameter, gradient, first, second] =
                update.tensors().map(|tensor| take_cube_tensor(context, tensor, OP));
            let parameter = parameter?;
            parameters.push(Parameter {
                place: Place::of(&parameter),
                shape: parameter.shape(),
                dtype: parameter.dtype,
            });
            let tensors = AdamwTensors {
                parameter: rows(parameter),
                gradient: rows(gradient?),
                first: rows(first?),
                second: rows(second?),
            };
            updates.push(AdamwUpdate { step: numbers(step), tensors, draw });
        }
        let Some(Parameter { place, .. }) = parameters.first() else { return Ok(()) };
        let client = place.client.clone();
        // As a step alone does: what was taken is gone, and nothing else could be done with it.
        let updated = adamw_update_many(&client, updates, gate, seed)
            .unwrap_or_else(|error| panic!("{error}"));
        for ((update, parameter), updated) in self.updates.iter().zip(parameters).zip(updated) {
            let Parameter { place, shape, dtype } = parameter;
            let made = [
                (updated.parameter, dtype),
                (updated.first, DType::F32),
                (updated.second, DType::F32),
            ];
            for (out, (rows, dtype)) in update.0.outputs.iter().zip(made) {
                let tensor = tensor_of_rows(&place, shape.clone(), rows, dtype);
                register_cube_tensor(context, out, tensor, OP)?;
            }
            for shared in &update.0.inputs[Update::TENSORS..] {
                consume(context, shared);
            }
        }
        Ok(())
    }
}

impl FusedOperation for AdamwOperation {
    const NAME: &'static str = NAME;
    type State = Self;

    fn num_ops_fused(&self) -> usize {
        self.updates.len()
    }

    fn run(
        &mut self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        if let Err(reason) = self.launch(context) {
            declined::tell_once(NAME, &reason);
            for update in 0..self.updates.len() {
                fallback(update).run(context);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gelu::row_sum::tests::view, pattern::emit::tensor};
    use burn_ir::TensorStatus::{NotInit, ReadOnly, ReadWrite};

    /// A step of a parameter of its own, whose tensors have the numbers from `first` on.
    fn step(first: u64, shared: &[u64]) -> OperationIr {
        let own = (first..first + 4).map(|id| tensor(id, [2], ReadWrite));
        let shared = shared.iter().map(|id| tensor(*id, [1], ReadOnly));
        let inputs: Vec<_> = own.chain(shared).collect();
        let outputs: Vec<_> = (first + 4..first + 7).map(|id| tensor(id, [2], NotInit)).collect();
        let scalars = (0..7).map(ScalarIr::UInt).collect();
        OperationIr::Custom(CustomOpIr { id: ID.into(), inputs, outputs, scalars })
    }

    fn fused(operations: &[OperationIr]) -> AdamwFuser {
        let mut fuser = AdamwFuser::default();
        operations.iter().for_each(|operation| fuser.fuse(operation));
        fuser
    }

    fn is_open(fuser: &AdamwFuser) -> bool {
        fuser.status() == FuserStatus::Open
    }

    #[test]
    fn steps_are_taken_up_to_what_a_launch_takes() {
        let all: Vec<_> = (0..20).map(|i| step(100 * i, &[7, 8, 9])).collect();
        let some = fused(&all[..MOST_TENSORS - 1]);
        assert!(is_open(&some) && some.properties().ready);
        assert_eq!(some.len(), MOST_TENSORS - 1);
        let many = fused(&all);
        assert!(!is_open(&many));
        assert_eq!(many.len(), MOST_TENSORS);
    }

    #[test]
    fn another_step_of_the_same_parameter_is_not_taken() {
        // The second one reads what the first makes.
        let fuser = fused(&[step(10, &[]), step(14, &[])]);
        assert!(!is_open(&fuser));
        assert_eq!(fuser.len(), 1);
    }

    #[test]
    fn steps_share_gate_and_seed_or_are_not_taken() {
        for (one, other) in
            [(&[1, 2, 3][..], &[1, 2, 4][..]), (&[1], &[2]), (&[1, 2, 3, 5], &[1, 2, 3])]
        {
            let fuser = fused(&[step(10, one), step(20, other)]);
            assert!(!is_open(&fuser), "{one:?} and {other:?}");
            assert_eq!(fuser.len(), 1);
        }
        let OperationIr::Custom(with_seed) = step(10, &[1, 2, 3, 5]) else { unreachable!() };
        let with_seed = Update(with_seed);
        assert_eq!(with_seed.seed().map(|seed| seed.id), Some(TensorId::new(5)));
        assert_eq!(with_seed.gate().map(<[_]>::len), Some(3));
        let OperationIr::Custom(alone) = step(10, &[5]) else { unreachable!() };
        assert_eq!(Update(alone).seed().map(|seed| seed.id), Some(TensorId::new(5)));
    }

    #[test]
    fn any_other_operation_ends_it_in_whichever_block() {
        let fuser = fused(&[step(10, &[])]);
        let mut other_block = fuser.clone();
        other_block.reset();
        assert!(is_open(&fuser) && is_open(&other_block));
        other_block.fuse(&view(1, [1, 2], 5));
        assert!(!is_open(&fuser) && !is_open(&other_block));
        assert!(fuser.properties().ready && !other_block.properties().ready);
        // The next search begins anew.
        other_block.reset();
        other_block.fuse(&step(10, &[]));
        assert!(is_open(&other_block));
    }

    #[test]
    fn other_operations_of_that_kind_are_left_alone() {
        let OperationIr::Custom(good) = step(10, &[]) else { unreachable!() };
        let named = CustomOpIr { id: "another".into(), ..good.clone() };
        let mut short = good.clone();
        short.scalars.pop();
        let mut more = good;
        more.inputs.extend([1, 2].map(|id| tensor(id, [1], ReadOnly)));
        for other in [named, short, more] {
            assert!(Update::of(&OperationIr::Custom(other)).is_none());
        }
    }
}
