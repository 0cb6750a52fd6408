use super::{CrossEntropyBlueprint, forward::Extent};
use crate::functions::exponential_by;
use cubecl::prelude::*;

/// What a pass over the elements of rows makes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ElementForm {
    /// The derivative of losses in logits.
    OfLosses,
    /// The derivative of the targets' log-probabilities, of which a row has its logits less the largest,
    /// and in place of `lse` the sum of their exponentials. A target that is no class is met nowhere.
    OfLogProbabilities,
    /// Logits less a number of their row, which stands in place of `lse`.
    Less,
    /// And less a second one, which stands in place of `grad`.
    LessTwice,
}

impl ElementForm {
    fn is_difference(self) -> bool {
        matches!(self, Self::Less | Self::LessTwice)
    }
}

/// What the gradient of a row needs besides its logits.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowTerms {
    /// The logarithm of the sum of exponentials.
    pub(super) lse: f32,
    /// What probabilities less targets are multiplied by; NaN with a target that is no class.
    pub(super) scale: f32,
    /// The class.
    pub(super) target: u32,
    /// The gradient is zero, whatever the logits hold.
    pub(super) is_ignored: bool,
}

/// What the derivative is of.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Derivative {
    /// What probabilities are diminished by everywhere: `smoothing / classes`.
    pub(crate) everywhere: f32,
    /// What they are diminished by at the target: `1 - smoothing`.
    pub(crate) at_target: f32,
    pub(crate) ignore_index: i32,
    /// NaN, of which WGSL has no constant.
    pub(crate) invalid: f32,
    /// Rows with the target `ignore_index` have no gradient.
    #[cube(comptime)]
    pub(crate) ignores: bool,
    #[cube(comptime)]
    pub(crate) is_smoothed: bool,
    /// `grad` is one for all rows, to be multiplied by `factor`.
    #[cube(comptime)]
    pub(crate) is_reduced: bool,
    #[cube(comptime)]
    pub(crate) form: ElementForm,
}

/// What is read of each row besides its logits.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowTensors {
    pub(crate) targets: Box<[i32]>,
    pub(crate) lse: Box<[f32]>,
    pub(crate) grad: Box<[f32]>,
    pub(crate) factor: Box<[f32]>,
}

/// `scale (exp(x - lse) - everywhere - at_target [is the target])`, the derivative of a row's loss; or
/// what else the form says.
#[cube]
pub(super) fn derivative(
    logit: f32,
    is_target: bool,
    terms: &RowTerms,
    of: &Derivative,
    #[comptime] blueprint: CrossEntropyBlueprint,
) -> f32 {
    let form = comptime!(of.form);
    let less = logit - terms.lse;
    if comptime!(form.is_difference()) {
        if comptime!(form == ElementForm::LessTwice) { less - terms.scale } else { less }
    } else {
        let mut excess = exponential_by(less, comptime!(blueprint.hardware));
        if comptime!(of.is_smoothed) {
            excess -= of.everywhere;
        }
        excess = select(is_target, excess - of.at_target, excess);
        excess * terms.scale
    }
}

/// `dlogits` of the rows from `first_row` on, from element `first_element` on. `dlogits` may be `logits`:
/// a vector is read and written by one unit, as long as both are of one type. Rows along x, `lanes` units each;
/// parts of rows along y.
#[cube(launch_unchecked)]
pub(crate) fn cross_entropy_backward_kernel<F: Float, O: Float, N: Size>(
    logits: &[Vector<F, N>],
    tensors: &RowTensors,
    dlogits: &mut [Vector<O, N>],
    extent: Extent,
    first_row: u32,
    first_element: u32,
    of: &Derivative,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[define(F, O)] _types: [ElemType; 2],
) {
    let (rows, classes, row_stride) = (extent.rows, extent.classes, extent.row_stride);
    let lanes = comptime!(blueprint.lanes);
    let width = comptime!(blueprint.vector_size as u32);
    let size = N::value().comptime();
    let rows_a_cube = comptime!(blueprint.rows_a_cube());
    // What no whole vector holds at the very end is left to a launch with vectors of one.
    let whole = ((rows - 1) * row_stride + classes) / width;

    let mut row = first_row + CUBE_POS_X * rows_a_cube + UNIT_POS / lanes;
    while row < rows {
        let start = row * row_stride;
        let end = start + classes;
        let terms = terms_of(row, tensors, classes, of);
        // A vector with an end of the row before belongs to that row.
        let mut first = max(start / width, first_element / width);
        if row > 0 {
            first = max(first, (start - row_stride + classes - 1) / width + 1);
        }
        let last = min((end - 1) / width + 1, whole);
        let mut index = first + CUBE_POS_Y * lanes + UNIT_POS % lanes;
        while index < last {
            let element = index * width;
            let stored = logits[index as usize];
            let x = Vector::<f32, N>::cast_from(stored);
            let mut dx = Vector::<f32, N>::empty();
            if element >= start && element + width <= end {
                // 1. A vector within the row.
                let target = terms.target - (element - start);
                #[unroll]
                for i in 0..size {
                    let is_target = target == comptime!(i as u32);
                    let one = derivative(x.extract(i), is_target, &terms, of, blueprint);
                    dx.insert(i, select(terms.is_ignored, 0.0f32, one));
                }
            } else {
                // 2. One at an end of it: the next row may begin here. What lies between rows stays.
                let next_start = start + row_stride;
                let next = terms_of(min(row + 1, rows - 1), tensors, classes, of);
                #[unroll]
                for i in 0..size {
                    let at = element + comptime!(i as u32);
                    let mut one = x.extract(i);
                    if at >= start && at < end {
                        let is_target = at - start == terms.target;
                        let here = derivative(one, is_target, &terms, of, blueprint);
                        one = select(terms.is_ignored, 0.0f32, here);
                    } else if at >= next_start {
                        let is_target = at - next_start == next.target;
                        let there = derivative(one, is_target, &next, of, blueprint);
                        one = select(next.is_ignored, 0.0f32, there);
                    }
                    dx.insert(i, one);
                }
            }
            dlogits[index as usize] = Vector::cast_from(dx);
            index += CUBE_COUNT_Y * lanes;
        }
        row += CUBE_COUNT_X * rows_a_cube;
    }
}

#[cube]
fn terms_of(row: u32, tensors: &RowTensors, classes: u32, of: &Derivative) -> RowTerms {
    let form = comptime!(of.form);
    let number = tensors.lse[row as usize];
    if comptime!(form.is_difference()) {
        let second = comptime!(form == ElementForm::LessTwice);
        RowTerms {
            lse: number,
            scale: if comptime!(second) { tensors.grad[row as usize] } else { 0.0f32.runtime() },
            target: 0u32.runtime(),
            is_ignored: false.runtime(),
        }
    } else if comptime!(form == ElementForm::OfLogProbabilities) {
        RowTerms {
            lse: number.ln(),
            scale: -tensors.grad[row as usize],
            target: u32::cast_from(tensors.targets[row as usize]),
            is_ignored: false.runtime(),
        }
    } else {
        let target = tensors.targets[row as usize];
        let is_class = target >= 0 && u32::cast_from(target) < classes;
        let scale = if comptime!(of.is_reduced) {
            tensors.grad[0] * tensors.factor[0]
        } else {
            tensors.grad[row as usize]
        };
        let mut is_ignored = false;
        if comptime!(of.ignores) {
            is_ignored = target == of.ignore_index;
        }
        RowTerms {
            lse: number,
            scale: select(is_class, scale, of.invalid),
            target: u32::cast_from(target),
            is_ignored,
        }
    }
}
