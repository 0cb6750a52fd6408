//! Scans along another dimension than the last: a unit walks down a vector of columns.

use super::operation::{Combination, Combined, combine, neutral, read, written};
use cubecl::prelude::*;

/// Rows that a unit asks for before it combines the first: one after the other they would take the latency of memory
/// each.
const ROWS_AT_ONCE: usize = 8;

/// Sizes; `columns` and `inner` count vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ColumnExtent {
    /// Columns of all outer dimensions.
    pub(crate) columns: u32,
    pub(crate) length: u32,
    pub(crate) inner: u32,
    /// Rows of a chunk.
    pub(crate) chunk: u32,
}

/// What a vector of columns was combined to.
#[derive(CubeType)]
struct Columns<A: Numeric> {
    values: Array<A>,
    exponents: Array<i32>,
}

/// `totals[chunk, column]` is what the rows of a chunk were combined to. Columns along x, chunks along y.
#[cube(launch_unchecked)]
pub(crate) fn scan_column_totals_kernel<I: Numeric, A: Numeric, N: Size>(
    x: &[Vector<I, N>],
    totals: &mut [Vector<A, N>],
    exponents: &mut [Vector<i32, N>],
    extent: ColumnExtent,
    extreme: f32,
    #[comptime] how: Combination,
    #[define(I)] _input: ElemType,
    #[define(A)] _wide: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if column >= extent.columns {
        terminate!();
    }
    let size = N::value().comptime();
    let mut sums = nothing::<A>(extreme, size, how);
    let origin = column / extent.inner * extent.length * extent.inner + column % extent.inner;
    let mut row = CUBE_POS_Y * extent.chunk;
    let end = min(extent.length, row + extent.chunk);
    while row < end {
        let found = rows_from::<I, N>(x, origin, row, end, &extent);
        #[unroll]
        for i in 0..ROWS_AT_ONCE {
            if row + comptime!(i as u32) < end {
                #[unroll]
                for k in 0..size {
                    take::<A>(&mut sums, k, A::cast_from(found[i].extract(k)), how);
                }
            }
        }
        row += comptime!(ROWS_AT_ONCE as u32);
    }
    let to = (CUBE_POS_Y * extent.columns + column) as usize;
    let mut values = Vector::<A, N>::empty();
    let mut powers = Vector::<i32, N>::empty();
    #[unroll]
    for k in 0..size {
        values.insert(k, sums.values[k]);
        powers.insert(k, sums.exponents[k]);
    }
    totals[to] = values;
    if comptime!(how.is_scaled) {
        exponents[to] = powers;
    }
}

/// `y[i, column]` is what `x[0..=i, column]` are combined to. Columns along x, chunks along y.
#[cube(launch_unchecked)]
pub(crate) fn scan_columns_kernel<I: Numeric, A: Numeric, N: Size>(
    x: &[Vector<I, N>],
    totals: &[Vector<A, N>],
    exponents: &[Vector<i32, N>],
    y: &mut [Vector<I, N>],
    extent: ColumnExtent,
    extreme: f32,
    #[comptime] how: Combination,
    #[define(I)] _input: ElemType,
    #[define(A)] _wide: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if column >= extent.columns {
        terminate!();
    }
    let size = N::value().comptime();
    let mut sums = nothing::<A>(extreme, size, how);

    // 1. What the chunks before this one come to.
    let mut chunk = 0u32;
    while chunk < CUBE_POS_Y {
        let mut found = Array::<Vector<A, N>>::new(ROWS_AT_ONCE);
        let mut powers =
            Array::<Vector<i32, N>>::new(comptime!(if how.is_scaled { ROWS_AT_ONCE } else { 1 }));
        #[unroll]
        for i in 0..ROWS_AT_ONCE {
            let this = min(chunk + comptime!(i as u32), CUBE_POS_Y - 1);
            let from = (this * extent.columns + column) as usize;
            found[i] = totals[from];
            if comptime!(how.is_scaled) {
                powers[i] = exponents[from];
            }
        }
        #[unroll]
        for i in 0..ROWS_AT_ONCE {
            if chunk + comptime!(i as u32) < CUBE_POS_Y {
                #[unroll]
                for k in 0..size {
                    let mut late =
                        Combined::<A> { value: found[i].extract(k), exponent: 0i32.runtime() };
                    if comptime!(how.is_scaled) {
                        late.exponent = powers[i].extract(k);
                    }
                    join::<A>(&mut sums, k, &late, how);
                }
            }
        }
        chunk += comptime!(ROWS_AT_ONCE as u32);
    }

    // 2. The rows of the chunk.
    let origin = column / extent.inner * extent.length * extent.inner + column % extent.inner;
    let mut row = CUBE_POS_Y * extent.chunk;
    let end = min(extent.length, row + extent.chunk);
    while row < end {
        let found = rows_from::<I, N>(x, origin, row, end, &extent);
        #[unroll]
        for i in 0..ROWS_AT_ONCE {
            let this = row + comptime!(i as u32);
            if this < end {
                let mut out = Vector::<I, N>::empty();
                #[unroll]
                for k in 0..size {
                    let all = take::<A>(&mut sums, k, A::cast_from(found[i].extract(k)), how);
                    out.insert(k, I::cast_from(written::<A>(&all, how)));
                }
                y[(origin + this * extent.inner) as usize] = out;
            }
        }
        row += comptime!(ROWS_AT_ONCE as u32);
    }
}

/// Rows of a column from `row` on. Those from `end` on are the one before it.
#[cube]
fn rows_from<I: Numeric, N: Size>(
    x: &[Vector<I, N>],
    origin: u32,
    row: u32,
    end: u32,
    extent: &ColumnExtent,
) -> Array<Vector<I, N>> {
    let mut found = Array::<Vector<I, N>>::new(ROWS_AT_ONCE);
    #[unroll]
    for i in 0..ROWS_AT_ONCE {
        let this = min(row + comptime!(i as u32), end - 1);
        found[i] = x[(origin + this * extent.inner) as usize];
    }
    found
}

/// Columns of which nothing was read.
#[cube]
fn nothing<A: Numeric>(
    extreme: f32,
    #[comptime] size: usize,
    #[comptime] how: Combination,
) -> Columns<A> {
    let mut values = Array::<A>::new(size);
    let mut exponents = Array::<i32>::new(size);
    let none = neutral::<A>(extreme, how);
    #[unroll]
    for k in 0..size {
        values[k] = none.value;
        exponents[k] = none.exponent;
    }
    Columns::<A> { values, exponents }
}

/// Reads the next number of column `k`; what they come to with it.
#[cube]
fn take<A: Numeric>(
    sums: &mut Columns<A>,
    #[comptime] k: usize,
    value: A,
    #[comptime] how: Combination,
) -> Combined<A> {
    join::<A>(sums, k, &read::<A>(value, how), how)
}

#[cube]
fn join<A: Numeric>(
    sums: &mut Columns<A>,
    #[comptime] k: usize,
    late: &Combined<A>,
    #[comptime] how: Combination,
) -> Combined<A> {
    let early = Combined::<A> { value: sums.values[k], exponent: sums.exponents[k] };
    let both = combine::<A>(&early, late, how);
    sums.values[k] = both.value;
    sums.exponents[k] = both.exponent;
    both
}
