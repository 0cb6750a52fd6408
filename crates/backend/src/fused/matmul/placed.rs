//! Where a product writes: in the order of its output's dimensions, or in one that saves a copy of it.

use crate::tensors::{Input, contiguous_strides};
use blackburn_kernels::matmul::{Epilogue, MatmulBlueprint, MatmulProblem};

/// A product as it is launched.
pub(super) struct Placed {
    pub(super) problem: MatmulProblem,
    /// Whether it is the transpose of what is asked for, so that operands change places.
    pub(super) turned: bool,
    /// Whether rows of the inner batch's matrices [take turns](Epilogue::interleaved).
    pub(super) interleaved: bool,
    /// How far neighbors of each dimension of the output lie apart, if its elements are not in order.
    pub(super) strides: Option<Vec<usize>>,
}

impl Placed {
    /// The best of what is to be had for a product into a tensor of `shape`.
    pub(super) fn of(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        shape: &[usize],
        rhs: &Input,
    ) -> Self {
        let in_order =
            || Self { problem: *problem, turned: false, interleaved: false, strides: None };
        let is_plain = epilogue.residual.is_none() && !epilogue.keep_preactivation;
        if !is_plain {
            return in_order();
        }
        Self::interleaved(problem, epilogue, shape, rhs)
            .or_else(|| Self::aligned(problem, epilogue, shape, rhs))
            .unwrap_or_else(in_order)
    }

    /// The heads of a token beside each other, where those of the operand along whose columns the output's go lie so, as
    /// attention's values and keys do. A layer behind attention sees the heads as one row, and with heads one after the
    /// other it would be copied to that.
    ///
    /// The gradient of keys comes as that of their transpose. That is the transpose of a product of the other kind.
    fn interleaved(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        shape: &[usize],
        rhs: &Input,
    ) -> Option<Self> {
        let is_turned = !problem.has_interleaved_rhs();
        let turned = || problem.transposed().filter(MatmulProblem::has_interleaved_rhs);
        let placed = if is_turned { turned()? } else { *problem };
        if is_turned && epilogue.bias.is_some() {
            return None;
        }
        let &[.., heads, rows, columns] = shape else { return None };
        let matrix = if is_turned { [columns, rows] } else { [rows, columns] };
        // Too few tiles fill a device by splits, which are added up in order.
        let is_whole = || {
            let plan = MatmulBlueprint::plan(&placed, epilogue, &rhs.client);
            plan.is_ok_and(|plan| plan.splits == 1)
        };
        if heads != placed.batch[1] || matrix != [placed.m, placed.n] || !is_whole() {
            return None;
        }
        let mut strides = contiguous_strides(shape);
        let of_matrix = strides.len() - 2;
        strides[of_matrix - 1] = placed.n;
        strides[of_matrix] = heads * placed.n;
        strides[of_matrix + 1] = 1;
        if is_turned {
            strides.swap(of_matrix, of_matrix + 1);
        }
        Some(Self { problem: placed, turned: is_turned, interleaved: true, strides: Some(strides) })
    }

    /// Rows of the output at aligned addresses, where that is worth it. A head's logits over a vocabulary of an odd size
    /// would be copied to such rows by both products that take their gradient. The scores of attention over an odd number
    /// of tokens would be written by narrower stores, and what softmax makes of them, which lies as they do, copied by the
    /// products behind.
    fn aligned(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        shape: &[usize],
        rhs: &Input,
    ) -> Option<Self> {
        /// What is small is packed in no time, and small tensors are looked at in more ways.
        const LEAST_ELEMENTS: usize = 1 << 20;
        if shape.last() != Some(&problem.n) || problem.out_elements() < LEAST_ELEMENTS {
            return None;
        }
        let is_served = |aligned: &MatmulProblem| {
            problem.batches() == 1 || MatmulBlueprint::plan(aligned, epilogue, &rhs.client).is_ok()
        };
        let aligned = problem
            .with_aligned_rows()
            .filter(|aligned| rhs.holds(aligned.rhs_span()) && is_served(aligned))?;
        let mut in_memory = shape.to_vec();
        in_memory[shape.len() - 1] = aligned.n;
        let strides = contiguous_strides(&in_memory);
        Some(Self { problem: aligned, turned: false, interleaved: false, strides: Some(strides) })
    }
}
