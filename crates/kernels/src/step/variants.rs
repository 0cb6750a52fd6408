//! Steps that cover an optimizer's kernels: see [`variants`](crate::variants).

use super::{
    Gate, MOST_TENSORS, StepNumbers, Tuning, Update, Walk, layout::GRADIENT, update_many_with,
};
use crate::{
    KernelError, Promise,
    buffer::{Buffer, Rows},
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind, VectorSize},
};

/// What is compiled apart.
#[derive(Clone, Copy)]
struct Way<S> {
    parameter: (ElemType, &'static str),
    gradient: (ElemType, &'static str),
    step: (S, &'static str),
    walk: Walk,
    gated: bool,
    by_chance: bool,
    /// Whether somebody else holds what would be overwritten.
    held: bool,
    /// The type of the copy that is made.
    copy: Option<(ElemType, &'static str)>,
    widest: VectorSize,
    tensors: usize,
}

/// Every pair of types by the longest way that it can take, each thing left out in the types that training
/// has, each walk, one tensor and as many as a launch takes, and what may be measured against the plan.
///
/// `steps` are the one that takes the longest way and the one that takes the shortest, with what they add to
/// a name.
pub(crate) fn variants<S, const N: usize>(
    optimizer: &'static str,
    [long, short]: [(S, &'static str); 2],
) -> Vec<Variant>
where
    S: StepNumbers<N> + Send + Sync + 'static,
{
    let widest = Tuning::default().widest;
    let mut all = Vec::new();
    for parameter in FLOATS {
        let rounds = parameter != FLOATS[0];
        let longest = |gradient| Way {
            parameter,
            gradient,
            step: long,
            walk: Walk::Flat,
            gated: true,
            by_chance: rounds,
            held: false,
            copy: None,
            widest,
            tensors: 1,
        };
        for gradient in FLOATS {
            all.push(longest(gradient));
            all.push(Way { tensors: MOST_TENSORS, ..longest(gradient) });
            all.push(Way { walk: Walk::Rows, ..longest(gradient) });
            all.push(Way { walk: Walk::Gathered, ..longest(gradient) });
        }
        let held = Way { held: true, ..longest(parameter) };
        all.extend([held, Way { tensors: MOST_TENSORS, ..held }]);
        let copied = Way { copy: Some(FLOATS[2]), ..longest(parameter) };
        all.extend([copied, Way { tensors: MOST_TENSORS, ..copied }, Way { held: true, ..copied }]);
        let open = Way { gated: false, step: short, ..longest(parameter) };
        all.push(open);
        let nearest = Way { by_chance: false, ..open };
        if rounds {
            all.extend([nearest, Way { widest: 8, ..nearest }]);
        }
        all.push(Way { gradient: FLOATS[2], tensors: MOST_TENSORS, ..nearest });
    }
    all.into_iter().map(|way| way.variant(optimizer)).collect()
}

impl<S: Copy> Way<S> {
    fn variant<const N: usize>(self, optimizer: &str) -> Variant
    where
        S: StepNumbers<N> + Send + Sync + 'static,
    {
        let promises = [("optimizer_step", Promise::registers(most_registers(self.widest)))];
        Variant::new(self.name(optimizer), promises, move |client| self.launch(client))
    }

    fn name(&self, optimizer: &str) -> String {
        let mut name =
            format!("{optimizer}_{}_{}{}", self.parameter.1, self.gradient.1, self.step.1);
        for (is_it, part) in [
            (self.gated, "_gated"),
            (self.by_chance, "_by_chance"),
            (self.held, "_held"),
            (self.walk == Walk::Rows, "_by_rows"),
            (self.walk == Walk::Gathered, "_gathered"),
        ] {
            if is_it {
                name += part;
            }
        }
        if let Some((_, copy)) = self.copy {
            name += &format!("_with_{copy}_copy");
        }
        if self.widest != Tuning::default().widest {
            name += &format!("_by_{}", self.widest);
        }
        if self.tensors > 1 {
            name += &format!("_of_{}", self.tensors);
        }
        name
    }

    fn launch<const N: usize>(&self, client: &Client) -> Result<(), KernelError>
    where
        S: StepNumbers<N>,
    {
        let (f32, _) = FLOATS[0];
        let reading = || Buffer::empty(client, 1, f32);
        let gate =
            self.gated.then(|| Gate { taken: reading(), skipped: reading(), factor: reading() });
        let word = ElemType::UInt(UIntKind::U32);
        let seed = self.by_chance.then(|| Buffer::empty(client, 2, word));
        let tensors: Vec<[Rows; N]> = (0..self.tensors).map(|_| self.tensors(client)).collect();
        let holder = self.held.then(|| tensors.clone());
        let update = |(draw, tensors): (usize, [Rows; N])| Update {
            step: self.step.0,
            tensors: tensors.into(),
            draw: draw as u32,
            copy: self.copy.map(|(dtype, _)| self.rows(client, dtype, 0)),
        };
        let updates = tensors.into_iter().enumerate().map(update).collect();
        let tuning = Tuning { widest: self.widest, ..Tuning::default() };
        let updated = update_many_with(client, updates, gate, seed, tuning).map(drop);
        drop(holder);
        updated
    }

    /// Parameter, gradient and states, for which no walk but this one has vectors so wide.
    fn tensors<const N: usize>(&self, client: &Client) -> [Rows; N] {
        std::array::from_fn(|which| {
            let dtype = match which {
                0 => self.parameter.0,
                GRADIENT => self.gradient.0,
                _ => FLOATS[0].0,
            };
            self.rows(client, dtype, which)
        })
    }

    /// The tensor at the place `which`.
    fn rows(&self, client: &Client, dtype: ElemType, which: usize) -> Rows {
        const ROWS: usize = 64;
        let [columns, pitch] = match self.walk {
            Walk::Flat => [1024, 1024],
            Walk::Rows => [1000, 1024],
            Walk::Gathered if which == GRADIENT => [1030, 1032],
            Walk::Gathered => [1030, 1030],
        };
        Rows { buffer: Buffer::empty(client, ROWS * pitch, dtype), rows: ROWS, columns, pitch }
    }
}

/// What occupancy takes, for the bytes that a unit has on the way: a multiprocessor has 65,536 registers for
/// cubes of 256 units.
fn most_registers(vector_size: VectorSize) -> u32 {
    match vector_size {
        // Five cubes, each with up to 56 bytes on the way in f32.
        ..=4 => 48,
        // Four, with twice as much.
        _ => 64,
    }
}
