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

    // 1. The tensor that the cube is for, and its share of it.
    let cube = CUBE_POS as u32;
    let mut tensor = 0u32;
    let mut first = 0u32;
    let mut vectors = 0u32;
    let mut columns = 1u32;
    let mut last = 0u32;
    let mut pitch = 0u32;
    let mut start = 0u32;
    #[unroll]
    for index in 0..tensors.len() {
        let part = &parts[index];
        if cube >= start && cube < part.end {
            tensor = comptime!(index as u32).runtime();
            first = (cube - start) * share;
            vectors = part.vectors;
            columns = part.columns;
            last = part.last;
            pitch = part.pitch;
        }
        start = part.end;
    }

    // 2. Each unit adds up its squares.
    let x = Chosen { tensor, vectors, columns, last, pitch };
    let sum = squares::<I, N>(&tensors, &x, first, share, by_rows);
    let mut mine = 0.0f32;
    #[unroll]
    for lane in 0..size {
        mine += sum.extract(lane);
    }

    // 3. The units of a cube meet.
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

/// The tensor that a cube reads, by its place among all; the rest as in its [`Part`].
#[derive(CubeType, Clone, Copy)]
struct Chosen {
    tensor: u32,
    vectors: u32,
    columns: u32,
    last: u32,
    pitch: u32,
}

/// A unit's share of the squares of one tensor: of `share` vectors from `first`, every 256th.
#[cube]
fn squares<I: Float, N: Size>(
    tensors: &Sequence<Box<[Vector<I, N>]>>,
    x: &Chosen,
    first: u32,
    share: u32,
    #[comptime] by_rows: bool,
) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let end = min(first + share, x.vectors);
    // Without rows only the last vector of all can be partial, and comes alone.
    let whole = if comptime!(by_rows) { end } else { min(end, max(x.vectors, 1u32) - 1u32) };
    // All loads before any is used, so that they are on the way together, while there are as many left.
    let mut index = first + UNIT_POS;
    while index + comptime!((UNROLL as u32 - 1) * UNITS) < whole {
        let values = load::<I, N>(tensors, x, index, UNROLL, by_rows);
        #[unroll]
        for step in 0..UNROLL {
            let at = index + comptime!(step as u32 * UNITS);
            sum += square::<I, N>(values[step], counted(at, x, by_rows), by_rows);
        }
        index += comptime!(UNROLL as u32 * UNITS);
    }
    while index < end {
        let value = load::<I, N>(tensors, x, index, 1usize, by_rows);
        sum += square::<I, N>(value[0], counted(index, x, by_rows), true);
        index += UNITS;
    }
    sum
}

/// Every 256th vector of the chosen tensor from `index`, `count` of them.
#[cube]
fn load<I: Float, N: Size>(
    tensors: &Sequence<Box<[Vector<I, N>]>>,
    x: &Chosen,
    index: u32,
    #[comptime] count: usize,
    #[comptime] by_rows: bool,
) -> Array<Vector<I, N>> {
    let mut places = Array::<u32>::new(count);
    #[unroll]
    for step in 0..count {
        places[step] = place(index + comptime!(step as u32 * UNITS), x, by_rows);
    }
    let mut values = Array::<Vector<I, N>>::new(count);
    let of = tensors.len().comptime();
    load_among::<I, N>(tensors, x.tensor, &places, &mut values, 0usize, of, count);
    values
}

/// Loads from the one of the tensors from `begin` to `end` that is `chosen`, which a binary search finds:
/// buffers cannot be indexed, and the branches are the same for a whole cube. Only the loads are there once
/// for each tensor, so that many take little longer to compile than one.
#[cube]
fn load_among<I: Float, N: Size>(
    tensors: &Sequence<Box<[Vector<I, N>]>>,
    chosen: u32,
    places: &Array<u32>,
    values: &mut Array<Vector<I, N>>,
    #[comptime] begin: usize,
    #[comptime] end: usize,
    #[comptime] count: usize,
) {
    if comptime!(end - begin == 1) {
        let x = &tensors[begin];
        #[unroll]
        for step in 0..count {
            values[step] = x[places[step] as usize];
        }
    } else {
        let middle = comptime!((begin + end) / 2);
        if chosen < comptime!(middle as u32) {
            load_among::<I, N>(tensors, chosen, places, values, begin, middle, count);
        } else {
            load_among::<I, N>(tensors, chosen, places, values, middle, end, count);
        }
    }
}

/// Where the vector `index` lies.
#[cube]
fn place(index: u32, x: &Chosen, #[comptime] by_rows: bool) -> u32 {
    if comptime!(by_rows) { index / x.columns * x.pitch + index % x.columns } else { index }
}

/// Elements of the vector `index` that count.
#[cube]
fn counted(index: u32, x: &Chosen, #[comptime] by_rows: bool) -> u32 {
    let (at, all) =
        if comptime!(by_rows) { (index % x.columns, x.columns) } else { (index, x.vectors) };
    select(at + 1 == all, x.last, u32::MAX)
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
