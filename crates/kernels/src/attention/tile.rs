//! Tiles of the portable kernels: products of rows out of shared memory, in f32.
//!
//! 16 by 16 units hold a square tile of pairs; unit (x, y) has rows `y + 16 i` and columns
//! `x + 16 j` of it, and of rows of `head_dim` elements columns `x + 16 j` too.

use super::rules::{Sequence, Strides, origin};
use cubecl::prelude::*;

/// Units of a cube along each side of a tile.
pub(crate) const UNITS: u32 = 16;
/// Elements of rows that are in shared memory at a time while they are multiplied.
pub(crate) const DEPTH: u32 = 32;

/// How the portable kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PortableBlueprint {
    /// Rows and columns of a unit.
    pub(crate) unit_tile: u32,
    pub(crate) head_dim: u32,
}

impl PortableBlueprint {
    /// Rows and columns of a tile.
    pub(crate) fn side(self) -> u32 {
        self.unit_tile * UNITS
    }

    /// Elements of a row that a unit holds.
    pub(super) fn columns(self) -> usize {
        self.head_dim.div_ceil(UNITS) as usize
    }

    /// Pairs that a unit holds.
    pub(super) fn pairs(self) -> usize {
        (self.unit_tile * self.unit_tile) as usize
    }

    /// Elements of rows that a unit holds.
    pub(super) fn elements(self) -> usize {
        self.unit_tile as usize * self.columns()
    }

    /// Elements of a tile of parts of rows, of one of pairs, and of one of rows. The first two have
    /// an element more a row: units along columns read different banks.
    pub(super) fn part_elements(self) -> usize {
        (self.side() * (DEPTH + 1)) as usize
    }

    pub(super) fn pair_elements(self) -> usize {
        (self.side() * (self.side() + 1)) as usize
    }

    pub(super) fn row_elements(self) -> usize {
        (self.side() * self.head_dim) as usize
    }

    /// Shared memory of the kernel that needs most, a backward one.
    pub(crate) fn shared_bytes(self) -> usize {
        4 * (2 * self.part_elements() + 2 * self.pair_elements() + self.row_elements())
    }
}

/// Rows `first..end` of a head, of which a tile holds as many as it can.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Span {
    /// Where row 0 lies.
    pub(super) origin: u32,
    pub(super) stride: u32,
    pub(super) first: u32,
    pub(super) end: u32,
}

/// Rows `first..` of a sequence's queries, or of a tensor of their shape.
#[cube]
pub(super) fn of_queries<I: Float, M: Numeric>(
    strides: &Strides,
    sequence: &Sequence<'_, I, M>,
    head: u32,
    first: u32,
) -> Span {
    Span {
        origin: origin(strides, sequence.batch, head, sequence.first_q),
        stride: strides.row,
        first,
        end: sequence.seq_q,
    }
}

/// Rows `first..` of a sequence's keys, or of a tensor of their shape.
#[cube]
pub(super) fn of_keys<I: Float, M: Numeric>(
    strides: &Strides,
    sequence: &Sequence<'_, I, M>,
    head: u32,
    first: u32,
) -> Span {
    Span {
        origin: origin(strides, sequence.batch, head, sequence.first_kv),
        stride: strides.row,
        first,
        end: sequence.seq_kv,
    }
}

/// Shared memory of the two tiles that a product reads.
#[derive(CubeType)]
pub(super) struct Parts {
    lhs: Shared<[f32]>,
    rhs: Shared<[f32]>,
}

#[cube]
pub(super) fn parts(#[comptime] blueprint: PortableBlueprint) -> Parts {
    Parts {
        lhs: Shared::<[f32]>::new_slice(comptime!(blueprint.part_elements())),
        rhs: Shared::<[f32]>::new_slice(comptime!(blueprint.part_elements())),
    }
}

/// Copies elements `first_column..` of rows to shared memory; zero beyond the last row and column.
#[cube]
fn load_part<I: Float>(
    source: &[I],
    tile: &mut [f32],
    span: &Span,
    first_column: u32,
    #[comptime] blueprint: PortableBlueprint,
) {
    let side = comptime!(blueprint.side());
    #[unroll]
    for round in 0..comptime!(side * DEPTH / (UNITS * UNITS)) {
        let index = round * comptime!(UNITS * UNITS) + UNIT_POS;
        let (row, column) = (index / DEPTH, index % DEPTH);
        let mut value = 0.0f32;
        if span.first + row < span.end && first_column + column < comptime!(blueprint.head_dim) {
            let at = span.origin + (span.first + row) * span.stride + first_column + column;
            value = f32::cast_from(source[at as usize]);
        }
        tile[(row * comptime!(DEPTH + 1) + column) as usize] = value;
    }
}

/// Copies whole rows to shared memory, without an element more.
#[cube]
pub(super) fn load_rows<I: Float>(
    source: &[I],
    tile: &mut [f32],
    span: &Span,
    #[comptime] blueprint: PortableBlueprint,
) {
    let elements = comptime!(blueprint.row_elements() as u32);
    let head_dim = comptime!(blueprint.head_dim);
    let mut index = UNIT_POS;
    while index < elements {
        let (row, column) = (index / head_dim, index % head_dim);
        let mut value = 0.0f32;
        if span.first + row < span.end {
            let at = span.origin + (span.first + row) * span.stride + column;
            value = f32::cast_from(source[at as usize]);
        }
        tile[index as usize] = value;
        index += comptime!(UNITS * UNITS);
    }
}

/// `sums[i, j] = lhs row . rhs row` for the unit's pairs. Meets all units at its end.
#[cube]
pub(super) fn products<I: Float>(
    sums: &mut Array<f32>,
    lhs: &[I],
    rhs: &[I],
    lhs_span: &Span,
    rhs_span: &Span,
    parts: &mut Parts,
    #[comptime] blueprint: PortableBlueprint,
) {
    let unit_tile = comptime!(blueprint.unit_tile as usize);
    #[unroll]
    for pair in 0..comptime!(blueprint.pairs()) {
        sums[pair] = 0.0f32;
    }
    let mut column = Array::<f32>::new(unit_tile);
    let mut first_column = 0u32;
    while first_column < comptime!(blueprint.head_dim) {
        load_part::<I>(lhs, parts.lhs.as_mut_slice(), lhs_span, first_column, blueprint);
        load_part::<I>(rhs, parts.rhs.as_mut_slice(), rhs_span, first_column, blueprint);
        sync_cube();
        for depth in 0..DEPTH {
            #[unroll]
            for i in 0..unit_tile {
                let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
                column[i] = parts.lhs[(row * comptime!(DEPTH + 1) + depth) as usize];
            }
            #[unroll]
            for j in 0..unit_tile {
                let row = UNIT_POS_X + comptime!(UNITS * j as u32);
                let value = parts.rhs[(row * comptime!(DEPTH + 1) + depth) as usize];
                #[unroll]
                for i in 0..unit_tile {
                    sums[comptime!(i * unit_tile + j)] += column[i] * value;
                }
            }
        }
        sync_cube();
        first_column += DEPTH;
    }
}

/// `sums[row] += sum_inner pairs[row, inner] rows[inner]` for the unit's rows, of `inner` as many as
/// there are. With `transposed`, `pairs[inner, row]`.
#[cube]
pub(super) fn accumulate(
    sums: &mut Array<f32>,
    pairs: &[f32],
    rows: &[f32],
    inner: u32,
    #[comptime] transposed: bool,
    #[comptime] blueprint: PortableBlueprint,
) {
    let columns = comptime!(blueprint.columns());
    let pitch = comptime!(blueprint.side() + 1);
    let head_dim = comptime!(blueprint.head_dim);
    let mut values = Array::<f32>::new(columns);
    for at in 0..inner {
        #[unroll]
        for j in 0..columns {
            let column = UNIT_POS_X + comptime!(UNITS * j as u32);
            values[j] = 0.0f32;
            if column < head_dim {
                values[j] = rows[(at * head_dim + column) as usize];
            }
        }
        #[unroll]
        for i in 0..comptime!(blueprint.unit_tile as usize) {
            let row = UNIT_POS_Y + comptime!(UNITS * i as u32);
            let index = if comptime!(transposed) { at * pitch + row } else { row * pitch + at };
            let weight = pairs[index as usize];
            #[unroll]
            for j in 0..columns {
                sums[comptime!(i * columns + j)] += weight * values[j];
            }
        }
    }
}

/// Writes the unit's rows, times `factor`.
#[cube]
pub(super) fn store_rows<I: Float>(
    sums: &Array<f32>,
    out: &mut [I],
    span: &Span,
    factor: f32,
    #[comptime] blueprint: PortableBlueprint,
) {
    let columns = comptime!(blueprint.columns());
    #[unroll]
    for i in 0..comptime!(blueprint.unit_tile as usize) {
        let row = span.first + UNIT_POS_Y + comptime!(UNITS * i as u32);
        #[unroll]
        for j in 0..columns {
            let column = UNIT_POS_X + comptime!(UNITS * j as u32);
            if row < span.end && column < comptime!(blueprint.head_dim) {
                let at = (span.origin + row * span.stride + column) as usize;
                out[at] = I::cast_from(factor * sums[comptime!(i * columns + j)]);
            }
        }
    }
}
