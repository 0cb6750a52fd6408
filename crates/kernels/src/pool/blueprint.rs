use super::{
    PoolProblem, PoolWindow,
    backward::BackwardPlan,
    forward::{ForwardPlan, Taken},
    walk::LineLaunch,
};
use crate::{
    Promise,
    divisor::divisor,
    pixels::{PixelPlan, Read},
    plan::tell_plan,
};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// Which way a pool goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    /// From x to y: a unit for each window.
    Forward,
    /// From dy to dx, by cells of so many pixels.
    Backward([usize; 2]),
}

/// How a launch is compiled and spread over the device: a vector of channels a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolBlueprint {
    /// Channels that a unit loads at once.
    pub vector_size: VectorSize,
    pub(super) plan: PixelPlan,
}

impl PoolBlueprint {
    /// Taps, or windows, up to which a loop over them is unrolled.
    const UNROLLED: usize = 9;
    /// The largest stride whose pixels are a cell: their sums have to stay in registers.
    const WIDEST_CELL: usize = 2;
    /// Three cubes a multiprocessor, of units that have up to nine vectors on their way.
    pub(super) const PROMISE: Promise = Promise::registers(80);

    /// The widest vectors that fit channels and the distance of pixels.
    pub(super) fn plan(problem: &PoolProblem, way: Way, client: &Client) -> Self {
        let PoolProblem { images, channels, dtype, .. } = *problem;
        let (grid, pixels, stride) = match way {
            Way::Forward => (problem.output, problem.pixels(), problem.x_stride),
            Way::Backward(grid) => (grid, problem.window_count(), problem.dy_stride),
        };
        let read = Read { pixels, stride, bytes: dtype.size() };
        let plan = PixelPlan::new(client, [images, channels], grid, read);
        let reason = format_args!("the widest vectors that divide channels and strides, {way:?}");
        tell_plan(super::problem::OP, problem, &plan, reason);
        Self { vector_size: plan.vector_size, plan }
    }
}

impl fmt::Display for PoolBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.plan.fmt(f)
    }
}

/// Rows, then columns.
pub(super) fn lines(problem: &PoolProblem, window: &PoolWindow) -> [LineLaunch; 2] {
    [0, 1].map(|dim| LineLaunch {
        size: problem.input[dim] as u32,
        windows: problem.output[dim] as u32,
        taps: window.kernel[dim] as u32,
        stride: divisor(window.stride[dim]),
        padding: window.padding[dim] as u32,
        dilation: window.dilation[dim] as u32,
    })
}

impl ForwardPlan {
    pub(super) fn new(taken: Taken, padded: bool, window: &PoolWindow) -> Self {
        let [rows, columns] = window.kernel;
        let unrolled = rows * columns <= PoolBlueprint::UNROLLED;
        Self { taken, padded, taps: window.kernel.map(|taps| taps as u32), unrolled }
    }
}

impl BackwardPlan {
    pub(super) fn new(by_index: bool, padded: bool, window: &PoolWindow) -> Self {
        let divides = window.stride.map(|stride| stride > PoolBlueprint::WIDEST_CELL);
        let cell = [0, 1].map(|dim| if divides[dim] { 1 } else { window.stride[dim] as u32 });
        let windows = [0, 1].map(|dim| (window.reach(dim) / window.stride[dim] + 1) as u32);
        let unrolled = windows[0] as usize * windows[1] as usize <= PoolBlueprint::UNROLLED;
        Self { by_index, padded, cell, divides, windows, unrolled }
    }

    /// Rows and columns of cells that cover the image, and the padding before it where that takes whole windows.
    pub(super) fn grid(&self, problem: &PoolProblem, window: &PoolWindow) -> [usize; 2] {
        [0, 1].map(|dim| match self.divides[dim] {
            true => problem.input[dim],
            false => (problem.input[dim] + window.padding[dim]).div_ceil(window.stride[dim]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::F32;

    #[test]
    fn a_cell_s_pixels_are_reached_by_the_same_windows() {
        let plan = |window: PoolWindow| BackwardPlan::new(true, false, &window);
        let stem = plan(PoolWindow { padding: [1; 2], ..PoolWindow::square(3, 2) });
        assert_eq!((stem.cell, stem.windows, stem.unrolled), ([2, 2], [2, 2], true));
        let apart = plan(PoolWindow::square(2, 2));
        assert_eq!((apart.cell, apart.windows), ([2, 2], [1, 1]));
        let wide = plan(PoolWindow::square(4, 3));
        assert_eq!((wide.cell, wide.windows, wide.divides), ([1, 1], [2, 2], [true; 2]));
        let dilated = plan(PoolWindow { dilation: [3; 2], ..PoolWindow::square(3, 1) });
        assert_eq!((dilated.cell, dilated.windows, dilated.unrolled), ([1, 1], [7, 7], false));
    }

    #[test]
    fn cells_cover_the_image() {
        for size in 1..20 {
            for kernel in 1..6 {
                for stride in 1..4 {
                    for padding in 0..kernel {
                        let padding = [padding; 2];
                        let window = PoolWindow { padding, ..PoolWindow::square(kernel, stride) };
                        let problem = PoolProblem::contiguous([1, size, size, 1], window, F32);
                        let plan = BackwardPlan::new(true, false, &window);
                        let cells = plan.grid(&problem, &window)[0];
                        // The last pixel, from the first cell's.
                        let last = size - 1 + if plan.divides[0] { 0 } else { padding[0] };
                        let cell = plan.cell[0] as usize;
                        assert_eq!(last / cell + 1, cells, "{size} {window:?}");
                    }
                }
            }
        }
    }
}
