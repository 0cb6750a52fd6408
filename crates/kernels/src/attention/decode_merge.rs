//! What the units of a cube, and the splits of the keys, found: put together.

use super::{
    decode::{DecodeBlueprint, Parts, Splits, Vectors, placed},
    rules::{Rules, origin},
};
use cubecl::prelude::*;

/// What a unit's stripe found for a row: a vector of the weighted values, the largest score and the sum of weights.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Found<N: Size> {
    pub(super) sum: Vector<f32, N>,
    pub(super) most: f32,
    pub(super) total: f32,
}

/// What all stripes found together, for the units of the first one. All units have to call it. `memory` has
/// `N` elements a unit, `statistics` two a stripe.
#[cube]
pub(super) fn merged<N: Size>(
    found: Found<N>,
    memory: &mut [f32],
    statistics: &mut [f32],
    #[comptime] blueprint: DecodeBlueprint,
) -> Found<N> {
    let size = N::value().comptime();
    let vectors = comptime!(blueprint.vectors);
    let stripes = comptime!(blueprint.stripes());
    let units = comptime!(blueprint.units());
    let (stripe, column) = (UNIT_POS / vectors, UNIT_POS % vectors);
    if column == 0 {
        statistics[stripe as usize] = found.most;
        statistics[(stripes + stripe) as usize] = found.total;
    }
    sync_cube();
    let mut most = statistics[0];
    for other in 1..stripes {
        most = max(most, statistics[other as usize]);
    }
    let own = found.sum * Vector::new((found.most - most).exp());
    #[unroll]
    for i in 0..size {
        memory[(comptime!(i as u32 * units) + UNIT_POS) as usize] = own.extract(i);
    }
    sync_cube();
    let mut total = 0.0f32;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if stripe == 0 {
        for other in 0..stripes {
            let factor = (statistics[other as usize] - most).exp();
            total += statistics[(stripes + other) as usize] * factor;
            #[unroll]
            for i in 0..size {
                let at = comptime!(i as u32 * units) + other * vectors + UNIT_POS;
                sum.insert(i, sum.extract(i) + memory[at as usize]);
            }
        }
    }
    // The next row is written to the same memory.
    sync_cube();
    Found::<N> { sum, most, total }
}

/// The output, and `lse` in its two parts, of what the splits found. Cubes: queries of all heads along x, sequences
/// along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_merge_kernel<I: Float, M: Numeric, N: Size>(
    parts: &Parts<N>,
    rules: &Rules<I, M>,
    position: &[i32],
    out: &mut Vectors<I, N>,
    lse: &mut [f32],
    splits: Splits,
    #[comptime] blueprint: DecodeBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
) {
    let size = N::value().comptime();
    let vectors = comptime!(blueprint.vectors);
    let mut memory = Shared::<[f32]>::new_slice(comptime!(size * blueprint.units() as usize));
    let mut statistics = Shared::<[f32]>::new_slice(comptime!(2 * blueprint.stripes() as usize));
    let column = UNIT_POS % vectors;
    let stripe = UNIT_POS / vectors;
    let batch = rules.batch_of(CUBE_POS_Z);
    let sequence = placed::<I, M>(rules, batch, position, splits, comptime!(blueprint.is_placed));
    let row = batch * rules.sizes.heads_q * rules.sizes.seq_q + CUBE_POS_X;
    let seen = sequence.keys_of(0u32, rules.sizes.seq_q);
    // Splits with none of these keys have written nothing.
    let keys = seen.1 - min(seen.0, seen.1);
    let end = keys.div_ceil(splits.keys_of_each(keys));
    let mut split = stripe;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut most = f32::min_value();
    let mut total = 0.0f32;
    while split < end {
        let at = row * splits.count + split;
        let peak = max(most, parts.most[at as usize]);
        let (rescale, factor) = ((most - peak).exp(), (parts.most[at as usize] - peak).exp());
        total = total * rescale + parts.total[at as usize] * factor;
        sum = sum * Vector::new(rescale)
            + parts.sums[(at * vectors + column) as usize] * Vector::new(factor);
        most = peak;
        split += comptime!(blueprint.stripes());
    }
    let found = merged::<N>(
        Found::<N> { sum, most, total },
        memory.as_mut_slice(),
        statistics.as_mut_slice(),
        blueprint,
    );
    if stripe == 0 {
        // Of no key the sum is 0; its logarithm is minus infinity.
        let factor = select(found.total == 0.0f32, 0.0f32, 1.0f32 / found.total);
        let head = CUBE_POS_X / rules.sizes.seq_q;
        let query = CUBE_POS_X % rules.sizes.seq_q;
        let at = origin(&out.strides, batch, head, query) + column;
        out.memory[at as usize] = Vector::cast_from(found.sum * Vector::new(factor));
        if column == 0 {
            lse[row as usize] = found.most;
            lse[(rules.all_rows() + row) as usize] = found.total.ln();
        }
    }
}
