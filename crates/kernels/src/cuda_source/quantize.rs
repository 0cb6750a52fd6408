//! Variants of the kernels that round to 8 bits.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, bandwidth_bound, properties, settings,
    variant,
};
use crate::quantize::{
    CastBlueprint, Fp8Format, GROUPS, Layouts, UNITS, quantize_amax_kernel, quantize_cast_kernel,
    quantize_decode_kernel,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};
use std::sync::Arc;

const FORMATS: [(Fp8Format, &str); 2] = [(Fp8Format::E4m3, "e4m3"), (Fp8Format::E5m2, "e5m2")];

pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let mut kernels = Vec::new();
    for (kind, name) in
        [(FloatKind::F32, "f32"), (FloatKind::F16, "f16"), (FloatKind::BF16, "bf16")]
    {
        let dtype = ElemType::Float(kind);
        kernels.push(amax(name, dtype)?);
        for (format, format_name) in FORMATS {
            let blueprint = CastBlueprint { format, layouts: Layouts::Both, hardware: true };
            kernels.push(cast(&format!("{name}_{format_name}"), dtype, blueprint)?);
            kernels.push(decode(&format!("{format_name}_{name}"), dtype, format)?);
        }
    }
    let bf16 = ElemType::Float(FloatKind::BF16);
    for (format, name) in FORMATS {
        let blueprint = CastBlueprint { format, layouts: Layouts::Both, hardware: false };
        kernels.push(cast(&format!("bf16_{name}_portable"), bf16, blueprint)?);
    }
    for (layouts, name) in [(Layouts::Rows, "rows"), (Layouts::Transposed, "transposed")] {
        let blueprint = CastBlueprint { format: Fp8Format::E4m3, layouts, hardware: true };
        kernels.push(cast(&format!("bf16_e4m3_{name}"), bf16, blueprint)?);
    }
    Ok(kernels)
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn amax(name: &str, dtype: ElemType) -> Result<CudaKernel, SourceError> {
    bandwidth_bound(
        format!("quantize_amax_{name}"),
        quantize_amax_kernel::QuantizeAmaxKernel::new(
            settings(),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            (),
            16 / dtype.size(),
            dtype,
        ),
    )
}

/// With at most 64 registers a thread, a multiprocessor's 65,536 hold the four cubes that the
/// launcher counts on.
fn cast(name: &str, dtype: ElemType, blueprint: CastBlueprint) -> Result<CudaKernel, SourceError> {
    let from = usize::from(blueprint.hardware);
    let promise = Promise {
        // The conversion came with Ada.
        architectures: EVERY_ARCHITECTURE[from..].to_vec(),
        tensor_core: None,
        max_registers: Some(64),
    };
    let kernel = quantize_cast_kernel::QuantizeCastKernel::new(
        KernelSettings::new(
            *CubeDim::new_2d(GROUPS, GROUPS),
            ExecutionMode::Unchecked,
            AddressType::U32,
        ),
        properties(),
        Arc::default(),
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
        (),
        16 / dtype.size(),
        blueprint,
        dtype,
    );
    variant(format!("quantize_cast_{name}"), kernel, promise)
}

fn decode(name: &str, dtype: ElemType, format: Fp8Format) -> Result<CudaKernel, SourceError> {
    bandwidth_bound(
        format!("quantize_decode_{name}"),
        quantize_decode_kernel::QuantizeDecodeKernel::new(
            KernelSettings::new(
                *CubeDim::new_1d(UNITS),
                ExecutionMode::Unchecked,
                AddressType::U32,
            ),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            (),
            format,
            dtype,
        ),
    )
}
