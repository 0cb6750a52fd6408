//! What the passes share: how rows are loaded, and how units that work on the same channels merge what they have.

use super::blueprint::Tile;
use cubecl::prelude::*;

/// The rows of a tensor, as a kernel shares them out. Columns count vectors of channels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    /// Rows of a split.
    pub(crate) split_rows: u32,
}

/// Rows of vectors that may lie apart.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StridedRows<T: CubePrimitive> {
    pub(crate) memory: Box<[T]>,
    /// Vectors from one row to the next.
    pub(crate) stride: u32,
}

/// Mean and variance of each channel, and what is added to the variance.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Statistics<T: CubePrimitive> {
    pub(crate) mean: Box<[T]>,
    pub(crate) variance: Box<[T]>,
    pub(crate) epsilon: f32,
}

/// What splits have left of each channel.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Partials {
    /// `[splits, 2, channels]`.
    pub(crate) sums: Box<[f32]>,
    pub(crate) channels: u32,
    pub(crate) splits: u32,
    pub(crate) rows: u32,
    pub(crate) split_rows: u32,
}

/// The column of a unit, and the rows of its cube's split: the first and the one after the last.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Share {
    pub(super) column: u32,
    pub(super) first_row: u32,
    pub(super) end: u32,
}

#[cube]
pub(super) fn share(extent: &Extent, #[comptime] tile: Tile) -> Share {
    let column = CUBE_POS_X * tile.lanes + UNIT_POS_X;
    let first_row = CUBE_POS_Y * extent.split_rows;
    let end = first_row + min(extent.rows - first_row, extent.split_rows);
    Share { column, first_row, end }
}

/// A channel by itself.
pub(crate) type One = Const<1>;

/// What two parts of a channel's rows make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Merge {
    /// Means and sums of squares around them.
    Moments,
    /// Two sums.
    Sums,
}

/// What some rows of a vector of channels have.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Part<N: Size> {
    /// How many rows; of moments alone.
    pub(crate) count: f32,
    /// The mean, or the first sum.
    pub(crate) first: Vector<f32, N>,
    /// The squares around it, or the second sum.
    pub(crate) second: Vector<f32, N>,
}

/// The part of no rows.
#[cube]
pub(crate) fn no_rows<N: Size>() -> Part<N> {
    Part::<N> {
        count: 0.0f32.runtime(),
        first: Vector::new(0.0f32.runtime()),
        second: Vector::new(0.0f32.runtime()),
    }
}

/// Adds to `part` the rows of another.
#[cube]
pub(crate) fn add<N: Size>(part: &mut Part<N>, other: &Part<N>, #[comptime] merge: Merge) {
    if comptime!(merge == Merge::Moments) {
        let count = part.count + other.count;
        let apart = other.first - part.first;
        // Two parts without rows make none.
        let share = other.count / max(count, 1.0f32);
        part.second += other.second + apart * apart * Vector::new(part.count * share);
        part.first += apart * Vector::new(share);
        part.count = count;
    } else {
        part.first += other.first;
        part.second += other.second;
    }
}

/// Merges the parts of a cube's units, for those of the first row lane. All units have to call it.
#[cube]
pub(crate) fn meet<N: Size>(part: &mut Part<N>, #[comptime] merge: Merge, #[comptime] tile: Tile) {
    let half = comptime!((tile.lanes * tile.row_lanes / 2) as usize);
    let mut counts = Shared::<[f32]>::new_slice(half);
    let mut firsts = Shared::<[Vector<f32, N>]>::new_slice(half);
    let mut seconds = Shared::<[Vector<f32, N>]>::new_slice(half);
    #[unroll]
    for halving in 1..comptime!(tile.row_lanes.ilog2() + 1) {
        let distance = comptime!(tile.row_lanes >> halving);
        if UNIT_POS_Y >= distance && UNIT_POS_Y < comptime!(2 * distance) {
            let place = (UNIT_POS_Y - distance) * tile.lanes + UNIT_POS_X;
            counts[place as usize] = part.count;
            firsts[place as usize] = part.first;
            seconds[place as usize] = part.second;
        }
        sync_cube();
        if UNIT_POS_Y < distance {
            let place = UNIT_POS_Y * tile.lanes + UNIT_POS_X;
            let other = Part::<N> {
                count: counts[place as usize],
                first: firsts[place as usize],
                second: seconds[place as usize],
            };
            add::<N>(part, &other, merge);
        }
        // The next parts are written to the same memory.
        sync_cube();
    }
}

/// Merges the parts of a cube's units and writes what comes of them to the place of the cube's split:
/// `partials` is `[splits, 2, columns]`, in vectors. All units have to call it.
#[cube]
pub(super) fn write_part<N: Size>(
    part: &mut Part<N>,
    partials: &mut [Vector<f32, N>],
    column: u32,
    columns: u32,
    #[comptime] merge: Merge,
    #[comptime] tile: Tile,
) {
    meet::<N>(part, merge, tile);
    if UNIT_POS_Y == 0 && column < columns {
        let place = 2 * CUBE_POS_Y * columns + column;
        partials[place as usize] = part.first;
        partials[(place + columns) as usize] = part.second;
    }
}

/// Merges what all splits have of a channel, for the units of the first row lane. All units of the cube have
/// to call it.
#[cube]
pub(super) fn merge_splits(
    partials: &Partials,
    channel: u32,
    #[comptime] merge: Merge,
    #[comptime] tile: Tile,
) -> Part<One> {
    let (rows, split_rows) = (partials.rows, partials.split_rows);
    let mut part = no_rows::<One>();
    if channel < partials.channels {
        let mut split = UNIT_POS_Y;
        while split < partials.splits {
            // All loads before the first use, so that they are on their way together. A part of no rows
            // changes nothing.
            let mut others = Sequence::<Part<One>>::new();
            #[unroll]
            for i in 0..tile.at_once {
                let at = split + comptime!(i * tile.row_lanes);
                let mut other = no_rows::<One>();
                if at < partials.splits {
                    let place = 2 * at * partials.channels + channel;
                    other.count = f32::cast_from(min(rows - at * split_rows, split_rows));
                    other.first = Vector::new(partials.sums[place as usize]);
                    other.second = Vector::new(partials.sums[(place + partials.channels) as usize]);
                }
                others.push(other);
            }
            #[unroll]
            for i in 0..tile.at_once {
                add::<One>(&mut part, &others[i as usize], merge);
            }
            split += comptime!(tile.at_once * tile.row_lanes);
        }
    }
    meet::<One>(&mut part, merge, tile);
    part
}

/// `count` elements from `place` on, `step` apart.
#[cube]
pub(crate) fn load<T: CubePrimitive>(
    from: &[T],
    place: u32,
    step: u32,
    #[comptime] count: u32,
) -> Array<T> {
    let mut values = Array::<T>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..count {
        values[i as usize] = from[(place + i * step) as usize];
    }
    values
}

/// `value` where `by` is above zero or NaN, and zero elsewhere: `ReLU` by itself, and its gradient by what
/// came out of it.
#[cube]
pub(crate) fn gated<I: Float, N: Size>(value: Vector<f32, N>, by: Vector<I, N>) -> Vector<f32, N> {
    let stops = by.less_equal(&Vector::<I, N>::new(I::new(0.0)));
    select_many(stops, Vector::new(0.0f32), value)
}

/// 1 / deviation.
#[cube]
pub(super) fn inverse_deviation<S: Float, N: Size>(
    variance: Vector<S, N>,
    epsilon: f32,
) -> Vector<f32, N> {
    (Vector::<f32, N>::cast_from(variance) + Vector::new(epsilon)).inverse_sqrt()
}
