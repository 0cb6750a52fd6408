//! The provider that overwrites several tensors in one launch: a replay takes hundreds, each in less time than a launch.

use crate::{
    ops::{
        copies,
        overwrite::{Overwritten, memory_for, overwrite_together},
    },
    stream::{Claim, Done, Elapsed, Moment, Next, Part, Replacement, Scalars, Search},
    tensors::{
        Tensors, consume, cube_tensor, known_output, register_cube_tensor, rows_of,
        take_cube_tensor,
    },
};
use blackburn_kernels::{KernelError, step::MOST_TENSORS};
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{BaseOperationIr, CustomOpIr, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "overwrite";
/// What the operations are named in the stream: their traits say so, too.
const ALONE: [&str; 2] = ["overwrite_float", "overwrite_int"];
const TOGETHER: [&str; 2] = ["overwrite_float_together", copies::ID];
const COPIED: &str = "copied_float";

/// Tensors that are overwritten, which do not depend on each other.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Overwrites {
    operations: Vec<CustomOpIr>,
}

/// An operation that overwrites.
struct Parts<'a> {
    /// What is overwritten. None where memory is taken for it.
    target: Option<&'a TensorIr>,
    source: &'a TensorIr,
    out: &'a TensorIr,
    /// What it shares with those that are taken together with it.
    together: Option<&'a TensorIr>,
}

impl<'a> Parts<'a> {
    fn of(operation: &'a CustomOpIr) -> Option<Self> {
        let [out] = &operation.outputs[..] else { return None };
        let id = operation.id.as_str();
        let (target, source, together) = match &operation.inputs[..] {
            [target, source] if ALONE.contains(&id) => (Some(target), source, None),
            [source, together] if id == COPIED => (None, source, Some(together)),
            [target, source, together] if TOGETHER.contains(&id) => {
                (Some(target), source, Some(together))
            }
            _ => return None,
        };
        Some(Self { target, source, out, together })
    }

    /// All that belongs to this operation alone.
    fn own(&self) -> impl Iterator<Item = &'a TensorIr> + use<'a> {
        self.target.into_iter().chain([self.source, self.out])
    }
}

/// The number of the copies that the target is one of; none for one that it has to be and is unknown.
fn copies_of(operation: &CustomOpIr, context: &Tensors) -> Option<Option<u32>> {
    if operation.id != copies::ID {
        return Some(None);
    }
    let number = Scalars::of(operation, context).whole(0)?;
    u32::try_from(number).ok().map(Some)
}

/// Memory that nobody writes to at the same time.
fn memory_of(tensor: &CubeTensor) -> impl PartialEq + use<> {
    tensor.handle.clone().binding().memory.id()
}

impl Replacement for Overwrites {
    const NAME: &'static str = "BlackburnOverwrite";

    fn launch(&self, context: &mut Tensors) -> Result<Done, KernelError> {
        let mut memory = Vec::new();
        let numbers: Option<Vec<_>> =
            self.operations.iter().map(|operation| copies_of(operation, context)).collect();
        let Some(numbers) = numbers else { return Ok(Done::First(0)) };
        for Parts { target, source, out, .. } in self.operations.iter().filter_map(Parts::of) {
            let source = cube_tensor(context, source, OP)?;
            known_output(context, out, OP)?;
            let target = target.map(|target| cube_tensor(context, target, OP)).transpose()?;
            if target.as_ref().is_some_and(|target| rows_of(target).is_none()) {
                return Ok(Done::First(0));
            }
            memory.push((target.as_ref().map(memory_of), memory_of(&source)));
        }
        // Views have names of their own.
        let is_apart = memory.iter().enumerate().all(|(place, (target, _))| {
            let Some(target) = target else { return true };
            memory.iter().enumerate().all(|(other, (written, read))| {
                place == other || (written.as_ref() != Some(target) && read != target)
            })
        });
        if !is_apart {
            return Ok(Done::First(0));
        }
        let (mut all, mut outs) = (Vec::new(), Vec::new());
        let pairs = self.operations.iter().filter_map(Parts::of).zip(numbers);
        for (Parts { target, source, out, together }, copies) in pairs {
            let target = target.map(|target| take_cube_tensor(context, target, OP)).transpose()?;
            let shape = known_output(context, out, OP)?.shape.clone();
            let source = take_cube_tensor(context, source, OP)?;
            let target = target.unwrap_or_else(|| memory_for(&source, shape, out.dtype));
            all.push(Overwritten { target, source, copies });
            outs.push(out);
            if let Some(together) = together {
                consume(context, together);
            }
        }
        overwrite_together(&all);
        for (Overwritten { target, .. }, out) in all.into_iter().zip(outs) {
            register_cube_tensor(context, out, target, OP)?;
        }
        Ok(Done::All)
    }
}

/// Takes operations that overwrite and follow each other, and those that take memory for their targets. It is over
/// when Burn shows any other operation, to whichever block.
#[derive(Clone, Default)]
pub(crate) struct OverwriteSearch {
    found: Overwrites,
    /// Positions of `found` in the block.
    overwrites: Vec<usize>,
    /// Positions of what takes memory.
    empties: Vec<usize>,
}

impl OverwriteSearch {
    /// As of any fusion below those that save a tensor. Nobody else takes these operations.
    const SCORE: u64 = 15;
}

fn takes_memory(operation: &OperationIr) -> bool {
    matches!(
        operation,
        OperationIr::BaseFloat(BaseOperationIr::Empty(_))
            | OperationIr::BaseInt(BaseOperationIr::Empty(_))
    )
}

impl Search for OverwriteSearch {
    type Replacement = Overwrites;
    const MAY_CAST_FIRST: bool = false;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        if self.gives_up(now.elapsed) {
            return Next::Refused;
        }
        if takes_memory(operation) {
            self.empties.push(now.position);
            return Next::Taken;
        }
        let OperationIr::Custom(custom) = operation else { return Next::Refused };
        let Some(new) = Parts::of(custom) else { return Next::Refused };
        let is_new = |old: &TensorIr| new.own().all(|new| new.id != old.id);
        let found = self.found.operations.iter().filter_map(Parts::of);
        if !found.flat_map(|parts| parts.own()).all(is_new) {
            return Next::Refused;
        }
        self.overwrites.push(now.position);
        self.found.operations.push(custom.clone());
        if self.overwrites.len() == MOST_TENSORS { Next::Last } else { Next::Taken }
    }

    fn claim(&self) -> Option<Claim<Overwrites>> {
        let replaced = Part::Replaced(self.overwrites.clone(), self.found.clone());
        let parts = match self.empties.is_empty() {
            true => vec![replaced],
            false => vec![Part::Unfused(self.empties.clone()), replaced],
        };
        (self.overwrites.len() > 1).then_some(Claim { score: Self::SCORE, parts })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_first > 0
    }

    fn takes_time(operation: &OperationIr) -> bool {
        let overwrites =
            matches!(operation, OperationIr::Custom(custom) if Parts::of(custom).is_some());
        !(overwrites || takes_memory(operation) || matches!(operation, OperationIr::Drop(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{
        Fuser,
        emit::{tensor, view},
    };
    use burn_ir::TensorStatus::{NotInit, ReadOnly, ReadWrite};

    /// What they share.
    const TOGETHER: u64 = 1;

    fn custom(id: &str, inputs: &[u64], out: u64) -> OperationIr {
        let read = |id: &u64| tensor(*id, [2], if *id == TOGETHER { ReadOnly } else { ReadWrite });
        OperationIr::Custom(CustomOpIr {
            id: id.into(),
            inputs: inputs.iter().map(read).collect(),
            outputs: vec![tensor(out, [2], NotInit)],
            scalars: Vec::new(),
        })
    }

    fn fuser(operations: &[OperationIr]) -> Fuser<OverwriteSearch> {
        Fuser::after(OverwriteSearch::default(), operations)
    }

    #[test]
    fn what_shares_a_tensor_is_taken_with_and_without_memory_of_before() {
        let operations = [
            custom(COPIED, &[10, TOGETHER], 11),
            custom("overwrite_float_together", &[20, 21, TOGETHER], 22),
            custom(copies::ID, &[30, 31, TOGETHER], 32),
            custom("overwrite_int", &[40, 41], 42),
        ];
        let all = fuser(&operations);
        assert!(all.is_open());
        assert_eq!(all.claims(), Some(operations.len()));
        assert_eq!(fuser(&operations[..1]).claims(), None);
    }

    #[test]
    fn what_reads_the_result_of_another_is_not_taken() {
        let first = custom(COPIED, &[10, TOGETHER], 11);
        let second = custom(COPIED, &[20, TOGETHER], 21);
        let reader = custom("overwrite_float_together", &[30, 11, TOGETHER], 31);
        let fuser = fuser(&[first, second, reader]);
        assert!(!fuser.is_open());
        assert_eq!(fuser.claims(), Some(2));
    }

    #[test]
    fn other_operations_and_other_numbers_of_tensors_end_it() {
        let copied = || custom(COPIED, &[10, TOGETHER], 11);
        for other in [
            view(1, [1, 2], 5),
            custom("another", &[20, TOGETHER], 21),
            custom(COPIED, &[20, 21, TOGETHER], 22),
            custom("overwrite_float", &[20, 21, TOGETHER], 22),
        ] {
            assert!(!fuser(&[copied(), other]).is_open());
        }
    }
}
