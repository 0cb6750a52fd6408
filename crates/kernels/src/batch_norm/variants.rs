//! Problems that cover the plans: see [`variants`](crate::variants).

use super::{
    BatchNormBlueprint, BatchNormInputs, BatchNormPass, BatchNormProblem, BatchNormSaved,
    RunningStatistics, Statistics, batch_norm_apply, batch_norm_backward, batch_norm_running,
    batch_norm_statistics,
};
use crate::{
    KernelError,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{client::Client, ir::ElemType};

/// Channels that vectors do not divide; narrow rows, and rows of as many vectors as a cube has lanes.
pub const CHANNELS: [usize; 3] = [63, 64, 256];
/// Enough that every multiprocessor has some.
const ROWS: usize = 1 << 16;

/// A problem, and what comes behind normalization.
#[derive(Clone, Copy)]
struct Case {
    problem: BatchNormProblem,
    /// Type of mean and variance where they are read.
    statistics: ElemType,
    /// A residual and `ReLU`.
    tail: bool,
}

/// All passes in every combination of types that programs have: with and without what follows.
pub(crate) fn variants() -> Vec<Variant> {
    let [f32, f16, bf16] = FLOATS.map(|(dtype, _)| dtype);
    // Rows, parameters, statistics.
    let types = [[f32; 3], [f16, f32, f32], [f16; 3], [bf16, f32, f32], [bf16; 3]];
    let mut all = Vec::new();
    for [dtype, parameter, statistics] in types {
        for channels in CHANNELS {
            for tail in [false, true] {
                let problem = BatchNormProblem::contiguous(ROWS, channels, dtype, parameter, 1e-5);
                all.push(variant(Case { problem, statistics, tail }));
            }
        }
    }
    all
}

fn variant(case: Case) -> Variant {
    let (residual, relu) = (case.tail, case.tail);
    let promises = [
        ("batch_norm_statistics", BatchNormPass::Statistics.promise()),
        ("batch_norm_merge_moments", BatchNormBlueprint::MERGING_PROMISE),
        ("batch_norm_running", BatchNormBlueprint::MERGING_PROMISE),
        ("batch_norm_apply", BatchNormPass::Apply { residual }.promise()),
        ("batch_norm_sums", BatchNormPass::Sums { relu }.promise()),
        ("batch_norm_merge_sums", BatchNormBlueprint::MERGING_PROMISE),
        ("batch_norm_input_gradient", BatchNormPass::InputGradient { relu }.promise()),
    ];
    let BatchNormProblem { channels, dtype, parameter, .. } = case.problem;
    let told = |dtype| FLOATS.into_iter().find(|(float, _)| *float == dtype).map_or("", |it| it.1);
    let tail = if case.tail { "_residual_relu" } else { "" };
    let name = format!("{channels}_{}_{}{tail}", told(dtype), told(parameter));
    Variant::new(name, promises, move |client| launch(client, case))
}

fn launch(client: &Client, Case { problem, statistics, tail }: Case) -> Result<(), KernelError> {
    let rows = || Buffer::empty(client, problem.elements(), problem.dtype);
    let of_channels = |dtype| Buffer::empty(client, problem.channels, dtype);
    let x = rows();
    let of_batch = batch_norm_statistics(client, &problem, &x)?;
    let [mean, variance] = [(); 2].map(|()| of_channels(statistics));
    let running =
        RunningStatistics { mean: mean.clone(), variance: variance.clone(), kept: 0.9, new: 0.1 };
    batch_norm_running(client, &running, &of_batch)?;
    let statistics = Statistics { mean, variance };
    let [gamma, beta] = [(); 2].map(|()| of_channels(problem.parameter));
    let residual = tail.then(rows);
    let inputs = BatchNormInputs {
        x: x.clone(),
        statistics: statistics.clone(),
        gamma: gamma.clone(),
        beta,
        residual,
        relu: tail,
    };
    let y = batch_norm_apply(client, &problem, &inputs)?;
    let saved = BatchNormSaved { x, statistics, gamma, y: tail.then_some(y) };
    batch_norm_backward(client, &problem, &saved, &rows(), tail).map(drop)
}
