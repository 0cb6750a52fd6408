//! Losses and their gradient by one pass over the rows.
//!
//! Apart, the two passes read the logits from memory twice. Here the units of a cube read a row to find the sum of its
//! exponentials, and read it again at once, from the cache, to write the gradient over it. That gradient is of losses
//! whose own gradient is 1; [`cross_entropy_rescale_kernel`] multiplies it where that turns out otherwise.

use super::{
    CrossEntropyBlueprint,
    backward::{Derivative, RowTerms, derivative},
    forward::{Extent, Logits, LossRules, join_row, loss_of, nothing, see_row, target_logit},
};
use cubecl::prelude::*;

/// The gradient of logits, by vectors and one by one: both are the same memory, that of the logits or another.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Gradient<F: Float, N: Size> {
    pub(crate) vectors: Box<[Vector<F, N>]>,
    pub(crate) elements: Box<[F]>,
}

/// `loss[r]` of each row, and `dlogits` for a gradient of `factor[0]`. Rows are spread over the cubes along x, `lanes`
/// units a row.
#[cube(launch_unchecked)]
pub(crate) fn cross_entropy_at_once_kernel<F: Float, N: Size>(
    logits: &Logits<F, N>,
    targets: &[i32],
    factor: &[f32],
    loss: &mut [f32],
    dlogits: &mut Gradient<F, N>,
    extent: Extent,
    rules: &LossRules,
    of: &Derivative,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = comptime!(blueprint.lanes);
    let rows_a_cube = comptime!(blueprint.rows_a_cube());
    let lane = UNIT_POS % lanes;
    let (rows, classes, row_stride) = (extent.rows, extent.classes, extent.row_stride);
    let mut partials = Shared::<[f32]>::new_slice(comptime!(blueprint.partials()));

    let mut first_row = CUBE_POS_X * rows_a_cube;
    while first_row < rows {
        let row = first_row + UNIT_POS / lanes;
        let start = row * row_stride;
        let mut seen = nothing();
        let mut target = 0i32;
        let mut picked = 0.0f32;
        // 1. Each unit sees its part. The target's logit is read before the gradient is written over it.
        if row < rows {
            let is_smoothed = comptime!(rules.is_smoothed);
            target = targets[row as usize];
            see_row::<F, N>(&mut seen, logits, start, classes, lane, blueprint, is_smoothed);
            if lane == 0 {
                picked = target_logit::<F, N>(logits, start, target, classes, rules);
            }
        }

        // 2. The units of the row meet.
        join_row(&mut seen, &mut partials, blueprint);
        sync_cube();
        if row < rows {
            let log = seen.peak + seen.total.ln();
            if lane == 0 {
                loss[row as usize] = loss_of(picked, log, target, seen.sum, classes, rules);
            }

            // 3. Each writes the gradient of what it saw.
            let is_class = target >= 0 && u32::cast_from(target) < classes;
            let mut is_ignored = false;
            if comptime!(of.ignores) {
                is_ignored = target == of.ignore_index;
            }
            let terms = RowTerms {
                lse: log,
                scale: select(is_class, factor[0], of.invalid),
                target: u32::cast_from(target),
                is_ignored,
            };
            write_row::<F, N>(dlogits, logits, start, classes, lane, &terms, of, blueprint);
        }
        first_row += CUBE_COUNT_X * rows_a_cube;
    }
}

/// The gradient of a row, from element `start` on, each element by the unit that
/// [saw](super::forward::see_row) it.
#[cube]
fn write_row<F: Float, N: Size>(
    dlogits: &mut Gradient<F, N>,
    logits: &Logits<F, N>,
    start: u32,
    classes: u32,
    lane: u32,
    terms: &RowTerms,
    of: &Derivative,
    #[comptime] blueprint: CrossEntropyBlueprint,
) {
    let lanes = comptime!(blueprint.lanes);
    let width = comptime!(blueprint.vector_size as u32);
    let head = min((width - start % width) % width, classes);
    let vectors = (classes - head) / width;
    let ends = classes - vectors * width;
    let mut end = lane;
    while end < ends {
        let column = select(end < head, end, end + vectors * width);
        let at = (start + column) as usize;
        let logit = f32::cast_from(logits.elements[at]);
        let one = derivative(logit, column == terms.target, terms, of, blueprint);
        dlogits.elements[at] = F::cast_from(select(terms.is_ignored, 0.0f32, one));
        end += lanes;
    }
    let first = (start + head) / width;
    let mut index = lane;
    if index < vectors {
        let mut next = logits.vectors[(first + index) as usize];
        while index < vectors {
            let x = Vector::<f32, N>::cast_from(next);
            let here = index;
            index += lanes;
            if index < vectors {
                next = logits.vectors[(first + index) as usize];
            }
            let target = terms.target - (head + here * width);
            let mut dx = Vector::<f32, N>::empty();
            #[unroll]
            for i in 0..N::value().comptime() {
                let is_target = target == comptime!(i as u32);
                let one = derivative(x.extract(i), is_target, terms, of, blueprint);
                dx.insert(i, select(terms.is_ignored, 0.0f32, one));
            }
            dlogits.vectors[(first + here) as usize] = Vector::cast_from(dx);
        }
    }
}

/// Multiplies a gradient of so many vectors by `grad[0]`, in place. Of 1 it reads nothing else.
#[cube(launch_unchecked)]
pub(crate) fn cross_entropy_rescale_kernel<F: Float, N: Size>(
    dlogits: &mut [Vector<F, N>],
    grad: &[f32],
    vectors: u32,
    #[define(F)] _dtype: ElemType,
) {
    let scale = grad[0];
    if scale != 1.0f32 {
        let mut at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
        while at < vectors {
            let value = Vector::<f32, N>::cast_from(dlogits[at as usize]) * Vector::new(scale);
            dlogits[at as usize] = Vector::cast_from(value);
            at += CUBE_COUNT_X * CUBE_DIM_X;
        }
    }
}
