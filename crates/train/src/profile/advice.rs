//! What to change, by what it gains.

use super::{BlockRow, ServedBy, StepProfile, Verdict};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Blocks below this part of the kernels' time are not worth a recommendation of their own.
const WORTH_IT: f64 = 0.05;
/// Kernels above this share of the roofline have little left to gain.
const NEAR_THE_ROOFLINE: f64 = 0.6;
/// How many times the arithmetic 16 bits have to allow, for casts not to eat up the gain.
const WORTH_CASTING: f64 = 1.5;
/// Recommendations of one kind for single kernels.
const MOST_OF_A_KIND: usize = 3;

/// A change that would make the step faster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recommendation {
    /// What it is about.
    pub kind: Advice,
    /// Microseconds of a step that it gains at most. Gains overlap, so they do not add up. `None` where
    /// nothing was measured that it follows from.
    pub gain_us: Option<f64>,
    /// What was found and what to do, in words.
    pub text: String,
}

/// What a recommendation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// The device waits for the host to ask for kernels.
    LaunchBound,
    /// Operations that Blackburn has kernels for, on Burn's.
    Unserved,
    /// Neighboring memory-bound blocks that could be one.
    Unfused,
    /// A kernel that takes much longer than its bytes and arithmetic need.
    FarFromRoofline,
    /// f32 products where 16 bits have a higher peak.
    Precision,
}

/// What follows from `profile`, the largest gain first, and what has none last.
pub(super) fn recommend(profile: &StepProfile) -> Vec<Recommendation> {
    let mut all: Vec<_> =
        [launch_bound(profile), unserved(profile), unfused(profile), precision(profile)]
            .into_iter()
            .flatten()
            .chain(far_from_roofline(profile))
            .collect();
    let gain = |recommendation: &Recommendation| recommendation.gain_us.unwrap_or(-1.0);
    all.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
    all
}

fn launch_bound(profile: &StepProfile) -> Option<Recommendation> {
    if profile.verdict != Verdict::HostBound {
        return None;
    }
    let (gap, launches) = (profile.gap_us?, profile.launches?);
    let found = format!(
        "the device waits for the host for {:.2} of {:.2} ms; a step launches {launches:.0} kernels, of \
         {:.1} us on average",
        gap / 1e3,
        profile.wall_us / 1e3,
        profile.device_us? / launches.max(1.0)
    );
    let advice = if profile.eager_wall_us.is_some() {
        "passes are recorded already: take a larger batch, prepare batches on another thread, and read \
         values such as the loss less often"
    } else {
        "have the passes recorded (blackburn_train::graph::GradientGraph), take a larger batch, and read \
         values such as the loss less often"
    };
    Some(Recommendation {
        kind: Advice::LaunchBound,
        gain_us: Some(gap),
        text: format!("{found}: {advice}"),
    })
}

/// Blackburn's extension operations that Burn's kernels may do as well, by how their names begin.
const EXTENSIONS: [&str; 4] = ["attention_", "cross_entropy_", "layer_norm_", "embedding_"];

/// What of the block Blackburn has kernels for, where Burn's ran. An extension operation counts where one was
/// declined: some use Burn's kernels by design.
fn left_to_burn<'a>(block: &'a BlockRow, declined: &[String]) -> Option<&'a str> {
    let is_left = |name: &&str| match *name {
        "Matmul" | "Attention" => true,
        name => EXTENSIONS
            .iter()
            .filter(|start| name.starts_with(**start))
            .any(|start| declined.iter().any(|reason| is_about(reason, start))),
    };
    let mut names = block.operations.split([',', ' ']).filter(is_left);
    names.next().filter(|_| block.served_by != ServedBy::Blackburn)
}

/// Whether a reason, which begins with the name of what declined, is about an operation.
fn is_about(reason: &str, operation: &str) -> bool {
    let plain = |name: &str| name.replace('_', "").to_lowercase();
    plain(reason.split(':').next().unwrap_or(reason)).contains(&plain(operation))
}

fn unserved(profile: &StepProfile) -> Option<Recommendation> {
    let left: Vec<_> = profile
        .blocks
        .iter()
        .filter_map(|block| Some((block, left_to_burn(block, &profile.declined)?)))
        .collect();
    if left.is_empty() {
        return None;
    }
    let count: f64 = left.iter().map(|(block, _)| block.count).sum();
    let time: Option<f64> = left.iter().map(|(block, _)| block.device_us).sum();
    let gains =
        left.iter().map(|(block, _)| Some((block.device_us? - block.roofline_us?).max(0.0)));
    let starts = |name: &str| {
        let start = EXTENSIONS.into_iter().find(|start| name.starts_with(*start));
        start.unwrap_or(name).to_owned()
    };
    let of: BTreeSet<String> = left.iter().map(|(_, name)| starts(name)).collect();
    let reasons: Vec<_> = profile
        .declined
        .iter()
        .filter(|reason| of.iter().any(|operation| is_about(reason, operation)))
        .map(String::as_str)
        .collect();
    let reasons = match reasons[..] {
        [] => "no reason was noted: the provider is switched off, or the operations around them kept it from \
               seeing them"
            .to_owned(),
        _ => reasons.join("; "),
    };
    let names: BTreeSet<&str> = left.iter().map(|(_, name)| *name).collect();
    let names = Vec::from_iter(names).join(", ");
    let time = time.map_or(String::new(), |time| format!(" ({:.2} ms)", time / 1e3));
    Some(Recommendation {
        kind: Advice::Unserved,
        gain_us: gains.sum(),
        text: format!("{names} on Burn's kernels: {count:.0}{time}; {reasons}"),
    })
}

fn unfused(profile: &StepProfile) -> Option<Recommendation> {
    let chains = &profile.chains;
    if chains.count == 0.0 {
        return None;
    }
    let gain = profile
        .peaks
        .as_ref()
        .filter(|_| profile.device_us.is_some())
        .map(|peaks| (1e6 * chains.saved_bytes / peaks.bytes_per_second).min(chains.device_us));
    Some(Recommendation {
        kind: Advice::Unfused,
        gain_us: gain,
        text: format!(
            "{:.0} neighboring blocks of element-wise operations and reductions write {:.1} MB in {:.0} places \
             only for the next to read: use modules with a kernel of their own (blackburn::nn, cross_entropy, \
             optim), or write the operations next to each other so that Burn fuses them",
            chains.blocks,
            chains.saved_bytes / 1e6,
            chains.count
        ),
    })
}

fn far_from_roofline(profile: &StepProfile) -> impl Iterator<Item = Recommendation> {
    let is_far = |block: &&BlockRow| {
        block.share.is_some_and(|share| share >= WORTH_IT)
            && block.roofline.is_some_and(|share| share < NEAR_THE_ROOFLINE)
            && left_to_burn(block, &profile.declined).is_none()
    };
    let recommend = |block: &BlockRow| {
        let (time, least) = (block.device_us?, block.roofline_us?);
        let of = match block.served_by {
            ServedBy::Blackburn => "Blackburn's kernels",
            ServedBy::BurnFused => "a kernel of Burn's fusion",
            ServedBy::Burn => "Burn's kernels",
        };
        Some(Recommendation {
            kind: Advice::FarFromRoofline,
            gain_us: Some((time - least).max(0.0)),
            text: format!(
                "{:.0} x [{}] on {of} ({}) take {:.2} ms, and their bytes and arithmetic {:.2}: larger shapes, or \
                 sizes that are multiples of 64, may come closer",
                block.count,
                block.operations,
                block.kernels.join(", "),
                time / 1e3,
                least / 1e3
            ),
        })
    };
    profile.blocks.iter().filter(is_far).filter_map(recommend).take(MOST_OF_A_KIND)
}

fn precision(profile: &StepProfile) -> Option<Recommendation> {
    let peaks = profile.peaks.as_ref()?;
    let sixteen = peaks.flops_16_bit.filter(|flops| *flops > WORTH_CASTING * peaks.flops_f32)?;
    let products = || profile.blocks.iter().filter(|block| block.element_bytes == Some(4));
    let time: f64 = products().map(|block| block.device_us).sum::<Option<f64>>()?;
    if products().next().is_none() || time < WORTH_IT * profile.device_us? {
        return None;
    }
    Some(Recommendation {
        kind: Advice::Precision,
        gain_us: Some(time * (1.0 - peaks.flops_f32 / sixteen)),
        text: format!(
            "products of f32 matrices take {:.2} ms, and the device does {:.1} times as much arithmetic in 16 bits: \
             compute in bf16 (blackburn_train::precision)",
            time / 1e3,
            sixteen / peaks.flops_f32
        ),
    })
}
