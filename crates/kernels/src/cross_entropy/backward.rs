use super::{
    blueprint::{CrossEntropyBlueprint, UNITS},
    exponential::exponential,
};
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
struct RowTerms {
    /// The logarithm of the sum of exponentials.
    lse: f32,
    /// What probabilities less targets are multiplied by; NaN with a target that is no class.
    scale: f32,
    /// The class.
    target: u32,
    /// The gradient is zero, whatever the logits hold.
    is_ignored: bool,
}

/// What probabilities are diminished by: everywhere, and at the target.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Targets {
    /// `smoothing / classes`.
    pub(crate) everywhere: f32,
    /// `1 - smoothing`.
    pub(crate) at_target: f32,
}

/// `scale (exp(x - lse) - everywhere - at_target [is the target])`, the derivative of a row's loss; or
/// what else the form says.
#[cube]
fn derivative(
    logit: f32,
    is_target: bool,
    terms: &RowTerms,
    expected: &Targets,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[comptime] is_smoothed: bool,
    #[comptime] form: ElementForm,
) -> f32 {
    let less = logit - terms.lse;
    if comptime!(form.is_difference()) {
        if comptime!(form == ElementForm::LessTwice) { less - terms.scale } else { less }
    } else {
        let mut excess = exponential(less, blueprint);
        if comptime!(is_smoothed) {
            excess -= expected.everywhere;
        }
        excess = select(is_target, excess - expected.at_target, excess);
        excess * terms.scale
    }
}

/// `dlogits` of the rows from `first_row` on, from element `first_element` on. `dlogits` may be `logits`:
/// a vector is read and written by one unit, as long as both are of one type. `grad` is one for each row or, with `is_reduced`, one for
/// all, to be multiplied by `factor`. Rows along x, `lanes` units each; parts of rows along y.
#[cube(launch_unchecked)]
pub(crate) fn cross_entropy_backward_kernel<F: Float, O: Float, N: Size>(
    logits: &[Vector<F, N>],
    targets: &[i32],
    lse: &[f32],
    grad: &[f32],
    factor: &[f32],
    dlogits: &mut [Vector<O, N>],
    rows: u32,
    classes: u32,
    row_stride: u32,
    first_row: u32,
    first_element: u32,
    ignore_index: i32,
    invalid: f32,
    expected: Targets,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[comptime] ignores: bool,
    #[comptime] is_smoothed: bool,
    #[comptime] is_reduced: bool,
    #[comptime] form: ElementForm,
    #[define(F)] _dtype: ElemType,
    #[define(O)] _out: ElemType,
) {
    let lanes = comptime!(blueprint.lanes);
    let width = comptime!(blueprint.vector_size as u32);
    let size = N::value().comptime();
    let rows_a_cube = comptime!(UNITS / lanes);
    // What no whole vector holds at the very end is left to a launch with vectors of one.
    let whole = ((rows - 1) * row_stride + classes) / width;

    let mut row = first_row + CUBE_POS_X * rows_a_cube + UNIT_POS / lanes;
    while row < rows {
        let start = row * row_stride;
        let end = start + classes;
        let terms = terms_of(
            row,
            targets,
            lse,
            grad,
            factor,
            classes,
            ignore_index,
            invalid,
            ignores,
            is_reduced,
            form,
        );
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
                    let one = derivative(
                        x.extract(i),
                        is_target,
                        &terms,
                        &expected,
                        blueprint,
                        is_smoothed,
                        form,
                    );
                    dx.insert(i, select(terms.is_ignored, 0.0f32, one));
                }
            } else {
                // 2. One at an end of it: the next row may begin here. What lies between rows stays.
                let next_start = start + row_stride;
                let next = terms_of(
                    min(row + 1, rows - 1),
                    targets,
                    lse,
                    grad,
                    factor,
                    classes,
                    ignore_index,
                    invalid,
                    ignores,
                    is_reduced,
                    form,
                );
                #[unroll]
                for i in 0..size {
                    let at = element + comptime!(i as u32);
                    let mut one = x.extract(i);
                    if at >= start && at < end {
                        let is_target = at - start == terms.target;
                        let here = derivative(
                            one,
                            is_target,
                            &terms,
                            &expected,
                            blueprint,
                            is_smoothed,
                            form,
                        );
                        one = select(terms.is_ignored, 0.0f32, here);
                    } else if at >= next_start {
                        let is_target = at - next_start == next.target;
                        let there = derivative(
                            one,
                            is_target,
                            &next,
                            &expected,
                            blueprint,
                            is_smoothed,
                            form,
                        );
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
fn terms_of(
    row: u32,
    targets: &[i32],
    lse: &[f32],
    grad: &[f32],
    factor: &[f32],
    classes: u32,
    ignore_index: i32,
    invalid: f32,
    #[comptime] ignores: bool,
    #[comptime] is_reduced: bool,
    #[comptime] form: ElementForm,
) -> RowTerms {
    let number = lse[row as usize];
    if comptime!(form.is_difference()) {
        let second = comptime!(form == ElementForm::LessTwice);
        RowTerms {
            lse: number,
            scale: if comptime!(second) { grad[row as usize] } else { 0.0f32.runtime() },
            target: 0u32.runtime(),
            is_ignored: false.runtime(),
        }
    } else if comptime!(form == ElementForm::OfLogProbabilities) {
        RowTerms {
            lse: number.ln(),
            scale: -grad[row as usize],
            target: u32::cast_from(targets[row as usize]),
            is_ignored: false.runtime(),
        }
    } else {
        let target = targets[row as usize];
        let is_class = target >= 0 && u32::cast_from(target) < classes;
        let scale = if comptime!(is_reduced) { grad[0] * factor[0] } else { grad[row as usize] };
        let mut is_ignored = false;
        if comptime!(ignores) {
            is_ignored = target == ignore_index;
        }
        RowTerms {
            lse: number,
            scale: select(is_class, scale, invalid),
            target: u32::cast_from(target),
            is_ignored,
        }
    }
}
