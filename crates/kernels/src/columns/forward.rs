use crate::divisor::{Divisor, divide};
use cubecl::prelude::*;

/// Where columns lie, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Place {
    /// From one row to the next.
    pub(crate) pitch: u32,
    /// The first one in a row.
    pub(crate) first: u32,
}

/// A vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn copy_columns_kernel<E: Float, N: Size>(
    source: &[Vector<E, N>],
    target: &mut [Vector<E, N>],
    vectors: u32,
    columns: Divisor,
    from: Place,
    to: Place,
    #[define(E)] _dtype: ElemType,
) {
    let unit = u32::cast_from(ABSOLUTE_POS);
    if unit >= vectors {
        terminate!();
    }
    let (row, column) = divide(unit, &columns);
    target[(row * to.pitch + to.first + column) as usize] =
        source[(row * from.pitch + from.first + column) as usize];
}
