//! Whether a run fits the device at all.

use crate::settings::{AttentionKind, MastersKind, Precision, RunSettings};
use anyhow::{Result, bail};
use blackburn::Report;

/// Bytes that a training step holds at the very least: parameters, what they are cast to, gradients
/// and Adam's two moments in f32; the logits, their log-softmax and its gradient in f32; and, unless attention is flash,
/// three attention matrices a layer, which Burn's automatic differentiation keeps.
fn least_bytes(settings: &RunSettings, attention: AttentionKind) -> f64 {
    let element = match settings.precision {
        Precision::F32 => 4.0,
        Precision::Bf16 | Precision::F16 | Precision::Fp8 => 2.0,
    };
    let of_parameter = match (settings.masters, settings.precision) {
        (_, Precision::F32) => 4.0 + 4.0 + 8.0,
        (MastersKind::F32, _) => 4.0 + 2.0 + 4.0 + 8.0,
        (MastersKind::None, _) => 2.0 + 2.0 + 8.0,
    };
    let model = &settings.model;
    let sequence = settings.batch as f64 * model.context as f64;
    let parameters = of_parameter * model.parameters() as f64;
    let logits = 3.0 * 4.0 * sequence * model.vocabulary as f64;
    let matrices = match attention {
        AttentionKind::Naive => 3.0 * model.layers as f64,
        AttentionKind::Flash | AttentionKind::FlashOnly => 0.0,
    };
    let weights = matrices * element * sequence * model.heads as f64 * model.context as f64;
    parameters + logits + weights
}

/// Refuses a run that cannot fit, before it wastes anyone's time.
pub(crate) fn check(
    settings: &RunSettings,
    attention: AttentionKind,
    report: &Report,
) -> Result<()> {
    let available = report
        .memory_bytes
        .map(|bytes| bytes as f64)
        .or_else(|| (report.runtime == "flex").then(available_host_memory).flatten());
    let needed = least_bytes(settings, attention);
    match available {
        Some(available) if needed > available => bail!(
            "out of memory before the start: a step needs more than {:.1} GiB, and {} has {:.1} \
             GiB. Use a smaller --batch (now {}) with a larger --accumulate, a smaller --context \
             (now {}), or a smaller --preset",
            needed / GIB,
            report.device,
            available / GIB,
            settings.batch,
            settings.model.context
        ),
        _ => Ok(()),
    }
}

const GIB: f64 = (1u64 << 30) as f64;

/// Linux tells what can be had without swapping; elsewhere nothing is checked.
fn available_host_memory() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}
