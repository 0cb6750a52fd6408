//! The tensor-core family for Ampere and later: eight warps a cube, fed by `cp.async`, which fills with zeros
//! what lies outside of an image.
//!
//! 1. All units copy blocks of terms of both operands into a ring in shared memory, some blocks ahead. The
//!    gathered one comes in pieces of 16 bytes, neighboring channels of one tap of one pixel. Where pixels are
//!    rows, a unit copies for the same pixels in every block; where they are terms, for the same tap.
//! 2. Each warp multiplies its part of the tile out of the oldest block.
//! 3. It finishes and writes its part, each row where its pixel lies in the output.

use super::gather::{
    Gather, ImageStrides, OUTSIDE, Pixel, Shift, WeightStrides, element_at, is_inside, pixel_at,
    shift_of, tap_at, weight_at,
};
use crate::{
    matmul::{
        EpilogueBlueprint,
        mma_parts::{
            Blocks, BlocksExpand, Extent, Finish, Fragment, MmaBlueprint, Pitch, UNITS,
            bias_element_bytes, chunk_bytes as column_bytes, dense_fragment, fetch_bias, fragments,
            load_operand, multiply, store_fragment, work_at,
        },
    },
    ptx::{ROW_BYTES, copy::copy_16_bytes, global_address, load, shared_address},
};
use cubecl::prelude::*;

/// Chunks of 16 bytes in a row of shared memory.
const ROW_CHUNKS: u32 = ROW_BYTES as u32 / 16;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConvMmaBlueprint {
    pub(crate) mma: MmaBlueprint,
    /// Pixels are terms, and the gathered images the right operand; else pixels are rows and they are the left.
    pub(crate) sums_pixels: bool,
    /// Chunks of 16 bytes divide a group's channels.
    pub(crate) whole_chunks: bool,
}

/// Bytes of a chunk of neighboring channels from `channel` on.
#[cube]
fn chunk_bytes(channel: u32, channels: u32, #[comptime] blueprint: ConvMmaBlueprint) -> u32 {
    if comptime!(blueprint.whole_chunks) {
        16u32.runtime()
    } else {
        let element_bytes = comptime!(blueprint.mma.element_bytes);
        let there = select(channel < channels, channels - channel, 0u32);
        min(there, comptime!(16 / element_bytes)) * element_bytes
    }
}

/// Starts the copy of a chunk at `element`; what is not there of it becomes zero. Where nothing is there, the
/// element may lie anywhere: a copy of no bytes reads nothing.
#[cube]
fn copy_chunk(
    destination: u32,
    source: u64,
    element: u32,
    bytes: u32,
    #[comptime] element_bytes: u32,
) {
    let from = source + u64::cast_from(element) * comptime!(u64::from(element_bytes)).runtime();
    copy_16_bytes(destination, load::<u64>(from), load::<u32>(bytes));
}

/// Starts copies of a block of taps of the pixels that this unit copies for, a row each.
#[cube]
fn load_pixels(
    destination: u32,
    source: u64,
    pixels: &Sequence<Pixel>,
    gather: &Gather,
    first_term: u32,
    terms: u32,
    #[comptime] blueprint: ConvMmaBlueprint,
) {
    let element_bytes = comptime!(blueprint.mma.element_bytes);
    let (chunk, first_row) = (UNIT_POS % ROW_CHUNKS, UNIT_POS / ROW_CHUNKS);
    let term = first_term + chunk * comptime!(16 / element_bytes);
    let tap = tap_at(term, gather);
    let shift = shift_of(&tap, gather);
    let mut there = 0u32;
    if term < terms {
        there = chunk_bytes(tap.channel, gather.channels, blueprint);
    }
    #[unroll]
    for round in 0..comptime!((blueprint.mma.tile_m() * ROW_CHUNKS / UNITS) as usize) {
        let row = comptime!(round as u32 * (UNITS / ROW_CHUNKS)) + first_row;
        let pixel = &pixels[round];
        let bytes = select(is_inside(pixel, &shift, gather), there, 0u32);
        let at = destination + row * comptime!(ROW_BYTES as u32) + ((chunk ^ (row & 7)) << 4);
        copy_chunk(at, source, pixel.element + shift.element, bytes, element_bytes);
    }
}

/// Starts copies of a block of taps of the weights of a tile's columns, a row each.
#[cube]
fn load_weights(
    destination: u32,
    source: u64,
    weights: &WeightStrides,
    gather: &Gather,
    first_column: u32,
    columns: u32,
    first_term: u32,
    terms: u32,
    #[comptime] blueprint: ConvMmaBlueprint,
) {
    let element_bytes = comptime!(blueprint.mma.element_bytes);
    let (chunk, first_row) = (UNIT_POS % ROW_CHUNKS, UNIT_POS / ROW_CHUNKS);
    let term = first_term + chunk * comptime!(16 / element_bytes);
    let tap = tap_at(term, gather);
    let mut there = 0u32;
    if term < terms {
        there = chunk_bytes(tap.channel, gather.channels, blueprint);
    }
    #[unroll]
    for round in 0..comptime!(blueprint.mma.tile_n() * ROW_CHUNKS / UNITS) {
        let row = round * comptime!(UNITS / ROW_CHUNKS) + first_row;
        let bytes = select(first_column + row < columns, there, 0u32);
        let at = destination + row * comptime!(ROW_BYTES as u32) + ((chunk ^ (row & 7)) << 4);
        let element = weight_at(first_column + row, &tap, weights);
        copy_chunk(at, source, element, bytes, element_bytes);
    }
}

/// Chunks of a row of terms: the right operand's columns.
fn row_chunks(blueprint: ConvMmaBlueprint) -> u32 {
    blueprint.mma.tile_n() * blueprint.mma.element_bytes / 16
}

/// Starts copies of the tap that this unit copies for, of a block of pixels, a row each.
#[cube]
fn load_taps(
    destination: u32,
    source: u64,
    shift: &Shift,
    there: u32,
    gather: &Gather,
    first_pixel: u32,
    #[comptime] blueprint: ConvMmaBlueprint,
) {
    let element_bytes = comptime!(blueprint.mma.element_bytes);
    let row_chunks = comptime!(row_chunks(blueprint));
    let (chunk, first_row) = (UNIT_POS % row_chunks, UNIT_POS / row_chunks);
    let column = destination + (chunk / ROW_CHUNKS) * comptime!(column_bytes(element_bytes));
    #[unroll]
    for round in 0..comptime!(blueprint.mma.tile_n() * ROW_CHUNKS / UNITS) {
        let row = round * comptime!(UNITS / row_chunks) + first_row;
        let pixel = pixel_at(first_pixel + row, gather);
        let bytes = select(is_inside(&pixel, shift, gather), there, 0u32);
        let swizzled = ((chunk & 7) ^ (row & 7)) << 4;
        let at = column + row * comptime!(ROW_BYTES as u32) + swizzled;
        copy_chunk(at, source, pixel.element + shift.element, bytes, element_bytes);
    }
}

/// What a unit knows before the first block of what it copies of the gathered images.
#[derive(CubeType)]
struct Copied {
    /// Its pixels, where those are rows.
    pixels: Sequence<Pixel>,
    /// The way to its tap, where pixels are terms: outside of every image where it has none.
    shift: Shift,
    /// Bytes of its chunk.
    there: u32,
}

/// Blocks of which one operand is gathered.
#[derive(CubeType)]
struct GatheredBlocks {
    gathered: u64,
    other: u64,
    copied: Copied,
    gather: Gather,
    weights: WeightStrides,
    pitch: Pitch,
    row: u32,
    column: u32,
    columns: u32,
    terms: u32,
    #[cube(comptime)]
    blueprint: ConvMmaBlueprint,
}

#[cube]
impl Blocks for GatheredBlocks {
    fn load(&self, stage: u32, block: u32) {
        let (blueprint, mma) = comptime!((self.blueprint, self.blueprint.mma));
        let (copied, gather, terms) = (&self.copied, &self.gather, self.terms);
        let first_term = block * comptime!(ROW_BYTES as u32 / mma.element_bytes);
        let rhs = stage + comptime!(mma.tile_m() * ROW_BYTES as u32);
        if comptime!(blueprint.sums_pixels) {
            load_operand(
                stage,
                self.other,
                &self.pitch,
                self.row,
                first_term,
                terms,
                comptime!(mma.tile_m()),
                false,
                comptime!(mma.element_bytes),
            );
            load_taps(
                rhs,
                self.gathered,
                &copied.shift,
                copied.there,
                gather,
                first_term,
                blueprint,
            );
        } else {
            let pixels = &copied.pixels;
            load_pixels(stage, self.gathered, pixels, gather, first_term, terms, blueprint);
            load_weights(
                rhs,
                self.other,
                &self.weights,
                gather,
                self.column,
                self.columns,
                first_term,
                terms,
                blueprint,
            );
        }
    }
}

/// A product with one gathered operand; with splits, sums of each split to `out[split]`. `images` are the
/// output where pixels are rows; `pitch` is that of the other operand where they are terms.
#[cube(launch_unchecked)]
pub(crate) fn conv_mma_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    gathered: &[u32],
    other: &[u32],
    bias: &[O],
    out: &mut [Vector<S, W>],
    extent: Extent,
    gather: Gather,
    weights: WeightStrides,
    images: ImageStrides,
    pitch: Pitch,
    terms: u32,
    #[comptime] blueprint: ConvMmaBlueprint,
    #[comptime] epilogue: EpilogueBlueprint,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let operands = comptime!(blueprint.mma.operands);
    let (tile_m, tile_n) = comptime!((blueprint.mma.tile_m(), blueprint.mma.tile_n()));
    let element_bytes = comptime!(blueprint.mma.element_bytes);
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.mma.shared_bytes() / 4), 1024usize);
    let ring = shared_address::<u32>(memory.as_slice());

    let work = work_at(CUBE_POS_X, &extent, tile_m, tile_n);
    let group = work.batch;
    let size = comptime!(u64::from(element_bytes)).runtime();
    let source_channel = group * gather.channels;
    let gathered_from = global_address::<u32>(gathered) + u64::cast_from(source_channel) * size;
    let other_origin =
        if comptime!(blueprint.sums_pixels) { group * extent.m } else { group * weights.group };
    let other_from = global_address::<u32>(other) + u64::cast_from(other_origin) * size;

    let mut pixels = Sequence::<Pixel>::new();
    if comptime!(!blueprint.sums_pixels) {
        #[unroll]
        for round in 0..comptime!(tile_m * ROW_CHUNKS / UNITS) {
            let row = round * comptime!(UNITS / ROW_CHUNKS) + UNIT_POS / ROW_CHUNKS;
            pixels.push(pixel_at(work.row + row, &gather));
        }
    }
    let chunk = UNIT_POS % comptime!(row_chunks(blueprint));
    let first_tap = work.column + chunk * comptime!(16 / element_bytes);
    let tap = tap_at(first_tap, &gather);
    let shift = shift_of(&tap, &gather);
    let copied = Copied {
        pixels,
        shift: Shift {
            row: select(first_tap < extent.n, shift.row, OUTSIDE),
            column: shift.column,
            element: shift.element,
        },
        there: chunk_bytes(tap.channel, gather.channels, blueprint),
    };

    let blocks = GatheredBlocks {
        gathered: gathered_from,
        other: other_from,
        copied,
        gather,
        weights,
        pitch,
        row: work.row,
        column: work.column,
        columns: extent.n,
        terms,
        blueprint,
    };
    let fragments = fragments(comptime!(blueprint.mma));

    // It arrives with the first block.
    let half = comptime!(blueprint.mma.store.half());
    let bias_at = ring + comptime!(blueprint.mma.stages * blueprint.mma.stage_bytes());
    if comptime!(epilogue.bias) {
        fetch_bias::<O>(
            bias,
            bias_at,
            group * extent.n + work.column,
            extent.batches * extent.n,
            UNIT_POS,
            UNITS,
            tile_n,
            half,
        );
    }

    // 1. and 2.
    let mma = comptime!(blueprint.mma);
    let sums = multiply::<GatheredBlocks, R>(&blocks, ring, &work, &fragments, mma);

    // 3. Finish and write.
    let bias_at = bias_at + fragments.column * comptime!(bias_element_bytes(half));
    let finish = Finish { bias_at, scale: 1.0f32, beta: 0.0f32 };
    #[unroll]
    for i in 0..comptime!(operands.m16) {
        let row = work.row + fragments.row + comptime!(16 * i as u32) + fragments.lane / 4;
        let column = work.column + fragments.column;
        let place = if comptime!(blueprint.sums_pixels) {
            let origin = (work.split * extent.batches + group) * extent.m;
            dense_fragment(origin, row, column, fragments.lane % 4, extent.m, extent.n)
        } else {
            let first = group * extent.n;
            Fragment {
                upper: element_at(row, &blocks.gather, &images) + first,
                has_upper: row < extent.m,
                lower: element_at(row + 8, &blocks.gather, &images) + first,
                has_lower: row + 8 < extent.m,
                column,
                quad: fragments.lane % 4,
                n: extent.n,
            }
        };
        store_fragment::<O, S, W, R>(
            sums,
            out,
            bias,
            &place,
            &finish,
            comptime!(i * operands.n16 * 8),
            comptime!(16 * operands.n16),
            comptime!(mma.store),
            epilogue,
            false,
        );
    }
}
