//! Problems that cover the plans: see [`variants`](crate::variants).

use super::{
    Affine, Form, GroupNormBlueprint, GroupNormInputs, GroupNormPass, GroupNormProblem,
    GroupNormSaved, Order, group_norm_backward, group_norm_forward, group_norm_forward_with_parts,
};
use crate::{
    KernelError,
    buffer::{Buffer, F32},
    variants::{FLOATS, Variant},
};
use cubecl::client::Client;

/// (samples, channels, pixels) and groups: channels and pixels that vectors do not divide; narrow rows; rows of as
/// many vectors as a cube has lanes.
pub const SHAPES: [([usize; 3], usize); 3] =
    [([8, 63, 1023], 21), ([8, 64, 4096], 32), ([8, 512, 1024], 32)];

/// All passes in every combination of types and orders that programs have: from x, and from what Burn keeps.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, told) in FLOATS {
        for (parameter, of) in [(F32, "f32"), (dtype, told)] {
            if dtype == F32 && told != of {
                continue;
            }
            for (shape, groups) in SHAPES {
                for order in [Order::ChannelsLast, Order::PixelsLast] {
                    let problem = GroupNormProblem {
                        parameter,
                        ..GroupNormProblem::contiguous(shape, groups, order, dtype)
                    };
                    let name = format!("{}_{told}_{of}_{order:?}", shape[1]).to_lowercase();
                    all.push(variant(name, problem));
                }
            }
        }
    }
    all
}

fn variant(name: String, problem: GroupNormProblem) -> Variant {
    let parts = GroupNormPass::Apply { parts: true };
    let mut promises = vec![
        ("group_norm_statistics", GroupNormPass::Statistics.promise()),
        ("group_norm_merge_moments", GroupNormBlueprint::MERGING_PROMISE),
        ("group_norm_apply", GroupNormPass::Apply { parts: false }.promise()),
        ("group_norm_sums", GroupNormPass::Sums.promise()),
        ("group_norm_merge_sums", GroupNormBlueprint::MERGING_PROMISE),
        ("group_norm_input_gradient", GroupNormPass::InputGradient.promise()),
        ("layer_norm_parameters", GroupNormBlueprint::MERGING_PROMISE),
    ];
    if problem.order == Order::ChannelsLast {
        promises.push(("group_norm_apply_turned", parts.promise()));
    }
    Variant::new(name, promises, move |client| launch(client, problem))
}

fn launch(client: &Client, problem: GroupNormProblem) -> Result<(), KernelError> {
    let images = || Buffer::empty(client, problem.elements(), problem.dtype);
    let [gamma, beta] =
        [(); 2].map(|()| Buffer::empty(client, problem.channels, problem.parameter));
    let affine = Some(Affine { gamma: gamma.clone(), beta });
    let inputs = GroupNormInputs { x: images(), affine };
    let output = group_norm_forward(client, &problem, &inputs)?;
    let (_, parts) = group_norm_forward_with_parts(client, &problem, &inputs)?;
    let saved = GroupNormSaved {
        x: inputs.x,
        form: Form::Input,
        mean: Some(output.mean),
        rstd: output.rstd.clone(),
        gamma: Some(gamma.clone()),
    };
    group_norm_backward(client, &problem, &saved, &images(), true)?;
    let saved = GroupNormSaved {
        x: parts.normalized,
        form: Form::Normalized,
        mean: None,
        rstd: output.rstd,
        gamma: Some(gamma),
    };
    group_norm_backward(client, &problem, &saved, &images(), true).map(drop)
}
