//! Launches of the tensor-core families.

use super::{
    Epilogue, MatmulBlueprint, MatmulOutput, MatmulProblem,
    blueprint::tensor_core_type,
    layout::OperandWalk,
    mma::{PitchLaunch, PitchedOperandLaunch, matmul_mma_kernel},
    mma_bulk::{BULK_UNITS, MmaBulkBlueprint, matmul_mma_bulk_kernel},
    mx_mma::matmul_mx_mma_kernel,
    mx_scales::ArrangedScales,
    mx_tcgen05::{matmul_mx_tcgen05_kernel, matmul_mx_tcgen05_pair_kernel},
    operand::AlignedOperand,
    pairs::PAIR_TILES_N,
    problem::{OP, is_fp4},
    ring::{MmaBlueprint, UNITS},
    split::sum_splits,
    store::StoreWidth,
    tcgen05::{self, Tcgen05Blueprint, matmul_tcgen05_kernel},
    tcgen05_pair::matmul_tcgen05_pair_kernel,
    wgmma::{self, WgmmaBlueprint, accumulator_width, matmul_wgmma_kernel},
    work::{ExtentLaunch, LastMatrixLaunch, extent},
};
use crate::{
    DeviceProfile, Family, KernelError, ahead,
    block_format::BlockFormat,
    buffer::{Buffer, F32},
    device::SCALE_BLOCK_BYTES,
    ptx::{
        HalfKind,
        mma::{MmaOperands, Scales},
        wgmma::WgmmaOperands,
    },
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind, UIntKind},
    prelude::*,
};

/// A product on tensor cores, and the sum over its splits. Blocks of k of operands in 8 bits may have scales; those of
/// operands in 4 bits have some.
pub(super) fn launch(
    client: &Client,
    problem: &MatmulProblem,
    blueprint: &MatmulBlueprint,
    [lhs, rhs]: [&Buffer; 2],
    scales: Option<&ArrangedScales>,
    epilogue: &Epilogue,
    output: &MatmulOutput,
) -> Result<(), KernelError> {
    let op = scales.map_or(OP, |scales| scales.format.op());
    let types = match scales {
        Some(_) if is_fp4(problem.lhs.dtype) => Some(["e2m1"; 2]),
        _ => tensor_core_type(problem),
    };
    let types = types.ok_or_else(|| {
        KernelError::unsupported(op, format!("{:?} on tensor cores", problem.lhs.dtype))
    })?;
    let aligned = |walk: OperandWalk, memory| {
        let across_k = blueprint.takes_across_k(walk.operand.dtype);
        AlignedOperand::new(client, op, walk, memory, across_k)
    };
    let launch = Launch {
        client,
        op,
        problem,
        blueprint,
        types,
        lhs: aligned(OperandWalk::lhs(problem), lhs)?,
        rhs: aligned(OperandWalk::rhs(problem), rhs)?,
        scales,
    };
    if blueprint.splits == 1 {
        return launch.product(epilogue, output);
    }
    if epilogue.interleaved {
        let reason = format!("{blueprint}, into rows of matrices that take turns");
        return Err(KernelError::unsupported(op, reason));
    }
    let elements = blueprint.splits * problem.out_elements();
    if u32::try_from(elements).is_err() {
        let reason = format!("{elements} partial sums");
        return Err(KernelError::unsupported(op, reason));
    }
    let partial = MatmulOutput { out: Buffer::empty(client, elements, F32), preactivation: None };
    launch.product(&Epilogue::default(), &partial)?;
    sum_splits(client, &partial.out, blueprint.splits, problem.n, epilogue, output);
    Ok(())
}

/// How a kernel stores its output: element and width of the vectors, and what they hold.
pub(crate) fn store_width(dtype: ElemType, columns: usize) -> (StoreWidth, ElemType, usize) {
    let half = match dtype {
        ElemType::Float(FloatKind::BF16) => Some(HalfKind::Bf16),
        ElemType::Float(FloatKind::F16) => Some(HalfKind::F16),
        _ => None,
    };
    let word = ElemType::UInt(UIntKind::U32);
    match half {
        Some(half) if columns.is_multiple_of(8) => (StoreWidth::Octet(half), word, 4),
        Some(half) if columns.is_multiple_of(2) => (StoreWidth::HalfPair(half), word, 1),
        Some(half) => (StoreWidth::HalfShifted(half), dtype, 1),
        None if columns.is_multiple_of(2) => (StoreWidth::Pair, dtype, 2),
        None => (StoreWidth::Single, dtype, 1),
    }
}

/// How TMA finds boxes of a tensor, whose elements follow each other along the last dimension, for shared memory
/// in rows of 128 bytes. It has to lie within the memory.
pub(crate) fn tensor_map(
    memory: &Buffer,
    shape: Vec<usize>,
    strides: Vec<usize>,
    tile_size: Vec<usize>,
) -> TensorMapArg<Tiled> {
    let element = match memory.dtype {
        // The copy rounds to TF32 as it goes.
        ElemType::Float(FloatKind::F32) => ElemType::Float(FloatKind::TF32),
        // Pairs are copied as bytes: a map of theirs would count single elements.
        ElemType::Float(FloatKind::E2M1x2) => ElemType::UInt(UIntKind::U8),
        other => other,
    };
    // SAFETY: shape and strides stay within the memory, which callers have checked.
    let tensor =
        unsafe { TensorArg::from_raw_parts(memory.argument(), strides.into(), shape.into()) };
    TensorMapArg::new(TiledArgs { tile_size: tile_size.into() }, tensor, element)
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(TensorMapPrefetch::B256)
}

/// How TMA finds blocks of scales, those of a block of k at a time.
fn scales_map(scales: &Buffer, format: BlockFormat) -> TensorMapArg<Tiled> {
    let words = SCALE_BLOCK_BYTES / 4;
    let shape = vec![scales.elements / words, words];
    // SAFETY: the rows are the memory's.
    let tensor = unsafe {
        TensorArg::from_raw_parts(scales.argument(), vec![words, 1].into(), shape.into())
    };
    let tile_size = vec![format.scale_blocks(), words].into();
    TensorMapArg::new(TiledArgs { tile_size }, tensor, scales.dtype)
}

struct Launch<'a> {
    client: &'a Client,
    /// What errors call it.
    op: &'static str,
    problem: &'a MatmulProblem,
    blueprint: &'a MatmulBlueprint,
    types: [&'static str; 2],
    lhs: AlignedOperand,
    rhs: AlignedOperand,
    scales: Option<&'a ArrangedScales>,
}

impl Launch<'_> {
    fn product(&self, epilogue: &Epilogue, output: &MatmulOutput) -> Result<(), KernelError> {
        match self.blueprint.family {
            Family::Wgmma => self.wgmma(epilogue, output),
            Family::Tcgen05 => self.tcgen05(epilogue, output),
            _ if self.blueprint.bulk => self.mma_bulk(epilogue, output),
            _ => self.mma(epilogue, output),
        }
    }

    fn cubes(&self) -> usize {
        self.blueprint.tiles(self.problem) * self.blueprint.splits
    }

    fn extent(&self, device: DeviceProfile) -> ExtentLaunch {
        let MatmulBlueprint { tile_m, tile_n, splits, .. } = *self.blueprint;
        let MatmulProblem { m, n, batch, .. } = *self.problem;
        let k_blocks = self.blueprint.k_blocks(self.problem);
        extent([m, n, k_blocks], [tile_m, tile_n], splits, batch, device)
    }

    fn last_matrix(&self) -> LastMatrixLaunch {
        let last = |operand: &AlignedOperand, dim: usize| (operand.matrices[dim] - 1) as u32;
        LastMatrixLaunch {
            lhs_outer: last(&self.lhs, 0),
            lhs_inner: last(&self.lhs, 1),
            rhs_outer: last(&self.rhs, 0),
            rhs_inner: last(&self.rhs, 1),
        }
    }

    fn bulk_operands(&self) -> WgmmaOperands {
        WgmmaOperands {
            n: self.blueprint.tile_n,
            lhs: self.types[0],
            rhs: self.types[1],
            lhs_k_major: self.lhs.k_major,
            rhs_k_major: self.rhs.k_major,
        }
    }

    fn tcgen05(&self, epilogue: &Epilogue, output: &MatmulOutput) -> Result<(), KernelError> {
        let (store, stored, width) = store_width(output.out.dtype, self.problem.n);
        let kernel = Tcgen05Blueprint {
            operands: self.bulk_operands(),
            block_k: (crate::ptx::ROW_BYTES / self.problem.lhs.dtype.size()) as u32,
            stages: self.blueprint.stages as u32,
            batched: self.problem.batches() > 1,
            store,
            format: self.scales.map(|scales| scales.format),
            pair: self.blueprint.is_of_pairs(),
        };
        let device = DeviceProfile::of(self.client);
        self.check_shared_memory(kernel.shared_bytes(), device)?;
        let clusters = device.multiprocessors / kernel.cubes();
        if kernel.pair && !PAIR_TILES_N.contains(&self.blueprint.tile_n) || clusters == 0 {
            let reason = format!("{} on this device", self.blueprint);
            return Err(KernelError::unsupported(self.op, reason));
        }
        let cubes = (kernel.cubes() * self.cubes().min(clusters)) as u32;
        macro_rules! launch {
            ($kernel:ident $(, $scales:expr)*; $($format:expr)?) => {
                // SAFETY: as in `wgmma`; scales were made for the operands, and clusters are whole.
                ahead::launch(self.client, |client| unsafe {
                    $kernel::launch_unchecked(
                        client,
                        CubeCount::Static(cubes, 1, 1),
                        CubeDim::new_1d(tcgen05::UNITS),
                        self.operand_map(&self.lhs, tcgen05::TILE_M),
                        self.operand_map(&self.rhs, kernel.copied().n),
                        $($scales,)*
                        epilogue.args(&self.lhs.memory),
                        output.args(),
                        self.extent(DeviceProfile { multiprocessors: clusters, ..device }),
                        self.last_matrix(),
                        kernel,
                        $($format,)?
                        [output.out.dtype, stored],
                        [width, tcgen05::PART_REGISTERS],
                    )
                })
            };
        }
        match (self.scales, kernel.pair) {
            (None, false) => launch!(matmul_tcgen05_kernel;),
            (None, true) => launch!(matmul_tcgen05_pair_kernel;),
            (Some(ArrangedScales { format, lhs, rhs }), pair) => {
                let map = |scales| scales_map(scales, *format);
                if pair {
                    launch!(matmul_mx_tcgen05_pair_kernel, map(lhs), map(rhs); *format)
                } else {
                    launch!(matmul_mx_tcgen05_kernel, map(lhs), map(rhs); *format)
                }
            }
        }
        Ok(())
    }

    fn wgmma(&self, epilogue: &Epilogue, output: &MatmulOutput) -> Result<(), KernelError> {
        let tile_n = self.blueprint.tile_n;
        let (store, stored, width) = store_width(output.out.dtype, self.problem.n);
        let kernel = WgmmaBlueprint {
            operands: self.bulk_operands(),
            block_k: (crate::ptx::ROW_BYTES / self.problem.lhs.dtype.size()) as u32,
            stages: self.blueprint.stages as u32,
            batched: self.problem.batches() > 1,
            store,
            promotion: self.blueprint.promotion as u32,
        };
        let device = DeviceProfile::of(self.client);
        self.check_shared_memory(kernel.shared_bytes(), device)?;
        let cubes = self.cubes().min(device.multiprocessors) as u32;
        // SAFETY: the tensor maps describe memory that the operands were checked to have, the
        // epilogue's tensors were checked, and the outputs were allocated for the problem; the
        // kernel writes rows below m and columns below n alone.
        ahead::launch(self.client, |client| unsafe {
            matmul_wgmma_kernel::launch_unchecked(
                client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(wgmma::UNITS),
                self.operand_map(&self.lhs, wgmma::TILE_M),
                self.operand_map(&self.rhs, tile_n),
                epilogue.args(&self.lhs.memory),
                output.args(),
                self.extent(device),
                self.last_matrix(),
                kernel,
                [output.out.dtype, stored],
                [width, accumulator_width(tile_n)],
            )
        });
        Ok(())
    }

    /// How TMA finds boxes of `tile` rows or columns of the output by one block of k.
    fn operand_map(&self, operand: &AlignedOperand, tile: usize) -> TensorMapArg<Tiled> {
        let bytes = operand.memory.dtype.size();
        let block_k = crate::ptx::ROW_BYTES / bytes;
        let (rows, columns, tile_size) = if operand.k_major {
            (operand.mn, operand.k, [tile, block_k])
        } else {
            // As many columns are 128 bytes.
            (operand.k, operand.mn, [block_k, block_k])
        };
        let mut shape = vec![rows, columns];
        let mut strides = vec![operand.pitch, 1];
        let mut tile_size = tile_size.to_vec();
        if self.problem.batches() > 1 {
            for dim in [1, 0] {
                shape.insert(0, operand.matrices[dim]);
                // A single matrix is never stepped over, but its distance has to be aligned.
                let stride = match operand.matrices[dim] {
                    1 => operand.pitch * rows,
                    _ => operand.batch_strides[dim],
                };
                strides.insert(0, stride);
                tile_size.insert(0, 1);
            }
        }
        tensor_map(&operand.memory, shape, strides, tile_size)
    }

    /// How the loop of the `mma` family is compiled.
    fn mma_blueprint(
        &self,
        store: StoreWidth,
        device: DeviceProfile,
    ) -> Result<MmaBlueprint, KernelError> {
        let MatmulBlueprint { tile_m, tile_n, stages, .. } = *self.blueprint;
        let Some((warps_m, m16, n16)) = MmaBlueprint::warp_tiles(tile_m, tile_n) else {
            let reason = format!("tiles of {tile_m} by {tile_n}");
            return Err(KernelError::unsupported(self.op, reason));
        };
        let in_8_bits = self.problem.lhs.dtype.size() == 1;
        let scales = match self.scales {
            Some(scales) => Scales::Blocks(scales.format),
            None if in_8_bits && device.scales_warp_products() => Scales::Ones,
            None => Scales::None,
        };
        Ok(MmaBlueprint {
            operands: MmaOperands {
                m16,
                n16,
                lhs: self.types[0],
                rhs: self.types[1],
                lhs_k_major: self.lhs.k_major,
                rhs_k_major: self.rhs.k_major,
                scales,
            },
            warps_m,
            element_bytes: self.problem.lhs.dtype.size() as u32,
            stages: stages as u32,
            store,
        })
    }

    fn mma_bulk(&self, epilogue: &Epilogue, output: &MatmulOutput) -> Result<(), KernelError> {
        let (store, stored, width) = store_width(output.out.dtype, self.problem.n);
        let device = DeviceProfile::of(self.client);
        let mma = self.mma_blueprint(store, device)?;
        // The boxes of the left operand have as many rows as those of `wgmma`.
        if self.blueprint.tile_m != wgmma::TILE_M || !device.scales_warp_products() {
            let reason = format!("{} on this device", self.blueprint);
            return Err(KernelError::unsupported(self.op, reason));
        }
        let kernel = MmaBulkBlueprint {
            mma,
            block_k: (crate::ptx::ROW_BYTES / self.problem.lhs.dtype.size()) as u32,
            batched: self.problem.batches() > 1,
        };
        self.check_shared_memory(kernel.shared_bytes(), device)?;
        let cubes = self.cubes().min(device.multiprocessors) as u32;
        // SAFETY: as in `wgmma`.
        ahead::launch(self.client, |client| unsafe {
            matmul_mma_bulk_kernel::launch_unchecked(
                client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(BULK_UNITS),
                self.operand_map(&self.lhs, self.blueprint.tile_m),
                self.operand_map(&self.rhs, self.blueprint.tile_n),
                epilogue.args(&self.lhs.memory),
                output.args(),
                self.extent(device),
                self.last_matrix(),
                kernel,
                [output.out.dtype, stored],
                [width, mma.operands.registers()],
            )
        });
        Ok(())
    }

    fn mma(&self, epilogue: &Epilogue, output: &MatmulOutput) -> Result<(), KernelError> {
        let (store, stored, width) = store_width(output.out.dtype, self.problem.n);
        let device = DeviceProfile::of(self.client);
        let kernel = self.mma_blueprint(store, device)?;
        self.check_shared_memory(kernel.shared_bytes(), device)?;
        let Ok(cubes) = u32::try_from(self.cubes()) else {
            let reason = format!("{} cubes", self.cubes());
            return Err(KernelError::unsupported(self.op, reason));
        };
        let pitched = |operand: &AlignedOperand| {
            let [outer, inner] = operand.batch_strides.map(|stride| stride as u32);
            let (row, mn) = (operand.pitch as u32, operand.mn as u32);
            let pitch = PitchLaunch { row, outer, inner, mn };
            PitchedOperandLaunch { memory: operand.memory.arg(1), pitch }
        };
        if let Some(ArrangedScales { format, lhs, rhs }) = self.scales {
            // SAFETY: as in `wgmma`; copies stop at the operands' ends, and the blocks of scales were made for them.
            ahead::launch(self.client, |client| unsafe {
                matmul_mx_mma_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(UNITS),
                    pitched(&self.lhs),
                    pitched(&self.rhs),
                    lhs.arg(1),
                    rhs.arg(1),
                    epilogue.args(&self.lhs.memory),
                    output.args(),
                    self.extent(device),
                    self.last_matrix(),
                    self.problem.k as u32,
                    kernel,
                    *format,
                    [output.out.dtype, stored],
                    [width, kernel.operands.registers()],
                )
            });
            return Ok(());
        }
        // SAFETY: as in `wgmma`; copies stop at the operands' ends.
        ahead::launch(self.client, |client| unsafe {
            matmul_mma_kernel::launch_unchecked(
                client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(UNITS),
                pitched(&self.lhs),
                pitched(&self.rhs),
                epilogue.args(&self.lhs.memory),
                output.args(),
                self.extent(device),
                self.last_matrix(),
                self.problem.k as u32,
                kernel,
                [output.out.dtype, stored],
                [width, kernel.operands.registers()],
            )
        });
        Ok(())
    }

    fn check_shared_memory(&self, bytes: usize, device: DeviceProfile) -> Result<(), KernelError> {
        if bytes <= device.shared_bytes {
            return Ok(());
        }
        let reason = format!(
            "{:?} needs {bytes} bytes of shared memory, the device has {}",
            self.blueprint, device.shared_bytes
        );
        Err(KernelError::unsupported(self.op, reason))
    }
}
