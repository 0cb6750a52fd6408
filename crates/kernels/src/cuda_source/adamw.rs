//! Variants of the optimizer's step.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, properties, settings_1d, variant,
};
use crate::adamw::{
    AdamwTuning, AdamwWalk, Compiled, FactorsCompilationArg, MOST_TENSORS, PartCompilationArg,
    PitchesCompilationArg, UNITS, adamw_update_kernel,
};
use cubecl::{
    ir::{ElemType, FloatKind, VectorSize},
    prelude::*,
};
use std::sync::Arc;

pub(super) const FLOATS: [(FloatKind, &str); 3] =
    [(FloatKind::F32, "f32"), (FloatKind::F16, "f16"), (FloatKind::BF16, "bf16")];

/// What is compiled apart.
#[derive(Clone, Copy)]
struct Variant {
    parameter: (FloatKind, &'static str),
    gradient: (FloatKind, &'static str),
    compiled: Compiled,
    vector_size: VectorSize,
    tensors: usize,
}

impl Variant {
    fn name(self) -> String {
        let Compiled { walk, gated, by_chance, in_place, .. } = self.compiled;
        let mut name = format!("adamw_update_{}_{}", self.parameter.1, self.gradient.1);
        for (is_it, part) in [
            (gated, "_gated"),
            (by_chance, "_by_chance"),
            (!in_place, "_copied"),
            (walk == AdamwWalk::Rows, "_by_rows"),
            (walk == AdamwWalk::Gathered, "_gathered"),
        ] {
            if is_it {
                name += part;
            }
        }
        if self.vector_size != AdamwTuning::default().widest {
            name += &format!("_by_{}", self.vector_size);
        }
        if self.tensors > 1 {
            name += &format!("_of_{}", self.tensors);
        }
        name
    }

    /// What occupancy takes, for the bytes that a unit has on the way: a multiprocessor has 65,536
    /// registers for cubes of 256 threads.
    fn max_registers(self) -> u32 {
        match self.vector_size {
            // Five cubes, each with 56 bytes on the way in f32.
            ..=4 => 48,
            // Four, with twice as much.
            _ => 64,
        }
    }
}

/// Every pair of types by the longest way that it can take, each thing left out in the types that
/// training has, each walk, one tensor and as many as a launch takes, and what may be measured against the
/// plan.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let AdamwTuning { widest, .. } = AdamwTuning::default();
    let mut all = Vec::new();
    for parameter in FLOATS {
        let by_chance = parameter.0 != FloatKind::F32;
        let longest = Compiled {
            walk: AdamwWalk::Flat,
            by_ptx: true,
            gated: true,
            by_chance,
            in_place: true,
        };
        let variant = |gradient, compiled| Variant {
            parameter,
            gradient,
            compiled,
            vector_size: widest,
            tensors: 1,
        };
        let many =
            |gradient, compiled| Variant { tensors: MOST_TENSORS, ..variant(gradient, compiled) };
        for gradient in FLOATS {
            all.push(variant(gradient, longest));
            all.push(many(gradient, longest));
            all.push(variant(gradient, Compiled { walk: AdamwWalk::Rows, ..longest }));
            all.push(variant(gradient, Compiled { walk: AdamwWalk::Gathered, ..longest }));
        }
        all.push(variant(parameter, Compiled { in_place: false, ..longest }));
        let open = Compiled { gated: false, ..longest };
        all.push(variant(parameter, open));
        if by_chance {
            let nearest = Compiled { by_chance: false, ..open };
            all.push(variant(parameter, nearest));
            all.push(Variant { vector_size: 8, ..variant(parameter, nearest) });
        }
        all.push(many(FLOATS[2], Compiled { by_chance: false, ..open }));
    }
    all.into_iter().map(compiled).collect()
}

fn compiled(this: Variant) -> Result<CudaKernel, SourceError> {
    let input = || BufferCompilationArg { inplace: None };
    let inputs = || (0..this.tensors).map(|_| input());
    let outs = |buffers_before: usize| {
        let position = move |place| buffers_before * this.tensors + place;
        (0..this.tensors).map(move |place| BufferCompilationArg {
            inplace: this.compiled.in_place.then_some(position(place)),
        })
    };
    let part = || PartCompilationArg {
        end: (),
        vectors: (),
        draw: (),
        factors: factors(),
        pitches: pitches(),
    };
    let is_gathered = this.compiled.walk == AdamwWalk::Gathered;
    let kernel = adamw_update_kernel::AdamwUpdateKernel::new(
        settings_1d(UNITS),
        properties(),
        Arc::default(),
        inputs().collect(),
        inputs().collect(),
        inputs().collect(),
        inputs().collect(),
        input(),
        input(),
        input(),
        input(),
        outs(0).collect(),
        outs(2).collect(),
        outs(3).collect(),
        (0..this.tensors).map(|_| part()).collect(),
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
        first: (),
        second: (),
        parameter_out: (),
        first_out: (),
        second_out: (),
    }
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
