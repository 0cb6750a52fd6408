//! What to change, by what it gains.

use super::{BlockRow, ServedBy, StepProfile, Verdict};
use serde::{Deserialize, Serialize};

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
    /// Products that Blackburn's kernels could have done, and did not.
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

/// Whether Blackburn has kernels for one of the block's operations, and Burn's ran.
fn is_unserved(block: &BlockRow) -> bool {
    let names = || block.operations.split([',', ' ']);
    block.served_by != ServedBy::Blackburn
        && names().any(|name| matches!(name, "Matmul" | "Attention"))
}

fn unserved(profile: &StepProfile) -> Option<Recommendation> {
    let blocks: Vec<_> = profile.blocks.iter().filter(|block| is_unserved(block)).collect();
    let count: f64 = blocks.iter().map(|block| block.count).sum();
    if blocks.is_empty() {
        return None;
    }
    let time: Option<f64> = blocks.iter().map(|block| block.device_us).sum();
    let gains = blocks.iter().map(|block| Some((block.device_us? - block.roofline_us?).max(0.0)));
    let is_about = |reason: &&String| {
        ["matmul", "attention"].iter().any(|op| reason.to_lowercase().contains(op))
    };
    let reasons: Vec<_> = profile.declined.iter().filter(is_about).map(String::as_str).collect();
    let reasons = match reasons[..] {
        [] => "no reason was noted: the provider is switched off, or the operations around them kept it from \
               seeing them"
            .to_owned(),
        _ => reasons.join("; "),
    };
    let time = time.map_or(String::new(), |time| format!(" ({:.2} ms)", time / 1e3));
    Some(Recommendation {
        kind: Advice::Unserved,
        gain_us: gains.sum(),
        text: format!(
            "matrix products and attentions on Burn's kernels: {count:.0}{time}; {reasons}"
        ),
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
            && !is_unserved(block)
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
