use crate::square_sum::PLACES;
use cubecl::prelude::*;

/// Units in the one cube of a measurement: every adapter takes as many.
pub(crate) const MEASURE_UNITS: u32 = 256;

/// Guards the division where all gradients are zero.
const EPSILON: f32 = 1e-6;

/// Bits of infinity.
const INFINITY: u32 = 0x7f80_0000;

/// Whether `x` is neither infinite nor missing: by its bits, since WGSL need not know such numbers.
#[cube]
fn is_finite(x: f32) -> bool {
    u32::reinterpret(x) & INFINITY != INFINITY
}

/// Norm, finite and factor of gradients. One cube; `scale` is read if they are `scaled`, `largest` if they
/// are `clipped`.
#[cube(launch_unchecked)]
pub(crate) fn loss_scale_measure_kernel(
    sums: &[f32],
    scale: &[f32],
    norm_out: &mut [f32],
    finite_out: &mut [f32],
    factor_out: &mut [f32],
    largest: f32,
    #[comptime] scaled: bool,
    #[comptime] clipped: bool,
) {
    // 1. Each unit adds up every 256th sum.
    let mut mine = 0.0f32;
    #[unroll]
    for round in 0..comptime!(PLACES as u32 / MEASURE_UNITS) {
        mine += sums[(round * MEASURE_UNITS + UNIT_POS) as usize];
    }

    // 2. The units meet.
    let mut all = Shared::<[f32]>::new_slice(comptime!(MEASURE_UNITS as usize));
    all[UNIT_POS as usize] = mine;
    sync_cube();
    #[unroll]
    for halving in 1..comptime!(MEASURE_UNITS.ilog2() + 1) {
        let distance = comptime!(MEASURE_UNITS >> halving);
        if UNIT_POS < distance {
            let other = all[(UNIT_POS + distance) as usize];
            all[UNIT_POS as usize] += other;
        }
        sync_cube();
    }

    // 3. One of them knows the rest.
    if UNIT_POS == 0 {
        let scaled_norm = all[0].sqrt();
        let mut factor = 1.0f32;
        if comptime!(scaled) {
            factor = 1.0f32 / scale[0];
        }
        let norm = scaled_norm * factor;
        norm_out[0] = norm;
        finite_out[0] = select(is_finite(scaled_norm), 1.0f32, 0.0f32);
        if comptime!(clipped) {
            let clipping = min(largest / (norm + EPSILON), 1.0f32);
            factor *= select(is_finite(norm), clipping, 1.0f32);
        }
        factor_out[0] = factor;
    }
}

/// What a scaler goes by.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) growth: f32,
    pub(crate) backoff: f32,
    pub(crate) interval: f32,
    pub(crate) least: f32,
    pub(crate) largest: f32,
}

/// The scaler's numbers after a step. One unit.
#[cube(launch_unchecked)]
pub(crate) fn loss_scale_update_kernel(
    finite: &[f32],
    scale: &[f32],
    clean: &[f32],
    skipped: &[f32],
    in_a_row: &[f32],
    scale_out: &mut [f32],
    clean_out: &mut [f32],
    skipped_out: &mut [f32],
    in_a_row_out: &mut [f32],
    rules: Rules,
) {
    if UNIT_POS == 0 {
        let is_clean = finite[0] != 0.0f32;
        let count = clean[0] + 1.0f32;
        let grows = is_clean && count >= rules.interval;
        let change = select(is_clean, select(grows, rules.growth, 1.0f32), rules.backoff);
        scale_out[0] = clamp(scale[0] * change, rules.least, rules.largest);
        clean_out[0] = select(is_clean && !grows, count, 0.0f32);
        skipped_out[0] = skipped[0] + select(is_clean, 0.0f32, 1.0f32);
        in_a_row_out[0] = select(is_clean, 0.0f32, in_a_row[0] + 1.0f32);
    }
}
