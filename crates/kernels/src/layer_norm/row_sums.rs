//! Sums over the units that share a row.

use super::blueprint::LayerNormBlueprint;
use cubecl::prelude::*;

/// The sums of two numbers that the units of a row hold; unless `both` are asked for, the first one is 0. All units of
/// the cube have to call it where rows have more than one plane.
#[cube]
pub(super) fn row_sums(
    first: f32,
    second: f32,
    #[comptime] both: bool,
    #[comptime] blueprint: LayerNormBlueprint,
) -> (f32, f32) {
    let plane = comptime!(blueprint.plane);
    let planes = comptime!(blueprint.planes);
    let mut a = first;
    let mut b = second;
    if comptime!(!both) {
        a = 0.0f32;
    }
    if comptime!(plane > 1) {
        if comptime!(both) {
            a = plane_sum(a);
        }
        b = plane_sum(b);
    }
    if comptime!(planes > 1) {
        let slots = comptime!(blueprint.planes * blueprint.rows);
        // Where those of the second number begin.
        let apart = comptime!(if both { slots } else { 0 });
        let mut partial = Shared::<[f32]>::new_slice(comptime!((apart + slots) as usize));
        let start = UNIT_POS_Y * planes;
        let lane = UNIT_POS_X % plane;
        if lane == 0 {
            let place = start + UNIT_POS_X / plane;
            if comptime!(both) {
                partial[place as usize] = a;
            }
            partial[(place + apart) as usize] = b;
        }
        sync_cube();
        a = 0.0f32;
        b = 0.0f32;
        // Few are read by each unit sooner than they are exchanged.
        let in_order = comptime!(blueprint.sums_planes_in_order());
        let mut at = if comptime!(in_order) { 0u32.runtime() } else { lane };
        let step = comptime!(if in_order { 1u32 } else { plane });
        while at < planes {
            if comptime!(both) {
                a += partial[(start + at) as usize];
            }
            b += partial[(start + apart + at) as usize];
            at += step;
        }
        if comptime!(plane > 1 && !in_order) {
            if comptime!(both) {
                a = plane_sum(a);
            }
            b = plane_sum(b);
        }
        // The next sums are written to the same memory.
        sync_cube();
    }
    (a, b)
}

/// The sum of a vector's elements over all units of a row. All units of the cube have to call it where rows have more than
/// one plane.
#[cube]
pub(super) fn row_sum_of<N: Size>(
    value: Vector<f32, N>,
    #[comptime] blueprint: LayerNormBlueprint,
) -> f32 {
    let (_, sum) = row_sums(0.0f32, total::<N>(value), false, blueprint);
    sum
}

/// The sum of a vector's elements.
#[cube]
pub(super) fn total<N: Size>(value: Vector<f32, N>) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..N::value().comptime() {
        sum += value.extract(i);
    }
    sum
}
