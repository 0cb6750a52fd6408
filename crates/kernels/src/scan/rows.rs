//! Scans along the last dimension.

use super::{
    blueprint::UNITS,
    operation::{Combination, Combined, append, combine, neutral, read, written},
};
use cubecl::prelude::*;

/// What a kernel over rows is compiled for, beside types and vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowPlan {
    pub(crate) how: Combination,
    /// Units that share a row.
    pub(crate) lanes: u32,
    /// Units that exchange numbers without shared memory.
    pub(crate) plane: u32,
    /// Neighboring vectors of a unit.
    pub(crate) vectors: u32,
    /// Whether a row has several chunks.
    pub(crate) is_split: bool,
}

/// Sizes; `columns` and `chunk` count vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowExtent {
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    /// Of a chunk.
    pub(crate) chunk: u32,
    /// How many chunks a row has.
    pub(crate) chunks: u32,
}

/// `totals[row, chunk]` is what a chunk was combined to. A cube takes one: rows along x, chunks along y.
#[cube(launch_unchecked)]
pub(crate) fn scan_row_totals_kernel<I: Numeric, A: Numeric, N: Size>(
    x: &[Vector<I, N>],
    totals: &mut [A],
    exponents: &mut [i32],
    extent: RowExtent,
    extreme: f32,
    #[comptime] how: Combination,
    #[define(I)] _input: ElemType,
    #[define(A)] _wide: ElemType,
) {
    let start = CUBE_POS_X * extent.columns;
    let mut sum = neutral::<A>(extreme, how);
    let mut at = CUBE_POS_Y * extent.chunk + UNIT_POS;
    let end = min(extent.columns, (CUBE_POS_Y + 1) * extent.chunk);
    while at < end {
        let found = x[(start + at) as usize];
        #[unroll]
        for k in 0..N::value().comptime() {
            let late = read::<A>(A::cast_from(found.extract(k)), how);
            let both = combine::<A>(&sum, &late, how);
            sum.value = both.value;
            sum.exponent = both.exponent;
        }
        at += UNITS;
    }
    let all = of_cube::<A>(&sum, how);
    if UNIT_POS == 0 {
        let to = CUBE_POS_X * extent.chunks + CUBE_POS_Y;
        totals[to as usize] = all.value;
        if comptime!(how.is_scaled) {
            exponents[to as usize] = all.exponent;
        }
    }
}

/// `y[row, i]` is what `x[row, 0..=i]` are combined to. A cube takes a chunk of one row, or several short rows:
/// rows along x, chunks along y.
#[cube(launch_unchecked)]
pub(crate) fn scan_rows_kernel<I: Numeric, A: Numeric, N: Size>(
    x: &[Vector<I, N>],
    totals: &[A],
    exponents: &[i32],
    y: &mut [Vector<I, N>],
    extent: RowExtent,
    extreme: f32,
    #[comptime] plan: RowPlan,
    #[define(I)] _input: ElemType,
    #[define(A)] _wide: ElemType,
) {
    let how = comptime!(plan.how);
    let size = N::value().comptime();
    let items = comptime!(plan.vectors as usize * size);
    let width = comptime!(if plan.plane < plan.lanes { plan.plane } else { plan.lanes });
    let groups = comptime!(plan.lanes / width);
    let mut group_values = Shared::<[A]>::new_slice(comptime!((2 * UNITS / width) as usize));
    let mut group_exponents = Shared::<[i32]>::new_slice(comptime!(if how.is_scaled {
        (2 * UNITS / width) as usize
    } else {
        1
    }));
    let row = CUBE_POS_X * comptime!(UNITS / plan.lanes) + UNIT_POS_Y;
    let place = UNIT_POS_X % width;
    let group = UNIT_POS_X / width;
    let start = row * extent.columns;

    // 1. What the chunks before this one come to.
    let mut carry = neutral::<A>(extreme, how);
    if comptime!(plan.is_split) {
        let mut at = UNIT_POS;
        while at < CUBE_POS_Y {
            let from = row * extent.chunks + at;
            let mut total =
                Combined::<A> { value: totals[from as usize], exponent: 0i32.runtime() };
            if comptime!(how.is_scaled) {
                total.exponent = exponents[from as usize];
            }
            let both = combine::<A>(&carry, &total, how);
            carry.value = both.value;
            carry.exponent = both.exponent;
            at += UNITS;
        }
        let all = of_cube::<A>(&carry, how);
        carry.value = all.value;
        carry.exponent = all.exponent;
    }

    let mut first = CUBE_POS_Y * extent.chunk;
    let end = min(extent.columns, first + extent.chunk);
    let mut half = 0u32;
    while first < end {
        // 2. Neighboring elements of a unit. Those beyond the end come after all others, and change none of them.
        let mut values = Array::<A>::new(items);
        let mut powers = Array::<i32>::new(comptime!(if how.is_scaled { items } else { 1 }));
        let mut own = neutral::<A>(extreme, how);
        #[unroll]
        for vector in 0..plan.vectors {
            let at = first + UNIT_POS_X * plan.vectors + vector;
            let mut found = Vector::<I, N>::new(I::from_int(0));
            if row < extent.rows && at < end {
                found = x[(start + at) as usize];
            }
            #[unroll]
            for k in 0..size {
                let late = read::<A>(A::cast_from(found.extract(k)), how);
                let both = append::<A>(&own, &late, how);
                own.value = both.value;
                own.exponent = both.exponent;
                let item = comptime!(vector as usize * size + k);
                values[item] = own.value;
                if comptime!(how.is_scaled) {
                    powers[item] = own.exponent;
                }
            }
        }

        // 3. The units of a plane, each time twice as far.
        let mut through = combine::<A>(&neutral::<A>(extreme, how), &own, how);
        #[unroll]
        for step in 0..comptime!(width.ilog2()) {
            let early = from_below::<A>(&through, comptime!(1u32 << step), how);
            let both = combine::<A>(&early, &through, how);
            if place >= comptime!(1u32 << step) {
                through.value = both.value;
                through.exponent = both.exponent;
            }
        }
        let mut before = neutral::<A>(extreme, how);
        if comptime!(width > 1) {
            let below = from_below::<A>(&through, 1u32, how);
            if place > 0 {
                before.value = below.value;
                before.exponent = below.exponent;
            }
        }

        // 4. The planes of a row. The halves of the memory take turns, so that none writes what another still reads.
        let mut tile = neutral::<A>(extreme, how);
        if comptime!(groups > 1) {
            let row_groups = half * comptime!(UNITS / width) + UNIT_POS_Y * groups;
            if place == comptime!(width - 1) {
                group_values[(row_groups + group) as usize] = through.value;
                if comptime!(how.is_scaled) {
                    group_exponents[(row_groups + group) as usize] = through.exponent;
                }
            }
            sync_cube();
            let mut ahead = neutral::<A>(extreme, how);
            for other in 0..groups {
                if other == group {
                    ahead.value = tile.value;
                    ahead.exponent = tile.exponent;
                }
                let at = (row_groups + other) as usize;
                let mut total = Combined::<A> { value: group_values[at], exponent: 0i32.runtime() };
                if comptime!(how.is_scaled) {
                    total.exponent = group_exponents[at];
                }
                let both = combine::<A>(&tile, &total, how);
                tile.value = both.value;
                tile.exponent = both.exponent;
            }
            let both = combine::<A>(&ahead, &before, how);
            before.value = both.value;
            before.exponent = both.exponent;
        }

        // 5. All that comes before an element, and it.
        let behind = combine::<A>(&carry, &before, how);
        #[unroll]
        for vector in 0..plan.vectors {
            let at = first + UNIT_POS_X * plan.vectors + vector;
            let mut out = Vector::<I, N>::empty();
            #[unroll]
            for k in 0..size {
                let item = comptime!(vector as usize * size + k);
                let mut late = Combined::<A> { value: values[item], exponent: 0i32.runtime() };
                if comptime!(how.is_scaled) {
                    late.exponent = powers[item];
                }
                let all = append::<A>(&behind, &late, how);
                out.insert(k, I::cast_from(written::<A>(&all, how)));
            }
            if row < extent.rows && at < end {
                y[(start + at) as usize] = out;
            }
        }
        let both = combine::<A>(&carry, &tile, how);
        carry.value = both.value;
        carry.exponent = both.exponent;
        half = 1 - half;
        first += comptime!(plan.lanes * plan.vectors);
    }
}

/// What the unit so far below in the plane has. The lowest get anything.
#[cube]
fn from_below<A: Numeric>(
    own: &Combined<A>,
    distance: u32,
    #[comptime] how: Combination,
) -> Combined<A> {
    let mut below =
        Combined::<A> { value: plane_shuffle_up(own.value, distance), exponent: own.exponent };
    if comptime!(how.is_scaled) {
        below.exponent = plane_shuffle_up(own.exponent, distance);
    }
    below
}

/// What the units of a cube have together, in their order. All of them have to call it.
#[cube]
fn of_cube<A: Numeric>(own: &Combined<A>, #[comptime] how: Combination) -> Combined<A> {
    let mut values = Shared::<[A]>::new_slice(comptime!(UNITS as usize));
    let mut exponents =
        Shared::<[i32]>::new_slice(comptime!(if how.is_scaled { UNITS as usize } else { 1 }));
    let unit = UNIT_POS as usize;
    values[unit] = own.value;
    if comptime!(how.is_scaled) {
        exponents[unit] = own.exponent;
    }
    sync_cube();
    #[unroll]
    for halving in 0..comptime!(UNITS.ilog2()) {
        let distance = comptime!(UNITS >> (halving + 1));
        if UNIT_POS < distance {
            let other = (UNIT_POS + distance) as usize;
            let mut mine = Combined::<A> { value: values[unit], exponent: 0i32.runtime() };
            let mut others = Combined::<A> { value: values[other], exponent: 0i32.runtime() };
            if comptime!(how.is_scaled) {
                mine.exponent = exponents[unit];
                others.exponent = exponents[other];
            }
            let both = combine::<A>(&mine, &others, how);
            values[unit] = both.value;
            if comptime!(how.is_scaled) {
                exponents[unit] = both.exponent;
            }
        }
        sync_cube();
    }
    let mut all = Combined::<A> { value: values[0], exponent: 0i32.runtime() };
    if comptime!(how.is_scaled) {
        all.exponent = exponents[0];
    }
    all
}
