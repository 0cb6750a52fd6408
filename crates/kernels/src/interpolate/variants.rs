//! Problems that cover the plans: see [`variants`](crate::variants).

use super::{InterpolateBlueprint, InterpolateProblem, Mode, interpolate_backward};
use crate::{
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

/// Images, rows, columns and channels of x: whole vectors, and one channel, as in images whose pixels are
/// contiguous.
pub const SIZES: [[usize; 4]; 2] = [[4, 28, 28, 64], [256, 28, 28, 1]];

/// Modes, and rows and columns that y has for one of x: both resized, and each alone.
pub const WAYS: [(Mode, [usize; 2]); 7] = [
    (Mode::Nearest, [2, 2]),
    (Mode::Linear, [2, 2]),
    (Mode::Linear, [1, 2]),
    (Mode::Linear, [2, 1]),
    (Mode::Cubic, [2, 2]),
    (Mode::Cubic, [1, 2]),
    (Mode::Cubic, [2, 1]),
];

/// The kernel in every type.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for [images, height, width, channels] in SIZES {
            for (mode, [rows, columns]) in WAYS {
                let problem = InterpolateProblem {
                    images,
                    channels,
                    input: [height, width],
                    output: [rows * height, columns * width],
                    mode,
                    align_corners: false,
                    dy_stride: channels,
                    dtype,
                };
                let told = format!("{mode:?}_{rows}x{columns}_{channels}_channels_{name}");
                let promise = ("interpolate_backward", InterpolateBlueprint::PROMISE);
                all.push(Variant::new(told.to_lowercase(), [promise], move |client| {
                    let dy = Buffer::empty(client, problem.outputs(), dtype);
                    interpolate_backward(client, &problem, &dy).map(drop)
                }));
            }
        }
    }
    all
}
