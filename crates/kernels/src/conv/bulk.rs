//! Launches of the family for Hopper: how TMA finds the operands, and one persistent kernel for each part.

use super::{
    ConvPass, ConvProblem, ImplicitBlueprint,
    blueprint::{takes_wgmma, tensor_core_type},
    call::Call,
    im2col::PixelBox,
    parts::{Gathered, Part, Weights, parts},
    problem::unsupported,
    tensor_core::{Images, Other, check_bias},
    wgmma::{BOX_CHANNELS, ConvWgmmaBlueprint, conv_wgmma_kernel},
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::Buffer,
    matmul::{
        Epilogue, MatmulOutput,
        mma_parts::{extent, store_width},
        wgmma_parts::{TILE_M, UNITS, WgmmaBlueprint, accumulator_width, tensor_map},
    },
    ptx::wgmma::WgmmaOperands,
};
use cubecl::prelude::*;

/// An implicit product by Hopper's instructions, and the sum over its splits.
pub(super) fn launch(call: &Call<'_>, plan: &ImplicitBlueprint) -> Result<Buffer, KernelError> {
    let (client, problem) = (call.client, call.problem);
    let (true, Some(element)) = (takes_wgmma(problem), tensor_core_type(problem)) else {
        return unsupported("a convolution that copies of boxes cannot follow, by wgmma".into());
    };
    let parts = parts(problem);
    if parts.len() > 1 && plan.splits > 1 {
        return unsupported(format!("{} products in {} splits", parts.len(), plan.splits));
    }
    check_bias(call)?;
    let shapes = problem.shapes();
    let images = Images { shape: shapes[0], strides: problem.first, memory: call.operands[0] };
    let images = images.aligned(client)?;
    let other = match problem.pass {
        ConvPass::Wgrad => {
            let dy = Images { shape: shapes[1], strides: problem.second, memory: call.operands[1] };
            Other::rows(client, &dy)?
        }
        ConvPass::Fprop | ConvPass::Dgrad => {
            let [channels, filters] = problem.group_channels();
            let lying = Weights::by_filter(problem);
            let sizes = [filters, channels];
            Other::weights(client, problem, call.operands[1], lying, sizes, channels)?
        }
    };
    call.summed(plan.splits, |out| {
        parts.iter().try_for_each(|part| {
            let Some(pixels) = PixelBox::of(problem, part) else {
                return unsupported("images whose pixels no tensor map can walk".into());
            };
            let product = Product {
                call,
                plan,
                element,
                part,
                scattered: parts.len() > 1,
                pixels,
                strides: images.strides,
                images: &images.memory,
                other: &other,
            };
            product.launch(out)
        })
    })
}

struct Product<'a> {
    call: &'a Call<'a>,
    plan: &'a ImplicitBlueprint,
    /// How tensor cores name the operands' type.
    element: &'static str,
    part: &'a Part,
    /// It is one of several, whose pixels take turns in the output.
    scattered: bool,
    pixels: PixelBox,
    /// Of the images, in the order n, c, h, w.
    strides: [usize; 4],
    images: &'a Buffer,
    other: &'a Other,
}

impl Product<'_> {
    fn launch(&self, out: &Buffer) -> Result<(), KernelError> {
        let Call { client, problem, bias, .. } = *self.call;
        let ImplicitBlueprint { tile_m, tile_n, stages, splits, .. } = *self.plan;
        let has_tile = tile_m == TILE_M && tile_n.is_multiple_of(BOX_CHANNELS) && tile_n <= 256;
        if !has_tile || tile_n == 0 {
            return unsupported(format!("tiles of {tile_m} by {tile_n} by wgmma"));
        }
        let channels = self.call.gathered_channels();
        let [m, n, terms] = self.call.sizes(self.part, channels);
        let (store, stored, width) = store_width(out.dtype, n);
        let product = WgmmaBlueprint {
            operands: WgmmaOperands {
                n: tile_n,
                lhs: self.element,
                rhs: self.element,
                lhs_k_major: problem.pass != ConvPass::Wgrad,
                rhs_k_major: problem.pass == ConvPass::Fprop,
            },
            block_k: BOX_CHANNELS as u32,
            stages: stages as u32,
            batched: false,
            store,
            promotion: 0,
        };
        let device = DeviceProfile::of(client);
        if stages < 2 || product.shared_bytes() > device.shared_bytes {
            let bytes = product.shared_bytes();
            return unsupported(format!("{stages} stages in {bytes} bytes of shared memory"));
        }
        let cubes = m.div_ceil(tile_m) * n.div_ceil(tile_n) * splits;
        if u32::try_from(cubes).is_err() {
            return unsupported(format!("{cubes} tiles"));
        }
        let slots = device.multiprocessors * self.plan.cubes_per_multiprocessor();
        let blocks = terms.div_ceil(BOX_CHANNELS);
        let epilogue = Epilogue { bias: bias.cloned(), ..Epilogue::default() };
        let output = MatmulOutput { out: out.clone(), preactivation: None };
        let gathered = Gathered { strides: self.strides, channels, padded_channels: channels };
        // SAFETY: the tensor maps describe memory that the operands were checked or allocated to have, the bias
        // was checked, and the output was allocated for the problem and its splits; the kernel writes rows below m
        // and columns below n alone.
        ahead::launch(client, |client| unsafe {
            conv_wgmma_kernel::launch_unchecked(
                client,
                CubeCount::Static(cubes.min(slots) as u32, 1, 1),
                CubeDim::new_1d(UNITS),
                self.image_map(),
                self.other_map(),
                epilogue.args(self.images),
                output.args(),
                extent([m, n, blocks], [tile_m, tile_n], splits, [1, 1], device),
                self.part.gather(problem, &gathered),
                self.part.out(problem),
                ConvWgmmaBlueprint { product, pass: problem.pass, scattered: self.scattered },
                [out.dtype, stored],
                [width, accumulator_width(tile_n)],
            )
        });
        Ok(())
    }

    /// How TMA walks the images: pixels of a tile's rows, or of a block of terms.
    fn image_map(&self) -> TensorMapArg<Im2col> {
        let problem = self.call.problem;
        let [batch, channels, ..] = problem.shapes()[0];
        let [height, width] = problem.gathered_size();
        let shape = [batch, height, width, channels];
        let [image, _, row, column] = self.strides;
        let strides = dense_where_single(shape, [image, row, column, 1]);
        let PixelBox { lower, upper, stride } = self.pixels;
        let args = Im2colArgs {
            pixel_box_lower_corner: lower.to_vec(),
            pixel_box_upper_corner: upper.to_vec(),
            channels_per_pixel: BOX_CHANNELS as u32,
            pixels_per_column: match problem.pass {
                ConvPass::Wgrad => BOX_CHANNELS as u32,
                ConvPass::Fprop | ConvPass::Dgrad => TILE_M as u32,
            },
        };
        // SAFETY: shape and strides stay within the memory, which was checked or allocated.
        let tensor = unsafe {
            TensorArg::from_raw_parts(
                self.images.argument(),
                strides.to_vec().into(),
                shape.to_vec().into(),
            )
        };
        TensorMapArg::new(args, tensor, self.images.dtype)
            .with_elem_stride(vec![1, stride[0], stride[1], 1].into())
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256)
    }

    /// How TMA finds boxes of the operand that is not gathered.
    fn other_map(&self) -> TensorMapArg<Tiled> {
        let ConvProblem { pass, out_channels, .. } = *self.call.problem;
        let Other { memory, weights, pitch } = self.other;
        if pass == ConvPass::Wgrad {
            let pixels = self.call.problem.out_pixels();
            let pitch = if pixels == 1 { out_channels } else { *pitch };
            let (shape, strides) = (vec![pixels, out_channels], vec![pitch, 1]);
            return tensor_map(memory, shape, strides, vec![BOX_CHANNELS; 2]);
        }
        let [channels, filters] = self.call.problem.group_channels();
        let (first, [row, column]) = self.part.taps_of(weights);
        // Where no tap meets the pixels, none is copied, and the map has any.
        let [r, s] = self.part.taps.map(|taps| taps.max(1));
        let shape = [filters, r, s, channels];
        let strides = [weights.column, row, column, weights.channel];
        let filters = if pass == ConvPass::Fprop { self.plan.tile_n } else { BOX_CHANNELS };
        let strides = dense_where_single(shape, strides);
        let memory = &memory.behind(first);
        tensor_map(memory, shape.to_vec(), strides.to_vec(), vec![filters, 1, 1, BOX_CHANNELS])
    }
}

/// Distances whose dimensions of one element have that of a dense tensor: nobody steps there, but a map has to be
/// told multiples of 16 bytes.
fn dense_where_single(shape: [usize; 4], strides: [usize; 4]) -> [usize; 4] {
    let mut all = strides;
    for dim in (0..3).rev() {
        if shape[dim] == 1 {
            all[dim] = all[dim + 1] * shape[dim + 1];
        }
    }
    all
}
