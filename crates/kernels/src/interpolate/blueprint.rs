use super::{InterpolateProblem, Mode, backward::Filter, problem::OP};
use crate::{
    Promise,
    pixels::{PixelPlan, Read},
    plan::tell_plan,
};
use cubecl::client::Client;
use std::fmt;

/// How a launch is compiled and spread over the device: a vector of channels of a pixel of dx a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InterpolateBlueprint {
    pub(super) plan: PixelPlan,
    /// Of rows, and of columns.
    pub(super) filters: [Filter; 2],
}

impl InterpolateBlueprint {
    /// Four cubes of 256 units a multiprocessor: a unit has few loads on their way, so that many units have to hide
    /// the latency of memory.
    pub(super) const PROMISE: Promise = Promise::registers(64);

    /// The widest vectors that fit channels and the distance of pixels.
    pub(super) fn plan(problem: &InterpolateProblem, client: &Client) -> Self {
        let InterpolateProblem { images, channels, input, dy_stride, dtype, .. } = *problem;
        let read = Read { pixels: problem.output_pixels(), stride: dy_stride, bytes: dtype.size() };
        let plan = PixelPlan::new(client, [images, channels], input, read);
        let blueprint = Self { plan, filters: [0, 1].map(|dim| filter(problem, dim)) };
        let reason = format_args!("the widest vectors that divide channels and strides");
        tell_plan(OP, problem, &blueprint, reason);
        blueprint
    }
}

impl fmt::Display for InterpolateBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, filters: [rows, columns] } = self;
        write!(f, "{plan}, {rows:?} along rows and {columns:?} along columns")
    }
}

/// Outputs of one pixel, or of as many pixels, lie on pixels: their weight is 1, whatever the mode.
fn filter(problem: &InterpolateProblem, dim: usize) -> Filter {
    let (pixels, outputs) = (problem.input[dim], problem.output[dim]);
    let is_filtered = pixels > 1 && pixels != outputs;
    match problem.mode {
        Mode::Linear if is_filtered => Filter::Linear,
        Mode::Cubic if is_filtered => Filter::Cubic,
        Mode::Nearest | Mode::NearestExact | Mode::Linear | Mode::Cubic => Filter::Nearest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::F32;

    #[test]
    fn a_dimension_that_keeps_its_size_needs_no_filter() {
        let of = |input, output| {
            let problem = InterpolateProblem {
                images: 1,
                channels: 1,
                input,
                output,
                mode: Mode::Cubic,
                align_corners: false,
                dy_stride: 1,
                dtype: F32,
            };
            [0, 1].map(|dim| filter(&problem, dim))
        };
        assert_eq!(of([1, 8], [1, 16]), [Filter::Nearest, Filter::Cubic]);
        assert_eq!(of([1, 8], [4, 8]), [Filter::Nearest; 2]);
        assert_eq!(of([4, 8], [1, 1]), [Filter::Cubic; 2]);
    }
}
