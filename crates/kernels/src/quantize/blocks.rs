//! Scales and rounds each block of 32 elements by a power of two of its own, along rows, along columns, or both; and
//! back.

use super::{
    Fp8Format, Layouts,
    codes::{INFINITY, MANTISSA_BITS, decode_one, encode_four},
};
use crate::block_format::BlockFormat;
use cubecl::prelude::*;

/// Elements that share a scale.
pub(super) const BLOCK: u32 = BlockFormat::Mxfp8.scaled_by() as u32;
/// Rows and columns of a tile: as many as a word has scales of blocks.
pub(super) const TILE: u32 = BlockFormat::WORD_SCALES as u32 * BLOCK;
/// Units of a cube: one for each column of a tile, and one for each block of a stripe of rows.
pub(super) const UNITS: u32 = TILE;
/// Words of codes in a block.
const BLOCK_WORDS: u32 = BLOCK / 4;
/// Distance of a stripe's rows in shared memory: units that go along different rows meet in no bank.
const PITCH: u32 = TILE + 1;

/// Both formats' largest number is 1.75 times a power of two. Added to bits whose mantissa is larger, this carries to
/// the exponent.
const ABOVE_LARGEST: u32 = 0x1f_ffff;

/// How a matrix is rounded by blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlocksBlueprint {
    pub(crate) format: Fp8Format,
    pub(crate) layouts: Layouts,
    pub(crate) hardware: bool,
}

/// Exponent of the power of two below the largest number.
fn most_exponent(format: Fp8Format) -> u32 {
    format.max_finite().log2() as u32
}

/// The code of the scale of numbers whose largest has those bits: the smallest power of two by which none is larger
/// than the format's largest. It is a normal number of f32.
#[cube]
fn scale_for(amax: u32, #[comptime] format: Fp8Format) -> u32 {
    let exponent = (amax + ABOVE_LARGEST) >> MANTISSA_BITS;
    max(exponent, comptime!(most_exponent(format) + 1)) - comptime!(most_exponent(format))
}

/// Rounds the block of a stripe that begins at `first`, whose elements are `step` apart, and writes its codes as those of
/// `chunk` and behind. Gives the code of its scale.
#[cube]
fn round_block(
    stripe: &Shared<[f32]>,
    first: u32,
    #[comptime] step: u32,
    codes: &mut [Vector<u32, Const<4>>],
    chunk: u32,
    chunks: u32,
    #[comptime] blueprint: BlocksBlueprint,
) -> u32 {
    let mut amax = 0u32;
    #[unroll]
    for at in 0..BLOCK {
        let bits = u32::reinterpret(stripe[(first + at * step) as usize].abs());
        // What is no number has no scale, and is no number in 8 bits.
        amax = max(amax, select(bits < INFINITY, bits, 0u32));
    }
    let scale = scale_for(amax, comptime!(blueprint.format));
    // Two to the power of 127 - scale.
    let factor = f32::reinterpret((254u32 - scale) << MANTISSA_BITS);
    #[unroll]
    for half in 0..comptime!(BLOCK_WORDS / 4) {
        let mut four = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for word in 0..4u32 {
            let at = first + comptime!((4 * half + word) * 4 * step);
            four.insert(
                comptime!(word as usize),
                encode_four(
                    stripe[at as usize] * factor,
                    stripe[(at + step) as usize] * factor,
                    stripe[(at + comptime!(2 * step)) as usize] * factor,
                    stripe[(at + comptime!(3 * step)) as usize] * factor,
                    comptime!(blueprint.format),
                    comptime!(blueprint.hardware),
                ),
            );
        }
        // The end of a row may cut the block.
        if half < chunks {
            codes[(chunk + half) as usize] = four;
        }
    }
    scale
}

/// Where the word of scales of row `row` and the tile `tile` along it lies: see [`scale_words`](super::scale_words).
#[cube]
fn scale_word(row: u32, tile: u32, tiles: u32) -> u32 {
    let block = row / TILE * tiles + tile;
    block * TILE + row % 32 * 4 + row % TILE / 32
}

/// `codes[r, c]` and `transposed[c, r]` are x, scaled and rounded by blocks along their rows, and `scales` and
/// `transposed_scales` what they were scaled by. A cube has a tile of 128 rows and columns, in stripes of 32 rows.
/// Pitches count groups of 16 codes.
#[cube(launch_unchecked)]
pub(crate) fn quantize_blocks_kernel<I: Float, N: Size>(
    x: &[Vector<I, N>],
    codes: &mut [Vector<u32, Const<4>>],
    transposed: &mut [Vector<u32, Const<4>>],
    scales: &mut [u32],
    transposed_scales: &mut [u32],
    rows: u32,
    columns: u32,
    codes_pitch: u32,
    transposed_pitch: u32,
    #[comptime] blueprint: BlocksBlueprint,
    #[define(I)] _input: ElemType,
) {
    let size = N::value().comptime();
    let mut stripe = Shared::<[f32]>::new_slice(comptime!((BLOCK * PITCH) as usize));
    let mut row_scales = Shared::<[u32]>::new_slice(comptime!(UNITS as usize));
    let tiles_across = columns.div_ceil(TILE);
    let tiles_down = rows.div_ceil(TILE);
    let mut tile = CUBE_POS_X;
    while tile < tiles_across * tiles_down {
        let (tile_row, tile_column) = (tile / tiles_across, tile % tiles_across);
        let first_column = tile_column * TILE;
        let mut turned_scales = 0u32;
        #[unroll]
        for part in 0..comptime!(TILE / BLOCK) {
            let first_row = tile_row * TILE + comptime!(part * BLOCK);
            // 1. A stripe of rows, zero beyond the ends.
            let mut at = UNIT_POS;
            while at < comptime!(BLOCK * TILE / size as u32) {
                let row = at / comptime!(TILE / size as u32);
                let column = at % comptime!(TILE / size as u32) * comptime!(size as u32);
                let mut vector = Vector::<f32, N>::new(0.0f32);
                // Rows are whole vectors.
                if first_row + row < rows && first_column + column < columns {
                    let index = ((first_row + row) * columns + first_column + column)
                        / comptime!(size as u32);
                    vector = Vector::cast_from(x[index as usize]);
                }
                #[unroll]
                for lane in 0..size {
                    let place = row * PITCH + column + comptime!(lane as u32);
                    stripe[place as usize] = vector.extract(lane);
                }
                at += UNITS;
            }
            sync_cube();

            // 2. Four blocks of each row.
            if comptime!(blueprint.layouts.rows()) {
                let (row, block) = (UNIT_POS % BLOCK, UNIT_POS / BLOCK);
                let chunk = tile_column * comptime!(TILE / 16) + block * 2;
                // None where the row lies beyond the last.
                let inside = u32::cast_from(first_row + row < rows);
                let chunks = (codes_pitch - min(chunk, codes_pitch)) * inside;
                row_scales[UNIT_POS as usize] = round_block(
                    &stripe,
                    row * PITCH + block * BLOCK,
                    1u32,
                    codes,
                    (first_row + row) * codes_pitch + chunk,
                    chunks,
                    blueprint,
                );
            }
            // 3. The same elements by blocks of each column.
            if comptime!(blueprint.layouts.transposed()) {
                let chunk = tile_row * comptime!(TILE / 16) + comptime!(part * 2);
                let inside = u32::cast_from(first_column + UNIT_POS < columns);
                let chunks = (transposed_pitch - min(chunk, transposed_pitch)) * inside;
                let scale = round_block(
                    &stripe,
                    UNIT_POS,
                    PITCH,
                    transposed,
                    (first_column + UNIT_POS) * transposed_pitch + chunk,
                    chunks,
                    blueprint,
                );
                turned_scales |= scale << comptime!(8 * part);
            }
            sync_cube();

            // 4. The scales of a row's four blocks in a word.
            if comptime!(blueprint.layouts.rows()) {
                if UNIT_POS < BLOCK {
                    let mut word = 0u32;
                    #[unroll]
                    for block in 0..comptime!(TILE / BLOCK) {
                        let scale = row_scales[(block * BLOCK + UNIT_POS) as usize];
                        word |= scale << comptime!(8 * block);
                    }
                    let at = scale_word(first_row + UNIT_POS, tile_column, tiles_across);
                    scales[at as usize] = word;
                }
            }
        }
        if comptime!(blueprint.layouts.transposed()) {
            let at = scale_word(first_column + UNIT_POS, tile_row, tiles_down);
            transposed_scales[at as usize] = turned_scales;
        }
        tile += CUBE_COUNT_X;
    }
}

/// `values[i]` are the numbers that the four codes in word i and their block's scale stand for. `pitch` counts the words
/// of a row.
#[cube(launch_unchecked)]
pub(crate) fn quantize_decode_blocks_kernel<O: Float>(
    codes: &[u32],
    scales: &[u32],
    values: &mut [Vector<O, Const<4>>],
    words: u32,
    pitch: u32,
    tiles: u32,
    #[comptime] format: Fp8Format,
    #[define(O)] _output: ElemType,
) {
    let index = ABSOLUTE_POS as u32;
    if index >= words {
        terminate!();
    }
    let (row, column) = (index / pitch, index % pitch * 4);
    let word = scales[scale_word(row, column / TILE, tiles) as usize];
    let code = (word >> (column % TILE / BLOCK * 8)) & 0xff;
    let scale = f32::reinterpret(code << MANTISSA_BITS);
    let word = codes[index as usize];
    let mut four = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for byte in 0..4usize {
        let code = (word >> comptime!(8 * byte as u32)) & 0xff;
        four.insert(byte, decode_one(code, format) * scale);
    }
    values[index as usize] = Vector::cast_from(four);
}
