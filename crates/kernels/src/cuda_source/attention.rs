//! Variants of attention.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, properties, settings_1d, variant,
};
use crate::attention::{
    BACKWARD_UNITS, DELTA_UNITS, FORWARD_UNITS, MmaBackwardBlueprint, MmaForwardBlueprint,
    NumbersCompilationArg, Options, PORTABLE_UNITS, PairStridesCompilationArg, PortableBlueprint,
    ROW_TERMS_UNITS, ROW_TERMS_WIDTH, RowStridesCompilationArg, RulesCompilationArg, Side,
    SizesCompilationArg, TensorStridesCompilationArg, WgmmaBackwardBlueprint,
    WgmmaForwardBlueprint, attention_backward_kv_portable_kernel, attention_backward_mma_kernel,
    attention_backward_q_portable_kernel, attention_backward_wgmma_kernel, attention_delta_kernel,
    attention_forward_mma_kernel, attention_forward_portable_kernel,
    attention_forward_wgmma_kernel, attention_row_terms_kernel,
};
use cubecl::{
    ir::{AddressType, ElemType, FloatKind, UIntKind},
    prelude::*,
};
use std::sync::Arc;

const F32: ElemType = ElemType::Float(FloatKind::F32);
const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F16: ElemType = ElemType::Float(FloatKind::F16);
const BYTE: ElemType = ElemType::UInt(UIntKind::U8);

const PLAIN: Options = Options {
    left: false,
    right: false,
    softcap: false,
    mask: false,
    bias: false,
    dropout: false,
    packed: false,
};

const CAUSAL: Options = Options { right: true, ..PLAIN };

const PACKED: Options = Options { packed: true, ..CAUSAL };

const EVERYTHING: Options = Options {
    left: true,
    right: true,
    softcap: true,
    mask: true,
    bias: true,
    dropout: true,
    packed: false,
};

pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let mut kernels = Vec::new();
    for (name, dtype) in [("f32", F32), ("f16", F16), ("bf16", BF16)] {
        kernels.push(delta(name, dtype)?);
    }
    kernels.push(row_terms("plain", false)?);
    kernels.push(row_terms("bias", true)?);
    for (unit_tile, head_dim, options) in [(4, 64, CAUSAL), (4, 128, CAUSAL), (2, 256, EVERYTHING)]
    {
        let blueprint = PortableBlueprint { unit_tile, head_dim };
        kernels.extend(portable(blueprint, options)?);
    }
    // Tiles as `AttentionBlueprint::candidates_on` has them.
    let wgmma = [
        ("plain", PLAIN, &[(32, 128), (64, 128), (96, 128), (128, 128), (256, 64)][..]),
        ("causal", CAUSAL, &[(64, 128), (128, 128), (256, 64)]),
        ("packed", PACKED, &[(64, 128), (128, 128)]),
        ("dropout", Options { dropout: true, ..CAUSAL }, &[(64, 128), (128, 64)]),
        ("everything", EVERYTHING, &[(64, 128), (128, 64)]),
    ];
    for (name, options, tiles) in wgmma {
        for (head_dim, tile_kv) in tiles.iter().copied() {
            let blueprint = WgmmaForwardBlueprint { dtype: "bf16", head_dim, tile_kv, stages: 2 };
            kernels.push(wgmma_forward(name, blueprint, options)?);
        }
    }
    let mma = [
        ("plain", PLAIN, &[(32, 128), (64, 128), (128, 64), (256, 32)][..]),
        ("causal", CAUSAL, &[(64, 128), (128, 64), (256, 32)]),
        ("packed", PACKED, &[(64, 128), (128, 64)]),
        ("dropout", Options { dropout: true, ..CAUSAL }, &[(64, 128), (128, 64)]),
        // With heads of 128 it spills a few registers on sm_120a.
        ("everything", EVERYTHING, &[(64, 128)]),
    ];
    for (name, options, tiles) in mma {
        for (head_dim, tile_kv) in tiles.iter().copied() {
            let blueprint = MmaForwardBlueprint { dtype: "bf16", head_dim, warps: 4, tile_kv };
            kernels.push(mma_forward(name, blueprint, options)?);
        }
    }
    let backward = [
        ("plain", PLAIN, &[32, 64, 96, 128][..]),
        ("causal", CAUSAL, &[64, 128]),
        ("packed", PACKED, &[64, 128]),
        ("dropout", Options { dropout: true, ..CAUSAL }, &[64, 128]),
        // With these and heads of 128, dk and dv spill a few registers.
        ("mask", Options { mask: true, ..CAUSAL }, &[64]),
        ("bias", Options { bias: true, softcap: true, ..PLAIN }, &[64]),
        ("everything", EVERYTHING, &[64]),
    ];
    for (name, options, heads) in backward {
        for head_dim in heads.iter().copied() {
            for (side, gradient) in [(Side::Queries, "q"), (Side::Keys, "kv")] {
                let blueprint = WgmmaBackwardBlueprint { dtype: "bf16", head_dim, stages: 2 };
                kernels.push(wgmma_backward(name, side, gradient, blueprint, options)?);
                // With dropout and heads of 128, dk and dv spill a few registers.
                if head_dim < 128 || !options.dropout {
                    let blueprint = MmaBackwardBlueprint { dtype: "bf16", head_dim, warps: 4 };
                    kernels.push(mma_backward(name, side, gradient, blueprint, options)?);
                }
            }
        }
    }
    let half = WgmmaForwardBlueprint { dtype: "f16", head_dim: 128, tile_kv: 128, stages: 2 };
    kernels.push(wgmma_forward("causal", half, CAUSAL)?);
    Ok(kernels)
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn rows() -> RowStridesCompilationArg {
    RowStridesCompilationArg { batch: (), head: (), row: () }
}

fn rules() -> RulesCompilationArg {
    let pairs = || PairStridesCompilationArg { batch: (), head: (), row: (), column: () };
    RulesCompilationArg {
        sizes: SizesCompilationArg {
            heads_q: (),
            group: (),
            seq_q: (),
            seq_kv: (),
            batch: (),
            first_batch: (),
            rows_q: (),
        },
        numbers: NumbersCompilationArg {
            scale: (),
            softcap: (),
            left: (),
            right: (),
            threshold: (),
            kept: (),
            seed_low: (),
            seed_high: (),
        },
        mask: pairs(),
        bias: pairs(),
    }
}

fn delta(name: &str, dtype: ElemType) -> Result<CudaKernel, SourceError> {
    variant(
        format!("attention_delta_{name}"),
        attention_delta_kernel::AttentionDeltaKernel::new(
            settings_1d(DELTA_UNITS),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            rows(),
            rows(),
            dtype,
        ),
        everywhere(),
    )
}

/// Without tensor cores.
fn everywhere() -> Promise {
    Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(255),
    }
}

fn portable(
    blueprint: PortableBlueprint,
    options: Options,
) -> Result<[CudaKernel; 3], SourceError> {
    let settings = || {
        let dim = CubeDim::new_2d(PORTABLE_UNITS, PORTABLE_UNITS);
        KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32)
    };
    let PortableBlueprint { unit_tile, head_dim } = blueprint;
    let name = |pass: &str| format!("attention_{pass}_portable_{unit_tile}_{head_dim}");
    Ok([
        variant(
            name("forward"),
            attention_forward_portable_kernel::AttentionForwardPortableKernel::new(
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
                buffer(),
                rules(),
                rows(),
                rows(),
                rows(),
                rows(),
                blueprint,
                options,
                BF16,
                BYTE,
            ),
            everywhere(),
        )?,
        variant(
            name("backward_kv"),
            attention_backward_kv_portable_kernel::AttentionBackwardKvPortableKernel::new(
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
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                rules(),
                rows(),
                rows(),
                rows(),
                rows(),
                rows(),
                blueprint,
                options,
                BF16,
                BYTE,
            ),
            everywhere(),
        )?,
        variant(
            name("backward_q"),
            attention_backward_q_portable_kernel::AttentionBackwardQPortableKernel::new(
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
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                rules(),
                rows(),
                rows(),
                rows(),
                rows(),
                rows(),
                true,
                blueprint,
                options,
                BF16,
                BYTE,
            ),
            everywhere(),
        )?,
    ])
}

fn mma_forward(
    name: &str,
    blueprint: MmaForwardBlueprint,
    options: Options,
) -> Result<CudaKernel, SourceError> {
    let MmaForwardBlueprint { dtype, head_dim, .. } = blueprint;
    let [registers, packed] = blueprint.widths();
    variant(
        format!("attention_forward_mma_{dtype}_{head_dim}_{name}"),
        attention_forward_mma_kernel::AttentionForwardMmaKernel::new(
            settings_1d(blueprint.units()),
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
            rules(),
            rows(),
            rows(),
            rows(),
            rows(),
            (),
            blueprint,
            options,
            if dtype == "f16" { F16 } else { BF16 },
            BYTE,
            registers,
            packed,
        ),
        Promise {
            // Packed, heads of 64 spill a register before and behind the loop on sm_90a, which has
            // wgmma for them.
            architectures: EVERY_ARCHITECTURE
                .iter()
                .copied()
                .filter(|architecture| {
                    !options.packed || head_dim != 64 || *architecture != "sm_90a"
                })
                .collect(),
            tensor_core: Some("HMMA"),
            max_registers: Some(255),
        },
    )
}

fn wgmma_forward(
    name: &str,
    blueprint: WgmmaForwardBlueprint,
    options: Options,
) -> Result<CudaKernel, SourceError> {
    let WgmmaForwardBlueprint { dtype, head_dim, .. } = blueprint;
    let [registers, packed] = blueprint.widths();
    variant(
        format!("attention_forward_wgmma_{dtype}_{head_dim}_{name}"),
        attention_forward_wgmma_kernel::AttentionForwardWgmmaKernel::new(
            settings_1d(FORWARD_UNITS),
            properties(),
            Arc::default(),
            (),
            (),
            (),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            rules(),
            rows(),
            (),
            (),
            blueprint,
            options,
            if dtype == "f16" { F16 } else { BF16 },
            BYTE,
            registers,
            packed,
        ),
        Promise {
            architectures: vec!["sm_90a"],
            tensor_core: Some("HGMMA"),
            // What a launch gives each unit; those that multiply then take from those that copy.
            max_registers: Some(168),
        },
    )
}

fn row_terms(name: &str, apart: bool) -> Result<CudaKernel, SourceError> {
    variant(
        format!("attention_row_terms_bf16_{name}"),
        attention_row_terms_kernel::AttentionRowTermsKernel::new(
            settings_1d(ROW_TERMS_UNITS),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            (),
            rows(),
            rows(),
            apart,
            BF16,
            ROW_TERMS_WIDTH,
        ),
        everywhere(),
    )
}

fn mma_backward(
    name: &str,
    side: Side,
    gradient: &str,
    blueprint: MmaBackwardBlueprint,
    options: Options,
) -> Result<CudaKernel, SourceError> {
    let MmaBackwardBlueprint { dtype, head_dim, .. } = blueprint;
    let [registers, packed] = blueprint.widths();
    let strides = || TensorStridesCompilationArg { first: rows(), second: rows() };
    variant(
        format!("attention_backward_{gradient}_mma_{dtype}_{head_dim}_{name}"),
        attention_backward_mma_kernel::AttentionBackwardMmaKernel::new(
            settings_1d(blueprint.units()),
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
            buffer(),
            buffer(),
            rules(),
            strides(),
            strides(),
            rows(),
            side,
            blueprint,
            options,
            if dtype == "f16" { F16 } else { BF16 },
            BYTE,
            registers,
            packed,
        ),
        Promise {
            // Heads of 128 spill two registers on sm_100a.
            architectures: EVERY_ARCHITECTURE
                .iter()
                .copied()
                .filter(|architecture| head_dim < 128 || *architecture != "sm_100a")
                .collect(),
            tensor_core: Some("HMMA"),
            max_registers: Some(255),
        },
    )
}

fn wgmma_backward(
    name: &str,
    side: Side,
    gradient: &str,
    blueprint: WgmmaBackwardBlueprint,
    options: Options,
) -> Result<CudaKernel, SourceError> {
    let WgmmaBackwardBlueprint { dtype, head_dim, .. } = blueprint;
    let [registers, packed] = blueprint.widths();
    variant(
        format!("attention_backward_{gradient}_wgmma_{dtype}_{head_dim}_{name}"),
        attention_backward_wgmma_kernel::AttentionBackwardWgmmaKernel::new(
            settings_1d(BACKWARD_UNITS),
            properties(),
            Arc::default(),
            (),
            (),
            (),
            (),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            rules(),
            rows(),
            side,
            blueprint,
            options,
            if dtype == "f16" { F16 } else { BF16 },
            BYTE,
            registers,
            packed,
        ),
        Promise {
            architectures: vec!["sm_90a"],
            tensor_core: Some("HGMMA"),
            // As for the forward pass.
            max_registers: Some(255),
        },
    )
}
