//! How far a replay has come.

use super::{Network, Passes, ROWS, Test, batch, pass};
use blackburn::train::precision::{Precision, PrecisionPolicy};
use blackburn_backend::graph::Identity;
use burn::prelude::*;
use libtest_mimic::Failed;

pub(super) const TESTS: [(&str, Test); 3] = [
    ("a_replay_counts_past_each_gradient", each),
    ("a_replay_counts_past_each_gradient_in_mixed_precision", each_in_f16),
    ("milestones_are_as_far_apart_as_was_asked", apart),
];

/// Calls of a pass behind which it is replayed.
const CALLS: u64 = 7;

/// The milestones of the gradients of the layer that runs second, of the one that runs first, and of the embedding.
fn milestones(
    every: usize,
    policy: PrecisionPolicy,
    device: &Device,
) -> Result<[Option<u32>; 3], Failed> {
    let network = policy.apply(Network::new(0.0, device))?;
    let mut graph = Passes::new(policy).with_milestones(every);
    let mut counts = Vec::new();
    let mut found = [None; 3];
    for step in 0..CALLS {
        let (_, gradients) = graph.run(&network, batch(step, ROWS, device), pass)?;
        let Some(progress) = graph.progress() else { continue };
        found =
            [&network.second.weight, &network.first.weight, &network.words.weight].map(|param| {
                let gradient = gradients.get::<2>(param.id)?;
                progress.milestone(Identity::of(gradient)?)
            });
        // All were passed: what is awaited of a milestone that no replay has is the start of the next one.
        let last = found.iter().flatten().max().copied().unwrap_or(0);
        let (count, awaited) = (progress.count()?, progress.count_at(last));
        if count < awaited {
            return Err(format!("call {step}: counted to {count}, expected {awaited}").into());
        }
        counts.push((progress.count_at(0), count));
    }
    // A replay begins where the one before has ended, unless a recording was made in between.
    let go_on = counts.windows(2).filter(|pair| pair[1].0 == pair[0].1).count();
    if go_on < 2 {
        return Err(format!("counts before and after replays: {counts:?}").into());
    }
    Ok(found)
}

fn in_order(policy: PrecisionPolicy, device: &Device) -> Result<(), Failed> {
    match milestones(1, policy, device)? {
        [Some(second), Some(first), words] if second < first => match words {
            Some(words) if words <= first => Err("the embedding's gradient comes last".into()),
            _ => Ok(()),
        },
        other => Err(format!("milestones of gradients: {other:?}").into()),
    }
}

fn each(device: &Device) -> Result<(), Failed> {
    in_order(PrecisionPolicy::default(), device)
}

fn each_in_f16(device: &Device) -> Result<(), Failed> {
    in_order(PrecisionPolicy::new(Precision::F16), device)
}

fn apart(device: &Device) -> Result<(), Failed> {
    match milestones(usize::MAX, PrecisionPolicy::default(), device)? {
        [None, None, None] => Ok(()),
        other => Err(format!("milestones of gradients: {other:?}").into()),
    }
}
