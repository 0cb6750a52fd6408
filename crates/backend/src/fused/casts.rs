//! The provider that casts several tensors in one launch. Burn's gradients of parameters that are computed with in 16 bits
//! come as f32 by a cast each, one behind the other at the end of a backward pass. Casts of parameters to 16 bits are
//! taken where no search takes them along, since a step may have made them.

use crate::{
    ops::overwrite::{copy_together, memory_for},
    stream::{Claim, Done, Elapsed, Moment, Next, Part, Replacement, Search, parameter_cast},
    tensors::{
        Tensors, kept_casts, known_output, register_cube_tensor, rows_of, shape_of,
        take_cube_tensor,
    },
};
use blackburn_kernels::{KernelError, step::MOST_TENSORS};
use burn_cubecl::kernel;
use burn_ir::{BaseOperationIr, OperationIr, TensorId, TensorIr};
use burn_std::DType;
use serde::{Deserialize, Serialize};

const OP: &str = "cast";

/// Tensors with as many are worth a launch of their own, and may be beyond what the kernel counts.
const MOST_ELEMENTS: usize = 1 << 30;

/// Casts that do not depend on each other: what is read, and what is made.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Casts {
    casts: Vec<[TensorIr; 2]>,
}

impl Replacement for Casts {
    const NAME: &'static str = "BlackburnCast";

    fn launch(&self, context: &mut Tensors) -> Result<Done, KernelError> {
        for [source, out] in &self.casts {
            shape_of(context, source, OP)?;
            known_output(context, out, OP)?;
        }
        let (mut pairs, mut outs) = (Vec::new(), Vec::new());
        for [source, out] in &self.casts {
            // From f32 are parameters.
            if source.dtype == DType::F32 && kept_casts::give(context, source, out) {
                continue;
            }
            let shape = known_output(context, out, OP)?.shape.clone();
            let source = take_cube_tensor(context, source, OP)?;
            let is_together = self.casts.len() > 1
                && (1..MOST_ELEMENTS).contains(&shape.num_elements())
                && rows_of(&source).is_some();
            if !is_together {
                // As Burn casts it: in the order of its memory.
                register_cube_tensor(context, out, kernel::cast(source, out.dtype), OP)?;
                continue;
            }
            pairs.push([memory_for(&source, shape, out.dtype), source]);
            outs.push(out);
        }
        copy_together(&pairs);
        for ([made, _], out) in pairs.into_iter().zip(outs) {
            register_cube_tensor(context, out, made, OP)?;
        }
        Ok(Done::All)
    }
}

/// Takes casts of 16 bits to f32, and of parameters to 16 bits, that follow each other. It is over when Burn shows any other
/// operation, to whichever block.
///
/// An extension that reads nothing but casts of parameters is taken along and runs as it is: a mark of a weight that is
/// multiplied in 8 bits. Burn would join it with what is left over behind the product, and run all of them unfused, since
/// the product comes in between.
#[derive(Clone, Default)]
pub(crate) struct CastSearch {
    found: Casts,
    /// The casts' positions, and those of extensions, which run behind all casts.
    casts: Vec<usize>,
    extensions: Vec<usize>,
    /// What extensions make.
    made_behind: Vec<TensorId>,
}

impl CastSearch {
    /// For each cast, as Burn's fusions bid.
    const SCORE: u64 = 10;
    /// Below any fusion that saves a tensor.
    const MOST: u64 = 90;

    /// Whether `operation` is an extension that reads nothing but what was cast to 16 bits here.
    fn is_of_casts(&self, operation: &OperationIr) -> bool {
        let mut casts = self.found.casts.iter().filter(|[_, out]| out.dtype != DType::F32);
        only_input(operation).is_some_and(|read| casts.any(|[_, out]| out.id == read.id))
    }
}

/// What `operation` reads, if it is an extension that reads one tensor.
fn only_input(operation: &OperationIr) -> Option<&TensorIr> {
    let OperationIr::Custom(custom) = operation else { return None };
    let [input] = &custom.inputs[..] else { return None };
    Some(input)
}

/// What `operation` reads and makes, if it casts numbers of 16 bits to f32, or a parameter to 16 bits. Other casts belong to
/// what reads them, as those of inputs do.
fn cast_of(operation: &OperationIr) -> Option<[&TensorIr; 2]> {
    let OperationIr::BaseFloat(BaseOperationIr::Cast(cast)) = operation else { return None };
    let is_widened =
        matches!(cast.input.dtype, DType::F16 | DType::BF16) && cast.out.dtype == DType::F32;
    is_widened.then_some([&cast.input, &cast.out]).or_else(|| parameter_cast(operation))
}

impl Search for CastSearch {
    type Replacement = Casts;
    const MAY_CAST_FIRST: bool = false;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        let Some([source, out]) = cast_of(operation) else {
            let is_taken = !self.gives_up(now.elapsed) && self.is_of_casts(operation);
            if is_taken {
                self.extensions.push(now.position);
                self.made_behind.extend(operation.outputs().map(|out| out.id));
            }
            return Next::taken_if(is_taken);
        };
        let is_made = self.made_behind.contains(&source.id)
            || self.found.casts.iter().any(|[_, made]| made.id == source.id);
        if is_made || self.gives_up(now.elapsed) {
            return Next::Refused;
        }
        self.found.casts.push([source.clone(), out.clone()]);
        self.casts.push(now.position);
        if self.found.casts.len() == MOST_TENSORS { Next::Last } else { Next::Taken }
    }

    /// One alone, too: left to Burn, it would be settled together with whatever ended this search.
    fn claim(&self) -> Option<Claim<Casts>> {
        let count = self.found.casts.len();
        let mut parts = vec![Part::Replaced(self.casts.clone(), self.found.clone())];
        if !self.extensions.is_empty() {
            parts.push(Part::Unfused(self.extensions.clone()));
        }
        let score = (Self::SCORE * (count as u64).saturating_sub(1)).clamp(1, Self::MOST);
        (count > 0).then_some(Claim { score, parts })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_first > 0
    }

    fn takes_time(operation: &OperationIr) -> bool {
        let is_drop = matches!(operation, OperationIr::Drop(_));
        !(is_drop || cast_of(operation).is_some() || only_input(operation).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, emit::tensor};
    use burn_ir::{
        CastOpIr, CustomOpIr,
        TensorStatus::{NotInit, ReadOnly, ReadWrite},
    };

    fn cast(from: u64, read_as: burn_ir::TensorStatus, types: [DType; 2], to: u64) -> OperationIr {
        let [mut input, mut out] = [tensor(from, [4], read_as), tensor(to, [4], NotInit)];
        [input.dtype, out.dtype] = types;
        OperationIr::BaseFloat(BaseOperationIr::Cast(CastOpIr { input, out }))
    }

    fn gradient(id: u64) -> OperationIr {
        cast(id, ReadWrite, [DType::BF16, DType::F32], id + 100)
    }

    #[test]
    fn casts_of_gradients_are_taken_up_to_what_a_launch_takes() {
        let all: Vec<_> = (0..20).map(gradient).collect();
        let few = Fuser::after(CastSearch::default(), &all[..3]);
        assert!(few.is_open());
        assert_eq!(few.claims(), Some(3));
        let many = Fuser::after(CastSearch::default(), &all);
        assert!(!many.is_open());
        assert_eq!(many.claims(), Some(MOST_TENSORS));
        assert_eq!(Fuser::after(CastSearch::default(), &all[..1]).claims(), Some(1));
    }

    #[test]
    fn a_cast_of_what_was_cast_is_not_taken() {
        for status in [ReadOnly, ReadWrite] {
            let back = cast(100, status, [DType::F32, DType::BF16], 300);
            let fuser = Fuser::after(CastSearch::default(), &[gradient(0), back]);
            assert!(!fuser.is_open());
            assert_eq!(fuser.claims(), Some(1));
        }
    }

    #[test]
    fn casts_of_parameters_are_taken() {
        let parameter = |id| cast(id, ReadOnly, [DType::F32, DType::BF16], id + 100);
        let fuser = Fuser::after(CastSearch::default(), &[parameter(1), parameter(2)]);
        assert!(fuser.is_open());
        assert_eq!(fuser.claims(), Some(2));
    }

    #[test]
    fn an_extension_that_reads_one_cast_is_taken_along() {
        let parameter = |id| cast(id, ReadOnly, [DType::F32, DType::BF16], id + 100);
        let extension = |read: &[u64]| {
            let inputs = read.iter().map(|id| tensor(*id, [4], ReadWrite)).collect();
            let outputs = vec![tensor(300, [4], NotInit)];
            OperationIr::Custom(CustomOpIr {
                id: "a mark".into(),
                inputs,
                outputs,
                scalars: vec![],
            })
        };
        let all = [parameter(1), extension(&[101]), parameter(2)];
        let fuser = Fuser::after(CastSearch::default(), &all);
        assert!(fuser.is_open());
        assert_eq!(fuser.claims(), Some(3));
        // What an extension makes is not there when casts run.
        let back = cast(300, ReadWrite, [DType::BF16, DType::F32], 400);
        let fuser = Fuser::after(CastSearch::default(), &[parameter(1), extension(&[101]), back]);
        assert!(!fuser.is_open());
        assert_eq!(fuser.claims(), Some(2));
        for (first, other) in
            [(parameter(1), &[1][..]), (parameter(1), &[101, 3]), (gradient(1), &[101])]
        {
            let fuser = Fuser::after(CastSearch::default(), &[first, extension(other)]);
            assert!(!fuser.is_open(), "{other:?}");
            assert_eq!(fuser.claims(), Some(1), "{other:?}");
        }
    }

    #[test]
    fn inputs_and_wide_numbers_are_left_alone() {
        let wide = cast(1, ReadWrite, [DType::BF16, DType::F64], 2);
        let input = cast(1, ReadWrite, [DType::F32, DType::F16], 2);
        for operation in [input, wide] {
            let fuser = Fuser::after(CastSearch::default(), &[operation]);
            assert!(!fuser.is_open());
            assert_eq!(fuser.claims(), None);
        }
    }
}
