//! Variants of the optimizer's step.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, properties, settings_1d, variant,
};
use crate::adamw::{FactorsCompilationArg, UNITS, adamw_update_kernel};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};
use std::sync::Arc;

const FLOATS: [(FloatKind, &str); 3] =
    [(FloatKind::F32, "f32"), (FloatKind::F16, "f16"), (FloatKind::BF16, "bf16")];

/// What is compiled apart.
#[derive(Clone, Copy)]
struct Variant {
    parameter: (FloatKind, &'static str),
    gradient: (FloatKind, &'static str),
    gated: bool,
    by_chance: bool,
    in_place: bool,
}

impl Variant {
    fn name(self) -> String {
        let mut name = format!("adamw_update_{}_{}", self.parameter.1, self.gradient.1);
        for (is_it, part) in
            [(self.gated, "_gated"), (self.by_chance, "_by_chance"), (!self.in_place, "_copied")]
        {
            if is_it {
                name += part;
            }
        }
        name
    }
}

/// Every pair of types by the longest way that it can take, and each thing left out in the types that
/// training has.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let mut all = Vec::new();
    for parameter in FLOATS {
        let by_chance = parameter.0 != FloatKind::F32;
        for gradient in FLOATS {
            all.push(Variant { parameter, gradient, gated: true, by_chance, in_place: true });
        }
        let longest =
            Variant { parameter, gradient: parameter, gated: true, by_chance, in_place: true };
        all.push(Variant { in_place: false, ..longest });
        all.push(Variant { gated: false, ..longest });
        if by_chance {
            all.push(Variant { by_chance: false, gated: false, ..longest });
        }
    }
    all.into_iter().map(compiled).collect()
}

fn compiled(this: Variant) -> Result<CudaKernel, SourceError> {
    let input = || BufferCompilationArg { inplace: None };
    let out = |position| BufferCompilationArg { inplace: this.in_place.then_some(position) };
    let kernel = adamw_update_kernel::AdamwUpdateKernel::new(
        settings_1d(UNITS),
        properties(),
        Arc::default(),
        input(),
        input(),
        input(),
        input(),
        input(),
        input(),
        input(),
        input(),
        out(0),
        out(2),
        out(3),
        factors(),
        (),
        (),
        16 / size_of::<f32>(),
        this.gated,
        this.by_chance,
        ElemType::Float(this.parameter.0),
        ElemType::Float(this.gradient.0),
    );
    let promise = Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        // Five cubes of 256 threads a multiprocessor, each with 56 bytes on the way in f32.
        max_registers: Some(48),
    };
    variant(this.name(), kernel, promise)
}

fn factors() -> FactorsCompilationArg {
    FactorsCompilationArg {
        of_first: (),
        of_second: (),
        decay: (),
        rate: (),
        correction: (),
        epsilon: (),
        log_beta_1: (),
        log_beta_2: (),
        time: (),
    }
}
