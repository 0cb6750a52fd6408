//! Variants of layer and RMS normalization.

use super::{CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, properties, variant};
use crate::layer_norm::{
    LayerNormBlueprint, LayerNormForm, LayerNormProblem, Norm, Pass, SUM_COLUMNS,
    layer_norm_backward_kernel, layer_norm_forward_kernel, layer_norm_parameters_kernel,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};
use std::sync::Arc;

const PLANE: u32 = 32;
const F32: FloatKind = FloatKind::F32;

/// GPT-2's, and one that vectors do not divide; wide ones in a cube; the widest that each tier
/// of each pass takes; one that units do not share out evenly.
const WIDTHS: [usize; 7] = [512, 768, 769, 4096, 8192, 8200, 24_576];

/// What is compiled apart.
#[derive(Clone, Copy)]
struct Variant {
    width: usize,
    x: (FloatKind, &'static str),
    parameter: (FloatKind, &'static str),
    norm: Norm,
    bias: bool,
    residual: bool,
}

impl Variant {
    fn problem(self) -> LayerNormProblem {
        LayerNormProblem {
            norm: self.norm,
            rows: 8192,
            width: self.width,
            dtype: ElemType::Float(self.x.0),
            parameter: ElemType::Float(self.parameter.0),
            bias: self.bias,
            residual: self.residual,
        }
    }

    fn form(self) -> LayerNormForm {
        let Self { norm, bias, residual, .. } = self;
        LayerNormForm { rms: norm == Norm::Rms, bias, residual }
    }

    fn vector_size(self) -> usize {
        let most = 16 / self.problem().dtype.size();
        if self.width.is_multiple_of(most) { most } else { 1 }
    }

    fn plan(self, pass: Pass) -> Option<LayerNormBlueprint> {
        LayerNormBlueprint::with_planes(&self.problem(), pass, self.vector_size(), PLANE)
    }

    fn name(self, pass: &str) -> String {
        let norm = match self.norm {
            Norm::Layer => "layer",
            Norm::Rms => "rms",
        };
        let residual = if self.residual { "_residual" } else { "" };
        format!("{norm}_norm_{pass}_{}_{}_{}{residual}", self.width, self.x.1, self.parameter.1)
    }
}

/// Every width by the longest way in each pair of types, and what may be left out in bf16.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let floats = [(F32, "f32"), (FloatKind::F16, "f16"), (FloatKind::BF16, "bf16")];
    let mut all = Vec::new();
    for x in floats {
        for parameter in [floats[0], x] {
            if all.iter().any(|v: &Variant| v.x == x && v.parameter == parameter) {
                continue;
            }
            all.extend(WIDTHS.map(|width| Variant {
                width,
                x,
                parameter,
                norm: Norm::Layer,
                bias: true,
                residual: true,
            }));
        }
    }
    let bf16 = floats[2];
    for width in [768, 4096] {
        let plain = Variant {
            width,
            x: bf16,
            parameter: bf16,
            norm: Norm::Layer,
            bias: true,
            residual: false,
        };
        all.extend([plain, Variant { norm: Norm::Rms, bias: false, ..plain }]);
    }
    let mut kernels = Vec::new();
    for this in all {
        if let Some(plan) = this.plan(Pass::Forward) {
            kernels.push(forward(this, plan)?);
        }
        if let Some(plan) = this.plan(Pass::Backward) {
            kernels.push(backward(this, plan)?);
        }
    }
    for (kind, name) in floats {
        kernels.push(parameters(name, ElemType::Float(kind))?);
    }
    Ok(kernels)
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn settings(x: u32, y: u32) -> KernelSettings {
    KernelSettings::new(*CubeDim::new_2d(x, y), ExecutionMode::Unchecked, AddressType::U32)
}

/// What the blueprint counts on.
fn promise(plan: &LayerNormBlueprint, pass: Pass) -> Promise {
    Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(plan.promise(pass).max_registers),
    }
}

fn forward(this: Variant, plan: LayerNormBlueprint) -> Result<CudaKernel, SourceError> {
    let problem = this.problem();
    let kernel = layer_norm_forward_kernel::LayerNormForwardKernel::new(
        settings(plan.units(), plan.rows),
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
        plan.vector_size,
        this.form(),
        plan,
        problem.dtype,
        problem.parameter,
    );
    variant(this.name("forward"), kernel, promise(&plan, Pass::Forward))
}

fn backward(this: Variant, plan: LayerNormBlueprint) -> Result<CudaKernel, SourceError> {
    let problem = this.problem();
    let kernel = layer_norm_backward_kernel::LayerNormBackwardKernel::new(
        settings(plan.units(), plan.rows),
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
        plan.vector_size,
        this.form(),
        plan,
        problem.dtype,
        problem.parameter,
    );
    variant(this.name("backward"), kernel, promise(&plan, Pass::Backward))
}

fn parameters(name: &str, dtype: ElemType) -> Result<CudaKernel, SourceError> {
    /// As many as make a cube of 1024 units.
    const LANES: u32 = 1024 / SUM_COLUMNS;
    let kernel = layer_norm_parameters_kernel::LayerNormParametersKernel::new(
        settings(SUM_COLUMNS, LANES),
        properties(),
        Arc::default(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        LANES,
        true,
        dtype,
    );
    // A cube fills a multiprocessor.
    let promise = Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(64),
    };
    variant(format!("layer_norm_parameters_{name}"), kernel, promise)
}
