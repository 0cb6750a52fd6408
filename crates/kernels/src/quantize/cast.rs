//! Scales and rounds a matrix, and writes it as it lies, transposed, or both.

use super::{
    Fp8Format, Layouts,
    amax::{UNITS, largest_of_cube},
    codes::encode_four,
};
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
/// What a unit takes: as many rows as a word has bytes, so that it holds whole words of the
/// transpose too, and as many columns as 16 bytes hold of 16-bit floats.
const UNIT_ROWS: u32 = 4;
pub(super) const UNIT_COLUMNS: u32 = 8;
pub(super) const TILE_ROWS: u32 = GROUPS * UNIT_ROWS;
pub(super) const TILE_COLUMNS: u32 = GROUPS * UNIT_COLUMNS;

/// Words of a row of codes that a unit holds.
const UNIT_WORDS: u32 = UNIT_COLUMNS / 4;
/// Words of 16 bytes.
const CHUNK: u32 = 4;
/// Distance of the transposed tile's rows in shared memory: one word more than they hold, so that
/// units that write the same word of different rows do not meet in one bank.
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
    let amax = largest_of_cube(largest);
    let factor = scale_for(amax, target);
    if CUBE_POS_X == 0 && UNIT_POS == 0 {
        scale[0] = 1.0f32 / factor;
        scale[1] = f32::reinterpret(amax);
    }

    let mut tile_memory = Shared::<[u32]>::new_slice(comptime!((TILE_COLUMNS * PITCH) as usize));
    let tiles_across = columns.div_ceil(TILE_COLUMNS);
    let tiles = tiles_across * rows.div_ceil(TILE_ROWS);
    let mut tile = CUBE_POS_X;
    while tile < tiles {
        let first_row = tile / tiles_across * TILE_ROWS;
        let first_column = tile % tiles_across * TILE_COLUMNS;

        // 2. Four rows by eight columns a unit, zero beyond the ends.
        let column = first_column + UNIT_POS_X * UNIT_COLUMNS;
        let mut words = Array::<u32>::new(comptime!((UNIT_ROWS * UNIT_WORDS) as usize));
        #[unroll]
        for r in 0..UNIT_ROWS {
            let row = first_row + UNIT_POS_Y * UNIT_ROWS + r;
            let values = load_row::<I, N>(x, row, column, rows, columns, factor);
            #[unroll]
            for w in 0..UNIT_WORDS {
                let at = comptime!(4 * w as usize);
                words[comptime!((r * UNIT_WORDS + w) as usize)] = encode_four(
                    values[at],
                    values[comptime!(at + 1)],
                    values[comptime!(at + 2)],
                    values[comptime!(at + 3)],
                    comptime!(blueprint.format),
                    comptime!(blueprint.hardware),
                );
            }
            if comptime!(blueprint.layouts.rows()) {
                if row < rows && column < codes_pitch {
                    let mut pair = Vector::<u32, Const<2>>::empty();
                    #[unroll]
                    for w in 0..UNIT_WORDS {
                        let word = words[comptime!((r * UNIT_WORDS + w) as usize)];
                        pair.insert(comptime!(w as usize), word);
                    }
                    codes[((row * codes_pitch + column) / UNIT_COLUMNS) as usize] = pair;
                }
            }
        }

        // 3. The same bytes column by column, through shared memory, so that whole rows of the
        //    transpose are written at once.
        if comptime!(blueprint.layouts.transposed()) {
            #[unroll]
            for c in 0..UNIT_COLUMNS {
                let word = column_of(&words, c);
                let at = (UNIT_POS_X * UNIT_COLUMNS + c) * PITCH + UNIT_POS_Y;
                tile_memory[at as usize] = word;
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

/// A unit's columns of one row, scaled; zero beyond the ends.
#[cube]
fn load_row<I: Float, N: Size>(
    x: &[Vector<I, N>],
    row: u32,
    column: u32,
    rows: u32,
    columns: u32,
    factor: f32,
) -> Array<f32> {
    let size = N::value().comptime();
    let mut values = Array::<f32>::new(comptime!(UNIT_COLUMNS as usize));
    #[unroll]
    for v in 0..comptime!(UNIT_COLUMNS as usize / size) {
        let at = column + comptime!((v * size) as u32);
        let mut vector = Vector::<f32, N>::new(0.0f32);
        // Rows are whole vectors.
        if row < rows && at < columns {
            let index = (row * columns + at) / comptime!(size as u32);
            vector = Vector::cast_from(x[index as usize]) * Vector::new(factor);
        }
        #[unroll]
        for lane in 0..size {
            values[comptime!(v * size + lane)] = vector.extract(lane);
        }
    }
    values
}

/// Byte `c` of each of a unit's rows, the first row's in the lowest byte.
#[cube]
fn column_of(words: &Array<u32>, #[comptime] c: u32) -> u32 {
    let mut column = 0u32;
    #[unroll]
    for r in 0..UNIT_ROWS {
        let word = words[comptime!((r * UNIT_WORDS + c / 4) as usize)];
        column |= ((word >> comptime!(8 * (c % 4))) & 0xff) << comptime!(8 * r);
    }
    column
}
