//! Scales and rounds a matrix, and writes it as it lies, transposed, or both.

use super::{Fp8Format, Layouts, amax::UNITS, codes::encode_four};
use crate::magnitude::largest_of_cube;
use cubecl::prelude::*;

/// How the second pass is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CastBlueprint {
    pub(crate) format: Fp8Format,
    pub(crate) layouts: Layouts,
    pub(crate) hardware: bool,
}

/// Units of a cube along rows and along columns.
pub(crate) const GROUPS: u32 = UNITS.isqrt();
/// Words of the transpose that a unit holds of each of its columns. With two a tile has 128 rows, so that its columns are
/// whole lines of a cache; with one, lines are written in halves.
const COLUMN_WORDS: u32 = 2;
/// Rows of a unit: as many as its words have bytes.
const UNIT_ROWS: u32 = 4 * COLUMN_WORDS;
/// Columns of a unit: as many as 16 bytes hold of 16-bit floats.
pub(super) const UNIT_COLUMNS: u32 = 8;
pub(super) const TILE_ROWS: u32 = GROUPS * UNIT_ROWS;
pub(super) const TILE_COLUMNS: u32 = GROUPS * UNIT_COLUMNS;

/// Words of a row of codes that a unit holds.
const UNIT_WORDS: u32 = UNIT_COLUMNS / 4;
/// Words of 16 bytes.
const CHUNK: u32 = 4;
/// Distance of the transposed tile's rows in shared memory: one word more than they hold, so that
/// units that read the same word of different rows do not meet in one bank.
const PITCH: u32 = TILE_ROWS / 4 + 1;

/// Bits of infinity, the first pattern above those of numbers.
const INFINITY: u32 = 0x7f80_0000;

/// The factor that takes a largest magnitude of those bits to `target`; 1 where there is none.
#[cube]
fn scale_for(amax: u32, target: f32) -> f32 {
    let scale = target / f32::reinterpret(amax);
    let exists = amax != 0 && amax < INFINITY && u32::reinterpret(scale) < INFINITY;
    select(exists, scale, 1.0f32)
}

/// `codes[r, c]` and `transposed[c, r]` are `round(scale x[r, c])`; `scale` receives the factor that
/// takes codes back and the largest magnitude. Pitches count bytes.
#[cube(launch_unchecked)]
pub(crate) fn quantize_cast_kernel<I: Float, N: Size>(
    x: &[Vector<I, N>],
    partials: &[u32],
    codes: &mut [Vector<u32, Const<2>>],
    transposed: &mut [Vector<u32, Const<4>>],
    scale: &mut [f32],
    rows: u32,
    columns: u32,
    codes_pitch: u32,
    transposed_pitch: u32,
    partial_count: u32,
    target: f32,
    #[comptime] blueprint: CastBlueprint,
    #[define(I)] _input: ElemType,
) {
    // 1. The scale, from the largest magnitude of all.
    let mut largest = 0u32;
    let mut index = UNIT_POS;
    while index < partial_count {
        largest = max(largest, partials[index as usize]);
        index += UNITS;
    }
    let amax = largest_of_cube(largest, UNITS);
    let factor = scale_for(amax, target);
    if CUBE_POS_X == 0 && UNIT_POS == 0 {
        scale[0] = 1.0f32 / factor;
        scale[1] = f32::reinterpret(amax);
    }

    let size = N::value().comptime();
    let row_vectors = comptime!(UNIT_COLUMNS as usize / size);
    let rows_at_once = comptime!((UNIT_ROWS / row_vectors as u32).max(1));
    let mut tile_memory = Shared::<[u32]>::new_slice(comptime!((TILE_COLUMNS * PITCH) as usize));
    let tiles_across = columns.div_ceil(TILE_COLUMNS);
    let tiles = tiles_across * rows.div_ceil(TILE_ROWS);
    let mut tile = CUBE_POS_X;
    while tile < tiles {
        let first_row = tile / tiles_across * TILE_ROWS;
        let first_column = tile % tiles_across * TILE_COLUMNS;

        // 2. Eight columns of some rows a unit, zero beyond the ends: eight loads before the first use.
        let column = first_column + UNIT_POS_X * UNIT_COLUMNS;
        let unit_row = first_row + UNIT_POS_Y * UNIT_ROWS;
        let mut words = Array::<u32>::new(comptime!((UNIT_ROWS * UNIT_WORDS) as usize));
        #[unroll]
        for some in 0..comptime!(UNIT_ROWS / rows_at_once) {
            let first = comptime!(some * rows_at_once);
            let mut loaded =
                Array::<Vector<I, N>>::new(comptime!(rows_at_once as usize * row_vectors));
            #[unroll]
            for r in 0..rows_at_once {
                let row = unit_row + comptime!(first + r);
                #[unroll]
                for v in 0..row_vectors {
                    let at = column + comptime!((v * size) as u32);
                    let mut vector = Vector::<I, N>::new(I::new(0.0));
                    // Rows are whole vectors.
                    if row < rows && at < columns {
                        let index = (row * columns + at) / comptime!(size as u32);
                        vector = x[index as usize];
                    }
                    loaded[comptime!(r as usize * row_vectors + v)] = vector;
                }
            }
            #[unroll]
            for r in 0..rows_at_once {
                let row = comptime!(first + r);
                let values =
                    scaled_row::<I, N>(&loaded, comptime!(r as usize * row_vectors), factor);
                let mut pair = Vector::<u32, Const<2>>::empty();
                #[unroll]
                for w in 0..UNIT_WORDS {
                    let at = comptime!(4 * w as usize);
                    let word = encode_four(
                        values[at],
                        values[comptime!(at + 1)],
                        values[comptime!(at + 2)],
                        values[comptime!(at + 3)],
                        comptime!(blueprint.format),
                        comptime!(blueprint.hardware),
                    );
                    words[comptime!((row * UNIT_WORDS + w) as usize)] = word;
                    pair.insert(comptime!(w as usize), word);
                }
                let row = unit_row + row;
                if comptime!(blueprint.layouts.rows()) {
                    if row < rows && column < codes_pitch {
                        codes[((row * codes_pitch + column) / UNIT_COLUMNS) as usize] = pair;
                    }
                }
            }
        }

        // 3. The same bytes column by column, through shared memory, so that whole rows of the
        //    transpose are written at once.
        if comptime!(blueprint.layouts.transposed()) {
            #[unroll]
            for c in 0..UNIT_COLUMNS {
                #[unroll]
                for w in 0..COLUMN_WORDS {
                    let word = column_of(&words, comptime!(4 * w), c);
                    let at =
                        (UNIT_POS_X * UNIT_COLUMNS + c) * PITCH + UNIT_POS_Y * COLUMN_WORDS + w;
                    tile_memory[at as usize] = word;
                }
            }
            sync_cube();
            #[unroll]
            for round in 0..comptime!(TILE_COLUMNS * (TILE_ROWS / 4 / CHUNK) / UNITS) {
                let index = round * UNITS + UNIT_POS;
                let column = index / comptime!(TILE_ROWS / 4 / CHUNK);
                let word = index % comptime!(TILE_ROWS / 4 / CHUNK) * CHUNK;
                let row = first_row + 4 * word;
                if first_column + column < columns && row < transposed_pitch {
                    let mut chunk = Vector::<u32, Const<4>>::empty();
                    #[unroll]
                    for w in 0..CHUNK {
                        let at = column * PITCH + word + w;
                        chunk.insert(comptime!(w as usize), tile_memory[at as usize]);
                    }
                    let at = ((first_column + column) * transposed_pitch + row) / (4 * CHUNK);
                    transposed[at as usize] = chunk;
                }
            }
            sync_cube();
        }
        tile += CUBE_COUNT_X;
    }
}

/// A unit's columns of one row, scaled, of the vectors from `first` on.
#[cube]
fn scaled_row<I: Float, N: Size>(
    loaded: &Array<Vector<I, N>>,
    #[comptime] first: usize,
    factor: f32,
) -> Array<f32> {
    let size = N::value().comptime();
    let mut values = Array::<f32>::new(comptime!(UNIT_COLUMNS as usize));
    #[unroll]
    for v in 0..comptime!(UNIT_COLUMNS as usize / size) {
        let vector =
            Vector::<f32, N>::cast_from(loaded[comptime!(first + v)]) * Vector::new(factor);
        #[unroll]
        for lane in 0..size {
            values[comptime!(v * size + lane)] = vector.extract(lane);
        }
    }
    values
}

/// Byte `c` of four of a unit's rows from `first` on, the first row's in the lowest byte.
#[cube]
fn column_of(words: &Array<u32>, #[comptime] first: u32, #[comptime] c: u32) -> u32 {
    let mut column = 0u32;
    #[unroll]
    for r in 0..4 {
        let word = words[comptime!(((first + r) * UNIT_WORDS + c / 4) as usize)];
        column |= ((word >> comptime!(8 * (c % 4))) & 0xff) << comptime!(8 * r);
    }
    column
}
