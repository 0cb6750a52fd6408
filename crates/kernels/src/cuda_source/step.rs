//! Variants of the optimizers' steps.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, properties, settings_1d, variant,
};
use crate::{
    adamw::{self, AdamwRule},
    sgd::{self, SgdRule},
    step::{
        Compiled, MOST_TENSORS, PartCompilationArg, PitchesCompilationArg, Rule, Tuning, UNITS,
        Walk, optimizer_step_kernel,
    },
};
use cubecl::{
    ir::{ElemType, FloatKind, VectorSize},
    prelude::*,
};
use std::sync::Arc;

const FLOATS: [(FloatKind, &str); 3] =
    [(FloatKind::F32, "f32"), (FloatKind::F16, "f16"), (FloatKind::BF16, "bf16")];

/// An optimizer, and what is compiled apart for it.
struct Kind<R: Rule> {
    name: &'static str,
    /// Tensors beside parameter and gradient.
    states: usize,
    factors: <R::Factors as LaunchArg>::CompilationArg,
    /// The longest form and the shortest, by what they add to a name.
    forms: [(R::Form, &'static str); 2],
}

/// All optimizers' variants.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let by_ptx = (adamw::Form { by_ptx: true }, "");
    let adamw = Kind::<AdamwRule> {
        name: "adamw_update",
        states: 2,
        factors: adamw::FactorsCompilationArg {
            of_first: (),
            of_second: (),
            decay: (),
            rate: (),
            correction: (),
            epsilon: (),
            log_beta_1: (),
            log_beta_2: (),
            time: (),
        },
        forms: [by_ptx, by_ptx],
    };
    let form = |nesterov| sgd::Form { nesterov };
    let sgd = Kind::<SgdRule> {
        name: "sgd_update",
        states: 1,
        factors: sgd::FactorsCompilationArg {
            momentum: (),
            of_gradient: (),
            decay: (),
            rate: (),
            time: (),
        },
        forms: [(form(true), "_nesterov"), (form(false), "")],
    };
    let mut all = adamw.variants()?;
    all.extend(sgd.variants()?);
    Ok(all)
}

/// What is compiled apart.
#[derive(Clone, Copy)]
struct Variant<F> {
    parameter: (FloatKind, &'static str),
    gradient: (FloatKind, &'static str),
    form: (F, &'static str),
    compiled: Compiled,
    vector_size: VectorSize,
    tensors: usize,
}

impl<F> Variant<F> {
    fn name(&self, kind: &str) -> String {
        let Compiled { walk, gated, by_chance, in_place } = self.compiled;
        let mut name = format!("{kind}_{}_{}{}", self.parameter.1, self.gradient.1, self.form.1);
        for (is_it, part) in [
            (gated, "_gated"),
            (by_chance, "_by_chance"),
            (!in_place, "_copied"),
            (walk == Walk::Rows, "_by_rows"),
            (walk == Walk::Gathered, "_gathered"),
        ] {
            if is_it {
                name += part;
            }
        }
        if self.vector_size != Tuning::default().widest {
            name += &format!("_by_{}", self.vector_size);
        }
        if self.tensors > 1 {
            name += &format!("_of_{}", self.tensors);
        }
        name
    }

    /// What occupancy takes, for the bytes that a unit has on the way: a multiprocessor has 65,536
    /// registers for cubes of 256 threads.
    fn max_registers(&self) -> u32 {
        match self.vector_size {
            // Five cubes, each with up to 56 bytes on the way in f32.
            ..=4 => 48,
            // Four, with twice as much.
            _ => 64,
        }
    }
}

impl<R: Rule> Kind<R> {
    /// Every pair of types by the longest way that it can take, each thing left out in the types that
    /// training has, each walk, one tensor and as many as a launch takes, and what may be measured against
    /// the plan.
    fn variants(&self) -> Result<Vec<CudaKernel>, SourceError> {
        let Tuning { widest, .. } = Tuning::default();
        let [long, short] = self.forms;
        let mut all = Vec::new();
        for parameter in FLOATS {
            let by_chance = parameter.0 != FloatKind::F32;
            let flat = Compiled { walk: Walk::Flat, gated: true, by_chance, in_place: true };
            let longest = |gradient, compiled| Variant {
                parameter,
                gradient,
                form: long,
                compiled,
                vector_size: widest,
                tensors: 1,
            };
            for gradient in FLOATS {
                all.push(longest(gradient, flat));
                all.push(Variant { tensors: MOST_TENSORS, ..longest(gradient, flat) });
                all.push(longest(gradient, Compiled { walk: Walk::Rows, ..flat }));
                all.push(longest(gradient, Compiled { walk: Walk::Gathered, ..flat }));
            }
            let copied = longest(parameter, Compiled { in_place: false, ..flat });
            all.push(copied);
            all.push(Variant { tensors: MOST_TENSORS, ..copied });
            let open = Compiled { gated: false, ..flat };
            let shortest =
                |gradient, compiled| Variant { form: short, ..longest(gradient, compiled) };
            all.push(shortest(parameter, open));
            let nearest = Compiled { by_chance: false, ..open };
            if by_chance {
                all.push(shortest(parameter, nearest));
                all.push(Variant { vector_size: 8, ..shortest(parameter, nearest) });
            }
            all.push(Variant { tensors: MOST_TENSORS, ..shortest(FLOATS[2], nearest) });
        }
        all.iter().map(|one| self.compiled(one)).collect()
    }

    fn compiled(&self, this: &Variant<R::Form>) -> Result<CudaKernel, SourceError> {
        let Self { states, .. } = *self;
        let buffer = |inplace| BufferCompilationArg { inplace };
        let input = || buffer(None);
        let out = |position| buffer(this.compiled.in_place.then_some(position));
        let each = 0..this.tensors;
        let inputs = || each.clone().map(|_| input());
        // After parameters and gradients, as the kernel names its buffers.
        let state = |tensor: usize| move |state| 2 * this.tensors + tensor * states + state;
        let pitches = || PitchesCompilationArg { old: (), new: () };
        let part = |_| PartCompilationArg {
            end: (),
            vectors: (),
            draw: (),
            columns: (),
            elements: (),
            parameter: pitches(),
            gradient: (),
            states: (0..states).map(|_| pitches()).collect(),
        };
        let kernel = optimizer_step_kernel::OptimizerStepKernel::<R>::new(
            settings_1d(UNITS),
            properties(),
            Arc::default(),
            inputs().collect(),
            inputs().collect(),
            each.clone().map(|_| (0..states).map(|_| input()).collect()).collect(),
            input(),
            input(),
            input(),
            input(),
            each.clone().map(out).collect(),
            each.clone().map(|tensor| (0..states).map(state(tensor)).map(out).collect()).collect(),
            each.clone().map(part).collect(),
            each.map(|_| self.factors.clone()).collect(),
            this.vector_size,
            this.compiled.walk.of_gradient(this.vector_size),
            this.compiled,
            this.form.0,
            ElemType::Float(this.parameter.0),
            ElemType::Float(this.gradient.0),
        );
        let promise = Promise {
            architectures: EVERY_ARCHITECTURE.to_vec(),
            tensor_core: None,
            max_registers: Some(this.max_registers()),
        };
        variant(this.name(self.name), kernel, promise)
    }
}
