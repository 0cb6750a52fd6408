//! Pools of images and their gradients: windows, channels, gaps between pixels, and special numbers.

use crate::{
    buffers::{download, download_integers, dtype},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    pool::{
        self as kernel, PoolProblem, PoolWindow, average_pool, average_pool_backward, max_pool,
        max_pool_backward,
    },
};
use blackburn_reference::{
    pool::{Pool, Sums, Windows},
    storage::Storage,
};

/// What becomes of a window's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The largest.
    Max,
    /// Their mean, over the padding or not.
    Average,
    /// The mean of a part of the image.
    Adaptive,
}

/// The problem of a pool whose pixels of x, and of dy, have `gaps` behind their channels.
pub fn problem(pool: &Pool, gaps: [usize; 2], storage: Storage) -> PoolProblem {
    let [images, height, width, channels] = pool.sizes;
    let windows = match pool.windows {
        Windows::Adaptive(_) => kernel::Windows::Adaptive,
        Windows::Walking { kernel, stride, padding, dilation, .. } => {
            kernel::Windows::Walking(PoolWindow { kernel, stride, padding, dilation })
        }
    };
    PoolProblem {
        images,
        channels,
        input: [height, width],
        output: pool.output(),
        windows,
        x_stride: channels + gaps[0],
        dy_stride: channels + gaps[1],
        dtype: dtype(storage),
    }
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let kind = draw.plan("kind", &[Kind::Max, Kind::Average, Kind::Adaptive]);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let (input, windows) = match kind {
        Kind::Max | Kind::Average => walking(draw, kind),
        Kind::Adaptive => adaptive(draw),
    };
    let most = if draw.holds("large", 200) { 1 << 18 } else { 1 << 14 };
    let pixels = input[0] * input[1];
    let channels = draw.multiple("channels", 1..=(most / pixels).clamp(1, 70), step);
    let images = draw.size("images", 1..=(most / pixels / channels).clamp(1, 5));
    let gaps = [draw.one_of("apart", &[0, 0, 8, 3]), draw.one_of("dy-apart", &[0, 0, 8, 3])];
    let pool = Pool { sizes: [images, input[0], input[1], channels], windows };
    let problem = problem(&pool, gaps, storage);

    let mut x = draw.normal(problem.inputs(), 1.0, storage);
    let mut dy = draw.normal(problem.outputs(), 1.0, storage);
    draw.spoil("x", &mut x);
    draw.spoil("dy", &mut dy);
    let mut send = |name: &str, values: &[f64], stride: usize| {
        let layout = Layout::rows(values.len() / channels, channels, stride);
        place(on, draw, name, (values, &layout), storage)
    };
    let buffers = [send("x", &x, problem.x_stride), send("dy", &dy, problem.dy_stride)];
    let of = Case { on, pool, problem, storage, x, dy, buffers };
    match kind {
        Kind::Max => of.max(draw, check),
        Kind::Average => {
            let padded = draw.planned("padded", 2);
            of.average(draw, check, padded)
        }
        Kind::Adaptive => of.average(draw, check, false),
    }
}

/// An image, and a window that walks it.
fn walking(draw: &mut Draw, kind: Kind) -> ([usize; 2], Windows) {
    let is_max = kind == Kind::Max;
    let mut pair = |names: [&str; 2], choices: &[usize]| names.map(|name| draw.plan(name, choices));
    let kernel = pair(["rows", "columns"], &[3, 2, 1, 3, 5, 7]);
    let stride = pair(["stride-rows", "stride-columns"], &[1, 2, 3]);
    // Averages of dilated windows are not served.
    let dilation = match is_max {
        true => pair(["dilation-rows", "dilation-columns"], &[1, 1, 2, 3]),
        false => [1; 2],
    };
    let ceil = draw.holds("ceil", 2);
    let mut side = |size: &str, around: &str, dim: usize| {
        let extent = (kernel[dim] - 1) * dilation[dim] + 1;
        // A maximum may have windows without a pixel, and a mean may not.
        let padding = draw.size(around, 1..=extent + usize::from(is_max)) - 1;
        let least = extent.saturating_sub(2 * padding).max(1);
        (draw.size(size, least..=least + 19), padding)
    };
    let ((height, above), (width, beside)) =
        (side("height", "above", 0), side("width", "beside", 1));
    let padding = [above, beside];
    ([height, width], Windows::Walking { kernel, stride, padding, dilation, ceil })
}

/// An image, and the parts that it is divided into.
fn adaptive(draw: &mut Draw) -> ([usize; 2], Windows) {
    let even = draw.planned("even", 3);
    let parts = [draw.size("parts-rows", 1..=9), draw.size("parts-columns", 1..=9)];
    if even {
        // Parts of equal size are windows that walk, whose size is compiled in.
        let size = ["part-rows", "part-columns"].map(|name| draw.plan(name, &[2, 3, 1, 5]));
        return ([0, 1].map(|dim| parts[dim] * size[dim]), Windows::Adaptive(parts));
    }
    let mut input = [draw.size("height", 1..=24), draw.size("width", 1..=24)];
    let is_even = [0, 1].iter().all(|dim| input[*dim].is_multiple_of(parts[*dim]));
    // The mean of a whole image has kernels of its own, for any size.
    if let Some(dim) = (0..2).find(|dim| is_even && parts[*dim] > 1) {
        input[dim] += 1;
    }
    (input, Windows::Adaptive(parts))
}

/// A pool and its tensors: of numbers and buffers, x first.
struct Case<'a> {
    on: &'a Target,
    pool: Pool,
    problem: PoolProblem,
    storage: Storage,
    x: Vec<f64>,
    dy: Vec<f64>,
    buffers: [Buffer; 2],
}

impl Case<'_> {
    fn max(&self, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
        let Self { pool, problem, storage, buffers: [x, dy], .. } = self;
        let client = &self.on.client;
        if draw.holds("contradiction", 60) {
            let result = max_pool(client, problem, &self.short(0), true);
            check.refuses("a short x", result)?;
            // Neither are gradients indices.
            return check.refuses("other indices", max_pool_backward(client, problem, dy, dy));
        }
        let pooled = max_pool(client, problem, x, true)?;
        let indices = pooled.indices.ok_or("no indices came")?;
        let expected = pool.max(&self.x);
        check.exactly("y", download(client, pooled.y, *storage)?, &expected.values, *storage)?;
        // Compiled apart.
        let alone = max_pool(client, problem, x, false)?.y;
        let alone = download(client, alone, *storage)?;
        check.exactly("y without indices", alone, &expected.values, *storage)?;
        let dx = max_pool_backward(client, problem, dy, &indices)?;
        let [found, named] = [&download_integers(client, indices)?, &expected.indices]
            .map(|indices| indices.iter().copied().map(f64::from).collect::<Vec<_>>());
        check.exactly("indices", found, &named, Storage::F32)?;
        let sums = pool.max_backward(&self.dy, &expected.indices);
        let dx = download(client, dx, *storage)?;
        if draw.has_whole_numbers() {
            return check.exactly("dx", dx, &sums.values, *storage);
        }
        self.within(check, "dx", dx, &sums)
    }

    fn average(&self, draw: &mut Draw, check: &mut Check, padded: bool) -> Result<(), Stop> {
        let Self { pool, problem, storage, buffers: [x, dy], .. } = self;
        let client = &self.on.client;
        if draw.holds("contradiction", 60) {
            check.refuses("a short x", average_pool(client, problem, &self.short(0), padded))?;
            let result = average_pool_backward(client, problem, &self.short(1), padded);
            return check.refuses("a short dy", result);
        }
        let y = download(client, average_pool(client, problem, x, padded)?, *storage)?;
        self.within(check, "y", y, &pool.average(&self.x, padded))?;
        let dx = average_pool_backward(client, problem, dy, padded)?;
        let dx = download(client, dx, *storage)?;
        self.within(check, "dx", dx, &pool.average_backward(&self.dy, padded))
    }

    fn within(
        &self,
        check: &mut Check,
        what: &str,
        actual: Vec<f64>,
        sums: &Sums,
    ) -> Result<(), Stop> {
        check.compare(what, actual, &sums.values, &sums.bounds(self.storage))
    }

    /// A tensor without its last pixel.
    fn short(&self, which: usize) -> Buffer {
        let buffer = &self.buffers[which];
        let pixels = [&self.x, &self.dy][which].len() / self.problem.channels;
        let stride = [self.problem.x_stride, self.problem.dy_stride][which];
        Buffer { elements: (pixels - 1) * stride, ..buffer.clone() }
    }
}
