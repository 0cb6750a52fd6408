//! Variants of cross-entropy.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, properties, settings_1d, variant,
};
use crate::cross_entropy::{
    CrossEntropyBlueprint, ElementForm, TargetsCompilationArg, UNITS,
    cross_entropy_backward_kernel, cross_entropy_forward_kernel, cross_entropy_reduce_kernel,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};
use std::sync::Arc;

/// Six cubes of 256 threads a multiprocessor, each thread with a vector of 16 bytes on the way and one
/// that it works on.
const MOST_REGISTERS: u32 = 40;

/// Of every type rows of a cube and rows of 32 units, with all that can be asked, and GPT-2's loss; and
/// the reductions.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let mut all = Vec::new();
    for (kind, name) in
        [(FloatKind::F32, "f32"), (FloatKind::F16, "f16"), (FloatKind::BF16, "bf16")]
    {
        let dtype = ElemType::Float(kind);
        for (lanes, vector_size, everything) in
            [(UNITS, 16 / dtype.size(), false), (UNITS, 16 / dtype.size(), true), (32, 1, true)]
        {
            let blueprint = CrossEntropyBlueprint { vector_size, lanes, plane: 32, hardware: true };
            let kind = if everything { "_smoothed" } else { "" };
            let name = format!("{name}_lanes{lanes}_vector{vector_size}{kind}");
            all.push(forward(&name, dtype, blueprint, everything)?);
            let name = format!("cross_entropy_backward_{name}");
            let form = ElementForm::OfLosses;
            all.push(elements(name, [dtype; 2], blueprint, everything, form)?);
        }
    }
    for (name, is_mean) in [("mean", true), ("sum", false)] {
        all.push(reduce(name, is_mean)?);
    }
    Ok(all)
}

/// What passes over rows keep to.
pub(super) fn promise() -> Promise {
    Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(MOST_REGISTERS),
    }
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn forward(
    name: &str,
    dtype: ElemType,
    blueprint: CrossEntropyBlueprint,
    everything: bool,
) -> Result<CudaKernel, SourceError> {
    let kernel = cross_entropy_forward_kernel::CrossEntropyForwardKernel::new(
        settings_1d(UNITS),
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
        blueprint.vector_size,
        blueprint,
        everything,
        everything,
        dtype,
    );
    variant(format!("cross_entropy_forward_{name}"), kernel, promise())
}

/// A pass over elements of the first type that writes the second, in place where it is one.
pub(super) fn elements(
    name: String,
    [dtype, out]: [ElemType; 2],
    blueprint: CrossEntropyBlueprint,
    everything: bool,
    form: ElementForm,
) -> Result<CudaKernel, SourceError> {
    let kernel = cross_entropy_backward_kernel::CrossEntropyBackwardKernel::new(
        settings_1d(UNITS),
        properties(),
        Arc::default(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        BufferCompilationArg { inplace: (dtype == out).then_some(0) },
        (),
        (),
        (),
        (),
        (),
        (),
        (),
        TargetsCompilationArg { everywhere: (), at_target: () },
        blueprint.vector_size,
        blueprint,
        everything,
        everything,
        !everything && form == ElementForm::OfLosses,
        form,
        dtype,
        out,
    );
    variant(name, kernel, promise())
}

fn reduce(name: &str, is_mean: bool) -> Result<CudaKernel, SourceError> {
    let kernel = cross_entropy_reduce_kernel::CrossEntropyReduceKernel::new(
        settings_1d(UNITS),
        properties(),
        Arc::default(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        (),
        true,
        is_mean,
    );
    variant(format!("cross_entropy_reduce_{name}"), kernel, promise())
}
