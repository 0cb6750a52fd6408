//! What a run takes of the device's memory, and whether it fits at all.

use crate::{
    cli::TrainArgs,
    model::{Attention, Computation, Gpt},
    settings::{AttentionKind, Precision, RunSettings},
};
use anyhow::{Result, bail};
use blackburn::{
    Report,
    train::{
        memory::{MemoryEstimate, limit},
        trainer::TrainerConfig,
    },
};
use burn::tensor::{Device, Tensor};

/// Bytes that a training step holds at the very least: parameters with all that is kept of each; the logits, unless
/// they are made in chunks, and their gradient, and with Burn's loss their log-softmax, too, all three in f32; and,
/// unless attention is flash, three attention matrices a layer, which Burn's automatic differentiation keeps.
fn least_bytes(
    args: &TrainArgs,
    settings: &RunSettings,
    trainer: &TrainerConfig,
    attention: AttentionKind,
    is_gpu: bool,
) -> f64 {
    let element = match settings.precision {
        Precision::F32 => 4.0,
        _ => 2.0,
    };
    let model = &settings.model;
    let parameters = trainer.memory_of(model.parameters() as u64, is_gpu).expected_bytes() as f64;
    let sequence = settings.batch as f64 * model.context as f64;
    let of_logit = match attention {
        _ if args.chunked_loss => 0.0,
        AttentionKind::Flash => 2.0 * element,
        AttentionKind::Naive | AttentionKind::FlashOnly => 3.0 * 4.0,
    };
    let logits = of_logit * sequence * model.vocabulary as f64;
    let matrices = match attention {
        AttentionKind::Naive => 3.0 * model.layers as f64,
        AttentionKind::Flash | AttentionKind::FlashOnly => 0.0,
    };
    let weights = matrices * element * sequence * model.heads as f64 * model.context as f64;
    parameters + logits + weights
}

/// Refuses a run that cannot fit, before it wastes anyone's time.
pub(crate) fn check(
    args: &TrainArgs,
    settings: &RunSettings,
    trainer: &TrainerConfig,
    attention: AttentionKind,
    report: &Report,
) -> Result<()> {
    let is_cpu = report.runtime == "flex";
    let device = report.memory_limit_bytes.into_iter().chain(report.memory_bytes).min();
    let available =
        device.map(|bytes| bytes as f64).or_else(|| is_cpu.then(available_host_memory).flatten());
    let needed = least_bytes(args, settings, trainer, attention, !is_cpu);
    match available {
        Some(available) if needed > available => bail!(
            "out of memory before the start: a step needs more than {}, and {} has {}{}. Use a smaller \
             --batch (now {}) with a larger --accumulate, --chunked-loss, --shard-optimizer on several GPUs, a \
             smaller --context (now {}), or a smaller --preset",
            shown(needed),
            report.device,
            shown(available),
            if report.memory_limit_bytes.is_some() { " by its limit" } else { "" },
            settings.batch,
            settings.model.context
        ),
        _ => Ok(()),
    }
}

/// What a step takes, by a dry run: where it was asked for, and where memory is limited, which is then compared.
/// `device` differentiates.
pub(crate) fn foresee(
    args: &TrainArgs,
    settings: &RunSettings,
    trainer: &TrainerConfig,
    attention: AttentionKind,
    device: &Device,
) -> Result<Option<MemoryEstimate>> {
    let limit = limit();
    if !args.estimate_memory && limit.is_none() {
        return Ok(None);
    }
    let context = settings.model.context;
    let attention = Attention::new(attention, context, device);
    let how = Computation { attention, chunked_loss: args.chunked_loss };
    let rows = settings.batch * settings.accumulate;
    let ids = || Tensor::zeros([rows, context], &device.clone().without_autodiff());
    let estimate = trainer.clone().with_micro_batches(settings.accumulate).estimate(
        device,
        || settings.model.init(device),
        |_| (ids(), ids()),
        |model: &Gpt, (inputs, targets)| model.loss(inputs, targets, &how),
    )?;
    if let Some(limit) = limit.filter(|_| estimate.reserved_bytes.is_some()) {
        estimate.check(limit)?;
    }
    Ok(Some(estimate))
}

const GIB: f64 = (1u64 << 30) as f64;

/// Limits may be smaller than a GiB.
fn shown(bytes: f64) -> String {
    match bytes < GIB {
        true => format!("{:.1} MiB", 1024.0 * bytes / GIB),
        false => format!("{:.1} GiB", bytes / GIB),
    }
}

/// Linux tells what can be had without swapping; elsewhere nothing is checked.
fn available_host_memory() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}
