use super::blueprint::{UNITS, UNROLL};
use cubecl::prelude::*;

/// Where a tensor is read, and by which cubes; vectors are counted in each of its rows as begun.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Part {
    /// The cube after its last one; those after the last of the tensor before are its own.
    pub(crate) end: u32,
    /// Vectors in all.
    pub(crate) vectors: u32,
    /// Vectors of a row.
    pub(crate) columns: u32,
    /// Elements of a row's last vector that count.
    pub(crate) last: u32,
    /// Vectors from one row to the next.
    pub(crate) pitch: u32,
}

/// Adds the squares of tensors to `sums`, each cube those of one tensor to its place. Cubes beyond all
/// tensors copy their places.
#[cube(launch_unchecked)]
pub(crate) fn square_sum_kernel<I: Float, N: Size>(
    tensors: Sequence<Box<[Vector<I, N>]>>,
    sums: &[f32],
    sums_out: &mut [f32],
    parts: Sequence<Part>,
    share: u32,
    #[comptime] by_rows: bool,
    #[define(I)] _input: ElemType,
) {
    let size = N::value().comptime();

    // 1. Each unit adds up its squares, of the tensor that its cube is for.
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let cube = CUBE_POS as u32;
    let mut start = 0u32;
    #[unroll]
    for tensor in 0..tensors.len() {
        let part = &parts[tensor];
        if cube >= start && cube < part.end {
            let first = (cube - start) * share;
            sum = squares::<I, N>(&tensors[tensor], part, first, share, by_rows);
        }
        start = part.end;
    }
    let mut mine = 0.0f32;
    #[unroll]
    for lane in 0..size {
        mine += sum.extract(lane);
    }

    // 2. The units of a cube meet.
    let mut all = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    all[UNIT_POS as usize] = mine;
    sync_cube();
    #[unroll]
    for halving in 1..comptime!(UNITS.ilog2() + 1) {
        let distance = comptime!(UNITS >> halving);
        if UNIT_POS < distance {
            let other = all[(UNIT_POS + distance) as usize];
            all[UNIT_POS as usize] += other;
        }
        sync_cube();
    }
    if UNIT_POS == 0 {
        let place = CUBE_POS;
        sums_out[place] = sums[place] + all[0];
    }
}

/// A unit's share of the squares of one tensor: of `share` vectors from `first`, every 256th.
#[cube]
fn squares<I: Float, N: Size>(
    x: &[Vector<I, N>],
    part: &Part,
    first: u32,
    share: u32,
    #[comptime] by_rows: bool,
) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut end = min(first + share, part.vectors);
    if comptime!(!by_rows) {
        // The one that may be partial comes last, and alone.
        end = min(first + share, part.vectors - 1);
        if first + share >= part.vectors && UNIT_POS == 0 {
            let last = part.vectors - 1;
            sum = square::<I, N>(x[last as usize], part.last, true);
        }
    }
    let mut index = first + UNIT_POS;
    while index < end {
        // All loads before any is used, so that they are on the way together. Beyond the end there is
        // nothing to load, and nothing to add.
        let mut values = Array::<Vector<I, N>>::new(UNROLL);
        #[unroll]
        for step in 0..UNROLL {
            let at = index + comptime!(step as u32 * UNITS);
            values[step] = Vector::new(I::new(0.0f32));
            if at < end {
                values[step] = x[place(at, part, by_rows)];
            }
        }
        #[unroll]
        for step in 0..UNROLL {
            let mut counted = 0u32;
            if comptime!(by_rows) {
                let column = (index + comptime!(step as u32 * UNITS)) % part.columns;
                counted = select(column + 1 == part.columns, part.last, u32::MAX);
            }
            sum += square::<I, N>(values[step], counted, by_rows);
        }
        index += comptime!(UNROLL as u32 * UNITS);
    }
    sum
}

/// Where the vector `index` lies.
#[cube]
fn place(index: u32, part: &Part, #[comptime] by_rows: bool) -> usize {
    if comptime!(by_rows) {
        (index / part.columns * part.pitch + index % part.columns) as usize
    } else {
        index as usize
    }
}

/// The squares of a vector: of its first `counted` elements where it may go beyond the end of a row.
#[cube]
fn square<I: Float, N: Size>(
    values: Vector<I, N>,
    counted: u32,
    #[comptime] may_go_beyond: bool,
) -> Vector<f32, N> {
    let mut values = Vector::<f32, N>::cast_from(values);
    if comptime!(may_go_beyond) {
        #[unroll]
        for lane in 0..N::value().comptime() {
            let counts = comptime!(lane as u32) < counted;
            values.insert(lane, select(counts, values.extract(lane), 0.0f32));
        }
    }
    values * values
}
