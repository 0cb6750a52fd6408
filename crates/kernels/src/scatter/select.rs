//! Adds slices to those that the same indices name everywhere.

use cubecl::prelude::*;

/// Sizes; `inner` counts vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SelectExtent {
    pub(crate) outer: u32,
    pub(crate) terms: u32,
    pub(crate) places: u32,
    pub(crate) inner: u32,
}

/// `y[o, p, c]` is `x[o, p, c]` and the `values[o, t, c]` of the terms t whose index is p. `keys` are the indices in
/// ascending order, and `order` their terms. A unit has a vector of y, and adds in the type `A`.
#[cube(launch_unchecked)]
pub(crate) fn select_add_kernel<T: Numeric, A: Numeric, N: Size>(
    x: &[Vector<T, N>],
    keys: &[u32],
    order: &[u32],
    values: &[Vector<T, N>],
    y: &mut [Vector<T, N>],
    extent: SelectExtent,
    #[define(T, A)] _dtypes: [ElemType; 2],
) {
    let unit = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if unit >= extent.outer * extent.places * extent.inner {
        terminate!();
    }
    let column = unit % extent.inner;
    let place = unit / extent.inner % extent.places;
    let outer = unit / extent.inner / extent.places;

    let mut at = 0u32;
    let mut span = extent.terms;
    while span > 0 {
        let half = span / 2;
        if keys[(at + half) as usize] < place {
            at += half + 1;
            span -= half + 1;
        } else {
            span = half;
        }
    }
    let mut sum = Vector::<A, N>::cast_from(x[unit as usize]);
    while at < extent.terms && keys[min(at, extent.terms - 1) as usize] == place {
        let from = (outer * extent.terms + order[at as usize]) * extent.inner + column;
        sum += Vector::cast_from(values[from as usize]);
        at += 1;
    }
    y[unit as usize] = Vector::cast_from(sum);
}
