//! The family for Hopper: matmul's persistent cubes, whose blocks TMA gathers from the images itself. Geometry is
//! an argument: a kernel serves every size of image and of kernel, and every stride.
//!
//! | pass | left operand | right operand |
//! |---|---|---|
//! | [`ConvPass::Fprop`] | 128 pixels by 64 channels of a tap, along k | filters by the same channels, along k |
//! | [`ConvPass::Dgrad`] | the same of dy | the same filters, across k: 64 of them by chunks of 64 channels of x |
//! | [`ConvPass::Wgrad`] | 64 pixels by chunks of 64 channels of dy, across k | the same pixels by chunks of 64 channels of a tap, across k |

use super::{
    ConvPass,
    gather::{Gather, ImageStrides, Tap, element_at, grid_position, tap_at},
};
use crate::{
    matmul::{
        mma_parts::{Extent, Fragment, Work},
        wgmma_parts::{
            BulkBlocks, BulkBlocksExpand, CHUNK_BYTES, EpilogueTensors, OutputRows,
            OutputRowsExpand, Outputs, TILE_M, WgmmaBlueprint, fragment_of, persistent_product,
        },
    },
    ptx::{
        ROW_BYTES,
        copy::{tma_batched_tile, tma_im2col, tma_tile},
    },
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Channels of a copy: a row of shared memory, of elements of 16 bits.
pub(super) const BOX_CHANNELS: usize = ROW_BYTES / 2;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConvWgmmaBlueprint {
    pub(crate) product: WgmmaBlueprint,
    pub(crate) pass: ConvPass,
    /// Rows are pixels that do not follow each other in the output: some of those of a gradient with a stride.
    pub(crate) scattered: bool,
}

/// Blocks of which one operand is gathered.
#[derive(CubeType)]
struct GatheredBoxes {
    images: u64,
    /// Weights by channels of x, columns and rows of taps, and filters; where pixels are terms, dy by channels and
    /// pixels.
    other: u64,
    gather: Gather,
    /// The output, where rows are scattered over it.
    out: ImageStrides,
    /// Columns of the product.
    columns: u32,
    #[cube(comptime)]
    blueprint: ConvWgmmaBlueprint,
}

/// How far the tap that is first in the image stands from tap 0, in a dimension of so many taps.
#[cube]
fn back(taps: u32, step: u32, #[comptime] pass: ConvPass) -> u32 {
    // Only there taps walk back.
    if comptime!(pass == ConvPass::Dgrad) { (taps - 1) * step } else { 0u32.runtime() }
}

/// Has TMA copy 64 channels of a tap of as many pixels as the map says, from pixel `pixel` of the grid on.
#[cube]
fn load_pixels(
    destination: u32,
    map: u64,
    pixel: u32,
    tap: &Tap,
    gather: &Gather,
    barrier: u32,
    #[comptime] pass: ConvPass,
) {
    let (image, i, j) = grid_position(pixel, gather);
    let back_row = back(gather.tap_rows, gather.step_row, pass);
    let back_column = back(gather.tap_columns.divisor, gather.step_column, pass);
    tma_im2col(
        destination,
        map,
        tap.channel,
        j * gather.scale_column + gather.shift_column + back_column,
        i * gather.scale_row + gather.shift_row + back_row,
        image,
        u16::cast_from(tap.column * gather.step_column - back_column),
        u16::cast_from(tap.row * gather.step_row - back_row),
        barrier,
    );
}

#[cube]
impl BulkBlocks for GatheredBoxes {
    fn load(&self, stage: u32, work: &Work, block: u32, barrier: u32) {
        let pass = comptime!(self.blueprint.pass);
        let tile_n = comptime!(self.blueprint.product.operands.n);
        let gather = &self.gather;
        let first_term = block * comptime!(BOX_CHANNELS as u32);
        let rhs = stage + comptime!((TILE_M * ROW_BYTES) as u32);
        if comptime!(pass == ConvPass::Wgrad) {
            #[unroll]
            for chunk in 0..comptime!(TILE_M / BOX_CHANNELS) {
                let at = stage + comptime!((chunk * CHUNK_BYTES) as u32);
                let row = work.row + comptime!((chunk * BOX_CHANNELS) as u32);
                tma_tile(at, self.other, row, first_term, barrier);
            }
            #[unroll]
            for chunk in 0..comptime!(tile_n / BOX_CHANNELS) {
                let at = rhs + comptime!((chunk * CHUNK_BYTES) as u32);
                let column = work.column + comptime!((chunk * BOX_CHANNELS) as u32);
                // Behind the last tap there is none; what is there of the sums is not stored.
                let column = min(column, self.columns - comptime!(BOX_CHANNELS as u32));
                let tap = tap_at(column, gather);
                load_pixels(at, self.images, first_term, &tap, gather, barrier, pass);
            }
        } else {
            let tap = tap_at(first_term, gather);
            load_pixels(stage, self.images, work.row, &tap, gather, barrier, pass);
            if comptime!(pass == ConvPass::Fprop) {
                tma_batched_tile(
                    rhs,
                    self.other,
                    tap.channel,
                    tap.column,
                    tap.row,
                    work.column,
                    barrier,
                );
            } else {
                #[unroll]
                for chunk in 0..comptime!(tile_n / BOX_CHANNELS) {
                    let at = rhs + comptime!((chunk * CHUNK_BYTES) as u32);
                    let channel = work.column + comptime!((chunk * BOX_CHANNELS) as u32);
                    let (column, row) = (tap.column, tap.row);
                    tma_batched_tile(at, self.other, channel, column, row, tap.channel, barrier);
                }
            }
        }
    }
}

#[cube]
impl OutputRows for GatheredBoxes {
    fn fragment(
        &self,
        work: &Work,
        extent: &Extent,
        row: u32,
        column: u32,
        quad: u32,
        #[comptime] interleaved: bool,
    ) -> Fragment {
        if comptime!(self.blueprint.scattered) {
            Fragment {
                upper: element_at(row, &self.gather, &self.out),
                has_upper: row < extent.m,
                lower: element_at(row + 8, &self.gather, &self.out),
                has_lower: row + 8 < extent.m,
                column,
                quad,
                n: extent.n,
            }
        } else {
            fragment_of(work, extent, row, column, quad, interleaved)
        }
    }
}

/// A product with one gathered operand, whose rows lie in the output behind each other or as `out` says; with splits,
/// sums of each split to `outputs[split]`.
#[cube(launch_unchecked)]
pub(crate) fn conv_wgmma_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    images: &TensorMap<u32, Im2col>,
    other: &TensorMap<u32, Tiled>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    gather: Gather,
    out: ImageStrides,
    #[comptime] blueprint: ConvWgmmaBlueprint,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let blocks = GatheredBoxes {
        images: tensor_map_address::<u32, Im2col>(images),
        other: tensor_map_address::<u32, Tiled>(other),
        gather,
        out,
        columns: extent.n,
        blueprint,
    };
    let product = comptime!(blueprint.product);
    persistent_product::<GatheredBoxes, O, S, W, R>(&blocks, epilogue, outputs, &extent, product);
}
