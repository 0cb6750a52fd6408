//! Launches of the tensor-core family: operands are copied into shape where the copies of 16 bytes could not
//! follow them.

use super::{
    ConvPass, ConvProblem, ImplicitBlueprint,
    blueprint::tensor_core_type,
    call::Call,
    mma::{ConvMmaBlueprint, conv_mma_kernel},
    parts::{Gathered, Part, Weights, parts},
    problem::{OP, unsupported},
    product::pixel_stride,
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::Buffer,
    device::ALIGNMENT_BYTES,
    matmul::{
        Operand,
        mma_parts::{MatrixSource, MmaBlueprint, PitchLaunch, UNITS, extent, store_width},
    },
    ptx::{
        ROW_BYTES,
        mma::{MmaOperands, Scales},
    },
};
use cubecl::{client::Client, prelude::*};

/// An implicit product on tensor cores, and the sum over its splits.
pub(super) fn launch(call: &Call<'_>, plan: &ImplicitBlueprint) -> Result<Buffer, KernelError> {
    let problem = call.problem;
    let Some(element) = tensor_core_type(problem) else {
        return unsupported(format!("{:?} on tensor cores", problem.dtype));
    };
    check_bias(call)?;
    let shapes = problem.shapes();
    let client = call.client;
    let images = Images { shape: shapes[0], strides: problem.first, memory: call.operands[0] };
    let images = images.aligned(client)?;
    let channels = call.gathered_channels();
    let padded_channels = channels.next_multiple_of(whole_elements(problem));
    let gathered = Gathered { strides: images.strides, channels, padded_channels };
    let other = match problem.pass {
        ConvPass::Wgrad => {
            let dy = Images { shape: shapes[1], strides: problem.second, memory: call.operands[1] };
            Other::rows(client, &dy)?
        }
        ConvPass::Fprop | ConvPass::Dgrad => {
            let [in_channels, out_channels] = problem.group_channels();
            let columns = match problem.pass {
                ConvPass::Dgrad => in_channels,
                _ => out_channels,
            };
            let (lying, sizes) = (Weights::of(problem), [columns, channels]);
            Other::weights(client, problem, call.operands[1], lying, sizes, padded_channels)?
        }
    };
    let product = Product { call, plan, element, images: &images.memory, gathered, other: &other };
    if problem.pass != ConvPass::Wgrad {
        return call
            .summed(1, |out| parts(problem).iter().try_for_each(|part| product.launch(part, out)));
    }
    let rows = problem.out_channels * problem.taps();
    let padded = call.summed_elements(plan.splits, rows * padded_channels, |out| {
        parts(problem).iter().try_for_each(|part| product.launch(part, out))
    })?;
    if padded_channels == channels {
        return Ok(padded);
    }
    let out = Buffer::empty(client, rows * channels, padded.dtype);
    matrix(&padded, [0, 0], [1, 1], [rows, channels], [padded_channels, 1])
        .pack(client, OP, &out, channels)?;
    Ok(out)
}

/// That the bias can be copied four bytes at a time.
pub(super) fn check_bias(call: &Call<'_>) -> Result<(), KernelError> {
    let offset = call.bias.and_then(|bias| bias.handle.offset_start);
    if offset.is_some_and(|offset| !offset.is_multiple_of(4)) {
        return unsupported("a bias that does not begin at a multiple of 4 bytes".into());
    }
    Ok(())
}

/// Elements of a copy.
fn whole_elements(problem: &ConvProblem) -> usize {
    ALIGNMENT_BYTES / problem.dtype.size()
}

fn begins_aligned(memory: &Buffer) -> bool {
    memory.offset_bytes().is_multiple_of(ALIGNMENT_BYTES as u64)
}

/// A batch of matrices to be copied.
fn matrix(
    memory: &Buffer,
    batch_strides: [usize; 2],
    matrices: [usize; 2],
    [rows, columns]: [usize; 2],
    [row, column]: [usize; 2],
) -> MatrixSource<'_> {
    let operand =
        Operand { row_stride: row, column_stride: column, batch_strides, dtype: memory.dtype };
    MatrixSource { memory, operand, matrices, rows, columns, row, column }
}

/// Images n, c, h, w as they lie.
pub(super) struct Images<'a> {
    pub(super) shape: [usize; 4],
    pub(super) strides: [usize; 4],
    pub(super) memory: &'a Buffer,
}

/// Images whose channels follow each other and whose pixels begin at multiples of 16 bytes.
pub(super) struct AlignedImages {
    pub(super) strides: [usize; 4],
    pub(super) memory: Buffer,
}

impl Images<'_> {
    fn is_aligned(&self) -> bool {
        let whole = ALIGNMENT_BYTES / self.memory.dtype.size();
        let is_whole = |dim: usize| self.shape[dim] == 1 || self.strides[dim].is_multiple_of(whole);
        let channels_follow = self.shape[1] == 1 || self.strides[1] == 1;
        channels_follow && [0, 2, 3].into_iter().all(is_whole) && begins_aligned(self.memory)
    }

    /// As they lie, or copied into shape.
    pub(super) fn aligned(&self, client: &Client) -> Result<AlignedImages, KernelError> {
        if self.is_aligned() {
            return Ok(AlignedImages { strides: self.strides, memory: self.memory.clone() });
        }
        self.packed(client)
    }

    fn packed(&self, client: &Client) -> Result<AlignedImages, KernelError> {
        let ([n, c, h, w], [image, channel, row, column]) = (self.shape, self.strides);
        let pitch = c.next_multiple_of(ALIGNMENT_BYTES / self.memory.dtype.size());
        let memory = Buffer::empty(client, n * h * w * pitch, self.memory.dtype);
        // Rows that follow each other are one.
        let source = if h == 1 || row == w * column {
            matrix(self.memory, [0, image], [1, n], [h * w, c], [column, channel])
        } else {
            matrix(self.memory, [image, row], [n, h], [w, c], [column, channel])
        };
        source.pack(client, OP, &memory, pitch)?;
        Ok(AlignedImages { strides: [h * w * pitch, 1, w * pitch, pitch], memory })
    }
}

/// The operand that is not gathered.
pub(super) struct Other {
    pub(super) memory: Buffer,
    /// Where pixels are rows: how the weights lie.
    pub(super) weights: Weights,
    /// Where pixels are terms: elements from one to the next.
    pub(super) pitch: usize,
}

impl Other {
    /// The gradient of the output, a row for each pixel.
    pub(super) fn rows(client: &Client, dy: &Images<'_>) -> Result<Self, KernelError> {
        let weights = Weights { group: 0, column: 0, channel: 0, taps: [0; 2] };
        if dy.is_aligned()
            && let Some(pitch) = pixel_stride(dy.shape, dy.strides)
        {
            return Ok(Self { memory: dy.memory.clone(), weights, pitch });
        }
        let AlignedImages { strides, memory } = dy.packed(client)?;
        Ok(Self { memory, weights, pitch: strides[3] })
    }

    /// Weights whose channels follow each other: as they are `lying`, or copied, tap by tap.
    pub(super) fn weights(
        client: &Client,
        problem: &ConvProblem,
        memory: &Buffer,
        lying: Weights,
        [columns, channels]: [usize; 2],
        padded_channels: usize,
    ) -> Result<Self, KernelError> {
        let whole = whole_elements(problem);
        let (groups, taps) = (problem.options.groups, problem.taps());
        let sizes = [groups, columns, problem.kernel[0], problem.kernel[1]];
        let steps = [lying.group, lying.column, lying.taps[0], lying.taps[1]];
        let is_aligned = sizes
            .into_iter()
            .zip(steps)
            .all(|(size, step)| size == 1 || step.is_multiple_of(whole));
        if is_aligned && (channels == 1 || lying.channel == 1) && begins_aligned(memory) {
            return Ok(Self { memory: memory.clone(), weights: lying, pitch: 0 });
        }
        let row = taps * padded_channels;
        let packed = Buffer::empty(client, groups * columns * row, memory.dtype);
        let tap_step = if problem.kernel[1] == 1 { lying.taps[0] } else { lying.taps[1] };
        let source = if taps == 1 || lying.column == taps * tap_step {
            let step = if taps == 1 { lying.column } else { tap_step };
            let rows = [columns * taps, channels];
            matrix(memory, [0, lying.group], [1, groups], rows, [step, lying.channel])
        } else {
            let batch_strides = [lying.group, lying.column];
            let rows = [taps, channels];
            matrix(memory, batch_strides, [groups, columns], rows, [tap_step, lying.channel])
        };
        source.pack(client, OP, &packed, padded_channels)?;
        let weights = Weights {
            group: columns * row,
            column: row,
            channel: 1,
            taps: [problem.kernel[1] * padded_channels, padded_channels],
        };
        Ok(Self { memory: packed, weights, pitch: 0 })
    }
}

/// What the products of all parts share.
struct Product<'a> {
    call: &'a Call<'a>,
    plan: &'a ImplicitBlueprint,
    /// How tensor cores name the operands' type.
    element: &'static str,
    images: &'a Buffer,
    gathered: Gathered,
    other: &'a Other,
}

impl Product<'_> {
    fn launch(&self, part: &Part, out: &Buffer) -> Result<(), KernelError> {
        let Call { client, problem, bias, .. } = *self.call;
        let ImplicitBlueprint { tile_m, tile_n, stages, splits, .. } = *self.plan;
        let Some((warps_m, m16, n16)) = MmaBlueprint::warp_tiles(tile_m, tile_n) else {
            return unsupported(format!("tiles of {tile_m} by {tile_n}"));
        };
        let [m, n, terms] = self.call.sizes(part, self.gathered.padded_channels);
        let sums_pixels = problem.pass == ConvPass::Wgrad;
        let (store, stored, width) = store_width(out.dtype, n);
        let mma = MmaBlueprint {
            operands: MmaOperands {
                m16,
                n16,
                lhs: self.element,
                rhs: self.element,
                lhs_k_major: !sums_pixels,
                rhs_k_major: !sums_pixels,
                scales: Scales::None,
            },
            warps_m,
            element_bytes: problem.dtype.size() as u32,
            stages: stages as u32,
            store,
        };
        let device = DeviceProfile::of(client);
        if stages < 2 || mma.shared_bytes() > device.shared_bytes {
            let bytes = mma.shared_bytes();
            return unsupported(format!("{stages} stages in {bytes} bytes of shared memory"));
        }
        let groups = problem.options.groups;
        let cubes = m.div_ceil(tile_m) * n.div_ceil(tile_n) * groups * splits;
        let Ok(cubes) = u32::try_from(cubes) else {
            return unsupported(format!("{cubes} cubes"));
        };
        let blocks = terms.div_ceil(ROW_BYTES / problem.dtype.size());
        // SAFETY: copies read what the operands were checked or allocated to hold: pixels inside of their images,
        // taps and channels below their ends. Rows below m and columns below n of the output are written, for
        // which it was allocated.
        ahead::launch(client, |client| unsafe {
            conv_mma_kernel::launch_unchecked(
                client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(UNITS),
                self.images.arg(1),
                self.other.memory.arg(1),
                bias.unwrap_or(self.images).arg(1),
                out.arg(1),
                extent([m, n, blocks], [tile_m, tile_n], splits, [groups, 1], device),
                part.gather(problem, &self.gathered),
                part.weights(&self.other.weights),
                part.out(problem),
                PitchLaunch { row: self.other.pitch as u32, outer: 0, inner: 0, mn: m as u32 },
                terms as u32,
                ConvMmaBlueprint {
                    mma,
                    sums_pixels,
                    whole_chunks: self.gathered.padded_channels == self.gathered.channels,
                },
                self.call.epilogue(),
                [out.dtype, stored],
                [width, mma.operands.registers()],
            )
        });
        Ok(())
    }
}
