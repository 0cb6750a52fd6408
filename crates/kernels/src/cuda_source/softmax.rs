//! Variants of softmax over whole rows, and of what its logarithm is made of: its sums, and passes over
//! its elements.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, cross_entropy::promise, properties,
    settings_1d, variant,
};
use crate::{
    cross_entropy::{CrossEntropyBlueprint, ElementForm, UNITS},
    softmax::{
        Pass, SoftmaxBlueprint, SoftmaxForm, softmax_rows_backward_kernel, softmax_rows_kernel,
        softmax_sums_kernel,
    },
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};
use std::sync::Arc;

/// Of every type rows of a cube, and what is written of them in the same type and of a narrow one in f32
/// and back.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let [f32, f16, bf16] = [FloatKind::F32, FloatKind::F16, FloatKind::BF16].map(ElemType::Float);
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
    for (dtype, name) in [(f32, "f32"), (f16, "f16"), (bf16, "bf16")] {
        for classes in LENGTHS {
            all.extend(rows(name, dtype, classes)?);
        }
    }
    Ok(all)
}

/// A plane's rows; a cube's; the longest of each tier of each pass; one that units do not share out evenly
/// and of which the last vector reaches beyond its end; one that is read twice.
const LENGTHS: [usize; 8] = [512, 1024, 4096, 8192, 16_384, 16_377, 24_576, 50_257];

/// Softmax alone, its logarithm with all that may be kept, and the gradient from exponentials.
fn rows(name: &str, dtype: ElemType, classes: usize) -> Result<Vec<CudaKernel>, SourceError> {
    let buffer = || BufferCompilationArg { inplace: None };
    let plan =
        |pass| SoftmaxBlueprint::with_planes(classes, pass, 16 / dtype.size(), 32, 1024, true);
    let settings = |plan: &SoftmaxBlueprint| {
        let dim = *CubeDim::new_2d(plan.units(), plan.rows);
        KernelSettings::new(dim, ExecutionMode::Unchecked, AddressType::U32)
    };
    let promise = |plan: &SoftmaxBlueprint, pass| Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(plan.promise(pass).max_registers),
    };
    let forward = plan(Pass::Forward);
    let mut all = Vec::new();
    for (kind, everything) in [("", false), ("_kept", true)] {
        let form =
            SoftmaxForm { logarithms: everything, shifted: everything, exponentials: everything };
        let kernel = softmax_rows_kernel::SoftmaxRowsKernel::new(
            settings(&forward),
            properties(),
            Arc::default(),
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
            forward.vector_size,
            form,
            forward,
            dtype,
            dtype,
        );
        let name = format!("softmax_rows_forward_{classes}_{name}{kind}");
        all.push(variant(name, kernel, promise(&forward, Pass::Forward))?);
    }
    let backward = plan(Pass::Backward);
    let kernel = softmax_rows_backward_kernel::SoftmaxRowsBackwardKernel::new(
        settings(&backward),
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
        backward.vector_size,
        true,
        backward,
        dtype,
    );
    let name = format!("softmax_rows_backward_{classes}_{name}");
    all.push(variant(name, kernel, promise(&backward, Pass::Backward))?);
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
