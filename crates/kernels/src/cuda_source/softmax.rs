//! Variants of what the logarithm of softmax is made of: its sums, and passes over its elements.

use super::{CudaKernel, SourceError, cross_entropy::promise, properties, settings_1d, variant};
use crate::{
    cross_entropy::{CrossEntropyBlueprint, ElementForm, UNITS},
    softmax::softmax_sums_kernel,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};
use std::sync::Arc;

/// Of every type rows of a cube, and what is written of them in the same type and of a narrow one in f32
/// and back.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let [f32, f16, bf16] =
        [FloatKind::F32, FloatKind::F16, FloatKind::BF16].map(ElemType::Float);
    let mut all = Vec::new();
    for (dtype, name) in [(f32, "f32"), (f16, "f16"), (bf16, "bf16")] {
        for picks in [false, true] {
            all.push(sums(name, dtype, picks)?);
        }
    }
    for (name, form) in [
        ("shifted", ElementForm::Less),
        ("log", ElementForm::LessTwice),
        ("picked_backward", ElementForm::OfLogProbabilities),
    ] {
        for (types, dtype, out) in [
            ("f32", f32, f32),
            ("f16", f16, f16),
            ("bf16", bf16, bf16),
            ("bf16_to_f32", bf16, f32),
            ("f32_to_bf16", f32, bf16),
        ] {
            let vector_size = 16 / dtype.size().max(out.size());
            let name = format!("softmax_{name}_{types}");
            let blueprint = blueprint(vector_size);
            all.push(super::cross_entropy::elements(name, [dtype, out], blueprint, false, form)?);
        }
    }
    Ok(all)
}

fn blueprint(vector_size: usize) -> CrossEntropyBlueprint {
    CrossEntropyBlueprint { vector_size, lanes: UNITS, plane: 32, hardware: true }
}

fn sums(name: &str, dtype: ElemType, picks: bool) -> Result<CudaKernel, SourceError> {
    let buffer = || BufferCompilationArg { inplace: None };
    let blueprint = blueprint(16 / dtype.size());
    let kernel = softmax_sums_kernel::SoftmaxSumsKernel::new(
        settings_1d(UNITS),
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
        blueprint.vector_size,
        blueprint,
        picks,
        dtype,
    );
    let kind = if picks { "_picked" } else { "" };
    variant(format!("softmax_sums_{name}{kind}"), kernel, promise())
}
