//! The fusers of both optimizers.

use super::{
    adamw::Adamw,
    operation::{READINGS, StepRequest},
    provider::{Optimizer, StepSearch},
    sgd::Sgd,
};
use crate::stream::{
    Fuser,
    emit::{tensor, view},
};
use blackburn_kernels::step::MOST_TENSORS;
use burn_fusion::OperationFuser;
use burn_ir::{
    CustomOpIr, OperationIr, ScalarIr, TensorId,
    TensorStatus::{NotInit, ReadOnly, ReadWrite},
};

/// Each of these for both.
macro_rules! of_both {
    ($($test:ident),+ $(,)?) => {$(
        #[test]
        fn $test() {
            for_kind::$test::<Adamw, 4>();
            for_kind::$test::<Sgd, 3>();
        }
    )+};
}

of_both!(
    steps_are_taken_up_to_what_a_launch_takes,
    another_step_of_the_same_parameter_is_not_taken,
    steps_share_gate_and_seed_or_are_not_taken,
    any_other_operation_ends_it_in_whichever_block,
    other_operations_of_that_kind_are_left_alone,
);

#[test]
fn steps_of_another_optimizer_end_it() {
    let mut fuser = for_kind::fused(&[for_kind::step::<Sgd, 3>(10, &[])]);
    OperationFuser::fuse(&mut fuser, &for_kind::step::<Adamw, 4>(20, &[]));
    let fuser: Fuser<StepSearch<Sgd, 3>> = fuser;
    assert!(!fuser.is_open());
    assert_eq!(fuser.len(), 1);
}

mod for_kind {
    use super::*;

    /// A step of a parameter of its own, whose tensors have the numbers from `first` on. It is taken together with others by
    /// tensor 0.
    pub(super) fn step<K: Optimizer<N>, const N: usize>(first: u64, shared: &[u64]) -> OperationIr {
        let own = (first..first + N as u64).map(|id| tensor(id, [2], ReadWrite));
        let shared = [0].iter().chain(shared).map(|id| tensor(*id, [1], ReadOnly));
        let inputs: Vec<_> = own.chain(shared).collect();
        let outputs: Vec<_> = (first + N as u64..first + 2 * N as u64 - 1)
            .map(|id| tensor(id, [2], NotInit))
            .collect();
        let scalars = (0..K::SCALARS as u64).map(ScalarIr::UInt).collect();
        OperationIr::Custom(CustomOpIr { id: K::ID.into(), inputs, outputs, scalars })
    }

    pub(super) fn fused<K: Optimizer<N>, const N: usize>(
        operations: &[OperationIr],
    ) -> Fuser<StepSearch<K, N>> {
        Fuser::after(StepSearch::default(), operations)
    }

    pub(super) fn steps_are_taken_up_to_what_a_launch_takes<K: Optimizer<N>, const N: usize>() {
        let all: Vec<_> = (0..20).map(|i| step::<K, N>(100 * i, &[7, 8, 9])).collect();
        let some = fused::<K, N>(&all[..MOST_TENSORS - 1]);
        assert!(some.is_open() && some.properties().ready);
        assert_eq!(some.len(), MOST_TENSORS - 1);
        let many = fused::<K, N>(&all);
        assert!(!many.is_open());
        assert_eq!(many.len(), MOST_TENSORS);
    }

    pub(super) fn another_step_of_the_same_parameter_is_not_taken<
        K: Optimizer<N>,
        const N: usize,
    >() {
        // The second one reads what the first makes.
        let fuser = fused::<K, N>(&[step::<K, N>(10, &[]), step::<K, N>(14, &[])]);
        assert!(!fuser.is_open());
        assert_eq!(fuser.len(), 1);
    }

    pub(super) fn steps_share_gate_and_seed_or_are_not_taken<K: Optimizer<N>, const N: usize>() {
        for (one, other) in
            [(&[1, 2, 3][..], &[1, 2, 4][..]), (&[1], &[2]), (&[1, 2, 3, 5], &[1, 2, 3])]
        {
            let fuser = fused::<K, N>(&[step::<K, N>(10, one), step::<K, N>(20, other)]);
            assert!(!fuser.is_open(), "{one:?} and {other:?}");
            assert_eq!(fuser.len(), 1);
        }
        let OperationIr::Custom(mut apart) = step::<K, N>(20, &[]) else { unreachable!() };
        apart.inputs[N] = tensor(9, [1], ReadOnly);
        let fuser = fused::<K, N>(&[step::<K, N>(10, &[]), OperationIr::Custom(apart)]);
        assert_eq!(fuser.len(), 1);
        let asked = |shared: &[u64]| StepRequest::<K, N>::of(&step::<K, N>(10, shared));
        let seed_of = |asked: &StepRequest<K, N>| asked.seed().map(|seed| seed.id);
        let with_gate = asked(&[1, 2, 3, 5]).expect("a step");
        assert_eq!(seed_of(&with_gate), Some(TensorId::new(5)));
        assert_eq!(with_gate.gate().map(<[_]>::len), Some(READINGS));
        assert_eq!(asked(&[5]).as_ref().and_then(seed_of), Some(TensorId::new(5)));
    }

    pub(super) fn any_other_operation_ends_it_in_whichever_block<
        K: Optimizer<N>,
        const N: usize,
    >() {
        let fuser = fused::<K, N>(&[step::<K, N>(10, &[])]);
        let mut other_block = fuser.clone();
        other_block.reset();
        assert!(fuser.is_open() && other_block.is_open());
        other_block.fuse(&view(1, [1, 2], 5));
        assert!(!fuser.is_open() && !other_block.is_open());
        assert!(fuser.properties().ready && !other_block.properties().ready);
        // The next search begins anew.
        other_block.reset();
        other_block.fuse(&step::<K, N>(10, &[]));
        assert!(other_block.is_open());
    }

    pub(super) fn other_operations_of_that_kind_are_left_alone<K: Optimizer<N>, const N: usize>() {
        let OperationIr::Custom(good) = step::<K, N>(10, &[]) else { unreachable!() };
        let named = CustomOpIr { id: "another".into(), ..good.clone() };
        let mut short = good.clone();
        short.scalars.pop();
        let mut more = good;
        more.inputs.extend([1, 2].map(|id| tensor(id, [1], ReadOnly)));
        for other in [named, short, more] {
            assert!(StepRequest::<K, N>::of(&OperationIr::Custom(other)).is_none());
        }
    }
}
