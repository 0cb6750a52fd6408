//! Gradients of resized images: modes, corners, sizes, channels, gaps between pixels, and special numbers.

use crate::{
    buffers::{download, dtype},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    interpolate::{self as kernel, InterpolateProblem, interpolate_backward},
};
use blackburn_reference::{
    interpolate::{Interpolation, Mode},
    storage::Storage,
};

/// The problem of images whose pixels of dy have a `gap` behind their channels.
pub fn problem(resized: &Interpolation, gap: usize, storage: Storage) -> InterpolateProblem {
    let [images, height, width, channels] = resized.sizes;
    InterpolateProblem {
        images,
        channels,
        input: [height, width],
        output: resized.output,
        mode: match resized.mode {
            Mode::Nearest => kernel::Mode::Nearest,
            Mode::NearestExact => kernel::Mode::NearestExact,
            Mode::Linear => kernel::Mode::Linear,
            Mode::Cubic => kernel::Mode::Cubic,
        },
        align_corners: resized.align_corners,
        dy_stride: channels + gap,
        dtype: dtype(storage),
    }
}

/// Which dimensions keep their size: others are compiled with a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Neither,
    Rows,
    Columns,
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let mode = draw.plan("mode", &Mode::ALL);
    let kept = draw.plan("kept", &[Kept::Neither, Kept::Neither, Kept::Rows, Kept::Columns]);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let align_corners = draw.holds("corners", 2);
    let mut side = |from: &str, to: &str, is_kept: bool| {
        let pixels = draw.size(from, if is_kept { 1..=24 } else { 2..=24 });
        let outputs = draw.size(to, 1..=50);
        match (is_kept, outputs == pixels) {
            (true, _) => [pixels, pixels],
            (false, true) => [pixels, pixels + 1],
            (false, false) => [pixels, outputs],
        }
    };
    let [height, rows] = side("height", "rows", kept == Kept::Rows);
    let [width, columns] = side("width", "columns", kept == Kept::Columns);
    let most = if draw.holds("large", 200) { 1 << 18 } else { 1 << 14 };
    let pixels = height.max(rows) * width.max(columns);
    let channels = draw.multiple("channels", 1..=(most / pixels).clamp(1, 70), step);
    let images = draw.size("images", 1..=(most / pixels / channels).clamp(1, 5));
    let gap = draw.one_of("apart", &[0, 0, 8, 3]);
    let sizes = [images, height, width, channels];
    let resized = Interpolation { sizes, output: [rows, columns], mode, align_corners };
    let problem = problem(&resized, gap, storage);

    let mut dy = draw.normal(problem.outputs(), 1.0, storage);
    draw.spoil("dy", &mut dy);
    let layout = Layout::rows(dy.len() / channels, channels, problem.dy_stride);
    let buffer = place(on, draw, "dy", (&dy, &layout), storage);
    if draw.holds("contradiction", 60) {
        // Without its last pixel.
        let elements = (dy.len() / channels - 1) * problem.dy_stride;
        let short = Buffer { elements, ..buffer };
        return check.refuses("a short dy", interpolate_backward(&on.client, &problem, &short));
    }
    let dx = interpolate_backward(&on.client, &problem, &buffer)?;
    let dx = download(&on.client, dx, storage)?;
    let expected = resized.backward(&dy);
    check.compare("dx", dx, &expected.values, &expected.bounds(storage))
}
