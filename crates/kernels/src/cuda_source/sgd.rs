//! Variants of gradient descent's step.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, adamw::FLOATS, properties, settings_1d,
    variant,
};
use crate::{
    adamw::UNITS,
    sgd::{
        Compiled, FactorsCompilationArg, PitchesCompilationArg, SgdTuning, SgdWalk,
        sgd_update_kernel,
    },
};
use cubecl::{
    ir::{ElemType, FloatKind, VectorSize},
    prelude::*,
};
use std::sync::Arc;

/// What is compiled apart.
#[derive(Clone, Copy)]
struct Variant {
    parameter: (FloatKind, &'static str),
    gradient: (FloatKind, &'static str),
    compiled: Compiled,
    vector_size: VectorSize,
    in_place: bool,
}

impl Variant {
    fn name(self) -> String {
        let Compiled { walk, nesterov, gated, by_chance } = self.compiled;
        let mut name = format!("sgd_update_{}_{}", self.parameter.1, self.gradient.1);
        for (is_it, part) in [
            (nesterov, "_nesterov"),
            (gated, "_gated"),
            (by_chance, "_by_chance"),
            (!self.in_place, "_copied"),
            (walk == SgdWalk::Rows, "_by_rows"),
            (walk == SgdWalk::Gathered, "_gathered"),
        ] {
            if is_it {
                name += part;
            }
        }
        if self.vector_size != SgdTuning::default().widest {
            name += &format!("_by_{}", self.vector_size);
        }
        name
    }

    /// What occupancy takes, for the bytes that a unit has on the way: a multiprocessor has 65,536
    /// registers for cubes of 256 threads.
    fn max_registers(self) -> u32 {
        match self.vector_size {
            // Five cubes, each with 40 bytes on the way in f32.
            ..=4 => 48,
            // Four, with twice as much.
            _ => 64,
        }
    }
}

/// Every pair of types by the longest way that it can take, each thing left out in the types that
/// training has, each walk, and what may be measured against the plan.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let SgdTuning { widest, .. } = SgdTuning::default();
    let mut all = Vec::new();
    for parameter in FLOATS {
        let by_chance = parameter.0 != FloatKind::F32;
        let longest = Compiled { walk: SgdWalk::Flat, nesterov: true, gated: true, by_chance };
        let variant = |gradient, compiled| Variant {
            parameter,
            gradient,
            compiled,
            vector_size: widest,
            in_place: true,
        };
        for gradient in FLOATS {
            all.push(variant(gradient, longest));
            all.push(variant(gradient, Compiled { walk: SgdWalk::Rows, ..longest }));
            all.push(variant(gradient, Compiled { walk: SgdWalk::Gathered, ..longest }));
        }
        all.push(Variant { in_place: false, ..variant(parameter, longest) });
        let plain = Compiled { nesterov: false, gated: false, by_chance: false, ..longest };
        all.push(variant(parameter, plain));
        if by_chance {
            all.push(variant(parameter, Compiled { by_chance, ..plain }));
            all.push(Variant { vector_size: 8, ..variant(parameter, plain) });
        }
    }
    all.into_iter().map(compiled).collect()
}

fn compiled(this: Variant) -> Result<CudaKernel, SourceError> {
    let input = || BufferCompilationArg { inplace: None };
    let out = |position| BufferCompilationArg { inplace: this.in_place.then_some(position) };
    let is_gathered = this.compiled.walk == SgdWalk::Gathered;
    let kernel = sgd_update_kernel::SgdUpdateKernel::new(
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
        out(0),
        out(2),
        FactorsCompilationArg { momentum: (), of_gradient: (), decay: (), rate: (), time: () },
        pitches(),
        (),
        (),
        this.vector_size,
        if is_gathered { 1 } else { this.vector_size },
        this.compiled,
        ElemType::Float(this.parameter.0),
        ElemType::Float(this.gradient.0),
    );
    let promise = Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(this.max_registers()),
    };
    variant(this.name(), kernel, promise)
}

fn pitches() -> PitchesCompilationArg {
    PitchesCompilationArg {
        columns: (),
        elements: (),
        parameter: (),
        gradient: (),
        velocity: (),
        parameter_out: (),
        velocity_out: (),
    }
}
