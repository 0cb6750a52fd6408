//! Problems that cover the plans: see [`variants`](crate::variants).

use super::{
    PoolBlueprint, PoolProblem, PoolWindow, Windows, average_pool, average_pool_backward, max_pool,
    max_pool_backward,
};
use crate::{
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{client::Client, ir::ElemType};

/// Images, rows, columns and channels of x: whole vectors, and one channel, as in images whose pixels are
/// contiguous.
pub const SIZES: [[usize; 4]; 2] = [[4, 28, 28, 64], [256, 28, 28, 1]];

/// The window of a stem, one that divides the image, one of many taps, and one of a stride that no cell has.
pub fn windows() -> [PoolWindow; 4] {
    let padded =
        |kernel, stride| PoolWindow { padding: [1; 2], ..PoolWindow::square(kernel, stride) };
    [padded(3, 2), PoolWindow::square(2, 2), padded(5, 1), padded(3, 3)]
}

/// All kernels in every type.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for sizes in SIZES {
            for window in windows() {
                all.push(walking(sizes, window, dtype, name));
            }
            let of = |which| format!("{which}_{}_channels_{name}", sizes[3]);
            all.push(adaptive(of("adaptive"), sizes, [5, 3], dtype));
        }
    }
    all
}

fn walking(sizes: [usize; 4], window: PoolWindow, dtype: ElemType, told: &str) -> Variant {
    let ([taps, _], [stride, _]) = (window.kernel, window.stride);
    let name = format!("{taps}x{taps}_by_{stride}_{}_channels_{told}", sizes[3]);
    let promises = ["pool_forward", "pool_backward"].map(|name| (name, PoolBlueprint::PROMISE));
    Variant::new(name, promises, move |client| {
        let problem = PoolProblem::contiguous(sizes, window, dtype);
        let [x, dy] = ends(client, &problem);
        let pooled = max_pool(client, &problem, &x, true)?;
        if let Some(indices) = pooled.indices {
            max_pool_backward(client, &problem, &dy, &indices)?;
        }
        max_pool(client, &problem, &x, false)?;
        for include_padding in [false, true] {
            average_pool(client, &problem, &x, include_padding)?;
            average_pool_backward(client, &problem, &dy, include_padding)?;
        }
        Ok(())
    })
}

fn adaptive(name: String, sizes: [usize; 4], output: [usize; 2], dtype: ElemType) -> Variant {
    let promises = [("pool_adaptive", PoolBlueprint::PROMISE)];
    Variant::new(name, promises, move |client| {
        let whole = PoolProblem::contiguous(sizes, PoolWindow::square(1, 1), dtype);
        let problem = PoolProblem { output, windows: Windows::Adaptive, ..whole };
        let [x, dy] = ends(client, &problem);
        average_pool(client, &problem, &x, false)?;
        average_pool_backward(client, &problem, &dy, false).map(drop)
    })
}

fn ends(client: &Client, problem: &PoolProblem) -> [Buffer; 2] {
    [problem.inputs(), problem.outputs()]
        .map(|elements| Buffer::empty(client, elements, problem.dtype))
}
