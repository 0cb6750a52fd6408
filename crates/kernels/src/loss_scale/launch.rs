use super::forward::{
    MEASURE_UNITS, RulesLaunch, loss_scale_measure_kernel, loss_scale_update_kernel,
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32},
    square_sum::PLACES,
};
use cubecl::{client::Client, prelude::*};

/// What gradients come to, one f32 each.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Of the gradients without the loss's scale.
    pub norm: Buffer,
    /// 1 if the norm with the scale is a finite number, else 0.
    pub finite: Buffer,
    /// What gradients are to be multiplied by.
    pub factor: Buffer,
}

/// A scaler's numbers, one f32 each.
#[derive(Clone, Debug)]
pub struct Scaler {
    /// What losses are multiplied by.
    pub scale: Buffer,
    /// Finite steps since the scale last changed.
    pub clean: Buffer,
    /// Steps that were not finite.
    pub skipped: Buffer,
    /// Of those, the last ones, one after another.
    pub in_a_row: Buffer,
}

/// What a scaler goes by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerRules {
    /// What the scale is multiplied by after `interval` finite steps.
    pub growth: f32,
    /// What it is multiplied by after one that was not.
    pub backoff: f32,
    /// Finite steps, one after another, before the scale grows.
    pub interval: u32,
    /// The scale never falls below.
    pub least: f32,
    /// The scale never grows beyond.
    pub largest: f32,
}

/// Norm, finiteness and factor of gradients whose squares `sums` adds up to: scaled by `scale`, if by
/// anything, and to be clipped to the norm `largest`, if that is finite.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where `sums` are not [`PLACES`] numbers of f32, `scale` not one, or
/// `largest` not positive.
pub fn loss_scale_measure(
    client: &Client,
    sums: &Buffer,
    scale: Option<&Buffer>,
    largest: f32,
) -> Result<Measured, KernelError> {
    const OP: &str = "loss_scale_measure";
    sums.check(OP, "sums", PLACES, F32)?;
    if let Some(scale) = scale {
        scale.check(OP, "scale", 1, F32)?;
    }
    if largest.is_nan() || largest <= 0.0 {
        return Err(KernelError::invalid(OP, "largest", "a positive number", largest));
    }
    let [norm, finite, factor] = [(); 3].map(|()| Buffer::empty(client, 1, F32));
    // SAFETY: all are as long as they are read and written, by one cube.
    ahead::launch(client, |client| unsafe {
        loss_scale_measure_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(MEASURE_UNITS),
            sums.arg(1),
            scale.unwrap_or(sums).arg(1),
            norm.arg(1),
            finite.arg(1),
            factor.arg(1),
            if largest.is_finite() { largest } else { 1.0 },
            scale.is_some(),
            largest.is_finite(),
        )
    });
    Ok(Measured { norm, finite, factor })
}

/// The scaler's numbers after a step whose gradients were `finite`, or not.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where a buffer is not one f32.
pub fn loss_scale_update(
    client: &Client,
    rules: &ScalerRules,
    finite: &Buffer,
    old: &Scaler,
) -> Result<Scaler, KernelError> {
    const OP: &str = "loss_scale_update";
    let Scaler { scale, clean, skipped, in_a_row } = old;
    for (argument, buffer) in [
        ("finite", finite),
        ("scale", scale),
        ("clean", clean),
        ("skipped", skipped),
        ("in_a_row", in_a_row),
    ] {
        buffer.check(OP, argument, 1, F32)?;
    }
    let new = || Buffer::empty(client, 1, F32);
    let new = Scaler { scale: new(), clean: new(), skipped: new(), in_a_row: new() };
    let ScalerRules { growth, backoff, interval, least, largest } = *rules;
    // SAFETY: all are one element long, which one unit reads and writes.
    ahead::launch(client, |client| unsafe {
        loss_scale_update_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            finite.arg(1),
            scale.arg(1),
            clean.arg(1),
            skipped.arg(1),
            in_a_row.arg(1),
            new.scale.arg(1),
            new.clean.arg(1),
            new.skipped.arg(1),
            new.in_a_row.arg(1),
            RulesLaunch::new(growth, backoff, interval as f32, least, largest),
        )
    });
    Ok(new)
}
