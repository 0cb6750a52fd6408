//! Problems that cover the plans: see [`variants`](crate::variants).

use super::{
    CrossEntropyBlueprint, CrossEntropyProblem, Reduction, cross_entropy_at_once,
    cross_entropy_backward, cross_entropy_forward, cross_entropy_reduce, cross_entropy_rescale,
    problem::I32,
};
use crate::{
    KernelError,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{client::Client, ir::ElemType};

/// A problem, and at which element of its memory the logits begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyVariant {
    /// What is asked.
    pub problem: CrossEntropyProblem,
    /// Elements before the first logit; with one, vectors would not be aligned.
    pub first: usize,
}

/// GPT-2's loss with rows of whole vectors, with the shortest and the longest way through the kernels; its
/// rows without anything between them, which vectors do not divide; and rows so short that 32 units share
/// one, from where vectors cannot begin.
pub fn problems(dtype: ElemType) -> [CrossEntropyVariant; 4] {
    let plain = |rows, classes| CrossEntropyProblem {
        rows,
        classes,
        row_stride: classes,
        dtype,
        ignore_index: None,
        smoothing: 0.0,
    };
    let everything =
        |problem| CrossEntropyProblem { ignore_index: Some(-100), smoothing: 0.1, ..problem };
    [
        CrossEntropyVariant { problem: plain(1024, 50_304), first: 0 },
        CrossEntropyVariant { problem: everything(plain(1024, 50_304)), first: 0 },
        CrossEntropyVariant { problem: plain(1023, 50_257), first: 0 },
        CrossEntropyVariant { problem: everything(plain(1023, 100)), first: 1 },
    ]
}

/// Both passes of each problem in every type, and the reductions.
pub(crate) fn variants() -> Vec<Variant> {
    let promises = CrossEntropyBlueprint::PROMISES;
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for variant in problems(dtype) {
            let CrossEntropyProblem { classes, smoothing, .. } = variant.problem;
            let kind = if smoothing > 0.0 { "_everything" } else { "" };
            let name = format!("{name}_{classes}{kind}");
            all.push(Variant::new(name, promises, move |client| launch(client, variant)));
        }
    }
    all
}

/// With the gradient of the mean, or, where rows are ignored, with one of each row's loss.
fn launch(client: &Client, variant: CrossEntropyVariant) -> Result<(), KernelError> {
    let CrossEntropyVariant { problem, first } = variant;
    let logits = || {
        let Buffer { handle, dtype, .. } =
            Buffer::empty(client, first + problem.span(), problem.dtype);
        let handle =
            if first == 0 { handle } else { handle.offset_start((first * dtype.size()) as u64) };
        Buffer { handle, elements: problem.span(), dtype }
    };
    let targets = Buffer::empty(client, problem.rows, I32);
    let output = cross_entropy_forward(client, &problem, &logits(), &targets)?;
    let reduce = |how| cross_entropy_reduce(client, &problem, how, &output.loss, &targets);
    reduce(Reduction::Sum)?;
    let mean = reduce(Reduction::Mean)?;
    let (grad, factor) = match problem.ignore_index {
        None => (&mean.loss, Some(&mean.factor)),
        Some(_) => (&output.loss, None),
    };
    // In their own memory, and where somebody else holds that.
    cross_entropy_backward(client, &problem, logits(), &targets, &output.lse, grad, factor)?;
    let both = |logits| cross_entropy_at_once(client, &problem, Reduction::Mean, logits, &targets);
    let of_one = both(logits())?;
    cross_entropy_rescale(client, &problem, of_one.dlogits, &mean.loss)?;
    let held = logits();
    both(held.clone())?;
    cross_entropy_backward(client, &problem, held.clone(), &targets, &output.lse, grad, factor)?;
    Ok(())
}
