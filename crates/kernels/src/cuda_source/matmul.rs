//! Variants of the matrix products.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, bandwidth_bound, properties, settings,
    settings_1d, variant,
};
use crate::{
    matmul::{
        Activation, EpilogueBlueprint, ExtentCompilationArg, LastMatrixCompilationArg, MMA_UNITS,
        MmaBlueprint, PACK_ROWS, PACK_TILE, PORTABLE_UNITS, PackSourceCompilationArg,
        PitchCompilationArg, PortableBlueprint, StridesCompilationArg, WGMMA_UNITS, WgmmaBlueprint,
        accumulator_width, matmul_mma_kernel, matmul_pack_kernel, matmul_portable_kernel,
        matmul_split_sum_kernel, matmul_wgmma_kernel, store_width,
    },
    ptx::{mma::MmaOperands, wgmma::WgmmaOperands},
};
use cubecl::{
    ir::{AddressType, ElemType, FloatKind, UIntKind},
    prelude::*,
};
use std::sync::Arc;

const F32: ElemType = ElemType::Float(FloatKind::F32);
const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F16: ElemType = ElemType::Float(FloatKind::F16);
/// Columns of an output whose rows are aligned.
const EVEN_COLUMNS: usize = 4096;

/// Whether k runs along the rows of either operand.
type Layouts = &'static [(bool, bool)];

/// Operands of a tensor-core variant: their PTX type and size, and the layouts they may have.
const OPERANDS: [(&str, u32, Layouts); 5] = [
    ("bf16", 2, &[(true, true), (true, false), (false, true), (false, false)]),
    ("f16", 2, &[(true, false)]),
    ("tf32", 4, &[(true, true)]),
    ("e4m3", 1, &[(true, true)]),
    ("e5m2", 1, &[(true, true)]),
];

/// What a linear layer's forward pass compiles in.
const BIAS: EpilogueBlueprint = EpilogueBlueprint {
    scaled: false,
    bias: true,
    activation: Activation::Identity,
    preactivation: false,
    residual: false,
    residual_in_octets: false,
};

/// The most that the widest tiles take.
const LINEAR_RESIDUAL: EpilogueBlueprint = EpilogueBlueprint {
    activation: Activation::Relu,
    residual: true,
    residual_in_octets: true,
    ..BIAS
};

/// Everything at once.
const EVERYTHING: EpilogueBlueprint = EpilogueBlueprint {
    scaled: true,
    bias: true,
    activation: Activation::Gelu,
    preactivation: true,
    residual: true,
    residual_in_octets: true,
};

pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let mut kernels = Vec::new();
    for (dtype, bytes, layouts) in OPERANDS {
        for (lhs_k_major, rhs_k_major) in layouts.iter().copied() {
            for tile_n in [64, 128, 192, 256] {
                let operands =
                    WgmmaOperands { n: tile_n, lhs: dtype, rhs: dtype, lhs_k_major, rhs_k_major };
                kernels.push(wgmma(operands, bytes, BIAS, 0, EVEN_COLUMNS)?);
            }
            for (m16, n16) in [(2, 2), (4, 2), (4, 4)] {
                let operands =
                    MmaOperands { m16, n16, lhs: dtype, rhs: dtype, lhs_k_major, rhs_k_major };
                kernels.push(mma(operands, bytes, BIAS)?);
            }
        }
    }
    for (n, epilogue, columns) in [
        (128, EVERYTHING, EVEN_COLUMNS),
        (256, LINEAR_RESIDUAL, EVEN_COLUMNS),
        // GPT-2's head.
        (256, BIAS, 50257),
    ] {
        let operands =
            WgmmaOperands { n, lhs: "bf16", rhs: "bf16", lhs_k_major: true, rhs_k_major: false };
        kernels.push(wgmma(operands, 2, epilogue, 0, columns)?);
    }
    let operands = MmaOperands {
        m16: 4,
        n16: 4,
        lhs: "bf16",
        rhs: "bf16",
        lhs_k_major: true,
        rhs_k_major: false,
    };
    kernels.push(mma(operands, 2, LINEAR_RESIDUAL)?);
    let fp8 =
        WgmmaOperands { n: 128, lhs: "e4m3", rhs: "e5m2", lhs_k_major: true, rhs_k_major: true };
    kernels.push(wgmma(fp8, 1, BIAS, 1, EVEN_COLUMNS)?);
    for (name, dtype) in [("f32", F32), ("f16", F16), ("bf16", BF16)] {
        kernels.push(split_sum(name, dtype, BIAS)?);
        kernels.push(split_sum(name, dtype, LINEAR_RESIDUAL)?);
        kernels.push(portable(name, dtype, BIAS)?);
    }
    kernels.push(portable("f32", F32, LINEAR_RESIDUAL)?);
    for (name, kind) in [("1", UIntKind::U8), ("2", UIntKind::U16), ("4", UIntKind::U32)] {
        for transpose in [false, true] {
            kernels.push(pack(name, ElemType::UInt(kind), transpose)?);
        }
    }
    Ok(kernels)
}

fn layout(lhs_k_major: bool, rhs_k_major: bool) -> &'static str {
    // As BLAS has it: N where k runs along the rows of A and down the columns of B.
    match (lhs_k_major, rhs_k_major) {
        (true, false) => "nn",
        (true, true) => "nt",
        (false, false) => "tn",
        (false, true) => "tt",
    }
}

/// What a name says of the steps that are more than a bias.
fn steps(epilogue: EpilogueBlueprint) -> &'static str {
    if epilogue == EVERYTHING {
        "_everything"
    } else if epilogue.residual {
        "_residual"
    } else {
        ""
    }
}

/// Type of the output of operands of that PTX type.
fn output(dtype: &str) -> ElemType {
    match dtype {
        "tf32" => F32,
        "f16" => F16,
        _ => BF16,
    }
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn extent() -> ExtentCompilationArg {
    ExtentCompilationArg {
        m: (),
        n: (),
        k_blocks: (),
        split_blocks: (),
        splits: (),
        batches: (),
        inner_batches: (),
        group: (),
    }
}

fn last_matrix() -> LastMatrixCompilationArg {
    LastMatrixCompilationArg { lhs_outer: (), lhs_inner: (), rhs_outer: (), rhs_inner: () }
}

fn pitch() -> PitchCompilationArg {
    PitchCompilationArg { row: (), outer: (), inner: (), mn: () }
}

fn strides() -> StridesCompilationArg {
    StridesCompilationArg { mn: (), k: (), outer: (), inner: () }
}

fn wgmma(
    operands: WgmmaOperands,
    bytes: u32,
    epilogue: EpilogueBlueprint,
    promotion: u32,
    columns: usize,
) -> Result<CudaKernel, SourceError> {
    let out = output(operands.lhs);
    let (store, stored, width) = store_width(out, columns);
    let stage_bytes = (128 + operands.n) * 128;
    let blueprint = WgmmaBlueprint {
        operands,
        block_k: 128 / bytes,
        stages: (226 * 1024 / stage_bytes).min(6) as u32,
        batched: promotion > 0,
        store,
        promotion,
    };
    let WgmmaOperands { n, lhs, lhs_k_major, rhs_k_major, .. } = operands;
    let extra = if epilogue != BIAS {
        steps(epilogue)
    } else if columns != EVEN_COLUMNS {
        "_odd"
    } else if promotion > 0 {
        "_promoted"
    } else {
        ""
    };
    variant(
        format!("matmul_wgmma_{lhs}_{}_128x{n}{extra}", layout(lhs_k_major, rhs_k_major)),
        matmul_wgmma_kernel::MatmulWgmmaKernel::new(
            settings_1d(WGMMA_UNITS),
            properties(),
            Arc::default(),
            (),
            (),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            extent(),
            last_matrix(),
            (),
            (),
            width,
            blueprint,
            epilogue,
            out,
            stored,
            accumulator_width(n),
        ),
        Promise {
            architectures: vec!["sm_90a"],
            tensor_core: Some(if bytes == 1 { "QGMMA" } else { "HGMMA" }),
            // 65,536 registers for 384 threads, in eights.
            max_registers: Some(168),
        },
    )
}

fn mma(
    operands: MmaOperands,
    bytes: u32,
    epilogue: EpilogueBlueprint,
) -> Result<CudaKernel, SourceError> {
    let out = output(operands.lhs);
    let (store, stored, width) = store_width(out, EVEN_COLUMNS);
    // What fits Ada's 99 KiB; more stages are the same code.
    let stages = if operands.n16 == 4 { 2 } else { 3 };
    let blueprint = MmaBlueprint { operands, element_bytes: bytes, stages, store };
    let MmaOperands { lhs, lhs_k_major, rhs_k_major, .. } = operands;
    let (m, n) = (blueprint.tile_m(), blueprint.tile_n());
    // As `MatmulBlueprint::candidates_on` has it.
    let served = |arch: &&str| bytes > 1 || matches!(*arch, "sm_89" | "sm_120a");
    let architectures = EVERY_ARCHITECTURE.into_iter().filter(served);
    variant(
        format!("matmul_mma_{lhs}_{}_{m}x{n}{}", layout(lhs_k_major, rhs_k_major), steps(epilogue)),
        matmul_mma_kernel::MatmulMmaKernel::new(
            settings_1d(MMA_UNITS),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            extent(),
            last_matrix(),
            pitch(),
            pitch(),
            (),
            (),
            (),
            width,
            blueprint,
            epilogue,
            out,
            stored,
            operands.registers(),
        ),
        Promise {
            architectures: architectures.collect(),
            tensor_core: Some(if bytes == 1 { "QMMA" } else { "HMMA" }),
            max_registers: Some(255),
        },
    )
}

fn split_sum(
    name: &str,
    dtype: ElemType,
    epilogue: EpilogueBlueprint,
) -> Result<CudaKernel, SourceError> {
    bandwidth_bound(
        format!("matmul_split_sum_{name}{}", steps(epilogue)),
        matmul_split_sum_kernel::MatmulSplitSumKernel::new(
            settings(),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            (),
            4,
            epilogue,
            dtype,
        ),
    )
}

fn portable(
    name: &str,
    dtype: ElemType,
    epilogue: EpilogueBlueprint,
) -> Result<CudaKernel, SourceError> {
    let blueprint = PortableBlueprint { unit_tile: 8, lhs_k_major: true, rhs_k_major: false };
    let dim = CubeDim::new_2d(PORTABLE_UNITS, PORTABLE_UNITS);
    variant(
        format!("matmul_portable_{name}_128x128{}", steps(epilogue)),
        matmul_portable_kernel::MatmulPortableKernel::new(
            KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            strides(),
            strides(),
            (),
            (),
            blueprint,
            epilogue,
            dtype,
            dtype,
        ),
        Promise {
            architectures: EVERY_ARCHITECTURE.to_vec(),
            tensor_core: None,
            // Two cubes of 256 threads a multiprocessor.
            max_registers: Some(128),
        },
    )
}

fn pack(name: &str, element: ElemType, transpose: bool) -> Result<CudaKernel, SourceError> {
    let dim = CubeDim::new_2d(PACK_TILE, PACK_ROWS);
    let how = if transpose { "_transposed" } else { "" };
    bandwidth_bound(
        format!("matmul_pack_{name}_bytes{how}"),
        matmul_pack_kernel::MatmulPackKernel::new(
            KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            PackSourceCompilationArg {
                row: (),
                column: (),
                outer: (),
                inner: (),
                rows: (),
                columns: (),
                inner_batches: (),
            },
            (),
            transpose,
            element,
        ),
    )
}
