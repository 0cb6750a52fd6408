//! The sum of the rows of a gradient, behind the operations that make it: the gradient of a bias.

use super::{NAME, OP, Sum, served_sum};
use crate::{
    declined::tell_once,
    stream::Shown,
    tensors::{Input, Tensors, consume, register_output},
};
use blackburn_kernels::{KernelError, buffer::Buffer};
use burn_cubecl_fusion::FallbackOperation;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

/// The sum of all rows, the last dimension's, of a gradient or of a view of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RowSum {
    /// Whether the view has an operation, in front of the sum's.
    viewed: bool,
    sum: Sum,
}

impl RowSum {
    /// How many operations it replaces, the view's among them.
    pub(crate) fn operations(&self) -> usize {
        1 + usize::from(self.viewed)
    }

    /// The length of a row.
    pub(crate) fn columns(&self, context: &Tensors) -> Option<usize> {
        context.tensors.get(&self.sum.input.id).and_then(|known| known.shape.last().copied())
    }

    /// Makes the view, and the sum what `db` holds, on the device and of the type of the tensor
    /// beside it. Without a `db` the sum is computed from the gradient.
    pub(crate) fn run(
        &self,
        context: &mut Tensors,
        db: Option<(Input, Buffer)>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        if self.viewed {
            fallback(0).run(context);
        }
        if let Err(reason) = self.finish(context, db) {
            tell_once(NAME, &reason);
            fallback(usize::from(self.viewed)).run(context);
        }
    }

    fn finish(
        &self,
        context: &mut Tensors,
        db: Option<(Input, Buffer)>,
    ) -> Result<(), KernelError> {
        let Some((like, db)) = db else { return self.sum.launch(context) };
        register_output(context, &self.sum.out, &like, db, OP)?;
        consume(context, &self.sum.input);
        Ok(())
    }
}

/// Looks for a [`RowSum`] right behind what makes a gradient.
#[derive(Clone, Debug)]
pub(crate) struct RowSumSearch {
    /// The gradient, or the view of it.
    value: TensorIr,
    viewed: bool,
    shown: Shown,
    /// How many had been shown with the one that made `value`.
    made_at: u64,
}

/// What an operation is to a [`RowSumSearch`].
#[derive(Clone, Debug)]
pub(crate) enum Followed {
    /// A view of the gradient, whose sum may be next.
    Waits(RowSumSearch),
    /// The sum.
    Found(RowSum),
    /// Neither.
    Lost,
}

impl RowSumSearch {
    /// The search behind the operation that makes `gradient`, the last of those `shown`.
    pub(crate) fn behind(gradient: TensorIr, shown: &Shown) -> Self {
        Self { value: gradient, viewed: false, shown: shown.clone(), made_at: shown.so_far() }
    }

    /// Whether the next operation has yet to come.
    pub(crate) fn waits(&self) -> bool {
        self.made_at == self.shown.so_far()
    }

    /// The next operation behind.
    pub(crate) fn follow(self, operation: &OperationIr) -> Followed {
        if let OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) = operation
            && op.input.id == self.value.id
            && !self.viewed
        {
            return Followed::Waits(Self {
                viewed: true,
                ..Self::behind(op.out.clone(), &self.shown)
            });
        }
        match served_sum(operation) {
            Some(sum) if sum.input.id == self.value.id && sum.is_of_rows() => {
                Followed::Found(RowSum { viewed: self.viewed, sum })
            }
            _ => Followed::Lost,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::stream::emit::tensor;
    use burn_backend::DType;
    use burn_ir::{
        NumericOperationIr, ReduceDimOpIr, ShapeOpIr,
        TensorStatus::{NotInit, ReadOnly, ReadWrite},
    };

    fn sum_along<const D: usize>(id: u64, shape: [usize; D], axis: usize) -> OperationIr {
        let out = tensor(id + 100, shape, NotInit);
        let sum =
            ReduceDimOpIr { input: tensor(id, shape, ReadOnly), out, axis, accumulator_len: 1 };
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::SumDim(sum))
    }

    /// The sum of the rows of the tensor of that number.
    pub(crate) fn sum(id: u64, shape: [usize; 2]) -> OperationIr {
        sum_along(id, shape, 0)
    }

    /// The tensor `out` that holds what the tensor `id` does.
    pub(crate) fn view(id: u64, shape: [usize; 2], out: u64) -> OperationIr {
        let (input, out) = (tensor(id, shape, ReadWrite), tensor(out, shape, NotInit));
        OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr { input, out }))
    }

    const SHAPE: [usize; 2] = [1, 2];

    fn follow(operations: &[OperationIr]) -> Followed {
        let search = RowSumSearch::behind(tensor(1, SHAPE, NotInit), &Shown::default());
        operations.iter().fold(Followed::Waits(search), |followed, operation| match followed {
            Followed::Waits(search) => search.follow(operation),
            other => other,
        })
    }

    #[test]
    fn a_sum_is_found_behind_the_gradient_or_one_view_of_it() {
        assert!(matches!(follow(&[sum(1, SHAPE)]), Followed::Found(_)));
        let Followed::Found(found) = follow(&[view(1, SHAPE, 5), sum(5, SHAPE)]) else {
            panic!("the view was not followed")
        };
        assert_eq!(found.operations(), 2);
        let views = [view(1, SHAPE, 5), view(5, SHAPE, 6), sum(6, SHAPE)];
        assert!(matches!(follow(&views), Followed::Lost));
    }

    #[test]
    fn a_sum_of_something_else_is_left_alone() {
        assert!(matches!(follow(&[sum(2, SHAPE)]), Followed::Lost), "another tensor");
        assert!(matches!(follow(&[view(2, SHAPE, 5)]), Followed::Lost), "a view of another");
        // Behind a view the gradient itself is no longer waited for.
        assert!(matches!(follow(&[view(1, SHAPE, 5), sum(1, SHAPE)]), Followed::Lost));
        let of_a_part = sum_along(1, [1, 2, 3], 1);
        assert!(matches!(follow(&[of_a_part]), Followed::Lost), "sums of groups of rows");
    }

    #[test]
    fn the_wait_is_over_when_another_block_got_the_next_operation() {
        let shown = Shown::default();
        let search = RowSumSearch::behind(tensor(1, SHAPE, NotInit), &shown);
        assert!(search.waits());
        shown.count();
        assert!(!search.waits());
        // It is still taken if it comes.
        let Followed::Waits(search) = search.follow(&view(1, SHAPE, 5)) else {
            panic!("the view was not followed")
        };
        assert!(search.waits());
        assert!(matches!(search.follow(&sum(5, SHAPE)), Followed::Found(_)));
    }
}
