use crate::{
    Pass,
    divisor::{Divisor, divide},
    magnitude::{larger, write_largest},
};
use cubecl::prelude::*;

/// Which vectors of which rows a unit turns: vectors of a row first, then neighboring rows, positions, and what is
/// left of the rows.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Walk {
    /// Units that have something to do.
    units: u32,
    /// Vectors of a row.
    vectors: Divisor,
    /// Rows that units side by side turn.
    neighbors: Divisor,
    /// Positions.
    seq: Divisor,
    /// Rows at one position, of all sequences and heads.
    rows: u32,
    /// Heads of a sequence.
    heads: Divisor,
    /// Position of the first row in the table.
    start: u32,
    /// Vectors of the table from one of its columns to the next, where it is read by column.
    table_step: u32,
}

/// Vectors from one sequence, head and position to the next.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Steps {
    batch: u32,
    head: u32,
    row: u32,
}

/// Cosine and sine of the even column of pair `pair` of the table, and of the odd one.
#[cube]
fn factors_of<T: Size>(table: &[Vector<f32, T>], pair: u32, step: u32) -> Vector<f32, Const<4>> {
    let mut both = Vector::<f32, Const<4>>::empty();
    let at_once = T::value().comptime();
    if comptime!(at_once == 4) {
        both = Vector::cast_from(table[pair as usize]);
    } else {
        let even = table[(2 * pair * step) as usize];
        let odd = table[((2 * pair + 1) * step) as usize];
        both.insert(0usize, even.extract(0usize));
        both.insert(1usize, even.extract(1usize));
        both.insert(2usize, odd.extract(0usize));
        both.insert(3usize, odd.extract(1usize));
    }
    both
}

/// What is added to a column's own product, for the pair of columns that `both` has the cosine and sine of: its
/// partner times this.
#[cube]
fn partners(both: Vector<f32, Const<4>>, #[comptime] pass: Pass) -> (f32, f32) {
    let (even, odd) = match comptime!(pass) {
        // y[2i] has x[2i+1] by -s[2i], y[2i+1] has x[2i] by s[2i+1].
        Pass::Forward => (-both.extract(1usize), both.extract(3usize)),
        // The other way round: dx[2i] has dy[2i+1] by s[2i+1].
        Pass::Backward => (both.extract(3usize), -both.extract(1usize)),
    };
    (even, odd)
}

/// The rows of a unit, turned. If they are `watched`, in cubes of so many units along x, `largest` receives the largest
/// magnitude that each cube wrote.
#[cube(launch_unchecked)]
pub(crate) fn rotary_kernel<F: Float, N: Size, T: Size>(
    x: &[Vector<F, N>],
    table: &[Vector<f32, T>],
    y: &mut [Vector<F, N>],
    largest: &mut [u32],
    walk: Walk,
    from: Steps,
    to: Steps,
    #[comptime] rows_per_unit: usize,
    #[comptime] pass: Pass,
    #[comptime] watched: Option<u32>,
    #[define(F)] _dtype: ElemType,
) {
    let mut of_rows = 0u32;
    let unit = u32::cast_from(ABSOLUTE_POS);
    if unit < walk.units {
        let size = N::value().comptime();
        let pairs = comptime!(size / 2);
        let (rest, vector) = divide(unit, &walk.vectors);
        let (rest, neighbor) = divide(rest, &walk.neighbors);
        let (part, position) = divide(rest, &walk.seq);
        let first = part * comptime!(rows_per_unit as u32) * walk.neighbors.divisor + neighbor;

        // 1. All loads before the first store, which may be to the same memory and so keeps a compiler from moving
        //    loads before it.
        let mut values = Array::<Vector<F, N>>::new(rows_per_unit);
        #[unroll]
        for i in 0..rows_per_unit {
            let row = first + comptime!(i as u32) * walk.neighbors.divisor;
            if row < walk.rows {
                let (batch, head) = divide(row, &walk.heads);
                let at = batch * from.batch + head * from.head + position * from.row + vector;
                values[i] = x[at as usize];
            }
        }
        let mut factors = Array::<Vector<f32, Const<4>>>::new(pairs);
        let place =
            ((walk.start + position) * walk.vectors.divisor + vector) * comptime!(pairs as u32);
        #[unroll]
        for pair in 0..pairs {
            factors[pair] = factors_of::<T>(table, place + comptime!(pair as u32), walk.table_step);
        }

        // 2. Each row by the same factors.
        #[unroll]
        for i in 0..rows_per_unit {
            let row = first + comptime!(i as u32) * walk.neighbors.divisor;
            if row < walk.rows {
                let value = Vector::<f32, N>::cast_from(values[i]);
                let mut turned = Vector::<f32, N>::empty();
                #[unroll]
                for pair in 0..pairs {
                    let both = factors[pair];
                    let (of_odd, of_even) = partners(both, pass);
                    let even = value.extract(comptime!(2 * pair));
                    let odd = value.extract(comptime!(2 * pair + 1));
                    turned.insert(comptime!(2 * pair), even * both.extract(0usize) + odd * of_odd);
                    turned.insert(
                        comptime!(2 * pair + 1),
                        odd * both.extract(2usize) + even * of_even,
                    );
                }
                let (batch, head) = divide(row, &walk.heads);
                let at = batch * to.batch + head * to.head + position * to.row + vector;
                y[at as usize] = Vector::cast_from(turned);
                if comptime!(watched.is_some()) {
                    of_rows = larger::<N>(of_rows, turned);
                }
            }
        }
    }
    if comptime!(watched.is_some()) {
        write_largest::<F>(of_rows, largest, comptime!(watched.unwrap_or_default()));
    }
}
