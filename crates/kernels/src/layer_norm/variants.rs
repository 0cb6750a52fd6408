//! Problems that cover the plans: see [`variants`](crate::variants).

use super::{
    LayerNormBlueprint, LayerNormInputs, LayerNormProblem, LayerNormSaved, LayerNormWanted, Norm,
    layer_norm_backward, layer_norm_backward_of_parts, layer_norm_forward,
    layer_norm_forward_with_parts,
};
use crate::{
    KernelError, Pass,
    buffer::Buffer,
    dropout::DropoutMask,
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};

/// GPT-2's width, and one that vectors do not divide; wide ones in a cube; the widest that each tier of each
/// pass takes; one that units do not share out evenly.
pub const WIDTHS: [usize; 7] = [512, 768, 769, 4096, 8192, 8200, 24_576];
/// Enough that every multiprocessor has some.
const ROWS: usize = 8192;

/// Every width by the longest way in each pair of types, and what may be left out in bf16.
pub fn problems() -> Vec<LayerNormProblem> {
    let [f32, f16, bf16] = FLOATS.map(|(dtype, _)| dtype);
    let longest = |width, [dtype, parameter]: [ElemType; 2]| LayerNormProblem {
        norm: Norm::Layer,
        rows: ROWS,
        width,
        dtype,
        parameter,
        bias: true,
        residual: true,
        parts: false,
        scaled: true,
        residual_bias: false,
        watched: false,
    };
    let types = [[f32, f32], [f16, f32], [f16, f16], [bf16, f32], [bf16, bf16]];
    let mut all: Vec<_> =
        types.into_iter().flat_map(|types| WIDTHS.map(|width| longest(width, types))).collect();
    for width in [768, 4096] {
        let plain = LayerNormProblem { residual: false, ..longest(width, [bf16; 2]) };
        all.extend([
            plain,
            LayerNormProblem { norm: Norm::Rms, bias: false, ..plain },
            LayerNormProblem { parts: true, ..plain },
            LayerNormProblem { parts: true, scaled: false, ..plain },
            LayerNormProblem { residual_bias: true, ..longest(width, [bf16; 2]) },
            LayerNormProblem { residual_bias: true, ..plain },
            LayerNormProblem { watched: true, ..longest(width, [bf16; 2]) },
        ]);
    }
    all
}

/// Both passes of each problem, where a cube holds its rows, and with dropout in every type.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    let variant = |(problem, dropped): (LayerNormProblem, bool)| {
        let plan = |pass| LayerNormBlueprint::plan(&problem, pass, client).ok();
        let [forward, backward] = [Pass::Forward, Pass::Backward].map(plan);
        let mut promises = vec![("layer_norm_parameters", LayerNormBlueprint::PARAMETERS_PROMISE)];
        let promise = |plan: LayerNormBlueprint, pass| plan.promise(&problem, pass);
        promises.extend(forward.map(|plan| ("layer_norm_forward", promise(plan, Pass::Forward))));
        promises
            .extend(backward.map(|plan| ("layer_norm_backward", promise(plan, Pass::Backward))));
        let has = [forward.is_some(), backward.is_some()];
        let name = name(&problem) + if dropped { "_dropout" } else { "" };
        Variant::new(name, promises, move |client| launch(client, &problem, dropped, has))
    };
    let all = problems();
    let dropped = all.clone().into_iter().filter(|problem| {
        problem.residual
            && problem.dtype == problem.parameter
            && [768, 4096].contains(&problem.width)
    });
    let dropped = dropped.map(|problem| (problem, true)).collect::<Vec<_>>();
    all.into_iter().map(|problem| (problem, false)).chain(dropped).map(variant).collect()
}

fn name(problem: &LayerNormProblem) -> String {
    let LayerNormProblem {
        norm,
        width,
        dtype,
        parameter,
        residual,
        parts,
        residual_bias,
        watched,
        ..
    } = *problem;
    let norm = if norm == Norm::Rms { "rms" } else { "layer" };
    let residual = if residual { "_residual" } else { "" };
    let parts = match (parts, problem.scaled) {
        (true, true) => "_parts",
        (true, false) => "_parts_unscaled",
        (false, _) => "",
    };
    let bias = if residual_bias { "_bias" } else { "" };
    let watched = if watched { "_watched" } else { "" };
    let told = |dtype| FLOATS.into_iter().find(|(float, _)| *float == dtype).map_or("", |it| it.1);
    format!("{norm}_{width}_{}_{}{residual}{bias}{watched}{parts}", told(dtype), told(parameter))
}

fn launch(
    client: &Client,
    problem: &LayerNormProblem,
    dropped: bool,
    [forward, backward]: [bool; 2],
) -> Result<(), KernelError> {
    let LayerNormProblem { norm, width, dtype, parameter, .. } = *problem;
    let rows = || Buffer::empty(client, problem.rows * width, dtype);
    let columns = || Buffer::empty(client, width, parameter);
    let statistics = || Buffer::empty(client, problem.rows, FLOATS[0].0);
    let (x, gamma) = (rows(), columns());
    let key = Buffer::empty(client, 2, ElemType::UInt(UIntKind::U32));
    let dropout = dropped.then_some(DropoutMask { rate: 0.1, seed: 1, key: Some(key) });
    if forward {
        let inputs = LayerNormInputs {
            x: x.clone(),
            residual: problem.residual.then(rows),
            residual_bias: (problem.residual && problem.residual_bias).then(columns),
            dropout: dropout.clone(),
            gamma: gamma.clone(),
            beta: problem.bias.then(columns),
            watched: problem.watched,
        };
        if problem.parts {
            layer_norm_forward_with_parts(client, &inputs, 1e-5)?;
        } else {
            layer_norm_forward(client, norm, &inputs, 1e-5)?;
        }
    }
    if backward && problem.parts {
        let gamma = problem.scaled.then_some(&gamma);
        layer_norm_backward_of_parts(client, &x, &statistics(), gamma, &rows(), None)?;
    } else if backward {
        let mean = (norm == Norm::Layer).then(statistics);
        let saved = LayerNormSaved { x, gamma, mean, rstd: statistics(), dropout };
        let dsum = problem.residual.then(rows);
        let LayerNormProblem { bias: beta, residual_bias, watched, .. } = *problem;
        let wanted = LayerNormWanted { beta, residual_bias, watched };
        layer_norm_backward(client, norm, &saved, &rows(), dsum.as_ref(), wanted)?;
    }
    Ok(())
}
